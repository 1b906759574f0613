//! The pictures show the API's values: address space, time axis and difference, flame graph, flight record.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::browser::{Browser, DESK, PHONE};
use super::{api, fully_measured, page, pictures};
use crate::agent::daemon::{Daemon, watching};
use crate::agent::metrics::{fragmented, fragments};
use crate::support::build::{output_dir, tool};
use crate::support::process::{Process, run, wait_until};
use crate::support::{LIMIT, bpf};

/// A function name that contains markup.
pub const HOSTILE: &str = "<img/src=x>";

/// Compiles `allocates.c` with its function renamed. A `name` of its own separates the tests.
pub fn allocates(name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pages/allocates.c");
    let (object, program) = (output_dir().join(format!("{name}.o")), output_dir().join(name));
    let steps = [
        run(Command::new("cc").args(["-O1", "-fno-builtin", "-c", "-o"]).args([&object, &source])),
        run(Command::new("objcopy").args(["--redefine-sym", &format!("place={HOSTILE}")]).arg(&object)),
        run(Command::new("cc").arg("-o").args([&program, &object])),
    ];
    for step in steps {
        assert!(step.status.success(), "{}", step.err);
    }
    program
}

fn totals(map: &Value) -> Vec<u64> {
    map["totals"].as_array().unwrap().iter().map(|total| total.as_u64().unwrap()).collect()
}

/// The sums that the canvas reports as drawn, in the order of the API's columns.
fn drawn(browser: &mut Browser) -> Vec<u64> {
    let script =
        "['live', 'pinned', 'trimmable', 'kept', 'other', 'resident'].map(key => Number(document.querySelector('canvas').dataset[key]))";
    browser.eval(script).as_array().unwrap().iter().map(|sum| sum.as_u64().unwrap()).collect()
}

#[test]
fn the_address_space_is_drawn_page_by_page_and_zoomed() {
    let Some(mut browser) = Browser::start() else { return };
    let target = fragmented(&fragments("fragments-map"), &["16"]);
    let daemon = Daemon::start(&watching(&["fragments-map"], ""));
    let list = fully_measured(&daemon, 1);
    let path = format!("/api/v1/processes/{}/map", target.pid());
    let map = api(&daemon, &format!("{path}?cells=6000"));
    browser.open(&page(&daemon, &format!("#/p/{}", target.pid())));
    browser.wait("the picture", "document.querySelector('canvas')?.dataset.cells > 0");
    assert_eq!(drawn(&mut browser), totals(&map));
    // The same bytes as the census counted.
    let heap = &list["processes"][0]["heaps"][0];
    assert_eq!(Some(totals(&map)[1]), heap["pinned_bytes"].as_u64());
    // Most pages hold a few live bytes: they are drawn in the brightest step of the live ramp.
    let share = browser.eval(
        "(() => { const canvas = document.querySelector('canvas');
            const hex = getComputedStyle(canvas).getPropertyValue('--live-5').trim();
            const wanted = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join();
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            let hit = 0; let painted = 0;
            for (let at = 0; at < data.length; at += 4) { if (!data[at + 3]) continue; painted += 1; if ([data[at], data[at + 1], data[at + 2]].join() === wanted) hit += 1; }
            return hit / painted; })()",
    );
    assert!(share.as_f64().unwrap() > 0.4, "only {share} of the picture shows pinned pages");
    // By keyboard: a cell's values, and a single piece through the table.
    browser.eval("document.querySelector('canvas').focus()");
    browser.press("Home");
    let first = map["pieces"][0]["start"].as_str().unwrap();
    assert!(browser.text(".facts").starts_with(first), "{}", browser.text(".facts"));
    let last = map["pieces"].as_array().unwrap().last().unwrap();
    browser.eval(
        "document.querySelector('.alternative').open = true; [...document.querySelectorAll('.alternative tbody button')].at(-1).click()",
    );
    let (from, to) = (last["start"].as_str().unwrap(), last["end"].as_str().unwrap());
    browser.wait("the single piece", "document.querySelectorAll('.alternative tbody tr').length === 1");
    assert_eq!(drawn(&mut browser), totals(&api(&daemon, &format!("{path}?from={from}&to={to}&cells=6000"))));
    assert!(browser.eval("location.hash").as_str().unwrap().contains(from), "a link leads to the same range");
}

