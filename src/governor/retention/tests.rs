//! The rule against a heap that reuses the block freed last first, and adversarial programs.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::random::Random;

const S: u64 = 1_000_000_000;
const BYTES: u64 = 120;
const CHUNK: u64 = 128;

/// The content of a site's blocks.
#[derive(Clone, Copy, PartialEq)]
enum Content {
    /// Objects of one type: the same first word, a count, and pointers and text of their own.
    Objects,
    /// Messages: a header of their own, the rest of the buffer keeps its former content.
    Messages,
    /// The same in each block.
    Constant,
    /// A reference count first, and all words are rewritten all the time.
    Rewritten,
}

/// When a site's blocks are freed.
#[derive(Clone, Copy)]
enum Life {
    /// After so many seconds.
    Seconds(f64),
    /// After so many seconds on average, at random.
    About(f64),
    /// All at once, at each multiple of so many seconds.
    Together(f64),
    Never,
}

#[derive(Clone, Copy)]
struct Site {
    content: Content,
    life: Life,
    /// Blocks that it allocates in each step of 10 ms.
    per_step: u32,
    /// It allocates only in the first tenth of each of so many seconds; 0 = always.
    burst_s: f64,
}

const fn site(content: Content, life: Life, per_step: u32) -> Site {
    Site { content, life, per_step, burst_s: 0.0 }
}

#[derive(Clone, Default)]
struct Slot {
    words: [u64; 15],
    /// Number of the allocation that has it; `None` = free.
    owner: Option<u64>,
    /// In the program's cache of freed blocks, which keeps the neighbour's flag.
    is_cached: bool,
}

/// Adjacent blocks of one size.
struct Heap {
    slots: Vec<Slot>,
    free: Vec<usize>,
    allocations: u64,
}

/// A chunk's header, and whether the next one says that it is in use.
fn chunk(bytes: u64, is_in_use: bool) -> Header {
    Header::Chunk { size: SizeField(bytes | 1), next: Some(SizeField(CHUNK | u64::from(is_in_use))) }
}

const BASE: u64 = 0x5555_5600_0010;

impl Heap {
    fn addr(slot: usize) -> u64 {
        BASE + slot as u64 * CHUNK
    }

    fn allocate(&mut self) -> (usize, u64) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        self.allocations += 1;
        self.slots[slot].owner = Some(self.allocations);
        (slot, self.allocations)
    }

    fn release(&mut self, slot: usize) {
        let next = self.free.last().map_or(0, |next| Self::addr(*next));
        let addr = Self::addr(slot);
        let freed = &mut self.slots[slot];
        freed.owner = None;
        // Seven of each size go into the thread's cache.
        freed.is_cached = self.free.len() % 1000 < 7;
        freed.words[0] = if freed.is_cached { next ^ (addr >> 12) } else { next };
        freed.words[1] = 0xfeed_5eed_0bad_cafe;
        self.free.push(slot);
    }

    fn words(&self, slot: usize) -> ([u64; WORDS], u32) {
        let mut words = [0; WORDS];
        let mut known = 0;
        for (at, place) in places(BYTES).into_iter().enumerate() {
            if let Some(place) = place {
                words[at] = self.slots[slot].words[place as usize / 8];
                known |= 1 << at;
            }
        }
        (words, known)
    }

    fn look(&self, slot: usize) -> BlockContents {
        let (words, known) = self.words(slot);
        let in_use = self.slots[slot].owner.is_some() || self.slots[slot].is_cached;
        BlockContents { header: chunk(CHUNK, in_use), words, known }
    }

    fn write(&mut self, slot: usize, content: Content, random: &mut Random) {
        let words = &mut self.slots[slot].words;
        match content {
            Content::Objects => {
                words[0] = 0x7f00_1234_5678;
                words[1] = random.bits() % 100;
                for word in &mut words[2..8] {
                    *word = random.bits();
                }
                words[8..].fill(0);
            }
            Content::Messages => {
                for word in &mut words[..4] {
                    *word = random.bits();
                }
            }
            Content::Constant => words.fill(0x0123_4567_89ab_cdef),
            Content::Rewritten => words.iter_mut().for_each(|word| *word = random.bits()),
        }
    }
}

/// The result of a run by site: what was concluded, the number of its sampled blocks that are old enough, and their bytes that are truly
/// live.
struct Outcome {
    said: HashMap<usize, Kept>,
    truth: HashMap<usize, (u64, u64)>,
}

