//! The curves of several replays over time, as an SVG. Pure.

use std::fmt::Write as _;

use super::outcome::Sample;
use crate::units::HumanBytes;

/// Size of the drawing, and of the room around the curves.
const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 80.0;
const TOP: f64 = 40.0;
const LEGEND_LINE: f64 = 18.0;
/// Horizontal lines.
const LINES: u32 = 4;
/// Colours that people with any colour vision tell apart (Okabe and Ito 2008), in the order of the curves; then again with dashes.
const COLOURS: [&str; 8] = ["#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#999999"];

/// A curve with its name.
#[derive(Debug, Clone)]
pub struct Curve {
    /// Shown in the legend.
    pub name: String,
    /// By time.
    pub samples: Vec<Sample>,
}

/// The drawing. Times are shown from `began_ns` on.
#[must_use]
pub fn svg(title: &str, began_ns: u64, curves: &[Curve]) -> String {
    let all = || curves.iter().flat_map(|curve| &curve.samples);
    let bytes_max = all().map(|one| one.bytes).max().unwrap_or(0).max(1);
    let span_ns = all().map(|one| one.time_ns.saturating_sub(began_ns)).max().unwrap_or(0).max(1);
    let full_height = TOP + HEIGHT + 40.0 + LEGEND_LINE * curves.len() as f64;
    let mut out = String::new();
    let full_width = LEFT + WIDTH + 20.0;
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {full_width} {full_height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n<text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{}</text>",
        escaped(title)
    );
    for line in 0..=LINES {
        let y = TOP + HEIGHT * f64::from(line) / f64::from(LINES);
        let bytes = HumanBytes((bytes_max as f64 * f64::from(LINES - line) / f64::from(LINES)) as u64);
        let (right, text_x, text_y) = (LEFT + WIDTH, LEFT - 6.0, y + 4.0);
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>\n\
             <text x=\"{text_x}\" y=\"{text_y:.1}\" text-anchor=\"end\">{bytes}</text>"
        );
    }
    for (index, curve) in curves.iter().enumerate() {
        let (colour, dash) = (COLOURS[index % COLOURS.len()], if index < COLOURS.len() { "" } else { " stroke-dasharray=\"6 3\"" });
        let _ = write!(out, "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"{dash} points=\"");
        for one in &curve.samples {
            let x = LEFT + WIDTH * one.time_ns.saturating_sub(began_ns) as f64 / span_ns as f64;
            let y = TOP + HEIGHT * (1.0 - one.bytes as f64 / bytes_max as f64);
            let _ = write!(out, "{x:.1},{y:.1} ");
        }
        let y = TOP + HEIGHT + 40.0 + LEGEND_LINE * index as f64;
        let (right, text_x) = (LEFT + 30.0, LEFT + 38.0);
        let _ = writeln!(
            out,
            "\"/>\n<line x1=\"{LEFT}\" y1=\"{:.1}\" x2=\"{right}\" y2=\"{:.1}\" stroke=\"{colour}\" stroke-width=\"3\"{dash}/>\n\
             <text x=\"{text_x}\" y=\"{y:.1}\">{}</text>",
            y - 4.0,
            y - 4.0,
            escaped(&curve.name)
        );
    }
    let (y, right) = (TOP + HEIGHT + 16.0, LEFT + WIDTH);
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{y}\">0 s</text>\n<text x=\"{right}\" y=\"{y}\" text-anchor=\"end\">{:.1} s</text>\n</svg>",
        span_ns as f64 / 1e9
    );
    out
}

/// Text for XML and HTML. Control characters, which it does not permit, are replaced.
#[must_use]
pub fn escaped(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        match character {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            character if character.is_control() => out.push('\u{fffd}'),
            character => out.push(character),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_curve_is_drawn_within_the_frame_and_named() {
        let samples = vec![Sample { time_ns: 100, bytes: 0 }, Sample { time_ns: 200, bytes: 50 }];
        let curves = [Curve { name: "today".into(), samples: samples.clone() }, Curve { name: "a<b>".into(), samples }];
        let drawn = svg("t & t\u{1b}", 100, &curves);
        assert_eq!(drawn.matches("<polyline").count(), 2);
        assert!(drawn.contains("a&lt;b&gt;") && drawn.contains("t &amp; t\u{fffd}"), "{drawn}");
        assert!(drawn.contains("80.0,460.0 1040.0,40.0"), "{drawn}");
        // Nothing to draw is no error.
        assert!(svg("", 0, &[]).ends_with("</svg>\n"));
    }
}