#[test]
fn the_verdict_is_shown_in_words_with_its_remedies() {
    let Some(mut browser) = Browser::start() else { return };
    let target = fragmented(&fragments("fragments-why"), &["1000"]);
    // A single census: a later one could change the wording.
    let daemon = Daemon::start(&watching(&["fragments-why"], "").replace("full_interval_s = 2", "full_interval_s = 3600"));
    fully_measured(&daemon, 1);
    let said = api(&daemon, &format!("/api/v1/processes/{}/explain", target.pid()));
    browser.open(&page(&daemon, &format!("#/p/{}", target.pid())));
    let text = browser.text("#verdict");
    assert!(text.contains(said["summary"].as_str().unwrap()), "{text}");
    for remedy in said["remedies"].as_array().unwrap() {
        assert!(text.contains(remedy["action"].as_str().unwrap()), "{text}");
        let shown = browser.eval("[...document.querySelectorAll('.remedies data')].map(one => Number(one.value))");
        assert!(remedy["predicted_bytes"].is_null() || shown.as_array().unwrap().contains(&remedy["predicted_bytes"]), "{shown}");
    }
    for unknown in said["unknowns"].as_array().unwrap() {
        assert!(text.contains(unknown.as_str().unwrap()), "{text}");
    }
}

#[test]
fn the_time_axis_shows_the_history_and_two_times_are_compared() {
    let Some(mut browser) = Browser::start() else { return };
    let program = allocates("allocates-time");
    let target = Process::start(&mut Command::new(&program));
    target.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let daemon = Daemon::start(&watching(&["allocates-time"], "[history]\nsample_interval_s = 1"));
    let path = format!("/api/v1/processes/{}", target.pid());
    let known = || {
        let answer = daemon.get(&format!("{path}/history?from=-3600&points=400"));
        let view: Value = serde_json::from_str(&answer.body).unwrap_or_default();
        view["live_bytes"].as_array().map_or(0, |points| points.iter().filter(|point| point.is_u64()).count())
    };
    wait_until("some samples", || known() >= 3);
    browser.open(&page(&daemon, &format!("#/p/{}", target.pid())));
    browser.eval("document.getElementById('pause').click(); document.querySelector('.chart').focus()");
    browser.press("Home");
    browser.press("Enter");
    browser.eval("document.querySelector('.chart').focus()");
    browser.press("End");
    browser.press("Enter");
    browser.wait("the difference", "document.querySelector('.difference tbody tr') !== null");
    let asked = browser.requests().into_iter().rfind(|url| url.contains("/diff?")).unwrap();
    let diff = api(&daemon, &asked[asked.find("/api").unwrap()..]);
    for (key, delta) in diff["delta_bytes"].as_object().unwrap() {
        let shown = browser.eval(&format!("Number(document.querySelector(\"[data-step='{key}'] td:last-child data\")?.value)"));
        let is_shown =
            !["swapped_bytes", "cached_bytes", "free_bytes", "top_bytes", "unknown_bytes", "mmapped_bytes"].contains(&key.as_str());
        assert!(!is_shown || shown.as_i64() == delta.as_i64(), "{key}: {shown}, not {delta}");
    }
    browser.screenshot(&pictures().join("difference.png"), None);
}

