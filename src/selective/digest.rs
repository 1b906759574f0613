//! SHA-256 of files (FIPS 180-4): a build id is only a note that anyone can write into a file, so stored sites of a build must not be
//! applied to another file with the same build id.

use std::fmt;

/// A SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Digest(pub [u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

const BLOCK_BYTES: usize = 64;

/// First 32 bits of the fractional parts of the square roots of the first 8 primes (5.3.3).
const START: [u32; 8] = [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// The same of the cube roots of the first 64 primes (4.2.2).
#[rustfmt::skip]
const ROUNDS: [u32; 64] = [
    0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5, 0x3956_c25b, 0x59f1_11f1, 0x923f_82a4, 0xab1c_5ed5,
    0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3, 0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174,
    0xe49b_69c1, 0xefbe_4786, 0x0fc1_9dc6, 0x240c_a1cc, 0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da,
    0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7, 0xc6e0_0bf3, 0xd5a7_9147, 0x06ca_6351, 0x1429_2967,
    0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13, 0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85,
    0xa2bf_e8a1, 0xa81a_664b, 0xc24b_8b70, 0xc76c_51a3, 0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070,
    0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5, 0x391c_0cb3, 0x4ed8_aa4a, 0x5b9c_ca4f, 0x682e_6ff3,
    0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208, 0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2,
];

impl Digest {
    /// The digest of bytes.
    pub(super) fn of(bytes: &[u8]) -> Self {
        let mut state = START;
        let (blocks, rest) = bytes.as_chunks::<BLOCK_BYTES>();
        blocks.iter().for_each(|block| mix(&mut state, block));
        // A one bit, zeros, and the length in bits.
        let mut tail = rest.to_vec();
        tail.push(0x80);
        let padded = (tail.len() + 8).next_multiple_of(BLOCK_BYTES);
        tail.resize(padded - 8, 0);
        tail.extend((bytes.len() as u64).wrapping_mul(8).to_be_bytes());
        tail.as_chunks::<BLOCK_BYTES>().0.iter().for_each(|block| mix(&mut state, block));
        let mut digest = [0; 32];
        for (out, word) in digest.chunks_exact_mut(4).zip(state) {
            out.copy_from_slice(&word.to_be_bytes());
        }
        Self(digest)
    }

    /// Parses its 64 hexadecimal digits.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let digit = |c: u8| (c.is_ascii_digit() || (b'a'..=b'f').contains(&c)).then(|| (c as char).to_digit(16)).flatten();
        let mut digest = [0; 32];
        if !rest.is_empty() || pairs.len() != digest.len() {
            return None;
        }
        for (out, [high, low]) in digest.iter_mut().zip(pairs) {
            *out = u8::try_from(digit(*high)? << 4 | digit(*low)?).ok()?;
        }
        Some(Self(digest))
    }
}

/// One block (6.2.2).
fn mix(state: &mut [u32; 8], block: &[u8; BLOCK_BYTES]) {
    let mut schedule = [0u32; 64];
    for (word, bytes) in schedule.iter_mut().zip(block.as_chunks::<4>().0) {
        *word = u32::from_be_bytes(*bytes);
    }
    for t in 16..64 {
        let (w2, w7, w15, w16) = (schedule[t - 2], schedule[t - 7], schedule[t - 15], schedule[t - 16]);
        let s0 = w15.rotate_right(7) ^ w15.rotate_right(18) ^ (w15 >> 3);
        let s1 = w2.rotate_right(17) ^ w2.rotate_right(19) ^ (w2 >> 10);
        schedule[t] = s1.wrapping_add(w7).wrapping_add(s0).wrapping_add(w16);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (constant, word) in ROUNDS.into_iter().zip(schedule) {
        let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let choice = (e & f) ^ (!e & g);
        let t1 = h.wrapping_add(s1).wrapping_add(choice).wrapping_add(constant).wrapping_add(word);
        let s0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let majority = (a & b) ^ (a & c) ^ (b & c);
        (h, g, f, e) = (g, f, e, d.wrapping_add(t1));
        (d, c, b, a) = (c, b, a, t1.wrapping_add(s0.wrapping_add(majority)));
    }
    for (word, add) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *word = word.wrapping_add(add);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::Command;

    use super::*;

    #[test]
    fn digests_equal_those_of_sha256sum() {
        let directory = tempfile::tempdir().unwrap();
        // Lengths around the block boundary, where the padding changes.
        for bytes in [0, 1, 55, 56, 63, 64, 65, 119, 120, 1_000_003] {
            let file = directory.path().join("file");
            let content: Vec<u8> = (0..bytes).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
            std::fs::write(&file, &content).unwrap();
            let said = Command::new("sha256sum").arg(&file).output().unwrap().stdout;
            let said = String::from_utf8(said).unwrap();
            let digest = Digest::of(&content);
            assert_eq!(said.split_whitespace().next(), Some(&*digest.to_string()), "{bytes} bytes");
            assert_eq!(Digest::parse(&digest.to_string()), Some(digest));
        }
        assert_eq!(Digest::parse(&"g".repeat(64)), None);
        assert_eq!(Digest::parse(&"a".repeat(63)), None);
    }
}
