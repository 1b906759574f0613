//! Whether a container is started with the sampler, and what is changed for that. Pure, but for the files of the container.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use thiserror::Error;

use super::messages::{Container, ContainerAdjustment, KeyValue, Mount, PodSandbox};
use crate::allocator::is_own_library;
use crate::sampler::fit::SANITIZER_LIBRARIES;
use crate::sampler::image::{self, ImageFit, ImageUnfit};
use crate::sampler::library::{self, Flavour};
use crate::sampler::root::Root;
use crate::sampler::{SAMPLE_BYTES_DEFAULT, SAMPLE_BYTES_VARIABLE};

/// Where the node's directory with the libraries is in a container.
pub const IN_CONTAINER: &str = "/.fragprof";
const PRELOAD: &str = "LD_PRELOAD";
/// The search path of a container without one (runc's default).
const SEARCH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why a container that was to have the sampler starts without it.
#[derive(Debug, Error)]
pub enum Refusal {
    /// A value of the label that means nothing.
    #[error("the label's value is neither \"true\" nor \"false\"")]
    Label,
    /// The program cannot run with it.
    #[error("{0}")]
    Program(#[from] ImageUnfit),
    /// The file is in a volume.
    #[error("{path} is in a volume ({destination}), whose files are not looked at")]
    Volume {
        /// The file.
        path: String,
        /// The mount.
        destination: String,
    },
    /// It has it already.
    #[error("it preloads the sampler by itself")]
    Preloaded,
    /// A sanitizer must come first.
    #[error("it preloads a sanitizer ({0}), which must come first")]
    Sanitizer(String),
    /// The mount point is in use.
    #[error("it has a mount at {IN_CONTAINER}")]
    MountPoint,
    /// Its root file system is not known.
    #[error("its root file system is not known: {0}")]
    Root(String),
    /// The library is not on the node.
    #[error("the library is not in delivery.directory: {0}")]
    Library(String),
    /// The time is up.
    #[error("its files were not examined within {0} ms: it starts without waiting longer")]
    TooSlow(u128),
    /// Others are still being examined.
    #[error("{0} containers are still being examined")]
    Busy(usize),
}

impl Refusal {
    /// Short, for metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Label => "label",
            Self::Program(unfit) => unfit.name(),
            Self::Volume { .. } => "volume",
            Self::Preloaded => "preloaded",
            Self::Sanitizer(_) => "sanitizer",
            Self::MountPoint => "mount_point",
            Self::Root(_) => "root_unknown",
            Self::Library(_) => "library",
            Self::TooSlow(_) => "too_slow",
            Self::Busy(_) => "busy",
        }
    }
}

/// Whether a pod is to have the sampler: its label decides, without one its namespace.
///
/// # Errors
/// If the label has another value than `true` or `false`.
pub fn is_wanted(pod: &PodSandbox, label: &str, namespaces: &[String]) -> Result<bool, Refusal> {
    match pod.labels.get(label).map(String::as_str) {
        Some("true") => Ok(true),
        Some("false") => Ok(false),
        Some(_) => Err(Refusal::Label),
        None => Ok(namespaces.contains(&pod.namespace)),
    }
}

/// The last value of a variable.
fn variable<'a>(container: &'a Container, name: &str) -> Option<&'a str> {
    container.env.iter().rev().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
}

/// Examines the container's program in its root file system.
///
/// # Errors
/// [`Refusal`].
pub fn examine(container: &Container, root: &Root) -> Result<ImageFit, Refusal> {
    let preloaded = variable(container, PRELOAD).unwrap_or_default();
    for entry in preloaded.split([':', ' ']) {
        if is_own_library(entry.as_bytes()) {
            return Err(Refusal::Preloaded);
        }
        let name = entry.rsplit('/').next().unwrap_or(entry);
        if SANITIZER_LIBRARIES.iter().any(|start| name.starts_with(start)) {
            return Err(Refusal::Sanitizer(name.to_owned()));
        }
    }
    let is_below = |path: &Path, mount: &Mount| mount.destination != "/" && path.starts_with(&mount.destination);
    if container.mounts.iter().any(|mount| Path::new(&mount.destination).starts_with(IN_CONTAINER)) {
        return Err(Refusal::MountPoint);
    }
    let command: Vec<OsString> = container.args.iter().map(OsString::from).collect();
    let search = variable(container, "PATH").unwrap_or(SEARCH);
    let volume = |path: &Path| {
        let mount = container.mounts.iter().find(|mount| is_below(path, mount))?;
        Some(Refusal::Volume { path: path.display().to_string(), destination: mount.destination.clone() })
    };
    let mut hidden = None;
    let fit = {
        let seen = std::cell::RefCell::new(&mut hidden);
        image::examine_with(root, &command, search, &|path| match volume(path) {
            Some(refusal) => {
                **seen.borrow_mut() = Some(refusal);
                Err(ImageUnfit::NotFound(path.display().to_string()))
            }
            None => Ok(()),
        })
    };
    if let Some(refusal) = hidden {
        return Err(refusal);
    }
    let mut fit = fit?;
    if preloaded.contains("libjemalloc.") {
        fit.flavour = Flavour::Jemalloc;
    }
    Ok(fit)
}