#[test]
fn the_flame_graph_shows_the_recording_and_a_hostile_function_name_stays_text() {
    let Some(mut browser) = Browser::start() else { return };
    if bpf().is_none() || tool("objcopy").is_none() {
        return;
    }
    let program = allocates("allocates-flame");
    let target = Process::start(&mut Command::new(&program));
    target.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let daemon = Daemon::start(&watching(&["allocates-flame"], "[profile]\non_demand = true\nseconds_max = 1"));
    fully_measured(&daemon, 1);
    let path = format!("/api/v1/processes/{}/profile", target.pid());
    browser.open(&page(&daemon, &format!("#/p/{}", target.pid())));
    browser.eval("document.querySelector('.record').click()");
    browser.wait("the recording", "document.querySelector('.flame .frame') !== null");
    // The recording is in the model from the next snapshot on.
    wait_until("the profile in the API", || daemon.get(&path).status == 200);
    let told = api(&daemon, &format!("{path}?by=live"));
    let total = |browser: &mut Browser| browser.eval("Number(document.querySelector('#stacks .total').value)").as_u64();
    assert_eq!(total(&mut browser), told["total"].as_u64());
    assert!(browser.text("#stacks").contains(HOSTILE), "{}", browser.text("#stacks"));
    assert_eq!(browser.eval("document.querySelectorAll('main img').length"), 0);
    assert_eq!(browser.eval("document.querySelector('#stacks [data-source]').dataset.source"), "exact");
    // Another kind of value, a search, and a zoom.
    browser.eval("document.querySelector('[data-by=allocated]').click()");
    let allocated = api(&daemon, &format!("{path}?by=allocated"));
    browser.wait("the other kind", &format!("Number(document.querySelector('#stacks .total')?.value) === {}", allocated["total"]));
    browser.eval("(() => { const search = document.querySelector('#stacks input'); search.value = 'src=x'; search.dispatchEvent(new Event('input')); })()");
    assert!(browser.eval("document.querySelectorAll('.frame.hit').length").as_u64() >= Some(1));
    browser.eval("document.querySelector('.frame.hit').click()");
    let width = browser.eval("parseFloat(document.querySelector('.frame.hit').style.width)");
    assert_eq!(width, 100);
    for (name, look) in [("desk", DESK), ("phone", PHONE)] {
        browser.look(look);
        browser.screenshot(&pictures().join(format!("flame-{name}.png")), None);
    }
    browser.look(DESK);

    // Every recorded block has an address: the range of all addresses has all live bytes of the recording.
    let everywhere = api(&daemon, &format!("/api/v1/processes/{}/stacks?top=200", target.pid()));
    let report = api(&daemon, &format!("{path}?format=stacks"));
    assert_eq!(everywhere["live_bytes"], report["totals"]["inuse_bytes"], "{everywhere}");
    assert_eq!(everywhere["live_allocations"], report["totals"]["inuse_allocations"], "{everywhere}");
    assert!(everywhere["stacks"][0]["frames"].as_array().unwrap().iter().any(|name| name == HOSTILE), "{everywhere}");
    // At their addresses the picture names them. Finds eight pages with blocks by bisection.
    let held = |from: u64, to: u64| api(&daemon, &format!("/api/v1/processes/{}/stacks?from={from:#x}&to={to:#x}", target.pid()));
    let map = api(&daemon, &format!("/api/v1/processes/{}/map", target.pid()));
    let address = |text: &Value| u64::from_str_radix(text.as_str().unwrap().trim_start_matches("0x"), 16).unwrap();
    let pieces = map["pieces"].as_array().unwrap().iter().map(|piece| (address(&piece["start"]), address(&piece["end"])));
    let (mut low, mut high) = pieces.into_iter().find(|&(start, end)| held(start, end)["live_allocations"] != 0).unwrap();
    while high - low > 8 * 4096 {
        let middle = (low + (high - low) / 2) & !4095;
        (low, high) = if held(low, middle)["live_allocations"] != 0 { (low, middle) } else { (middle, high) };
    }
    browser.open(&page(&daemon, &format!("#/p/{}?from={low:#x}&to={high:#x}", target.pid())));
    browser.wait("the pages", "document.querySelector('canvas')?.dataset.cells > 0");
    browser.eval("document.querySelector('canvas').focus()");
    browser.press("Home");
    let rows = "[...document.querySelectorAll('.owners tbody tr')].map(row => [Number(row.querySelector('data').value), row.innerText])";
    let mut before = String::new();
    let mut shown = Value::Null;
    for _ in 0..8 {
        browser.wait("the cell's stacks", &format!("(document.querySelector('.owners').dataset.range ?? '') !== {before:?}"));
        shown = browser.eval(rows);
        if !shown.as_array().unwrap().is_empty() {
            break;
        }
        before = browser.eval("document.querySelector('.owners').dataset.range").as_str().unwrap().to_owned();
        browser.press("ArrowRight");
    }
    let range = browser.eval("document.querySelector('.owners').dataset.range");
    let (from, to) = range.as_str().unwrap().split_once('-').unwrap();
    let expected = held(address(&from.into()), address(&to.into()));
    assert_eq!(shown[0][0], expected["stacks"][0]["live_bytes"], "{expected}");
    assert!(shown[0][1].as_str().unwrap().contains(HOSTILE), "{shown}");
    browser.screenshot(&pictures().join("owners.png"), None);
    let complaints = browser.complaints();
    assert!(complaints.iter().all(|one| !one.contains("Content Security Policy") && !one.contains("exception")), "{complaints:?}");
}

