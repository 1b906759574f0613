//! The pages show the API's values.

use serde_json::Value;

use super::browser::{Browser, DARK, DESK, Look, PHONE};
use super::{api, fully_measured, page, pictures};
use crate::agent::daemon::{Daemon, watching};
use crate::agent::metrics::{fragmented, fragments};
use crate::support::process::{Process, wait_until};

/// Three processes that kept every n-th block, and an agent that watches them. They are idle, so that two censuses agree.
fn scene(name: &str) -> (Vec<Process>, Daemon, Value) {
    let program = fragments(name);
    let processes: Vec<Process> = ["2", "16", "1000"].iter().map(|keep| fragmented(&program, &[keep])).collect();
    let daemon = Daemon::start(&watching(&[name], ""));
    let list = fully_measured(&daemon, processes.len());
    (processes, daemon, list)
}

/// The values that a page's elements carry, by selector.
fn values(browser: &mut Browser, selector: &str) -> Vec<Option<u64>> {
    let script = format!("[...document.querySelectorAll({selector:?})].map(cell => Number(cell.querySelector('data')?.value ?? NaN))");
    browser.eval(&script).as_array().unwrap().iter().map(|value| value.as_f64().map(|value| value as u64)).collect()
}

#[test]
fn the_list_shows_the_ladder_of_each_process_as_in_the_api() {
    let Some(mut browser) = Browser::start() else { return };
    let (_processes, daemon, list) = scene("fragments-list");
    browser.open(&page(&daemon, ""));
    let all = list["processes"].as_array().unwrap();
    for one in all {
        let row = format!("tr[data-pid='{}']", one["pid"]);
        assert!(browser.text(&row).contains("fragments-list"), "{row}");
        for (cell, key) in
            [("heap", "resident_bytes"), ("live", "live_bytes"), ("pinned", "pinned_bytes"), ("trimmable", "trimmable_bytes")]
        {
            assert_eq!(values(&mut browser, &format!("{row} .c-{cell}")), [one["heaps"][0][key].as_u64()], "{cell} of {one}");
        }
        // The kernel's value varies by some pages even at rest; page and API converge.
        let rss = || api(&daemon, &format!("/api/v1/processes/{}", one["pid"]))["rss_bytes"].as_u64();
        wait_until("the resident bytes of the API", || values(&mut browser, &format!("{row} .c-rss")) == [rss()]);
        assert!(browser.text(&format!("{row} .c-verdict .chip")).len() > 4, "a verdict");
    }
    let sum: u64 = all.iter().map(|one| one["heaps"][0]["pinned_bytes"].as_u64().unwrap()).sum();
    assert_eq!(values(&mut browser, "[data-tile='Pinned']"), [Some(sum)]);
    assert_eq!(browser.complaints(), Vec::<String>::new());
    let own = page(&daemon, "");
    assert!(browser.requests().iter().all(|url| url.starts_with(&own) || url == "about:blank"), "{:?}", browser.requests());
}

#[test]
fn the_list_is_sorted_and_filtered_from_the_keyboard() {
    let Some(mut browser) = Browser::start() else { return };
    let (processes, daemon, _) = scene("fragments-sort");
    browser.open(&page(&daemon, ""));
    browser.eval("document.querySelector('[data-sort=pinned]').focus()");
    browser.press("Enter");
    let pinned = values(&mut browser, ".c-pinned");
    assert!(pinned.len() == 3 && pinned.is_sorted_by(|a, b| a >= b), "{pinned:?}");
    assert_eq!(
        browser.eval("document.querySelector('[aria-sort]').innerText.trim().slice(0, 6) + document.querySelector('[aria-sort]').ariaSort"),
        "Pinneddescending"
    );
    browser.press("Enter");
    let pinned = values(&mut browser, ".c-pinned");
    assert!(pinned.is_sorted(), "{pinned:?}");
    browser.eval("document.activeElement.blur()");
    browser.press("/");
    browser.type_text(&processes[1].pid().to_string());
    assert_eq!(
        browser.eval("[...document.querySelectorAll('tbody tr')].map(row => row.dataset.pid).join()"),
        processes[1].pid().to_string()
    );
    assert_eq!(browser.text("#shown"), "1 of 3 processes");
    // The URL keeps the selection, so that it can be shared.
    let address = browser.eval("location.href");
    browser.open(address.as_str().unwrap());
    assert_eq!(browser.eval("document.querySelectorAll('tbody tr').length + document.querySelector('[aria-sort]').ariaSort"), "1ascending");
}

