//! Compares the order of the modules in the diagram of src/lib.rs with what they use.

mod targets;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Each module's line in the diagram, starting from the top.
fn drawn(library: &str) -> BTreeMap<String, usize> {
    let (_, rest) = library.split_once("uses only lines below its own").expect("src/lib.rs draws the layers");
    let (_, rest) = rest.split_once("```text").unwrap();
    let (drawing, _) = rest.split_once("```").unwrap();
    let lines = drawing.lines().map(|line| line.trim_start_matches("//!").trim()).filter(|line| !line.is_empty());
    let mut layers = BTreeMap::new();
    for (number, line) in lines.enumerate() {
        for module in line.split_whitespace() {
            assert!(layers.insert(module.to_owned(), number).is_none(), "{module} is drawn twice");
        }
    }
    layers
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The modules of the crate that a file names outside comments and unit tests, with line numbers.
fn used(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut is_test = false;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        // Attributes may stand between the two; whatever follows a module of unit tests belongs to it.
        is_test |= line == "#[cfg(test)]";
        if is_test && line.starts_with("mod ") && line.ends_with('{') {
            break;
        }
        if is_test && !line.starts_with("#[") {
            is_test = false;
        }
        if line.starts_with("//") {
            continue;
        }
        for (at, _) in line.match_indices("crate::") {
            let rest = &line[at + "crate::".len()..];
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            found.push((number + 1, &rest[..end]));
        }
    }
    found
}

#[test]
fn modules_use_only_those_below_them_in_the_diagram() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let layers = drawn(&std::fs::read_to_string(root.join("lib.rs")).unwrap());
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut wrong = Vec::new();
    for path in files {
        let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        let module = name.split('/').next().unwrap().trim_end_matches(".rs");
        if matches!(module, "lib" | "main") || name.ends_with("/tests.rs") || name.ends_with("/testing.rs") {
            continue;
        }
        let Some(own) = layers.get(module) else {
            wrong.push(format!("{module} is not drawn"));
            continue;
        };
        let text = std::fs::read_to_string(&path).unwrap();
        for (line, other) in used(&text) {
            // A macro of the crate belongs to no module.
            if let Some(layer) = layers.get(other).filter(|layer| other != module && *layer <= own) {
                wrong.push(format!("{name}:{line} uses {other}, which is drawn at line {layer}, not below line {own}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn names_in_comments_and_unit_tests_are_not_uses() {
    let text = "use crate::units::Pid;\n//! [`crate::cli`]\nfn f() { crate::heap::g() }\n#[cfg(test)]\n#[allow(unused)]\nmod tests {\n use crate::cli;\n}\n";
    assert_eq!(used(text), [(1, "units"), (3, "heap")]);
    let drawing = "each uses only lines below its own:\n//! ```text\n//! cli\n//! heap  units\n//! ```\n";
    assert_eq!(drawn(drawing).into_iter().collect::<Vec<_>>(), [("cli".into(), 0), ("heap".into(), 1), ("units".into(), 1)]);
}
