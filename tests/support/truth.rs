//! A test program's own ledger, as reported at a rendezvous.

use serde::Deserialize;

/// Allocations of one function.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct SiteTruth {
    /// The function's name.
    pub site: String,
    /// Bytes requested of live blocks.
    pub live_bytes: u64,
    /// Live blocks.
    pub live_count: u64,
    /// Bytes requested of all blocks ever allocated.
    pub allocated_bytes: u64,
    /// Blocks ever allocated.
    pub allocations: u64,
    /// Whether the two above are not known.
    pub live_only: bool,
}

/// One line of the rendezvous.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Truth {
    /// The program's phase.
    pub phase: String,
    /// Its process id.
    pub pid: u32,
    /// Nanoseconds per malloc/free pair, for the program that measures it.
    pub pair_ns: Option<f64>,
    /// Its sites, in the order of their first allocation.
    pub sites: Vec<SiteTruth>,
}

impl Truth {
    /// Parses a line. Rejects an inconsistent ledger, which would be a fault of the test program.
    pub fn parse(line: &str) -> Result<Self, String> {
        let truth: Self = serde_json::from_str(line).map_err(|e| format!("not a line of the rendezvous ({e})"))?;
        for site in &truth.sites {
            if site.live_count > site.allocations || site.live_bytes > site.allocated_bytes {
                return Err(format!("{} has more live blocks than it allocated", site.site));
            }
        }
        Ok(truth)
    }

    /// Live bytes and blocks of all sites.
    pub fn live(&self) -> (u64, u64) {
        self.sites.iter().fold((0, 0), |(bytes, count), site| (bytes + site.live_bytes, count + site.live_count))
    }
}

#[test]
fn a_ledger_line_is_read_with_every_site() {
    let line = r#"{"phase":"done","pid":7,"sites":[{"site":"site_a","live_bytes":10,"live_count":1,"allocated_bytes":30,"allocations":3,"live_only":false}]}"#;
    let truth = Truth::parse(line).expect("it is valid");
    assert_eq!((truth.phase.as_str(), truth.pid, truth.live()), ("done", 7, (10, 1)));
    assert_eq!((truth.sites[0].allocated_bytes, truth.sites[0].allocations), (30, 3));
}

#[test]
fn an_inconsistent_ledger_is_rejected() {
    let line = r#"{"phase":"done","pid":7,"sites":[{"site":"s","live_bytes":10,"live_count":4,"allocated_bytes":30,"allocations":3,"live_only":false}]}"#;
    assert!(Truth::parse(line).is_err());
    let negative = line.replace("\"live_count\":4", "\"live_count\":-1");
    assert!(Truth::parse(&negative).is_err());
    assert!(Truth::parse("{\"phase\":\"done\"").is_err());
}
