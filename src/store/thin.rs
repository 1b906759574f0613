//! Thinning: the older, the fewer rows; and the limits on age and size.

use rusqlite::{Connection, OptionalExtension as _, params};

use super::database::{Database, StoreError};

/// Steps by age: of samples older than the first number of seconds one is kept per second number. A day at half a minute, a week at five
/// minutes, then one per hour.
const TIERS: [(i64, i64); 2] = [(24 * 3600, 300), (7 * 24 * 3600, 3600)];
/// The same for profiles, which are larger: all of a day, one per six hours of a week, then one per day.
const PROFILE_TIERS: [(i64, i64); 2] = [(24 * 3600, 6 * 3600), (7 * 24 * 3600, 24 * 3600)];
/// How often the ages can be halved to get below the size limit: 24 h become a minute and a half.
const HALVINGS: u32 = 10;
/// Share of the remaining rows that is removed per step when even thinned rows are too many.
const DROP_PARTS: i64 = 8;

/// The limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the database, without free pages.
    pub size_bytes_max: u64,
    /// Age in seconds beyond which nothing is kept.
    pub age_s_max: i64,
}

/// The result of thinning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Thinned {
    /// Rows replaced by a later row of the same step.
    pub merged: u64,
    /// Rows beyond the age limit.
    pub aged: u64,
    /// Rows removed for lack of space, although thinned already.
    pub dropped: u64,
}

/// Bytes in use.
///
/// # Errors
/// What SQLite reports.
pub fn size_bytes(connection: &Connection) -> rusqlite::Result<u64> {
    let number = |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let pages = number("page_count")?.saturating_sub(number("freelist_count")?);
    Ok(u64::try_from(pages.saturating_mul(number("page_size")?)).unwrap_or(0))
}

/// The end of the samples, in seconds since 1970; `None` without any. The newest tenth is ignored: a clock that was ahead for a while leaves a
/// few rows with times in the future.
///
/// # Errors
/// What SQLite reports.
pub fn end_of_samples(connection: &Connection) -> rusqlite::Result<Option<i64>> {
    let end = "SELECT at FROM sample ORDER BY at DESC LIMIT 1 OFFSET (SELECT count(*) / 10 FROM sample)";
    connection.query_row(end, [], |row| row.get(0)).optional()
}

/// Thins old rows, removes those beyond the age limit, and continues until the size limit holds.
///
/// # Errors
/// What SQLite reports; what was done until then stays done.
pub fn thin(database: &Database, now: i64, limits: Limits) -> Result<Thinned, StoreError> {
    let mut connection = database.lock();
    run(&mut connection, now, limits).map_err(database.fail())
}

fn run(connection: &mut Connection, now: i64, limits: Limits) -> rusqlite::Result<Thinned> {
    let mut thinned = Thinned::default();
    let oldest = now.saturating_sub(limits.age_s_max);
    thinned.aged += remove_before(connection, oldest)?;
    for halving in 0..=HALVINGS {
        for (age_s, step_s) in TIERS {
            thinned.merged += merge(connection, cut(now, age_s >> halving, step_s), step_s)?;
        }
        for (age_s, step_s) in PROFILE_TIERS {
            thinned.merged += merge_profiles(connection, cut(now, age_s >> halving, step_s), step_s)?;
        }
        if size_bytes(connection)? <= limits.size_bytes_max {
            break;
        }
    }
    while size_bytes(connection)? > limits.size_bytes_max {
        let span = "SELECT coalesce(min(at), 0), coalesce(max(at), 0) FROM (SELECT at FROM sample UNION ALL SELECT at FROM profile
             UNION ALL SELECT id / 1000000 FROM event)";
        let (first, last): (i64, i64) = connection.query_row(span, [], |row| Ok((row.get(0)?, row.get(1)?)))?;
        // Rows from a time when the clock was ahead must not stretch the span, or an eighth of it could be all real rows.
        let last = last.min(now).max(first);
        let removed = remove_before(connection, first + ((last - first) / DROP_PARTS).max(1))?;
        thinned.dropped += removed;
        if removed == 0 {
            break;
        }
    }
    connection.execute_batch("PRAGMA incremental_vacuum")?;
    Ok(thinned)
}

/// Only whole steps are merged.
fn cut(now: i64, age_s: i64, step_s: i64) -> i64 {
    now.saturating_sub(age_s).div_euclid(step_s).saturating_mul(step_s)
}

/// Of the samples before `cut`, keeps the last of each step, with the highest peak of all of them.
fn merge(connection: &mut Connection, cut: i64, step_s: i64) -> rusqlite::Result<u64> {
    let transaction = connection.transaction()?;
    transaction.execute(
        "UPDATE sample SET step = ?2,
             rss_bytes_max = (SELECT max(s.rss_bytes_max) FROM sample s WHERE s.process = sample.process
                 AND s.at BETWEEN sample.at / ?2 * ?2 AND sample.at)
         WHERE at < ?1 AND step < ?2 AND NOT EXISTS (SELECT 1 FROM sample s WHERE s.process = sample.process
                 AND s.at > sample.at AND s.at < (sample.at / ?2 + 1) * ?2)",
        params![cut, step_s],
    )?;
    let removed = transaction.execute("DELETE FROM sample WHERE at < ?1 AND step < ?2", params![cut, step_s])?;
    transaction.commit()?;
    Ok(removed as u64)
}

/// Of the profiles before `cut`, keeps the last of each step and mode.
fn merge_profiles(connection: &Connection, cut: i64, step_s: i64) -> rusqlite::Result<u64> {
    let removed = connection.execute(
        "DELETE FROM profile WHERE at < ?1 AND EXISTS (SELECT 1 FROM profile p WHERE p.process = profile.process
             AND p.mode = profile.mode AND p.at > profile.at AND p.at < (profile.at / ?2 + 1) * ?2)",
        params![cut, step_s],
    )?;
    Ok(removed as u64)
}

fn remove_before(connection: &mut Connection, oldest: i64) -> rusqlite::Result<u64> {
    let transaction = connection.transaction()?;
    let mut removed = transaction.execute("DELETE FROM sample WHERE at < ?1", [oldest])?;
    removed += transaction.execute("DELETE FROM profile WHERE at < ?1", [oldest])?;
    removed += transaction.execute("DELETE FROM event WHERE id < ?1", [oldest.saturating_mul(1_000_000)])?;
    removed += transaction.execute("DELETE FROM outcome WHERE id < ?1", [oldest.saturating_mul(1_000_000)])?;
    if removed > 0 {
        transaction.execute(
            "DELETE FROM process WHERE NOT EXISTS (SELECT 1 FROM sample WHERE process = process.id)
                 AND NOT EXISTS (SELECT 1 FROM profile WHERE process = process.id)",
            [],
        )?;
    }
    transaction.commit()?;
    Ok(removed as u64)
}
