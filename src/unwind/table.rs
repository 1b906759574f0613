//! A file's rows as the blocks that the unwinder reads.

use zerocopy::{FromZeros as _, IntoBytes as _};

use super::Error;
use super::elf::{Elf, Image};
use super::layout::{BLOCK_BYTES, INDEX_GRANULES, ROWS_PER_BLOCK, RULES_PER_BLOCK, put_blocks};
use super::rows::{self, Counts, Rows};
use crate::bpf::{self, GRANULE_SHIFT};
use crate::machine::Machine;

/// Maximum number of granules of a file: 4 GiB of text, more than the code models of x86-64 can link; the index takes 4 MiB.
const GRANULES_MAX: u64 = 1 << 20;

/// A file's unwind table, ready to be written.
#[derive(Debug, Clone)]
pub struct Table {
    first_granule: u32,
    /// First row of each granule, and at the end the number of rows.
    index: Vec<u32>,
    rows: Rows,
}

impl Table {
    /// Reads a file of this machine and builds its table.
    ///
    /// # Errors
    /// If the file has no unwind information, is not an ELF file of this machine, or exceeds a limit.
    pub fn read<I: Image + ?Sized>(image: &I) -> Result<Self, Error> {
        Self::read_for(image, Machine::HOST)
    }

    /// Reads a file of any known machine and builds its table.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_for<I: Image + ?Sized>(image: &I, machine: Machine) -> Result<Self, Error> {
        let elf = Elf::parse(image)?;
        if elf.machine != machine {
            return Err(Error::OtherMachine);
        }
        let section = elf.unwind_section()?;
        Self::build(rows::convert(&section, &elf.segments, !elf.needs_libraries(), machine)?)
    }

    /// Builds the index of sorted rows.
    ///
    /// # Errors
    /// If there is no row, or the text spans more than the limit.
    pub fn build(rows: Rows) -> Result<Self, Error> {
        let (Some(first), Some(last)) = (rows.rows.first(), rows.rows.last()) else { return Err(Error::NoUnwindInformation) };
        let too_wide = Error::TooLarge { what: "granules of text", limit: GRANULES_MAX };
        let first_granule = first.address >> GRANULE_SHIFT;
        let granules = (last.address >> GRANULE_SHIFT).saturating_sub(first_granule) + 1;
        if granules > GRANULES_MAX {
            return Err(too_wide);
        }
        let mut index = Vec::with_capacity(usize::try_from(granules).unwrap_or(0) + 1);
        let mut row = 0u32;
        for granule in first_granule..first_granule + granules {
            index.push(row);
            while rows.rows.get(row as usize).is_some_and(|row| row.address >> GRANULE_SHIFT == granule) {
                row += 1;
            }
        }
        index.push(row);
        Ok(Self { first_granule: u32::try_from(first_granule).map_err(|_| too_wide)?, index, rows })
    }

    /// Number of blocks that it takes.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.rows_block() + self.rows.rows.len().div_ceil(ROWS_PER_BLOCK)
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.blocks() * BLOCK_BYTES
    }

    /// Its rows.
    #[must_use]
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// The counts of the conversion.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.rows.counts
    }

    fn granules(&self) -> usize {
        self.index.len().saturating_sub(1)
    }

    fn rules_block(&self) -> usize {
        1 + self.granules().div_ceil(INDEX_GRANULES)
    }

    fn rows_block(&self) -> usize {
        self.rules_block() + self.rows.rules.len().div_ceil(RULES_PER_BLOCK)
    }

    /// Writes the blocks. `out` must have [`Self::bytes`] bytes, all 0; blocks that do not fit are omitted.
    pub fn write(&self, out: &mut [u8]) {
        // All of these fit: a table has at most ROWS_MAX / 64 + GRANULES_MAX / 63 + 65536 / 32 blocks.
        let word = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let mut put = put_blocks(out);
        let header = bpf::TableHeader {
            first_granule: self.first_granule,
            granules: word(self.granules()),
            rules_block: word(self.rules_block()),
            rows_block: word(self.rows_block()),
            rows: word(self.rows.rows.len()),
            last_used: 0,
        };
        put(header.as_bytes());
        // Each block also holds the first row of the granule after its last.
        for first in (0..self.granules()).step_by(INDEX_GRANULES) {
            put(self.index[first..self.index.len().min(first + INDEX_GRANULES + 1)].as_bytes());
        }
        for rules in self.rows.rules.chunks(RULES_PER_BLOCK) {
            put(rules.as_bytes());
        }
        for rows in self.rows.rows.chunks(ROWS_PER_BLOCK) {
            let mut block = bpf::Rows::new_zeroed();
            for ((pc, rule), row) in block.pc.iter_mut().zip(&mut block.rule).zip(rows) {
                (*pc, *rule) = (row.address as u16, row.rule);
            }
            put(block.as_bytes());
        }
    }

    /// The blocks in new memory.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes()];
        self.write(&mut bytes);
        bytes
    }
}
