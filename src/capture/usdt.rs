//! Attaches to programs' own probes (USDT): the rows with the locations of their arguments, and the sites with semaphores.

use std::sync::PoisonError;

use libbpf_rs::{Link, MapCore as _, MapFlags, UprobeMultiOpts, UprobeOpts};
use zerocopy::{FromZeros as _, IntoBytes as _};

use super::{Attached, Capture, Error, Result, Slot, load};
use crate::bpf::{self, USDT_SITES_MAX, UsdtArgument, UsdtKind, UsdtSite};
use crate::emitter::passed::{PassedFile, PassedSite};
use crate::emitter::usdt::{Argument, Operand};
use crate::probe::cookie;
use crate::probe::features::Attach;
use crate::units::Pid;

/// No register.
const NO_REG: u8 = bpf::USDT_NO_REG as u8;

/// The rows assigned so far. They are shared and never freed: their number is limited by the ways in which compilers place three arguments.
#[derive(Debug, Default)]
pub struct Rows(Vec<UsdtSite>);

/// An argument in the programs' form.
fn row_argument(argument: &Argument) -> UsdtArgument {
    let row = UsdtArgument {
        bytes: argument.bytes,
        is_signed: u8::from(argument.signed),
        base: NO_REG,
        index: NO_REG,
        ..UsdtArgument::new_zeroed()
    };
    match argument.operand {
        Operand::Constant(value) => UsdtArgument { kind: UsdtKind::Constant as u8, value, ..row },
        Operand::Register { register, high_byte } => {
            UsdtArgument { kind: UsdtKind::Register as u8, base: register.0, shift: if high_byte { 8 } else { 0 }, ..row }
        }
        Operand::Memory { displacement, base, index } => UsdtArgument {
            kind: UsdtKind::Memory as u8,
            value: displacement,
            base: base.map_or(NO_REG, |register| register.0),
            index: index.map_or(NO_REG, |(register, _)| register.0),
            shift: index.map_or(0, |(_, shift)| shift),
            ..row
        },
    }
}

impl Capture {
    /// Listens to the sites, for this process only: to the frees first, so that no block is reported whose free would be missed.
    ///
    /// # Errors
    /// [`Error::Attach`]; sites that were already attached are detached again, and their semaphores are restored.
    pub fn attach_passed(&self, pid: Pid, slot: Slot, files: &[PassedFile]) -> Result<Attached> {
        let mut attached = Attached { links: Vec::new() };
        for with_weight in [false, true] {
            for file in files {
                let sites = if with_weight { &file.allocs } else { &file.frees };
                self.attach_sites(pid, slot, file, sites, with_weight, &mut attached.links)?;
            }
        }
        Ok(attached)
    }

    fn attach_sites(
        &self,
        pid: Pid,
        slot: Slot,
        file: &PassedFile,
        sites: &[PassedSite],
        with_weight: bool,
        links: &mut Vec<Link>,
    ) -> Result<()> {
        if sites.is_empty() {
            return Ok(());
        }
        let attach_error = |source| Error::Attach { pid, path: file.path.display().to_string(), sites: sites.len(), source };
        let mut cookies = Vec::with_capacity(sites.len());
        for site in sites {
            cookies.push(u64::from(self.row(&site.arguments)?) << bpf::USDT_COOKIE_SITE_SHIFT | cookie::of_slot(slot.index));
        }
        let multi = self.offer.method != Attach::PerfEvents;
        let name = match (with_weight, multi) {
            (true, true) => "usdt_alloc_multi",
            (true, false) => "usdt_alloc",
            (false, true) => "usdt_free_multi",
            (false, false) => "usdt_free",
        };
        let program = load::program(&self.object, name).map_err(attach_error)?;
        let counter = |site: &PassedSite| site.semaphore.map_or(0, |offset| offset.0 as usize);
        let process = pid.0 as i32;
        if multi {
            let options = UprobeMultiOpts {
                offsets: sites.iter().map(|site| site.offset.0 as usize).collect(),
                ref_ctr_offsets: sites.iter().map(counter).collect(),
                cookies,
                ..Default::default()
            };
            links.push(program.attach_uprobe_multi_with_opts(process, &file.path, "", options).map_err(attach_error)?);
            return Ok(());
        }
        for (site, cookie) in sites.iter().zip(cookies) {
            let options = UprobeOpts { cookie, ref_ctr_offset: counter(site), ..Default::default() };
            links.push(program.attach_uprobe_with_opts(process, &file.path, site.offset.0 as usize, options).map_err(attach_error)?);
        }
        Ok(())
    }

    /// The index of the row for these arguments, created if necessary.
    fn row(&self, arguments: &[Argument]) -> Result<u32> {
        let mut row = UsdtSite::new_zeroed();
        for (into, argument) in row.arguments.iter_mut().zip(arguments) {
            *into = row_argument(argument);
        }
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let number = match rows.0.iter().position(|known| *known == row) {
            Some(number) => number,
            None => {
                if rows.0.len() >= USDT_SITES_MAX as usize {
                    return Err(Error::TooManySites { max: USDT_SITES_MAX });
                }
                let number = rows.0.len() as u32;
                let map_error = |source| Error::Map { map: "usdt_sites", source };
                load::map(&self.object, "usdt_sites").update(&number.to_ne_bytes(), row.as_bytes(), MapFlags::ANY).map_err(map_error)?;
                rows.0.push(row);
                rows.0.len() - 1
            }
        };
        Ok(number as u32)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::emitter::usdt::arguments;
    use crate::machine::Machine;

    #[test]
    fn a_row_says_where_each_argument_is() {
        let parsed = arguments(b"-4@-24(%rbp,%r9,8) 1@%bh 8@$-5", Machine::X86_64).unwrap();
        let rows: Vec<UsdtArgument> = parsed.iter().map(row_argument).collect();
        let fields = |row: &UsdtArgument| (row.kind, row.value, row.bytes, row.is_signed, row.base, row.index, row.shift);
        assert_eq!(fields(&rows[0]), (UsdtKind::Memory as u8, -24, 4, 1, 6, 9, 3));
        assert_eq!(fields(&rows[1]), (UsdtKind::Register as u8, 0, 1, 0, 3, NO_REG, 8));
        assert_eq!(fields(&rows[2]), (UsdtKind::Constant as u8, -5, 8, 0, NO_REG, NO_REG, 0));
    }
}
