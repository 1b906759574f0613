//! The service that a process's environment names: OpenTelemetry's variables, in `/proc/PID/environ`.
//!
//! An environment may have secrets: it is read only if that is configured (`discovery.read_environment`), and nothing of it is kept but the
//! name and version of the service. What a process changes in its environment after its start is not seen.

use std::path::Path;

use super::text;
use crate::process::handle::read_bounded;
use crate::units::Pid;

/// Bytes read: the kernel's limit is a quarter of the stack's (2 MiB by default), most environments have a few KiB.
const ENVIRON_BYTES_MAX: u64 = 256 << 10;
/// Most attributes that are read of `OTEL_RESOURCE_ATTRIBUTES`.
const ATTRIBUTES_MAX: usize = 128;

/// The service that a process names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Named {
    /// `OTEL_SERVICE_NAME`, or `service.name` of `OTEL_RESOURCE_ATTRIBUTES`.
    pub service_name: Option<String>,
    /// `service.version` of `OTEL_RESOURCE_ATTRIBUTES`.
    pub service_version: Option<String>,
}

/// Reads the environment of a process. What cannot be read names nothing.
#[must_use]
pub fn of_process(pid: Pid) -> Named {
    let path = format!("/proc/{pid}/environ");
    parse(&read_bounded(Path::new(&path), ENVIRON_BYTES_MAX).unwrap_or_default())
}

/// Parses an environment: `NAME=VALUE`, each ended by a zero byte. The first of several variables of a name counts, as for `getenv`.
#[must_use]
pub fn parse(environ: &[u8]) -> Named {
    let variable = |name: &str| {
        let mut all = environ.split(|&byte| byte == 0);
        all.find_map(|one| one.strip_prefix(name.as_bytes())?.strip_prefix(b"=")).map(String::from_utf8_lossy)
    };
    let attributes = variable("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    let attribute = |name: &str| {
        let pairs = attributes.split(',').take(ATTRIBUTES_MAX).filter_map(|pair| pair.split_once('='));
        pairs.filter(|(key, _)| key.trim() == name).find_map(|(_, value)| text(&decoded(value.trim())))
    };
    Named {
        service_name: variable("OTEL_SERVICE_NAME").and_then(|value| text(value.trim())).or_else(|| attribute("service.name")),
        service_version: attribute("service.version"),
    }
}

/// Percent-decoding (W3C Baggage, which the attributes follow); what is not two hex digits stays as it is.
fn decoded(value: &str) -> String {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let digit = |at: usize| after.get(at).and_then(|&byte| char::from(byte).to_digit(16));
        match (first, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((high * 16 + low) as u8);
                rest = after.get(2..).unwrap_or_default();
            }
            _ => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn named(name: Option<&str>, version: Option<&str>) -> Named {
        Named { service_name: name.map(str::to_owned), service_version: version.map(str::to_owned) }
    }

    #[test]
    fn the_variable_comes_before_the_attribute() {
        let environ = b"PATH=/bin\0OTEL_RESOURCE_ATTRIBUTES=service.name=a, service.version=1%2E2 ,k=v\0OTEL_SERVICE_NAME=shop\0";
        assert_eq!(parse(environ), named(Some("shop"), Some("1.2")));
        assert_eq!(parse(b"OTEL_RESOURCE_ATTRIBUTES=service.name=a%20b"), named(Some("a b"), None));
        assert_eq!(parse(b"XOTEL_SERVICE_NAME=x\0OTEL_SERVICE_NAME_=y\0"), Named::default());
        assert_eq!(parse(b"OTEL_SERVICE_NAME=\0OTEL_RESOURCE_ATTRIBUTES=service.name=\0"), Named::default());
    }

    #[test]
    fn a_hostile_environment_is_cut_and_cleaned() {
        let long = [b"OTEL_SERVICE_NAME=\xff\x1b[2J".as_slice(), &[b'x'; 100_000]].concat();
        let name = parse(&long).service_name.unwrap();
        assert!(name.chars().count() < 300 && !name.contains('\u{1b}') && name.starts_with('\u{fffd}'), "{name}");
        assert_eq!(parse(b"OTEL_RESOURCE_ATTRIBUTES=service.version=%zz%"), named(None, Some("%zz%")));
    }

    #[test]
    fn the_environment_of_a_running_process_is_read() {
        let mut child = std::process::Command::new("/bin/cat");
        child.env_clear().env("OTEL_SERVICE_NAME", "shop").stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut child = child.spawn().unwrap();
        // Its environment is there once it runs, which is a moment after the spawn.
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"x").unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let found = of_process(Pid(child.id()));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(found, named(Some("shop"), None));
    }

    proptest! {
        #[test]
        fn any_environment_is_parsed_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
            let _ = parse(&[b"OTEL_RESOURCE_ATTRIBUTES=service.name=".as_slice(), &bytes].concat());
        }
    }
}
