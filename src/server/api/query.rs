//! Parameters of requests: every value is checked, and an invalid one is named.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use serde::Deserialize;

use super::{Refusal, refuse};
use crate::profile::ValueKind;

/// Most points in one history answer.
const POINTS_MAX: u64 = 2000;

/// The values by which a profile can be ranked, for messages.
const BY: &str = "by must be one of live, allocated, survivors, pinned, blocked, growth, peak, touched";

/// Refuses parameters, for paths that have none.
pub async fn none(request: Request, next: Next) -> Response {
    match request.uri().query() {
        None | Some("") => next.run(request).await,
        Some(_) => *refuse(StatusCode::BAD_REQUEST, "this path has no parameters"),
    }
}

/// The parameters, or a refusal that says what is wrong with them.
///
/// # Errors
/// 400 where they cannot be understood.
pub fn checked<T>(given: Result<Query<T>, QueryRejection>) -> Result<T, Refusal> {
    given.map(|Query(value)| value).map_err(|rejection| refuse(StatusCode::BAD_REQUEST, &rejection.body_text()))
}

/// A pid in a path.
///
/// # Errors
/// 400 unless it is a number.
pub fn pid(text: &str) -> Result<u32, Refusal> {
    text.parse().map_err(|_| refuse(StatusCode::BAD_REQUEST, "a pid must be a number"))
}

/// A kind of value by its name; live bytes without one.
///
/// # Errors
/// 400 for a name that does not exist.
pub fn by(text: Option<&str>) -> Result<ValueKind, Refusal> {
    text.map_or(Some(ValueKind::InuseSpace), ValueKind::from_by).ok_or_else(|| refuse(StatusCode::BAD_REQUEST, BY))
}

/// A span of time: seconds since the Unix epoch, or, where negative, seconds before now.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Span {
    from: Option<f64>,
    to: Option<f64>,
    points: Option<u64>,
    start_ticks: Option<u64>,
}

impl Span {
    /// The span in seconds since the Unix epoch; by default the last `default_s`.
    ///
    /// # Errors
    /// 400 if it ends before it begins, or is not a number.
    pub fn bounds(&self, now_unix_s: f64, default_s: f64) -> Result<(f64, f64), Refusal> {
        let to = self.to.map_or(Ok(now_unix_s), |to| time(to, now_unix_s))?;
        let from = self.from.map_or(Ok(to - default_s), |from| time(from, now_unix_s))?;
        if from <= to { Ok((from, to)) } else { Err(refuse(StatusCode::BAD_REQUEST, "from must not be after to")) }
    }

    /// Points requested, within the limit.
    ///
    /// # Errors
    /// 400 for none or too many.
    pub fn points(&self, default: u64) -> Result<u64, Refusal> {
        let points = self.points.unwrap_or(default);
        let message = "points must be a number from 1 to 2000";
        if (1..=POINTS_MAX).contains(&points) { Ok(points) } else { Err(refuse(StatusCode::BAD_REQUEST, message)) }
    }

    /// Identifies the process among those with the pid; `None` = the last one seen.
    #[must_use]
    pub fn start_ticks(&self) -> Option<u64> {
        self.start_ticks
    }
}

/// A time: seconds since the Unix epoch, or, where negative, seconds before now.
///
/// # Errors
/// 400 if it is not a finite number.
pub fn time(value: f64, now_unix_s: f64) -> Result<f64, Refusal> {
    if !value.is_finite() {
        return Err(refuse(StatusCode::BAD_REQUEST, "a time must be a number: seconds since 1970, or, if negative, seconds before now"));
    }
    Ok(if value < 0.0 { now_unix_s + value } else { value })
}

/// An address, decimal or hexadecimal with 0x.
///
/// # Errors
/// 400 if it is not an address.
pub fn address(text: &str) -> Result<u64, Refusal> {
    let parsed = text.strip_prefix("0x").map_or_else(|| text.parse(), |digits| u64::from_str_radix(digits, 16));
    parsed.map_err(|_| refuse(StatusCode::BAD_REQUEST, "an address must be a decimal number, or 0x and hexadecimal digits"))
}

/// A range of addresses; by default all.
///
/// # Errors
/// 400 if it is empty, or its ends are not addresses.
pub fn range(from: Option<&str>, to: Option<&str>) -> Result<std::ops::Range<u64>, Refusal> {
    let range = from.map_or(Ok(0), address)?..to.map_or(Ok(u64::MAX), address)?;
    if range.is_empty() { Err(refuse(StatusCode::BAD_REQUEST, "from must be before to")) } else { Ok(range) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_negative_time_counts_from_now() {
        let span = Span { from: Some(-60.0), ..Span::default() };
        assert_eq!(span.bounds(1000.0, 5.0).unwrap(), (940.0, 1000.0));
        assert_eq!(Span::default().bounds(1000.0, 5.0).unwrap(), (995.0, 1000.0));
        assert!(Span { from: Some(3.0), to: Some(2.0), ..Span::default() }.bounds(9.0, 1.0).is_err());
        assert!(Span { from: Some(f64::NAN), ..Span::default() }.bounds(9.0, 1.0).is_err());
        assert!(Span { points: Some(0), ..Span::default() }.points(10).is_err());
    }

    #[test]
    fn addresses_are_read_in_both_notations() {
        assert_eq!((address("0x10").unwrap(), address("16").unwrap()), (16, 16));
        assert!(address("0x").is_err() && address("-1").is_err() && address("1x").is_err());
    }
}
