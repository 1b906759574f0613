//! Node.js: which of its functions will have names. V8's code keeps frame pointers, so its frames are walked as those of any generated code;
//! names come only from the perf map that V8 writes if it is told to.

use std::fs;
use std::io::Read as _;

use crate::process::{Maps, Process};
use crate::symbol::has_perf_map;

/// The option that makes V8 write a perf map.
const MAP: &str = "perf-basic-prof";
/// The option that gives interpreted functions code of their own.
const INTERPRETED: &str = "interpreted-frames-native-stack";
/// Most that is read of a command line or an environment.
const TEXT_BYTES_MAX: u64 = 256 << 10;

/// What is said of Node.js's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// Functions are named, interpreted ones too.
    All,
    /// Those that V8 has compiled are named.
    Compiled,
    /// None is.
    None,
}

/// Whether a process is Node.js: its program, or a library of it.
pub fn is_in(maps: &Maps) -> bool {
    let is_node = |name: &str| matches!(name, "node" | "nodejs") || name.starts_with("libnode.so");
    maps.executable_files().any(|mapping| mapping.path().and_then(|path| path.file_name()?.to_str()).is_some_and(is_node))
}

/// What of a Node.js process will be named.
pub fn names(process: &Process) -> Names {
    let read = |name: &str| {
        let mut bytes = Vec::new();
        if let Ok(file) = fs::File::open(process.directory().join(name)) {
            // What cannot be read says nothing.
            let _ = file.take(TEXT_BYTES_MAX).read_to_end(&mut bytes);
        }
        bytes
    };
    let (words, environment) = (read("cmdline"), read("environ"));
    let is_options = |entry: &&[u8]| entry.starts_with(b"NODE_OPTIONS=");
    let options = environment.split(|&byte| byte == 0).find(is_options).unwrap_or_default();
    let has = |option: &str| has_option(&words, option) || has_option(options, option);
    // A node that is starting has not written its map yet.
    if !has(MAP) && !has_perf_map(process) {
        return Names::None;
    }
    if has(INTERPRETED) { Names::All } else { Names::Compiled }
}

/// Whether an option is among words, with dashes or underscores between its parts, as V8 takes both.
fn has_option(words: &[u8], option: &str) -> bool {
    let option = option.as_bytes();
    let text: Vec<u8> = words.iter().map(|&byte| if byte == b'_' { b'-' } else { byte }).collect();
    text.split(|byte| matches!(byte, 0 | b' ' | b'=')).any(|word| word.strip_prefix(b"--") == Some(option))
}

impl Names {
    /// A sentence for the user.
    pub fn sentence(self) -> String {
        match self {
            Self::All => "JavaScript functions are named by node's perf map, without source lines".to_owned(),
            Self::Compiled => format!(
                "JavaScript functions that V8 has compiled are named by node's perf map; interpreted ones are not: start node with \
                 --{INTERPRETED} too"
            ),
            Self::None => format!(
                "JavaScript functions are not named: node writes no perf map; start it with --{MAP} --{INTERPRETED} (the first one names \
                 functions, the second one those too that V8 has not compiled)"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_is_found_in_both_spellings_and_not_within_other_words() {
        assert!(has_option(b"node\0--interpreted-frames-native-stack\0x.js\0", INTERPRETED));
        assert!(has_option(b"NODE_OPTIONS=--perf-basic-prof --interpreted_frames_native_stack", INTERPRETED));
        assert!(!has_option(b"node\0--no-interpreted-frames-native-stack\0", INTERPRETED));
        assert!(!has_option(b"node\0x--interpreted-frames-native-stack.js\0", INTERPRETED));
    }
}