/// Runs a program for so many seconds, with a window of 20 ms in each second at a random time.
fn run(sites: &[Site], seconds: u64, seed: u64) -> Outcome {
    const STEP_NS: u64 = 10_000_000;
    let mut random = Random::new(seed);
    let mut heap = Heap { slots: Vec::new(), free: Vec::new(), allocations: 0 };
    let mut retention: Retention<usize> = Retention::default();
    // By end: slot, site.
    let mut ends: std::collections::BTreeMap<u64, Vec<(usize, usize)>> = std::collections::BTreeMap::new();
    let mut rewritten: Vec<(usize, u64)> = Vec::new();
    let mut sampled: HashMap<(u64, u64), u64> = HashMap::new();
    let mut window_ns = 0;
    for now_ns in (0..seconds * S).step_by(STEP_NS as usize) {
        if now_ns % S == 0 {
            window_ns = now_ns + random.bits() % 95 * STEP_NS;
        }
        for (slot, _) in ends.remove(&now_ns).unwrap_or_default() {
            heap.release(slot);
        }
        let in_window = now_ns == window_ns;
        let mut samples: Vec<(usize, usize, u64, ContentSample)> = Vec::new();
        for (index, site) in sites.iter().enumerate() {
            let phase_s = (now_ns as f64 / 1e9) % site.burst_s;
            if site.burst_s > 0.0 && phase_s > site.burst_s / 10.0 {
                continue;
            }
            for _ in 0..site.per_step {
                let (slot, number) = heap.allocate();
                let (words, known) = heap.words(slot);
                heap.write(slot, site.content, &mut random);
                let life_s = match site.life {
                    Life::Seconds(life_s) => life_s,
                    Life::About(life_s) => -life_s * (1.0 - random.unit()).ln(),
                    Life::Together(each_s) => each_s - (now_ns as f64 / 1e9) % each_s,
                    Life::Never => 1e9,
                };
                let end_ns = now_ns + ((life_s * 1e9) as u64).max(1).div_ceil(STEP_NS) * STEP_NS;
                ends.entry(end_ns).or_default().push((slot, index));
                if site.content == Content::Rewritten {
                    rewritten.push((slot, number));
                }
                if in_window && end_ns > now_ns + STEP_NS {
                    samples.push((
                        index,
                        slot,
                        number,
                        ContentSample { addr: Heap::addr(slot), bytes: BYTES, born_ns: now_ns, words, known },
                    ));
                }
            }
        }
        rewritten.retain(|(slot, number)| heap.slots[*slot].owner == Some(*number));
        for (slot, _) in &rewritten {
            heap.write(*slot, Content::Rewritten, &mut random);
        }
        for _ in 0..samples.len().min(OF_WINDOW_MAX) {
            let (index, slot, number, sample) = samples.swap_remove(random.bits() as usize % samples.len());
            sampled.insert((sample.addr, now_ns), number);
            retention.admit(index, &sample, &heap.look(slot), now_ns);
        }
        retention.look(now_ns, false, |place| Some(heap.look(((place.addr - BASE) / CHUNK) as usize)));
    }
    let now_ns = seconds * S;
    retention.look(now_ns, true, |place| Some(heap.look(((place.addr - BASE) / CHUNK) as usize)));
    let mut truth: HashMap<usize, (u64, u64)> = HashMap::new();
    for one in retention.verdicts().filter(|one| now_ns - one.born_ns >= TOLD_AGE_NS) {
        let lives = heap.slots[((one.addr - BASE) / CHUNK) as usize].owner == Some(sampled[&(one.addr, one.born_ns)]);
        let of = truth.entry(one.stack).or_default();
        of.0 += 1;
        of.1 += u64::from(lives) * one.bytes;
    }
    Outcome { said: retention.by_stack(now_ns), truth }
}

