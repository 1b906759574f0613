//! A method's name, source file and lines.

use std::sync::Arc;

use super::code::word32;
use super::layout::{Layout, SourceFile};
use crate::census::Memory;
use crate::census::memory::{is_user_address, word_at, word16_at, word32_at};
use crate::symbol::NAME_BYTES_MAX;

/// Longest bytecode of a method (JVM specification, 4.7.3).
const CODE_BYTES_MAX: u64 = 65_535;
/// Most that is read of a method's lines.
const LINES_BYTES_MAX: u64 = 256 << 10;
/// In the flags of a method: it has lines (`ConstMethod::_has_linenumber_table`, since JDK 21 `_misc_has_linenumber_table`; 1 in all).
const HAS_LINES: u32 = 1;

/// What frames of a method are named by.
#[derive(Debug)]
pub struct Method {
    /// Class and name: `java.util.zip.Deflater.init`.
    pub function: Arc<str>,
    /// The source file with its package's folders; empty = not known.
    pub file: Arc<str>,
    /// The line of each bytecode index at which one begins.
    pub lines: Vec<(u16, u32)>,
    /// Address of the bytecode.
    pub code: u64,
    /// Bytes of it; 0 of a native method.
    pub code_bytes: u16,
}

/// The unchanging part of a `Method`, by which another method at the same address is recognised.
pub fn const_of(memory: &dyn Memory, layout: &Layout, method: u64) -> Option<u64> {
    memory.word(method.wrapping_add(layout.method_const)).filter(|&address| is_user_address(address))
}

impl Method {
    /// Reads the method whose unchanging part lies at an address.
    pub fn read(memory: &dyn Memory, layout: &Layout, address: u64) -> Option<Self> {
        let at = |field: u64| usize::try_from(field).unwrap_or(usize::MAX);
        let head = memory.bytes(address, at(layout.const_bytes))?;
        let index = |field: u64| u64::from(word16_at(&head, at(field)));
        let pool = Some(word_at(&head, at(layout.const_pool))).filter(|&pool| is_user_address(pool))?;
        let holder = memory.word(pool.wrapping_add(layout.pool_holder)).filter(|&holder| is_user_address(holder))?;
        let text = |index: u64| {
            // The low bit of an entry marks a class that is not resolved yet.
            let entry = memory.word(pool.wrapping_add(layout.pool_bytes).wrapping_add(8 * index))?;
            symbol(memory, layout, entry & !1)
        };
        let class = symbol(memory, layout, memory.word(holder.wrapping_add(layout.klass_name))?)?;
        let name = text(index(layout.const_name))?;
        let source = match layout.source_file {
            SourceFile::Pool(field) => pool.wrapping_add(field),
            SourceFile::Class(field) => holder.wrapping_add(field),
        };
        let source = memory.bytes(source, 2).map_or(0, |bytes| word16_at(&bytes, 0));
        let source = (source != 0).then(|| text(u64::from(source))).flatten();
        let code_bytes = word16_at(&head, at(layout.const_code_bytes));
        let code = address.wrapping_add(layout.const_bytes);
        let lines = if word32_at(&head, at(layout.const_flags)) & HAS_LINES != 0 {
            let end = address.wrapping_add(8 * u64::from(word32_at(&head, at(layout.const_words))));
            let begin = code.wrapping_add(u64::from(code_bytes));
            let bytes = end.saturating_sub(begin).min(LINES_BYTES_MAX);
            memory.bytes(begin, at(bytes)).map_or_else(Vec::new, |bytes| layout.packing.lines(&bytes))
        } else {
            Vec::new()
        };
        let class = of_every_run(&class);
        let file = source.map_or_else(String::new, |source| in_package(class, &source));
        let function = format!("{}.{name}", class.replace('/', "."));
        Some(Self { function: function.into(), file: file.into(), lines, code, code_bytes })
    }

    /// The index of the bytecode whose address has these low 16 bits; `None` in a native method.
    pub fn index_of(&self, low_bits: u16) -> Option<u16> {
        debug_assert!(u64::from(self.code_bytes) <= CODE_BYTES_MAX);
        let index = low_bits.wrapping_sub(self.code as u16);
        (index < self.code_bytes).then_some(index)
    }
}

fn symbol(memory: &dyn Memory, layout: &Layout, address: u64) -> Option<String> {
    if !is_user_address(address) {
        return None;
    }
    let length = word32(memory, address.wrapping_add(layout.symbol_length))? & 0xffff;
    let bytes = memory.bytes(address.wrapping_add(layout.symbol_body), NAME_BYTES_MAX.min(length as usize))?;
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).into_owned())
}

/// A class's name without the address that HotSpot gives hidden classes: `Main$$Lambda+0x00007f…`, until JDK 14 `Main$$Lambda$14/0x…`.
fn of_every_run(class: &str) -> &str {
    match class.rfind(['+', '/', '.']) {
        Some(at) if class[at + 1..].starts_with("0x") => &class[..at],
        _ => class,
    }
}

/// A source file in the folders of its class's package, as build tools want it.
fn in_package(class: &str, source: &str) -> String {
    match class.rsplit_once('/') {
        Some((package, _)) if !source.contains('/') => format!("{package}/{source}"),
        _ => source.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hidden_classs_name_is_the_same_in_every_run() {
        assert_eq!(of_every_run("a/Main$$Lambda+0x00007f1b2c"), "a/Main$$Lambda");
        assert_eq!(of_every_run("a/Main$$Lambda$14/0x0000000800066c40"), "a/Main$$Lambda$14");
        assert_eq!(of_every_run("a/Main"), "a/Main");
        assert_eq!(of_every_run("Main"), "Main");
    }

    #[test]
    fn a_source_file_lies_in_the_folders_of_its_package() {
        assert_eq!(in_package("java/util/zip/Deflater", "Deflater.java"), "java/util/zip/Deflater.java");
        assert_eq!(in_package("Main", "Main.java"), "Main.java");
    }
}