/// What is changed: the node's directory, mounted read-only, and the variables. What the container preloads stays behind the library.
#[must_use]
pub fn adjustment(container: &Container, fit: &ImageFit, directory: &Path, sample_bytes: u64) -> ContainerAdjustment {
    let path = Path::new(IN_CONTAINER).join(fit.flavour.file_name());
    let preload = library::preload(&path, variable(container, PRELOAD).map(AsRef::as_ref));
    let mount = Mount {
        destination: IN_CONTAINER.to_owned(),
        kind: "bind".to_owned(),
        source: directory.display().to_string(),
        options: ["bind", "ro", "nosuid", "nodev"].map(str::to_owned).to_vec(),
    };
    let mut variables = BTreeMap::from([(PRELOAD, preload.to_string_lossy().into_owned())]);
    if sample_bytes != SAMPLE_BYTES_DEFAULT && variable(container, SAMPLE_BYTES_VARIABLE).is_none() {
        variables.insert(SAMPLE_BYTES_VARIABLE, sample_bytes.to_string());
    }
    // Two plugins that set the same variable make the runtime refuse the container, unless the second one removes it first.
    let removed = variables.keys().map(|name| KeyValue { key: format!("-{name}"), value: String::new() });
    let set = variables.iter().map(|(name, value)| KeyValue { key: (*name).to_owned(), value: value.clone() });
    ContainerAdjustment { mounts: vec![mount], env: removed.chain(set).collect() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::sampler::image::Libc;

    fn container(args: &[&str], env: &[&str], mounts: &[&str]) -> Container {
        let owned = |texts: &[&str]| texts.iter().map(ToString::to_string).collect();
        let mounts = mounts.iter().map(|to| Mount { destination: (*to).to_owned(), ..Mount::default() }).collect();
        Container { args: owned(args), env: owned(env), mounts, ..Container::default() }
    }

    #[test]
    fn the_label_decides_before_the_namespace() {
        let pod = |label: Option<&str>, namespace: &str| PodSandbox {
            namespace: namespace.to_owned(),
            labels: label.map(|value| ("l".to_owned(), value.to_owned())).into_iter().collect(),
            ..PodSandbox::default()
        };
        let is_wanted = |label, namespace| is_wanted(&pod(label, namespace), "l", &["shop".to_owned()]);
        assert!(is_wanted(Some("true"), "other").unwrap() && is_wanted(None, "shop").unwrap());
        assert!(!is_wanted(Some("false"), "shop").unwrap() && !is_wanted(None, "other").unwrap());
        assert_eq!(is_wanted(Some("yes"), "shop").unwrap_err().name(), "label");
    }

    #[test]
    fn what_the_container_preloads_stays_behind_the_sampler() {
        let fit = ImageFit { program: "/app".into(), libc: Libc::Glibc, flavour: Flavour::Standard, doubts: Vec::new() };
        let given = container(&["/app"], &["A=1", "LD_PRELOAD=/x/a.so", "LD_PRELOAD=/x/b.so /x/c.so"], &[]);
        let adjust = adjustment(&given, &fit, Path::new("/node"), SAMPLE_BYTES_DEFAULT);
        let pairs: Vec<_> = adjust.env.iter().map(|pair| (pair.key.as_str(), pair.value.as_str())).collect();
        assert_eq!(pairs, [("-LD_PRELOAD", ""), ("LD_PRELOAD", "/.fragprof/libfragprof_sampler.so:/x/b.so:/x/c.so")]);
        let [mount] = adjust.mounts.as_slice() else { panic!() };
        assert_eq!((mount.source.as_str(), mount.destination.as_str()), ("/node", IN_CONTAINER));
        assert!(mount.options.contains(&"ro".to_owned()));
        assert_eq!(adjustment(&given, &fit, Path::new("/node"), 7).env[2].value, "7");
    }

    #[test]
    fn each_refusal_has_its_name() {
        let root = Root::directory("/");
        let name = |given: &Container| examine(given, &root).unwrap_err().name();
        assert_eq!(name(&container(&["/proc/self/exe"], &["LD_PRELOAD=/.fragprof/libfragprof_sampler.so"], &[])), "preloaded");
        assert_eq!(name(&container(&["/proc/self/exe"], &["LD_PRELOAD=a.so libasan.so.8"], &[])), "sanitizer");
        assert_eq!(name(&container(&["x"], &[], &["/.fragprof/x"])), "mount_point");
        assert_eq!(name(&container(&["/bin/sh"], &[], &["/bin"])), "volume");
        assert_eq!(name(&container(&["sh"], &["PATH=/nonexistent"], &[])), "not_found");
        assert_eq!(name(&container(&[], &[], &[])), "no_program");
        assert!(examine(&container(&["sh"], &[], &["/", "/binary"]), &root).is_ok());
        // Through a link into a volume.
        assert!(matches!(examine(&container(&["/bin/sh"], &[], &["/usr/bin"]), &root), Err(Refusal::Volume { .. })));
    }
}