/// Runs the program several times: no flag is wrong (of a flagged site at least a tenth lives), and no bound is above the truth.
/// Returns how often each site was flagged.
fn flags(name: &str, sites: &[Site], seconds: u64) -> Vec<u32> {
    let mut flagged = vec![0; sites.len()];
    for seed in 0..4 {
        let outcome = run(sites, seconds, seed * 31 + 7);
        for (index, kept) in &outcome.said {
            let (sampled, live_bytes) = outcome.truth[index];
            assert!(
                kept.confirmed_bytes <= live_bytes,
                "{name}: site {index}: {} confirmed of {live_bytes} that live",
                kept.confirmed_bytes
            );
            if kept.is_flagged() {
                flagged[*index] += 1;
                assert!(live_bytes / BYTES * 10 >= sampled, "{name}: site {index} is flagged: {kept:?}, {live_bytes} bytes live");
            }
        }
    }
    flagged
}

#[test]
fn a_leak_is_flagged_and_the_churn_around_it_is_not() {
    let sites = [site(Content::Objects, Life::Never, 2), site(Content::Objects, Life::About(0.05), 40)];
    assert_eq!(flags("leak", &sites, 70), [4, 0]);
}

#[test]
fn buffers_whose_rest_nobody_writes_do_not_look_kept() {
    let sites = [site(Content::Messages, Life::About(0.05), 20), site(Content::Messages, Life::About(2.0), 4)];
    assert_eq!(flags("messages", &sites, 70), [0, 0]);
}

#[test]
fn blocks_that_are_all_alike_and_blocks_that_are_rewritten_are_never_flagged() {
    let sites = [
        site(Content::Constant, Life::Never, 2),
        site(Content::Constant, Life::About(0.1), 20),
        site(Content::Rewritten, Life::Never, 2),
        site(Content::Rewritten, Life::About(0.1), 20),
    ];
    assert_eq!(flags("alike", &sites, 60), [0, 0, 0, 0]);
}

#[test]
fn lifetimes_in_phase_with_the_windows_and_bursts_are_not_flagged() {
    let mut sites = vec![
        site(Content::Objects, Life::Seconds(1.0), 10),
        site(Content::Objects, Life::Seconds(5.0), 2),
        site(Content::Objects, Life::Together(15.0), 2),
        site(Content::Messages, Life::Seconds(1.0), 10),
    ];
    sites.push(Site { burst_s: 1.0, ..site(Content::Objects, Life::Seconds(1.0), 60) });
    sites.push(Site { burst_s: 10.0, ..site(Content::Objects, Life::Together(10.0), 100) });
    assert_eq!(flags("in phase", &sites, 70), [0; 6]);
}

#[test]
fn sites_that_reuse_each_others_blocks_are_distinguished() {
    // Sixteen that churn and one that keeps, all of one size: it reuses what they free.
    let mut sites: Vec<Site> = (0..16).map(|i| site(Content::Objects, Life::About(0.02 + 0.01 * f64::from(i)), 4)).collect();
    sites.push(site(Content::Objects, Life::Never, 4));
    let flagged = flags("storm", &sites, 60);
    assert_eq!((flagged[..16].iter().sum::<u32>(), flagged[16]), (0, 4));
}

fn sample(born_ns: u64) -> ContentSample {
    let words = std::array::from_fn(|at| at as u64);
    ContentSample { addr: 0x5555_0010, bytes: BYTES, born_ns, words, known: 0xc0ff }
}

fn look_of(words: [u64; WORDS]) -> BlockContents {
    BlockContents { header: chunk(CHUNK, true), words, known: 0xc0ff }
}

#[test]
fn a_chunk_of_another_size_or_in_a_bin_is_not_the_same_whatever_it_holds() {
    let words: [u64; WORDS] = std::array::from_fn(|at| 0xabcd_0000_0000_0000 + at as u64);
    let good = look_of(words);
    let mut linked = good;
    linked.words[0] = 0x5555_0410 ^ (0x5555_0010 >> 12);
    let mut shorter = good;
    shorter.words[..2].copy_from_slice(&[u64::from_le_bytes(*b"n0.37151"), u64::from_le_bytes(*b"8841,k7=")]);
    for (name, look, same) in [
        ("as it was", good, true),
        ("another size", BlockContents { header: chunk(CHUNK * 2, true), ..good }, false),
        ("free", BlockContents { header: chunk(CHUNK, false), ..good }, false),
        ("in a cache", linked, false),
        ("a shorter text before what is left of a longer one", shorter, false),
    ] {
        let mut retention = Retention::default();
        retention.admit(1, &sample(0), &good, 0);
        retention.look(S, true, |_| Some(look));
        assert_eq!(retention.verdicts().next().unwrap().same, same, "{name}");
        // A block found different stays different.
        retention.look(2 * S, true, |_| Some(good));
        assert_eq!(retention.verdicts().next().unwrap().same, same, "{name}");
    }
}