#[test]
fn a_process_is_shown_with_its_ladder_arenas_and_size_classes() {
    let Some(mut browser) = Browser::start() else { return };
    let (processes, daemon, _) = scene("fragments-page");
    let pid = processes[1].pid();
    browser.open(&page(&daemon, &format!("#/p/{pid}")));
    let heap = api(&daemon, &format!("/api/v1/processes/{pid}/heap"));
    browser.wait("the arenas", "document.querySelector('#arenas tbody tr') !== null");
    let arena = &heap["heaps"][0]["arenas"][0];
    let steps = ["extent_bytes", "resident_bytes", "live_bytes", "free_bytes", "cached_bytes", "top_bytes"].map(|key| arena[key].as_u64());
    assert_eq!(values(&mut browser, "#arenas tbody tr:first-child td.number:has(data)"), steps);
    let classes = heap["heaps"][0]["size_classes"].as_array().unwrap();
    assert_eq!(browser.eval("document.querySelectorAll('#sizes tbody tr').length"), classes.len());
    let live: Vec<_> = classes.iter().map(|class| class["live_bytes"].as_u64()).collect();
    assert_eq!(values(&mut browser, "#sizes tbody td:nth-child(3)"), live);
    let legend = values(&mut browser, "#where .legend dd");
    assert!(legend.contains(&heap["heaps"][0]["pinned_bytes"].as_u64()), "{legend:?}");
    // Each part says where its numbers come from.
    assert_eq!(
        browser.eval("[...document.querySelectorAll('#where [data-source]')].map(one => one.dataset.source).join()"),
        "kernel,census"
    );
}

#[test]
fn pages_fit_a_phone_in_both_themes_and_are_saved_as_images() {
    let Some(mut browser) = Browser::start() else { return };
    let (processes, daemon, _) = scene("fragments-look");
    let colourless = Look { vision: "achromatopsia", ..DESK };
    let red_blind = Look { vision: "deuteranopia", ..DESK };
    for (name, look) in [("desk", DESK), ("dark", DARK), ("phone", PHONE), ("colourless", colourless), ("red-blind", red_blind)] {
        for (view, fragment) in [("list", String::new()), ("process", format!("#/p/{}", processes[1].pid()))] {
            browser.look(look);
            browser.open(&page(&daemon, &fragment));
            browser
                .wait("all parts", "document.querySelector('#quality, tbody tr') !== null && !document.body.innerText.includes('Loading')");
            let beyond = browser.eval(&format!("document.scrollingElement.scrollWidth - {}", look.width)).as_i64().unwrap();
            assert!(beyond <= 0, "{name}: the {view} is {beyond} pixels wider than the screen");
            browser.screenshot(&pictures().join(format!("{view}-{name}.png")), None);
        }
    }
}

#[test]
fn live_pinned_and_trimmable_are_distinguishable_by_brightness_alone() {
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start(&watching(&["nothing-at-all"], ""));
    // Relative luminance as WCAG 2 defines it.
    let script = "(() => { const style = getComputedStyle(document.documentElement);
        const light = (name) => { const hex = style.getPropertyValue(name).trim();
          const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
          return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const all = ['--live-0', '--live-1', '--live-2', '--live-3', '--live-4', '--live-5', '--trimmable'].map(light);
        return all.map((one) => one + 0.05); })()";
    for look in [DESK, DARK] {
        browser.look(look);
        browser.open(&page(&daemon, ""));
        let light: Vec<f64> = browser.eval(script).as_array().unwrap().iter().map(|one| one.as_f64().unwrap()).collect();
        assert!(light.is_sorted(), "the ramp does not rise in brightness: {light:?}");
        assert!(light[5] / light[0] >= 2.0, "pinned and live are too close: {light:?}");
        assert!(light[6] / light[5] >= 1.4, "trimmable and pinned are too close: {light:?}");
    }
}
