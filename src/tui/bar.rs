//! The heap's extent as a row of cells. Pure.

use ratatui::style::Color;
use ratatui::text::{Line, Span};

use super::draw::Theme;
use super::sample::ProcessSample;
use super::words::LABEL_COLUMNS;

/// Most columns of the bar: more cells add no information.
const COLUMNS_MAX: usize = 64;

/// The heap's extent as a row of cells: live since attach, live from before, unknown, free, not resident. `None` if its parts are not known.
pub(super) fn bar(process: &ProcessSample, columns: usize, theme: Theme) -> Option<Line<'static>> {
    let ladder = &process.heap.ladder;
    let (extent, resident) = (ladder.extent_bytes?, ladder.resident_bytes?);
    let own = process.totals.inuse_bytes.min(extent);
    let unattributed = process.heap.unattributed_bytes.unwrap_or(0).min(extent - own);
    let unknown = ladder.unknown_bytes.unwrap_or(0).min(extent - own - unattributed);
    let free = resident.saturating_sub(own).saturating_sub(unattributed).saturating_sub(unknown);
    let not_resident = extent.saturating_sub(own).saturating_sub(unattributed).saturating_sub(unknown).saturating_sub(free);
    let parts = [
        (own, '█', "live", theme.coloured(Color::Green)),
        (unattributed, '▓', "live, unattributed", theme.coloured(Color::Blue)),
        (unknown, '▒', "unknown", theme.coloured(Color::Yellow)),
        (free, '░', "free", theme.coloured(Color::Cyan)),
        (not_resident, '·', "not resident", Theme::faint()),
    ];
    let legend: usize = parts.iter().filter(|(bytes, ..)| *bytes > 0).map(|(_, _, name, _)| name.len() + 4).sum();
    let room = columns.saturating_sub(LABEL_COLUMNS + legend).clamp(8, COLUMNS_MAX);
    let counts = cells(parts.map(|(bytes, ..)| bytes), room);
    let mut spans = vec![Span::styled(format!("{:<LABEL_COLUMNS$}", "extent"), Theme::strong())];
    for ((_, cell, _, style), count) in parts.iter().zip(counts) {
        spans.push(Span::styled(cell.to_string().repeat(count), *style));
    }
    for (_, cell, name, style) in parts.iter().filter(|(bytes, ..)| *bytes > 0) {
        spans.push(Span::styled(format!("  {cell}"), *style));
        spans.push(Span::raw(format!(" {name}")));
    }
    Some(Line::from(spans))
}

/// Shares of a row of cells. Each part ends at its cumulative sum, so that the row is always full; a part above 0 has a cell if there is
/// space.
fn cells<const N: usize>(parts: [u64; N], room: usize) -> [usize; N] {
    let total: u128 = parts.iter().map(|part| u128::from(*part)).sum();
    let mut counts = [0; N];
    if total == 0 {
        return counts;
    }
    let (mut sum, mut used) = (0u128, 0usize);
    for (count, part) in counts.iter_mut().zip(parts) {
        sum += u128::from(part);
        let end = usize::try_from((sum * room as u128 + total / 2) / total).unwrap_or(room).min(room);
        *count = end.saturating_sub(used).max(usize::from(part > 0 && used < room));
        used += *count;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_full_and_shows_every_part_that_is_there() {
        assert_eq!(cells([50, 25, 0, 25], 8), [4, 2, 0, 2]);
        assert_eq!(cells([1, 1_000_000, 0, 0], 10), [1, 9, 0, 0]);
        assert_eq!(cells([0; 4], 10), [0; 4]);
        assert_eq!(cells([u64::MAX; 4], 10).iter().sum::<usize>(), 10);
    }
}
