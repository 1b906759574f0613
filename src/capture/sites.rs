//! Probe sites on a kernel without attach cookies: a table from process and address to cookie, which the programs look up at each hit.

use std::os::unix::fs::MetadataExt as _;

use libbpf_rs::{Map, MapCore as _, MapFlags};
use zerocopy::IntoBytes as _;

use super::{AttachFile, Set, Slot};
use crate::bpf::Site;
use crate::probe::cookie;
use crate::process::Process;
use crate::units::{Addr, Pid};

/// The table's key.
pub(super) fn key(pid: Pid, address: Addr, set: Set) -> Site {
    Site { tgid: pid.0, large: u32::from(set == Set::Large), ip: address.0 }
}

/// Adds each address at which the process executes one of the file's sites. The file is identified by its inode number alone, because some
/// file systems show a different device in `/proc/PID/maps` than in `stat`. A superfluous entry does no harm, because there is no probe at
/// its address.
pub fn tell(map: &Map<'_>, pid: Pid, file: &AttachFile, set: Set, with_slot: impl Fn(u64) -> u64) -> libbpf_rs::Result<()> {
    let failed = |what: String| libbpf_rs::Error::from(std::io::Error::other(what));
    let inode = std::fs::metadata(&file.path).map_err(libbpf_rs::Error::from)?.ino();
    let maps = Process::open(pid).and_then(|process| process.maps()).map_err(|error| failed(error.to_string()))?;
    for mapping in maps.executable_files().filter(|mapping| mapping.inode == inode) {
        for site in &file.sites {
            if let Some(address) = mapping.address_of(site.offset) {
                map.update(key(pid, address, set).as_bytes(), &with_slot(site.cookie).to_ne_bytes(), MapFlags::ANY)?;
            }
        }
    }
    Ok(())
}

/// Removes the entries of a slot after its probes are detached.
pub fn forget(map: &Map<'_>, slot: Slot) {
    let of_slot = |key: &Vec<u8>| {
        let cookie = map.lookup(key, MapFlags::ANY).ok().flatten().and_then(|value| Some(u64::from_ne_bytes(value.try_into().ok()?)));
        cookie.is_some_and(|cookie| cookie::slot_of(cookie) == slot.index)
    };
    let gone: Vec<Vec<u8>> = map.keys().filter(of_slot).collect();
    for key in gone {
        // It existed a moment ago, and nothing else removes it.
        let _ = map.delete(&key);
    }
}
