//! The files that a container will have, before they are mounted: the layers of its snapshot, as containerd gives them.
//!
//! CRI-O has no such service: there the root file system stays unknown, and containers start untouched.

use std::path::{Path, PathBuf};

use super::decide::Refusal;
use super::messages::{MountsRequest, MountsResponse, SnapshotMount};
use crate::agent::cri::{self, Client};
use crate::sampler::root::Root;

/// containerd's namespace for what the CRI makes.
const NAMESPACE: &str = "k8s.io";

/// A container's files.
#[derive(Debug)]
pub struct Rootfs {
    /// The layers.
    pub root: Root,
    /// Whether the agent has them by the node's own paths; otherwise through the node's first process.
    pub is_here: bool,
}

/// Requests a container's layers.
///
/// # Errors
/// If there is no containerd, it does not know the container, or the snapshotter has no directories.
pub fn find(socket: Option<&Path>, snapshotter: &str, container: &str) -> Result<Rootfs, Refusal> {
    let unknown = |reason: String| Refusal::Root(reason);
    let path = cri::socket(socket).ok_or_else(|| unknown("no socket of a container runtime is known (containers.cri)".into()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| unknown(error.to_string()))?;
    let question = MountsRequest { snapshotter: snapshotter.to_owned(), key: container.to_owned() };
    let answer: MountsResponse = runtime
        .block_on(async {
            let mut client = Client::connect(&path).await?;
            client.call_in(Some(NAMESPACE), "/containerd.services.snapshots.v1.Snapshots/Mounts", question).await
        })
        .map_err(|error| unknown(error.to_string()))?;
    let directories = layers(&answer.mounts).map_err(unknown)?;
    let seen_at = |root: &str| {
        let root = Root::directory(root);
        let directory = |path: &PathBuf| root.find(path).ok().filter(|found| found.metadata.is_dir()).map(|found| found.here);
        directories.iter().map(directory).collect::<Option<Vec<PathBuf>>>()
    };
    let here = seen_at("/");
    let is_here = here.is_some();
    let directories = here.or_else(|| seen_at(cri::MACHINE)).ok_or_else(|| unknown("its layers cannot be reached (hostPID?)".into()))?;
    let root = Root::layers(directories).map_err(|error| unknown(error.to_string()))?;
    Ok(Rootfs { root, is_here })
}

/// The directories of a root file system that is an overlay or one directory, the uppermost first.
fn layers(mounts: &[SnapshotMount]) -> Result<Vec<PathBuf>, String> {
    let [mount] = mounts else { return Err(format!("it has {} mounts", mounts.len())) };
    let option = |name: &str| mount.options.iter().find_map(|option| option.strip_prefix(name)?.strip_prefix('='));
    // The runtime could not make the directory on which the library is mounted.
    let read_only = || "it is read-only".to_owned();
    let found: Vec<PathBuf> = match mount.kind.as_str() {
        "bind" if mount.options.iter().any(|option| option == "ro") => return Err(read_only()),
        "bind" => vec![mount.source.clone().into()],
        "overlay" => {
            let lower = option("lowerdir").ok_or("it has no layers")?;
            let upper = option("upperdir").ok_or_else(read_only)?;
            std::iter::once(upper).chain(lower.split(':')).map(PathBuf::from).collect()
        }
        other => return Err(format!("the snapshotter mounts {other}, not directories")),
    };
    if found.iter().any(|path| !path.is_absolute()) {
        return Err("a layer has no absolute path".to_owned());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn mount(kind: &str, source: &str, options: &[&str]) -> SnapshotMount {
        SnapshotMount { kind: kind.into(), source: source.into(), options: options.iter().map(ToString::to_string).collect() }
    }

    #[test]
    fn the_uppermost_layer_comes_first() {
        let overlay = mount("overlay", "overlay", &["index=off", "workdir=/s/9/work", "upperdir=/s/9/fs", "lowerdir=/s/2/fs:/s/1/fs"]);
        let expected = ["/s/9/fs", "/s/2/fs", "/s/1/fs"].map(PathBuf::from);
        assert_eq!(layers(&[overlay]).unwrap(), expected);
        assert_eq!(layers(&[mount("bind", "/s/1/fs", &["rw", "rbind"])]).unwrap(), [PathBuf::from("/s/1/fs")]);
    }

    #[test]
    fn what_is_no_directory_is_not_guessed() {
        for mounts in [
            &[][..],
            &[mount("ext4", "/dev/mapper/x", &[])],
            &[mount("overlay", "", &["upperdir=/u", "lowerdir=../a"])],
            &[mount("overlay", "", &[])],
            &[mount("overlay", "", &["lowerdir=/a"])],
            &[mount("bind", "/a", &["ro"])],
        ] {
            assert!(layers(mounts).is_err(), "{mounts:?}");
        }
    }
}
