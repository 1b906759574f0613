//! A Prometheus server (Debian's package) that scrapes an agent.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::LIMIT;
use crate::support::build::tool;
use crate::support::process::{Process, wait_until};

/// A server that ends when dropped.
pub struct Prometheus {
    _process: Process,
    address: SocketAddr,
    _directory: tempfile::TempDir,
}

impl Prometheus {
    /// Starts one that scrapes this address every two seconds, and evaluates the project's rules as often; skips the test if Prometheus is not
    /// installed.
    pub fn start(scraped: SocketAddr) -> Option<Self> {
        let scrape = format!("[{{job_name: fragprof, static_configs: [{{targets: ['{scraped}']}}]}}]");
        Self::start_with("2s", "2s", &scrape, |_| {})
    }

    /// Starts one with these scrape configurations (YAML), which evaluates the project's rules. `prepare` may write into its data directory.
    pub fn start_with(scrape_interval: &str, evaluation_interval: &str, scrape: &str, prepare: impl FnOnce(&Path)) -> Option<Self> {
        let program = tool("prometheus")?;
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("prometheus.yml");
        let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/prometheus/fragprof.rules.yml");
        let text = format!(
            "global: {{scrape_interval: {scrape_interval}, scrape_timeout: 2s, evaluation_interval: {evaluation_interval}}}\nrule_files: \
             [{rules:?}]\nscrape_configs: {scrape}\n"
        );
        std::fs::write(&config, text).unwrap();
        let data = directory.path().join("data");
        std::fs::create_dir(&data).unwrap();
        prepare(&data);
        // A free port, which nobody else takes in the moment until Prometheus binds it.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut command = Command::new(program);
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", data.display()));
        command.arg(format!("--web.listen-address={address}"));
        let process = Process::start(&mut command);
        let server = Self { _process: process, address, _directory: directory };
        wait_until("Prometheus is ready", || server.get("/-/ready").is_some_and(|(status, _)| status == 200));
        Some(server)
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The current result of a query.
    pub fn query(&self, expression: &str) -> Result<Vec<Value>, String> {
        let (_, body) = self.get(&format!("/api/v1/query?query={}", percent_encoded(expression))).ok_or("no answer")?;
        let answer: Value = serde_json::from_str(&body).map_err(|error| error.to_string())?;
        match answer["data"]["result"].as_array() {
            Some(series) => Ok(series.clone()),
            None => Err(answer["error"].to_string()),
        }
    }

    /// The number of series in the result of a query over the time until now.
    pub fn query_range(&self, expression: &str, seconds: u64, step_s: u64, now_unix_s: u64) -> Result<usize, String> {
        let (query, start) = (percent_encoded(expression), now_unix_s - seconds);
        let path = format!("/api/v1/query_range?query={query}&start={start}&end={now_unix_s}&step={step_s}");
        let (_, body) = self.get(&path).ok_or("no answer")?;
        let answer: Value = serde_json::from_str(&body).map_err(|error| error.to_string())?;
        answer["data"]["result"].as_array().map(Vec::len).ok_or_else(|| answer["error"].to_string())
    }

    /// The values of a label in a metric.
    pub fn label_values(&self, metric: &str, label: &str) -> Vec<String> {
        let path = format!("/api/v1/label/{label}/values?match%5B%5D={}", percent_encoded(metric));
        let (_, body) = self.get(&path).unwrap();
        let answer: Value = serde_json::from_str(&body).unwrap();
        let values = answer["data"].as_array().unwrap_or_else(|| panic!("{metric}: {body}"));
        values.iter().map(|value| value.as_str().unwrap().to_owned()).collect()
    }

    fn get(&self, path: &str) -> Option<(u16, String)> {
        let mut stream = TcpStream::connect(self.address).ok()?;
        stream.set_read_timeout(Some(LIMIT)).ok()?;
        // With HTTP/1.0 a response is not chunked.
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes()).ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let (headers, body) = text.split_once("\r\n\r\n")?;
        Some((headers.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
    }
}

fn percent_encoded(text: &str) -> String {
    text.bytes().map(|byte| if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}
