//! Reads sampled blocks of a governed process: a chunk's size field, its neighbour's, and the words that identify it.

use crate::governor::retention::words::{SizeField, WORDS, places};
use crate::governor::retention::{BlockContents, BlockQuery};
use crate::process::Process;

/// Maximum number of ranges per read: the words one by one, and the size fields.
const PIECES_MAX: usize = WORDS + 2;

/// The contents at a block; `None` if any part cannot be read.
pub fn look(process: &Process, place: &BlockQuery) -> Option<BlockContents> {
    let mut look = BlockContents { size: SizeField(0), next: None, words: [0; WORDS], known: place.wanted };
    let mut size = [0u64; 1];
    read(process, &[place.addr.checked_sub(8)?], &mut size)?;
    look.size = SizeField(size[0]);
    // A chunk begins 16 bytes before its block; the next chunk's size field is 8 bytes after that chunk's start.
    let next = place.addr.checked_sub(8)?.checked_add(look.size.chunk_bytes())?;
    let mut addresses = Vec::with_capacity(PIECES_MAX);
    let wanted = |at: &usize| place.wanted >> at & 1 == 1;
    let offsets = places(place.bytes);
    for at in (0..WORDS).filter(wanted) {
        addresses.push(place.addr.checked_add(offsets[at]?)?);
    }
    let has_next = !look.size.is_mmapped() && look.size.fits(place.bytes);
    if has_next {
        addresses.push(next);
    }
    let mut words = [0u64; PIECES_MAX];
    let words = words.get_mut(..addresses.len())?;
    read(process, &addresses, words)?;
    if has_next {
        look.next = words.last().map(|word| SizeField(*word));
    }
    for (at, word) in (0..WORDS).filter(wanted).zip(words.iter()) {
        look.words[at] = *word;
    }
    Some(look)
}

/// Reads a word at each address; `None` unless all can be read.
fn read(process: &Process, addresses: &[u64], out: &mut [u64]) -> Option<()> {
    let pid = libc::pid_t::try_from(process.pid().0).ok()?;
    let remote: Vec<libc::iovec> = addresses.iter().map(|addr| libc::iovec { iov_base: *addr as *mut libc::c_void, iov_len: 8 }).collect();
    let bytes = size_of_val(out);
    let local = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: bytes };
    // SAFETY: the local vector covers exactly `out`, for which all bit patterns are valid; only the kernel dereferences the remote vector,
    // and it checks the addresses.
    let got = unsafe { libc::process_vm_readv(pid, &raw const local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
    (usize::try_from(got).ok() == Some(bytes) && addresses.len() * 8 == bytes).then_some(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::units::Pid;

    #[test]
    fn a_block_of_our_own_is_read_with_its_chunk() {
        let process = Process::open(Pid(std::process::id())).unwrap();
        let block: Vec<u64> = (0..40).map(|i| 0x1111_0000_0000 + i).collect();
        let addr = block.as_ptr() as u64;
        let place = BlockQuery { addr, bytes: 320, wanted: 0xffff };
        let look = look(&process, &place).unwrap();
        assert!(look.size.fits(320) && look.next.unwrap().previous_is_in_use(), "{look:?}");
        for (word, place) in look.words.into_iter().zip(places(320)) {
            assert_eq!(word, block[place.unwrap() as usize / 8]);
        }
        assert!(super::look(&process, &BlockQuery { addr: 0x10, ..place }).is_none());
    }
}
