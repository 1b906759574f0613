//! Newtypes that keep numbers of different kinds apart.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$meta:meta])* $name:ident($inner:ty)) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

number! {
    /// A process id in the initial pid namespace (the kernel's tgid).
    Pid(u32)
}
number! {
    /// A virtual address of the watched process.
    Addr(u64)
}
number! {
    /// An offset in an ELF file, in bytes from its start. Not a virtual address: segments map one to the other.
    FileOffset(u64)
}
number! {
    /// A dense number of a call stack within one ledger, from 0.
    StackId(u32)
}
number! {
    /// The BPF programs' 64-bit hash of a stack; 0 = no stack.
    StackHash(u64)
}

impl fmt::Display for Pid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for FileOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Bytes of a page of this kernel: 4 KiB on x86-64, which has no other base page; 4, 16 or 64 KiB on arm64.
#[must_use]
#[inline]
pub fn page_bytes() -> u64 {
    if cfg!(target_arch = "x86_64") { 4096 } else { rustix::param::page_size() as u64 }
}

/// Bytes of a huge page: what one entry of the page table above the last level maps (`PMD_SIZE`). A table is a page of words.
#[must_use]
#[inline]
pub fn huge_page_bytes() -> u64 {
    page_bytes() / 8 * page_bytes()
}

/// Maximum number of threads of a process that are examined; stacks of further ones count as ordinary memory.
pub const THREADS_MAX: usize = 1 << 16;

/// A number of bytes, shown to people in binary units with three significant digits (`1.50 MiB`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct HumanBytes(pub u64);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        // 1023.95 would print as 1024: go to the next unit first.
        while value >= 999.5 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let decimals = if value < 9.995 {
            2
        } else if value < 99.95 {
            1
        } else {
            0
        };
        f.pad(&format!("{value:.decimals$} {}", UNITS[unit]))
    }
}

/// Standard errors to either side that hold 95 of 100 draws of a normal distribution.
pub const ERRORS_OF_95_PERCENT: f64 = 1.96;

/// Half the width of a 95 % interval, from the standard error.
#[must_use]
pub fn half_width(stderr: u64) -> u64 {
    (stderr as f64 * ERRORS_OF_95_PERCENT).round() as u64
}

/// An estimate as people read it, with half the width of its 95 % interval: `38.1 MiB ±2.40 MiB`. Where the interval reaches down to 0,
/// all that is known is its upper end: `48.0 KiB (at most 1.20 MiB)`. `number` writes a number with its unit.
#[must_use]
pub fn estimated(value: u64, stderr: u64, number: impl Fn(u64) -> String) -> String {
    match half_width(stderr) {
        0 => number(value),
        half if half < value => format!("{} ±{}", number(value), number(half)),
        half => format!("{} (at most {})", number(value), number(value.saturating_add(half))),
    }
}

/// A time in seconds, shown to people in seconds, minutes or hours (`0.4 s`, `12 s`, `25 min`, `3.5 h`).
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct HumanDuration(pub f64);

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            seconds if seconds < 9.95 => format!("{seconds:.1} s"),
            seconds if seconds < 119.5 => format!("{seconds:.0} s"),
            seconds if seconds < 119.5 * 60.0 => format!("{:.0} min", seconds / 60.0),
            seconds => format!("{:.1} h", seconds / 3600.0),
        };
        f.pad(&text)
    }
}

/// A time in seconds that may be short (`85 µs`, `1.3 ms`, `120 ms`); from a second on as [`HumanDuration`].
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct ShortDuration(pub f64);

impl fmt::Display for ShortDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            seconds if seconds < 0.000_999_5 => format!("{:.0} µs", seconds * 1e6),
            seconds if seconds < 0.009_95 => format!("{:.1} ms", seconds * 1e3),
            seconds if seconds < 0.999_5 => format!("{:.0} ms", seconds * 1e3),
            seconds => HumanDuration(seconds).to_string(),
        };
        f.pad(&text)
    }
}

/// A count with its digits in groups of three.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count with what is counted: `1 block`, `12,345 blocks`. The noun takes an s.
pub fn counted(value: u64, noun: &str) -> String {
    format!("{} {noun}{}", grouped(value), if value == 1 { "" } else { "s" })
}

/// The verb for so many things in the past: "was" for one, otherwise "were".
#[must_use]
pub fn were(count: u64) -> &'static str {
    if count == 1 { "was" } else { "were" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_grouped_and_one_is_not_many() {
        assert_eq!(
            [0, 1, 999, 1000, 1_234_567].map(|n| counted(n, "block")),
            ["0 blocks", "1 block", "999 blocks", "1,000 blocks", "1,234,567 blocks"]
        );
    }

    #[test]
    fn times_are_shown_in_the_unit_that_fits() {
        let shown = [0.44, 6.0, 12.3, 119.0, 1500.0, 12_600.0].map(|seconds| HumanDuration(seconds).to_string());
        assert_eq!(shown, ["0.4 s", "6.0 s", "12 s", "119 s", "25 min", "3.5 h"]);
    }

    #[test]
    fn bytes_are_shown_with_three_digits_and_a_binary_unit() {
        let shown = |n: u64| HumanBytes(n).to_string();
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(1023), "1023 B");
        assert_eq!(shown(1024), "1.00 KiB");
        assert_eq!(shown(1536 * 1024), "1.50 MiB");
        assert_eq!(shown(25 * 1024 * 1024 + 512 * 1024), "25.5 MiB");
        assert_eq!(shown(1023 * 1024), "1.00 MiB");
        assert_eq!(shown(640 << 20), "640 MiB");
        assert_eq!(shown(u64::MAX), "16.0 EiB");
    }
}
