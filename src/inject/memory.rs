//! Reads and writes of another process's memory that respect its protections.

/// Reads from `address` on; how many bytes were read. Fewer at the first page that cannot be read.
pub fn read(pid: i32, address: u64, out: &mut [u8]) -> usize {
    let local = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: out.len() };
    // SAFETY: the local part is `out`, which is writable for its length; the remote address belongs to the other process.
    let done = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(done).unwrap_or(0)
}

/// Writes all of `bytes` at `address`; whether it could.
pub fn write(pid: i32, address: u64, bytes: &[u8]) -> bool {
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: bytes.len() };
    // SAFETY: the local part is only read; the remote address belongs to the other process.
    let done = unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(done) == Ok(bytes.len())
}
