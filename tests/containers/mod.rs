//! Real containers: podman and containerd, each with storage and sockets of its own, and nothing left behind.
//!
//! The images are made here, of programs that are built here: no registry is used.

mod agent;
mod cgroup2;
mod containerd;
mod cri;
mod delivery;
mod manifests;
mod namespaces;
pub mod podman;
mod targets;
