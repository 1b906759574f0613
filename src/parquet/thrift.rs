//! Thrift's compact protocol (apache/thrift, doc/specs/thrift-compact-protocol.md), as far as Parquet's metadata needs it: written only. Pure.

/// Type numbers of fields and of a list's elements.
const TRUE: u8 = 1;
const FALSE: u8 = 2;
const I32: u8 = 5;
const I64: u8 = 6;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const STRUCT: u8 = 12;
/// Longest list whose length is in the byte of its type.
const SHORT_LIST_MAX: usize = 14;

/// A struct that is being written: fields come in ascending order of their numbers.
#[derive(Debug, Default)]
pub(super) struct Struct {
    bytes: Vec<u8>,
    last: u8,
}

impl Struct {
    fn field(&mut self, number: u8, kind: u8) {
        // All numbers here are below 16, so the distance to the last one fits its four bits.
        self.bytes.push((number - self.last) << 4 | kind);
        self.last = number;
    }

    pub fn bool(mut self, number: u8, value: bool) -> Self {
        self.field(number, if value { TRUE } else { FALSE });
        self
    }

    pub fn i32(mut self, number: u8, value: i32) -> Self {
        self.field(number, I32);
        varint(&mut self.bytes, zigzag(i64::from(value)));
        self
    }

    pub fn i64(mut self, number: u8, value: i64) -> Self {
        self.field(number, I64);
        varint(&mut self.bytes, zigzag(value));
        self
    }

    pub fn text(mut self, number: u8, value: &str) -> Self {
        self.field(number, BINARY);
        text(&mut self.bytes, value);
        self
    }

    pub fn structure(mut self, number: u8, value: Self) -> Self {
        self.field(number, STRUCT);
        self.bytes.extend(value.finish());
        self
    }

    pub fn structures(mut self, number: u8, values: Vec<Self>) -> Self {
        self.list(number, STRUCT, values.len());
        values.into_iter().for_each(|value| self.bytes.extend(value.finish()));
        self
    }

    pub fn i32s(mut self, number: u8, values: &[i32]) -> Self {
        self.list(number, I32, values.len());
        values.iter().for_each(|&value| varint(&mut self.bytes, zigzag(i64::from(value))));
        self
    }

    pub fn texts(mut self, number: u8, values: &[&str]) -> Self {
        self.list(number, BINARY, values.len());
        values.iter().for_each(|value| text(&mut self.bytes, value));
        self
    }

    fn list(&mut self, number: u8, kind: u8, length: usize) {
        self.field(number, LIST);
        match u8::try_from(length) {
            Ok(short) if length <= SHORT_LIST_MAX => self.bytes.push(short << 4 | kind),
            _ => {
                self.bytes.push(0xf0 | kind);
                varint(&mut self.bytes, length as u64);
            }
        }
    }

    /// The struct's bytes, with the field that ends it.
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.push(0);
        self.bytes
    }
}

fn text(bytes: &mut Vec<u8>, value: &str) {
    varint(bytes, value.len() as u64);
    bytes.extend_from_slice(value.as_bytes());
}

fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

/// Seven bits a byte, the lowest first.
pub(super) fn varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value > 0x7f {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_written_as_the_protocol_says() {
        let inner = Struct::default().bool(1, true).bool(3, false);
        let bytes = Struct::default().i32(1, -1).i64(3, 300).text(4, "ab").structure(5, inner).i32s(8, &[1, -2]).finish();
        let expected = [0x15, 1, 0x26, 0xd8, 4, 0x18, 2, b'a', b'b', 0x1c, 0x11, 0x22, 0, 0x39, 0x25, 2, 3, 0];
        assert_eq!(bytes, expected);
        let long = Struct::default().texts(1, &["x"; 20]).finish();
        assert_eq!(long.get(..5), Some([0x19, 0xf8, 20, 1, b'x'].as_slice()));
    }

    #[test]
    fn the_largest_numbers_fit() {
        let mut bytes = Vec::new();
        varint(&mut bytes, zigzag(i64::MIN));
        assert_eq!(bytes, [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]);
    }
}
