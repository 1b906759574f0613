//! Parsers of foreign bytes: neither the stored corpus of the fuzz targets nor mutations of it may make one panic.

use std::path::Path;

#[path = "../../fuzz/readers.rs"]
mod subjects;

/// Mutations of each file of the corpus. `make fuzz` runs the fuzz targets for longer.
const MUTATIONS: usize = 300;
/// Values at which arithmetic is likely to overflow.
const EDGES: [u64; 8] = [0, 1, 0x7f, 0xff, 0x7fff_ffff, 0xffff_ffff, 0x7fff_ffff_ffff_ffff, u64::MAX];

/// A generator with a fixed seed, so that a failure can be reproduced.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound.max(1) as u64) as usize
    }
}

/// One to four changes: a bit, a byte, a word set to an edge value, a piece cut out, doubled or moved, the end cut off.
fn mutate(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(out.len());
        if out.is_empty() {
            break;
        }
        match random.below(7) {
            0 => out[at] ^= 1 << random.below(8),
            1 => out[at] = random.below(256) as u8,
            2 => {
                let width = [1, 2, 4, 8][random.below(4)].min(out.len() - at);
                let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
                out[at..at + width].copy_from_slice(&edge[..width]);
            }
            3 => drop(out.drain(at..(at + 1 + random.below(16)).min(out.len()))),
            4 => {
                let piece = out[at..(at + 1 + random.below(64)).min(out.len())].to_vec();
                out.splice(at..at, piece);
            }
            5 => {
                let to = random.below(out.len());
                out.swap(at, to);
            }
            _ => out.truncate(at),
        }
    }
    out
}

#[test]
fn no_reader_panics_on_the_corpus_or_on_its_mutations() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for (name, read) in subjects::READERS {
        let mut files: Vec<_> = std::fs::read_dir(corpus.join(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(!files.is_empty(), "{name} has no corpus");
        let mut random = Random(0x2545_f491_4f6c_dd1d);
        for file in files {
            let bytes = std::fs::read(&file).unwrap();
            read(&bytes);
            // Large files take longer each time, and most decisions depend on their beginning.
            let times = if bytes.len() > 64 << 10 { MUTATIONS / 10 } else { MUTATIONS };
            for _ in 0..times {
                read(&mutate(&bytes, &mut random));
            }
        }
        read(&[]);
    }
}
