//! Demangles C++ and Rust names, with a length limit. Pure.

use std::borrow::Cow;
use std::fmt::{self, Write};

use super::{NAME_BYTES_MAX, capped, prefix};

/// Longest mangled name that is demangled, in bytes. Substitutions make the output, and the time, grow much faster than the input.
const MANGLED_BYTES_MAX: usize = 16 << 10;
/// Nesting of a C++ name. Real ones stay below 30; each level takes stack.
const CPP_DEPTH_MAX: u32 = 96;

/// The readable form of a symbol, or the symbol itself if it is not mangled.
///
/// Rust names lose their hash (`::h0123456789abcdef`): it changes with every build, and two profiles of one program would not compare.
pub fn demangle(name: &str) -> Cow<'_, str> {
    // Version marks of the dynamic linker, as in `memcpy@@GLIBC_2.14`.
    let name = name.split_once('@').map_or(name, |(bare, _)| if bare.is_empty() { name } else { bare });
    if name.len() > MANGLED_BYTES_MAX {
        return capped(name);
    }
    if let Ok(rust) = rustc_demangle::try_demangle(name) {
        let mut text = Bounded::default();
        // The only error is the limit's.
        let _ = write!(text, "{rust:#}");
        return Cow::Owned(text.finish());
    }
    if name.starts_with("_Z") || name.starts_with("___Z") {
        let options = cpp_demangle::ParseOptions::default().recursion_limit(CPP_DEPTH_MAX);
        if let Ok(symbol) = cpp_demangle::Symbol::new_with_options(name, &options) {
            let mut text = Bounded::default();
            let options = cpp_demangle::DemangleOptions::new().recursion_limit(CPP_DEPTH_MAX);
            let done = symbol.structured_demangle(&mut text, &options).is_ok();
            if done || text.full {
                return Cow::Owned(text.finish());
            }
        }
    }
    capped(name)
}

/// Collects text up to [`NAME_BYTES_MAX`], then refuses more, which stops the demangler.
#[derive(Default)]
struct Bounded {
    text: String,
    full: bool,
}

impl Bounded {
    fn finish(mut self) -> String {
        if self.full {
            self.text.push('…');
        }
        self.text
    }
}

impl Write for Bounded {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let room = NAME_BYTES_MAX - self.text.len();
        if part.len() <= room {
            self.text.push_str(part);
            return Ok(());
        }
        self.text.push_str(prefix(part, room));
        self.full = true;
        Err(fmt::Error)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // Expected names are those of c++filt and of the Rust mangling RFC 2603.
    #[test]
    fn cpp_and_rust_names_become_readable() {
        assert_eq!(demangle("_ZN7Session6createEi"), "Session::create(int)");
        assert_eq!(demangle("_Znwm"), "operator new(unsigned long)");
        assert_eq!(demangle("_ZN4core3fmt5Write9write_fmt17h0123456789abcdefE"), "core::fmt::Write::write_fmt");
        assert_eq!(demangle("_RNvCskwGfYPst2Cb_3foo16example_function"), "foo::example_function");
    }

    #[test]
    fn c_names_stay_and_lose_their_version() {
        assert_eq!(demangle("__libc_start_main"), "__libc_start_main");
        assert_eq!(demangle("memcpy@@GLIBC_2.14"), "memcpy");
    }

    #[test]
    fn a_name_that_only_looks_mangled_stays() {
        assert_eq!(demangle("_Zebra"), "_Zebra");
    }

    #[test]
    fn a_name_that_grows_endlessly_is_truncated() {
        // Each template argument doubles the text through a substitution.
        let mut name = String::from("_Z1fI1aEv");
        for _ in 0..60 {
            name = format!("_Z1f{}", "St4pairIS_S_E".repeat(40));
        }
        assert!(demangle(&name).len() <= NAME_BYTES_MAX + '…'.len_utf8());
        let long = "x".repeat(100_000);
        assert_eq!(demangle(&long).len(), NAME_BYTES_MAX + '…'.len_utf8());
    }

    proptest! {
        #[test]
        fn no_name_panics_or_escapes_the_limit(name in "(_Z|_R|_ZN)?[a-zA-Z0-9_$.é@]{0,80}") {
            prop_assert!(demangle(&name).len() <= NAME_BYTES_MAX + '…'.len_utf8());
        }
    }
}