#[test]
fn a_slot_that_its_group_has_as_free_or_whose_header_changed_is_not_the_same() {
    let slot = |header, is_used| BlockContents {
        header: Header::Slot { header, is_used },
        ..look_of(std::array::from_fn(|at| 0xabcd_0000_0000_0000 + at as u64))
    };
    let rewritten = BlockContents { words: [0; WORDS], ..slot(7, true) };
    for (look, same) in [(slot(7, true), true), (slot(7, false), false), (slot(8, true), false), (rewritten, false)] {
        let mut retention = Retention::default();
        retention.admit(1, &sample(0), &slot(7, true), 0);
        retention.look(S, true, |_| Some(look));
        assert_eq!(retention.verdicts().next().unwrap().same, same, "{look:?}");
    }
    let mut retention = Retention::default();
    retention.admit(1, &sample(0), &slot(7, false), 0);
    assert_eq!(retention.refused(), 1, "freed before its first check");
}

#[test]
fn without_a_header_only_an_unchanged_first_word_shows_that_a_block_was_not_freed() {
    let good = BlockContents { header: Header::FirstWord, ..look_of(std::array::from_fn(|at| 0xabcd_0000_0000_0000 + at as u64)) };
    let with = |at: usize, word| {
        let mut look = good;
        look.words[at] = word;
        look
    };
    // A link, the end of a list, an encoded link; and a word that the allocator does not write.
    let written =
        [(with(0, 0x7f00_0000_1000), false), (with(0, 0), false), (with(0, u64::MAX / 7), false), (with(1, 0), false), (with(2, 0), true)];
    for (look, same) in written {
        let mut retention = Retention::default();
        retention.admit(1, &sample(0), &good, 0);
        retention.look(S, true, |_| Some(look));
        assert_eq!(retention.verdicts().next().unwrap().same, same, "{look:?}");
    }
    let mut retention = Retention::default();
    retention.admit(1, &sample(0), &BlockContents { known: 0xc0fe, ..good }, 0);
    assert_eq!(retention.refused(), 1, "its first word is not known");
    // A first word that another block has too, or a small one, would be the same again after the next allocation there.
    for (others, look) in [(&[sample(1)][..], good), (&[], with(0, 7))] {
        let mut retention = Retention::default();
        retention.admit(1, &sample(0), &look, 0);
        assert_eq!(retention.verdicts().next().unwrap().informative, look.words[0] != 7);
        for other in others {
            retention.admit(2, other, &with(1, 0x1234_0000_0000), 0);
        }
        assert!(!retention.verdicts().next().unwrap().informative, "{look:?}");
    }
}

#[test]
fn a_chunk_that_is_not_glibcs_is_refused_and_counted() {
    let mut retention = Retention::default();
    let look = BlockContents { header: chunk(0, true), ..look_of([7; WORDS]) };
    retention.admit(1, &sample(0), &look, 0);
    assert_eq!((retention.verdicts().count(), retention.refused()), (0, 1));
}

#[test]
fn the_oldest_is_dropped_with_its_words_when_there_are_too_many() {
    let mut retention = Retention::default();
    for i in 0..SAMPLES_MAX as u64 + 100 {
        let words = std::array::from_fn(|at| ((((i << 8) | at as u64) + 1) << 20) | 1);
        retention.admit(1, &sample(i), &look_of(words), i);
    }
    assert_eq!(retention.samples.len(), SAMPLES_MAX);
    assert_eq!(retention.holders.len(), SAMPLES_MAX * 10);
}

#[test]
fn bytes_are_confirmed_of_flagged_stacks_alone_and_of_fewer_blocks_than_were_found_the_same() {
    let one = |same| Verdict { stack: 1, addr: 0, bytes: 100, born_ns: 0, looked_ns: 30 * S, informative: true, same };
    let of = |same: usize, other: usize| {
        let verdicts = std::iter::repeat_n(one(true), same).chain(std::iter::repeat_n(one(false), other));
        kept(verdicts, 30 * S)[&1].confirmed_bytes
    };
    assert_eq!((of(1, 0), of(19, 0), of(1, 50), of(3, 97), of(30, 10)), (0, 0, 0, 0, 2500));
}
