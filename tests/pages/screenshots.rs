//! `make screenshots`: the pictures of docs/pages.md, from a real run: the demo service, test programs that fragment, and redis.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::browser::{Browser, DARK, DESK, Look, PHONE};
use super::{api, page};
use crate::agent::daemon::{Daemon, watching};
use crate::agent::metrics::{fragmented, fragments};
use crate::support::build::{output_dir, tool};
use crate::support::process::{Process, run, wait_until};
use crate::support::{LIMIT, serial};

/// Length of the recording in seconds.
const RECORDED_S: u64 = 8;

/// The demo service, built and running.
fn shop() -> Process {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = output_dir().join("shopd");
    let done = run(Command::new("g++").args(["-std=c++17", "-O2", "-g", "-o"]).arg(&program).arg(root.join("demo/shopd.cpp")));
    assert!(done.status.success(), "{}", done.err);
    let process = Process::start(Command::new(program).arg("600"));
    process.out.wait_for(LIMIT, |line| line.contains("serving")).unwrap();
    process
}

/// The rectangle of an element, for a screenshot of that element only.
fn rectangle(browser: &mut Browser, selector: &str) -> Value {
    let script = format!(
        "(() => {{ const box = document.querySelector({selector:?}).getBoundingClientRect(); return [box.x - 8, box.y + scrollY - 8, box.width + 16, box.height + 16]; }})()"
    );
    let sides = browser.eval(&script);
    let [x, y, width, height] = [0usize, 1, 2, 3].map(|side| sides[side].as_f64().unwrap());
    json!({ "x": x.max(0.0), "y": y, "width": width, "height": height, "scale": 1 })
}

#[test]
#[ignore = "writes docs/images: make screenshots"]
fn screenshots_of_a_real_run() {
    let _alone = serial();
    let Some(mut browser) = Browser::start() else { return };
    let shop = shop();
    let mut others: Vec<Process> =
        ["2", "16", "1000"].iter().map(|keep| fragmented(&fragments(&format!("fragments-{keep}")), &[keep])).collect();
    if let Some(redis) = tool("redis-server") {
        others.push(Process::start(
            Command::new(redis).args(["--port", "0", "--save", "", "--unixsocket"]).arg(output_dir().join("shot.sock")),
        ));
    }
    let names = ["shopd", "fragments-*", "redis-*"];
    let rest = format!("[history]\nsample_interval_s = 1\n[profile]\non_demand = true\nseconds_max = {RECORDED_S}");
    let daemon = Daemon::start(&watching(&names, &rest).replace("full_interval_s = 2", "full_interval_s = 4"));
    let own = format!("/api/v1/processes/{}", shop.pid());
    wait_until("30 samples", || {
        let view: Value = serde_json::from_str(&daemon.get(&format!("{own}/history?from=-90&points=400")).body).unwrap_or_default();
        view["live_bytes"].as_array().is_some_and(|points| points.iter().filter(|point| point.is_u64()).count() >= 30)
    });
    api(&daemon, &format!("{own}/profile?seconds={RECORDED_S}"));
    wait_until("the recording in the model", || {
        api(&daemon, &own)["profiles"].as_array().is_some_and(|all| all.iter().any(|profile| profile["mode"] == "exact"))
    });
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/images");
    let desk = Look { height: 760, ..DESK };
    browser.look(desk);
    browser.open(&page(&daemon, ""));
    browser.screenshot(&images.join("page-processes.png"), Some(json!({ "x": 0, "y": 0, "width": 1280, "height": 640, "scale": 1 })));
    browser.look(Look { width: 1100, ..desk });
    browser.open(&page(&daemon, &format!("#/p/{}?by=pinned", shop.pid())));
    browser.eval("document.getElementById('pause').click()");
    browser.wait("the pictures", "document.querySelector('canvas')?.dataset.cells > 0 && document.querySelector('.flame .frame') !== null");
    // The owners of the blocks under the pointer.
    browser.point_at("canvas", 0.5, 0.55);
    browser.wait("the stacks of a cell", "document.querySelector('.owners').dataset.range !== undefined");
    browser.eval("scrollTo(0, 0)");
    for (name, selector) in [("verdict", "#verdict"), ("time", "#time"), ("address-space", "#space"), ("stacks", "#stacks .flame")] {
        let clip = rectangle(&mut browser, selector);
        browser.screenshot(&images.join(format!("page-{name}.png")), Some(clip));
    }
    for (name, look) in [("dark", Look { width: 1100, ..DARK }), ("phone", PHONE)] {
        browser.look(look);
        browser.screenshot(&super::pictures().join(format!("process-{name}-full.png")), None);
    }
}