#[test]
fn a_governed_target_is_shown_with_its_tier_and_the_values_that_it_measures() {
    let Some(mut browser) = Browser::start() else { return };
    if bpf().is_none() || tool("objcopy").is_none() {
        return;
    }
    let target = Process::start(&mut Command::new(allocates("allocates-slow")));
    target.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let governed = "[governed]\nenabled = true\nbudget_percent = 20.0\nnode_budget_percent = 100.0\ncpu_percent = 100.0";
    let daemon = Daemon::start(&watching(&["allocates-slow"], governed));
    let path = format!("/api/v1/processes/{}", target.pid());
    let mut one = Value::Null;
    // The first windows give only lower bounds.
    wait_until("estimates from windows", || {
        one = serde_json::from_str(&daemon.get(&path).body).unwrap_or_default();
        let has_profile = one["profiles"].as_array().is_some_and(|all| all.iter().any(|profile| profile["mode"] == "governed"));
        has_profile && one["rates"]["allocations_per_s"].is_number()
    });
    assert!(one["rates"]["allocations_per_s"].as_f64() > Some(0.0) && one["rates"]["mode"] == "governed", "{one}");
    browser.open(&page(&daemon, &format!("#/p/{}", target.pid())));
    browser.wait("the flame graph", "document.querySelector('#stacks .flame .frame') !== null");
    assert_eq!(browser.eval("document.querySelector('#stacks [data-source]').dataset.source"), "governed");
    // Values that its windows do not measure cannot be selected; the others are shown.
    let one = api(&daemon, &path);
    let measured = one["profiles"][0]["by"].as_array().unwrap();
    let offered = browser.eval("[...document.querySelectorAll('[data-by]')].filter(one => !one.disabled).map(one => one.dataset.by)");
    assert!(offered.as_array().unwrap().iter().all(|by| measured.contains(by)), "{offered} of {measured:?}");
    let chosen = browser.eval("document.querySelector('#stacks [aria-pressed=true]').dataset.by");
    assert!(measured.contains(&chosen), "{chosen} of {measured:?}");
    // Of what is live, windows may know large blocks alone; where memory is allocated, they always know.
    browser.eval("document.querySelector('#stacks [data-by=allocated]').click()");
    browser.wait("the stack", &format!("document.querySelector('#stacks').innerText.includes({HOSTILE:?})"));
}

#[test]
fn an_ended_process_has_a_flight_record_that_is_shown() {
    let Some(mut browser) = Browser::start() else { return };
    let mut target = fragmented(&fragments("fragments-gone"), &["16"]);
    let daemon = Daemon::start(&watching(&["fragments-gone"], "[flight]\nexit_rss_min_mib = 1"));
    fully_measured(&daemon, 1);
    target.signal(rustix::process::Signal::KILL);
    target.wait(LIMIT);
    let mut events = Value::Null;
    wait_until("the event", || {
        events = api(&daemon, "/api/v1/events");
        events["events"].as_array().is_some_and(|all| !all.is_empty())
    });
    let event = &events["events"][0];
    browser.open(&page(&daemon, ""));
    browser.wait("the event in the list", &format!("document.querySelector(\"[data-event='{}']\") !== null", event["id"]));
    browser.open(&page(&daemon, &format!("#/e/{}", event["id"])));
    let text = browser.text("main");
    assert!(text.contains(event["summary"].as_str().unwrap()) && text.contains("fragments-gone"), "{text}");
    let pinned = event["process"]["ladder"]["pinned_bytes"].as_u64().unwrap();
    let shown = browser.eval("[...document.querySelectorAll('#where .legend data')].map(one => Number(one.value))");
    assert!(shown.as_array().unwrap().iter().any(|value| value.as_u64() == Some(pinned)), "{shown}");
}
