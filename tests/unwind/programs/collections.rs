//! Sorts, formats and hashes in an endless loop.
use std::collections::{BTreeMap, HashMap};

fn main() {
    let mut n = 0u64;
    loop {
        let words: Vec<String> = (0..200).map(|i| format!("{:x}", (i + n).wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
        let mut sorted = words.clone();
        sorted.sort_by(|a, b| b.cmp(a));
        let counted: HashMap<&str, usize> = sorted.iter().map(|w| (w.as_str(), w.len())).collect();
        let ordered: BTreeMap<usize, Vec<&str>> = counted.iter().fold(BTreeMap::new(), |mut map, (word, len)| {
            map.entry(*len).or_insert_with(Vec::new).push(*word);
            map
        });
        n += ordered.len() as u64;
        let threads: Vec<_> = (0..2).map(|i| std::thread::spawn(move || (0..i * 1000u64).map(|x| x.to_string()).collect::<String>())).collect();
        for thread in threads {
            n += thread.join().unwrap().len() as u64;
        }
    }
}
