//! The flame graph: an SVG that a browser opens, with search and zoom.

use std::io::{self, Write};

use inferno::flamegraph::color::{BasicPalette, Color, Palette, PaletteMap};
use inferno::flamegraph::{self, Options};
use thiserror::Error;

use super::folded;
use super::kind::ValueKind;
use super::model::Profile;
use crate::frame::{Frame, FrameKind};
use crate::sanitize;

/// Why a flame graph could not be drawn.
#[derive(Debug, Error)]
pub enum SvgError {
    /// No stack has a value of the kind.
    #[error("no stack has any {0}: there is nothing to draw")]
    Nothing(&'static str),
    /// The writer's error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Writes a flame graph of a kind, with a title. The same profile gives the same bytes.
///
/// # Errors
/// [`SvgError`].
pub fn write(profile: &Profile, kind: ValueKind, title: &str, mut out: impl Write) -> Result<(), SvgError> {
    let lines = folded::lines(profile, kind);
    if lines.is_empty() {
        return Err(SvgError::Nothing(kind.name()));
    }
    let mut options = Options::default();
    options.title = sanitize::terminal(title).into_owned();
    options.count_name = if kind.unit() == "bytes" { "bytes".into() } else { "allocations".into() };
    options.name_type = "Function:".into();
    options.colors = Palette::Basic(BasicPalette::Mem);
    options.deterministic = true;
    let mut colours = colours(profile);
    options.palette_map = Some(&mut colours);
    let mut svg = Vec::new();
    flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg)?;
    out.write_all(&with_root_label(svg))?;
    Ok(())
}

/// Frames of managed runtimes have a colour by their kind. A method that was compiled while it was recorded is shown once, as compiled.
fn colours(profile: &Profile) -> PaletteMap {
    let mut colours = PaletteMap::default();
    let mut managed: Vec<&Frame> = profile.frames().iter().filter(|frame| frame.kind().is_managed()).collect();
    managed.sort_by_key(|frame| frame.kind());
    for frame in managed {
        let (r, g, b) = match frame.kind() {
            FrameKind::JavaInterpreted => (190, 210, 110),
            FrameKind::JavaCompiled => (90, 200, 100),
            FrameKind::JavaInlined => (100, 205, 190),
            FrameKind::Python => (110, 160, 230),
            FrameKind::Native => continue,
        };
        colours.insert(sanitize::folded(&frame.function), Color { r, g, b });
    }
    colours
}

/// Adds the label of the root's row, which is otherwise written by a script in the browser: viewers may not run scripts.
fn with_root_label(mut svg: Vec<u8>) -> Vec<u8> {
    let find = |svg: &[u8], from: usize, wanted: &[u8]| {
        svg.get(from..).and_then(|rest| rest.windows(wanted.len()).position(|window| window == wanted)).map(|at| from + at)
    };
    let empty = b"></text>";
    let place = find(&svg, 0, b"<title>all (").and_then(|root| find(&svg, root, empty));
    if let Some(place) = place {
        svg.splice(place + 1..place + 1, *b"all");
    }
    svg
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::profile::Values;
    use crate::profile::testing::{frame, shop};

    fn drawn(profile: &Profile, title: &str) -> String {
        let mut svg = Vec::new();
        write(profile, ValueKind::InuseSpace, title, &mut svg).unwrap();
        String::from_utf8(svg).unwrap()
    }

    #[test]
    fn names_and_titles_cannot_break_out_of_the_markup() {
        let mut profile = Profile::default();
        let evil = "</text></title><script>alert(1)</script>]]>\" onload=\"x' &";
        profile.add(0, &[frame(evil, 1)], None, &Values::default().with(ValueKind::InuseSpace, 10));
        let svg = drawn(&profile, evil);
        assert!(!svg.contains("<script>alert"), "a name became markup");
        assert!(!svg.contains("onload=\"x"), "a name became an attribute");
        assert!(svg.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "the name is shown");
    }

    #[test]
    fn the_graph_is_well_formed_and_the_same_each_time() {
        let svg = drawn(&shop(), "live bytes of shopd");
        assert_eq!(svg, drawn(&shop(), "live bytes of shopd"));
        assert!(svg.contains("Session::create(User const&amp;)"), "{svg}");
        assert!(svg.contains(">all</text>"), "the root has its label");
        // An independent parser: Python's expat.
        let mut child = std::process::Command::new("python3")
            .args(["-c", "import sys, xml.dom.minidom as m; m.parse(sys.stdin.buffer)"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(svg.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn a_name_that_ends_in_a_number_keeps_its_value() {
        let mut profile = Profile::default();
        profile.add(0, &[frame("render 12", 3)], None, &Values::default().with(ValueKind::InuseSpace, 4321));
        assert!(drawn(&profile, "t").contains("4,321 bytes"));
    }

    #[test]
    fn nothing_to_draw_is_an_error_that_says_so() {
        let error = write(&shop(), ValueKind::SurvivorSpace, "t", io::sink()).unwrap_err();
        assert_eq!(error.to_string(), "no stack has any survivor_space: there is nothing to draw");
    }
}
