//! Comparisons of figures with the truth, and the text of the table's cells. Pure.

use std::fmt::Write as _;

/// The result for a figure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cell {
    /// It equals the truth, within the allowed difference.
    Good(String),
    /// It cannot be compared with a truth, with the reason.
    None(String),
    /// It does not equal the truth.
    Wrong(String),
}

impl Cell {
    /// `good`, `none`, `wrong`.
    pub fn mark(&self) -> &'static str {
        match self {
            Self::Good(_) => "good",
            Self::None(_) => "none",
            Self::Wrong(_) => "wrong",
        }
    }

    /// Its text.
    pub fn text(&self) -> &str {
        match self {
            Self::Good(text) | Self::None(text) | Self::Wrong(text) => text,
        }
    }

    /// Parses the output of [`Cell::mark`] and [`Cell::text`].
    pub fn parse(mark: &str, text: &str) -> Self {
        match mark {
            "good" => Self::Good(text.into()),
            "wrong" => Self::Wrong(text.into()),
            _ => Self::None(text.into()),
        }
    }
}

/// A number with commas between groups of three digits.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A figure that may differ by at most `allowed`, with the reason if that is not zero.
pub fn within(seen: u64, truth: u64, allowed: u64, reason: &str) -> Cell {
    if seen.abs_diff(truth) <= allowed {
        return Cell::Good(if seen == truth { grouped(truth) } else { format!("{} of {}", grouped(seen), grouped(truth)) });
    }
    let mut text = format!("{} of {}, allowed ± {}", grouped(seen), grouped(truth), grouped(allowed));
    if allowed > 0 {
        write!(text, " ({reason})").expect("writing to a string works");
    }
    Cell::Wrong(text)
}

/// A figure that must equal the truth.
pub fn exact(seen: u64, truth: u64) -> Cell {
    within(seen, truth, 0, "")
}

/// An estimate compared with its truth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The estimate.
    pub est: f64,
    /// Its stated standard error. `None`: it is a lower bound.
    pub stderr: Option<f64>,
    /// The true value.
    pub truth: f64,
}

impl Estimate {
    /// Whether the stated interval of 95 %, or the bound, covers the truth.
    pub fn covers(&self) -> bool {
        match self.stderr {
            // Half a unit for rounding: counts are integers.
            Some(stderr) => (self.est - self.truth).abs() <= 1.96 * stderr + 0.5,
            None => self.est <= self.truth,
        }
    }

    /// `0.97 ± 0.05`, in units of the truth.
    fn ratio(&self) -> String {
        let unit = self.truth.max(1.0);
        match self.stderr {
            Some(stderr) => format!("{:.2} ± {:.2}", self.est / unit, 1.96 * stderr / unit),
            None => format!("≥ {:.2}", self.est / unit),
        }
    }
}

/// Probability that at least `misses` of `all` intervals miss if each misses with a probability of 7 %.
fn chance_of_misses(misses: u32, all: u32) -> f64 {
    let at_least = |k: u32| {
        let choose = (0..k).fold(1.0, |product, i| product * f64::from(all - i) / f64::from(i + 1));
        choose * 0.07_f64.powi(k as i32) * 0.93_f64.powi((all - k) as i32)
    };
    (misses..=all).map(at_least).sum()
}

/// The intervals of several recordings of one program. Wrong if so many of them miss that intervals with a coverage of 93 % would do so in
/// fewer than one of two hundred programs.
pub fn coverage(estimates: &[Estimate]) -> Cell {
    let all = estimates.len() as u32;
    let inside = estimates.iter().filter(|one| one.covers()).count() as u32;
    let ratios: Vec<String> = estimates.iter().map(Estimate::ratio).collect();
    let text = format!("{inside} of {all}: {}", ratios.join(", "));
    match all {
        0 => Cell::None("no recording".into()),
        _ if chance_of_misses(all - inside, all) < 0.005 => Cell::Wrong(text),
        _ => Cell::Good(text),
    }
}

/// Parses `INSIDE of ALL` at the beginning of a cell that [`coverage`] wrote.
pub fn covered(text: &str) -> Option<(u32, u32)> {
    let (inside, rest) = text.split_once(" of ")?;
    let (all, _) = rest.split_once(':')?;
    Some((inside.parse().ok()?, all.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(est: f64, stderr: f64) -> Estimate {
        Estimate { est, stderr: Some(stderr), truth: 100.0 }
    }

    #[test]
    fn one_byte_is_a_difference_where_none_is_allowed() {
        assert_eq!(exact(1_234_567, 1_234_567), Cell::Good("1,234,567".into()));
        assert_eq!(exact(999, 1000), Cell::Wrong("999 of 1,000, allowed ± 0".into()));
    }

    #[test]
    fn an_allowed_difference_is_stated_with_its_reason_once_it_is_exceeded() {
        assert_eq!(within(98, 100, 2, "two threads"), Cell::Good("98 of 100".into()));
        assert_eq!(within(97, 100, 2, "two threads"), Cell::Wrong("97 of 100, allowed ± 2 (two threads)".into()));
    }

    #[test]
    fn an_interval_covers_the_stated_range() {
        assert!(estimate(90.0, 5.2).covers() && !estimate(90.0, 4.0).covers());
        assert!(!estimate(0.0, 0.0).covers());
    }

    #[test]
    fn a_lower_bound_holds_only_below_the_truth() {
        let bound = |est| Estimate { est, stderr: None, truth: 100.0 };
        assert!(bound(31.0).covers() && !bound(101.0).covers());
    }

    #[test]
    fn one_miss_of_five_is_chance_and_three_are_not() {
        let (hit, miss) = (estimate(100.0, 5.0), estimate(50.0, 5.0));
        assert!(matches!(coverage(&[hit, hit, hit, hit, miss]), Cell::Good(_)));
        let wrong = coverage(&[hit, hit, miss, miss, miss]);
        assert!(matches!(&wrong, Cell::Wrong(text) if text.starts_with("2 of 5: 1.00 ± 0.10")), "{wrong:?}");
        assert_eq!(covered(wrong.text()), Some((2, 5)));
    }

    #[test]
    fn cells_are_parsed_as_they_were_written() {
        for cell in [Cell::Good("1".into()), Cell::None("no".into()), Cell::Wrong("2 of 3".into())] {
            assert_eq!(Cell::parse(cell.mark(), cell.text()), cell);
        }
    }
}
