//! A compiled method: the methods that the compiler inlined at a return address.

use super::code::{Blob, word32};
use super::layout::{Layout, Metadata, Scopes, ScopesData};
use crate::census::Memory;
use crate::census::memory::{word_at, word16_at, word32_at};

/// Most that is read of a method's tables; HotSpot's largest have some hundred KiB.
const TABLE_BYTES_MAX: u64 = 4 << 20;
/// Methods inlined at one address (`MaxInlineLevel` is 15, of which 9 before JDK 14; trivial ones are not counted).
const INLINED_MAX: usize = 256;

/// Tables of a compiled method.
#[derive(Debug)]
pub struct Compiled {
    /// Its `Method`.
    pub method: u64,
    /// Low bits of its number.
    pub compile_id: u32,
    /// First address of its code.
    begin: u64,
    metadata: Vec<u8>,
    scopes: Vec<u8>,
    pcs: Vec<u8>,
}

/// A method at a place of a compiled one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope {
    /// Its `Method`.
    pub method: u64,
    /// The bytecode's index; `None` = not in the bytecode.
    pub index: Option<u16>,
}

impl Compiled {
    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.metadata.len() + self.scopes.len() + self.pcs.len()
    }

    /// Reads the tables of the method of a blob.
    pub fn read(memory: &dyn Memory, layout: &Layout, blob: &Blob) -> Option<Self> {
        let field = |offset: u64| blob.address.wrapping_add(offset);
        let number = |offset: u64| word32(memory, field(offset)).map(u64::from);
        let read = |from: u64, to: u64| {
            let bytes = to.checked_sub(from).filter(|&bytes| bytes <= TABLE_BYTES_MAX)?;
            memory.bytes(from, usize::try_from(bytes).ok()?)
        };
        let method = memory.word(field(layout.method_of_code))?;
        let compile_id = word32(memory, field(layout.compile_id))?;
        let (metadata, scopes, pcs) = match layout.scopes {
            Scopes::Inside { metadata, data, pcs, dependencies } => {
                let metadata = field(number(metadata)?);
                let data = match data {
                    ScopesData::Address(place) => memory.word(field(place))?,
                    ScopesData::Offset(place) => field(number(place)?),
                };
                let (pcs, dependencies) = (field(number(pcs)?), field(number(dependencies)?));
                (read(metadata, data)?, read(data, pcs)?, read(pcs, dependencies)?)
            }
            Scopes::Outside { immutable, immutable_bytes, pcs, data, metadata } => {
                let immutable = memory.word(field(immutable))?;
                let end = immutable.checked_add(number(immutable_bytes)?)?;
                let (pcs, data) = (immutable.wrapping_add(number(pcs)?), immutable.wrapping_add(number(data)?));
                let metadata = match metadata {
                    Metadata::InBlob { data, metadata, size } => {
                        let offset = memory.bytes(field(metadata), 2).map(|bytes| u64::from(word16_at(&bytes, 0)))?;
                        read(field(number(data)?.wrapping_add(offset)), field(number(size)?))?
                    }
                    Metadata::Mutable { address, bytes, relocations } => {
                        let address = memory.word(field(address))?;
                        read(address.wrapping_add(number(relocations)?), address.wrapping_add(number(bytes)?))?
                    }
                };
                (metadata, read(data, end)?, read(pcs, data)?)
            }
        };
        Some(Self { method, compile_id, begin: blob.begin, metadata, scopes, pcs })
    }

    /// The methods at a return address, the innermost first; empty if the tables do not know the address. `is_exact`: the address is of an
    /// instruction that was interrupted, and what is known is that of the next place in the tables.
    pub fn scopes(&self, layout: &Layout, pc: u64, is_exact: bool) -> Vec<Scope> {
        let at = |field: u64| usize::try_from(field).unwrap_or(usize::MAX);
        let Some(distance) = i32::try_from(pc.wrapping_sub(self.begin)).ok() else { return Vec::new() };
        let found = self.pcs.chunks_exact(at(layout.pc_desc_bytes).max(1)).find(|desc| {
            let place = word32_at(desc, at(layout.pc_desc_pc)) as i32;
            if is_exact { place > distance } else { place == distance }
        });
        let Some(mut scope) = found.map(|desc| word32_at(desc, at(layout.pc_desc_scope)) as usize) else { return Vec::new() };
        let mut scopes = Vec::new();
        // Each is described by three numbers: where its caller is described, its method, and its bytecode index plus one. A caller was
        // described before.
        while scope != 0 && scopes.len() < INLINED_MAX {
            let mut at = scope;
            let mut next = || layout.packing.number(&self.scopes, &mut at);
            let (Some(sender), Some(method), Some(index)) = (next(), next(), next()) else { break };
            let method = (method as usize).checked_sub(1).map_or(0, |place| word_at(&self.metadata, place.saturating_mul(8)));
            if method == 0 {
                break;
            }
            scopes.push(Scope { method, index: index.checked_sub(1).and_then(|index| u16::try_from(index).ok()) });
            if sender as usize >= scope {
                break;
            }
            scope = sender as usize;
        }
        scopes
    }
}
