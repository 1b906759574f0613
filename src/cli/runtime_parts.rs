//! The memory of a managed runtime by part, in `fragprof explain`.

use std::io::{self, Write};

use crate::managed::account::{Account, Part};
use crate::units::HumanBytes;

/// Writes a table of the parts, and which of them grew.
pub fn write(out: &mut dyn Write, account: &Account) -> io::Result<()> {
    writeln!(out, "\n  memory of the {} runtime", account.runtime)?;
    writeln!(
        out,
        "    {:<18} {:>10} {:>10} {:>10} {:>10} {:>11} {:>8}",
        "", "reserved", "committed", "resident", "in use", "change", "pieces"
    )?;
    for part in &account.parts {
        write_part(out, part)?;
    }
    if let Some(name) = account.grew_most {
        let part = account.parts.iter().find(|part| part.name == name);
        let delta = part.and_then(|part| part.delta_bytes).unwrap_or(0);
        writeln!(out, "    {name} grew most between the first sample and the last: by {}", HumanBytes(delta.unsigned_abs()))?;
    }
    for text in &account.not_known {
        writeln!(out, "    not known: {text}")?;
    }
    Ok(())
}

fn write_part(out: &mut dyn Write, part: &Part) -> io::Result<()> {
    let shown = |bytes: Option<u64>| bytes.map_or_else(String::new, |bytes| HumanBytes(bytes).to_string());
    let change = part.delta_bytes.filter(|&delta| delta != 0).map_or_else(String::new, |delta| {
        let sign = if delta < 0 { "−" } else { "+" };
        format!("{sign}{}", HumanBytes(delta.unsigned_abs()))
    });
    let name = if part.within.is_some() { format!("  {}", part.name) } else { part.name.to_owned() };
    writeln!(
        out,
        "    {name:<18} {:>10} {:>10} {:>10} {:>10} {change:>11} {:>8}",
        shown(part.reserved_bytes),
        shown(part.committed_bytes),
        shown(part.resident_bytes),
        shown(part.used_bytes),
        part.count.map_or_else(String::new, |count| count.to_string()),
    )
}
