//! Names that contain markup, and access control.

use super::browser::Browser;
use super::{fully_measured, page};
use crate::agent::daemon::{Daemon, secret, watching};
use crate::agent::metrics::{fragmented, fragments};

#[test]
fn a_hostile_name_is_shown_as_text() {
    let Some(mut browser) = Browser::start() else { return };
    let program = fragments("fragments-html");
    // A name has at most 15 bytes.
    let names = ["<img src=x>", "<svg/onload=a>", "\"><b>&lt;", "\u{202e}gnp.exe\n\u{1b}[2J"];
    let targets: Vec<_> = names.iter().map(|name| fragmented(&program, &["16", name])).collect();
    let daemon = Daemon::start(&watching(&["<*", "\"*", "*gnp*"], ""));
    fully_measured(&daemon, names.len());
    browser.open(&page(&daemon, ""));
    let shown = |pid: u32| format!("document.querySelector(\"tr[data-pid='{pid}'] a\").textContent");
    assert_eq!(browser.eval(&shown(targets[0].pid())), "<img src=x>");
    assert_eq!(browser.eval(&shown(targets[3].pid())), "\\u{202e}gnp.exe\\u{a}\\u{1b}[2J".trim_end());
    for target in &targets {
        browser.open(&page(&daemon, &format!("#/p/{}", target.pid())));
        assert_eq!(browser.eval("document.querySelectorAll('main img, main script, main b:has(b), main svg[onload]').length"), 0);
    }
    let complaints = browser.complaints();
    assert!(complaints.iter().all(|one| !one.contains("Content Security Policy")), "{complaints:?}");
}

#[test]
fn the_pages_policy_allows_nothing_from_elsewhere_and_nothing_inline() {
    let daemon = Daemon::start(&watching(&["nothing-at-all"], ""));
    for path in ["/", "/pages/main.js", "/pages/style.css", "/pages/icon.svg"] {
        let answer = daemon.get(path);
        assert_eq!(answer.status, 200, "{path}");
        let headers = answer.headers.to_ascii_lowercase();
        assert!(headers.contains("content-security-policy: default-src 'none'") && !headers.contains("unsafe"), "{headers}");
        assert!(headers.contains("x-content-type-options: nosniff") && headers.contains("frame-ancestors 'none'"), "{headers}");
    }
    assert_eq!(daemon.get("/pages/nothing.js").status, 404);
    // The page refers to its files by paths that a browser may cache.
    let page = daemon.get("/").body;
    let script = page.split('"').find(|text| text.ends_with("/main.js")).unwrap();
    let file = daemon.get(&format!("/{script}"));
    assert!(file.status == 200 && file.headers.to_ascii_lowercase().contains("immutable"), "{script}: {}", file.headers);
    assert_eq!(file.body, daemon.get("/pages/main.js").body);
    let tag = daemon.get("/").headers.lines().find_map(|line| line.strip_prefix("etag: ").map(str::to_owned)).unwrap();
    let again = daemon.ask(&format!("GET / HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: {tag}\r\nConnection: close\r\n\r\n"));
    assert_eq!((again.status, again.body.as_str()), (304, ""));
}

#[test]
fn beyond_loopback_a_browser_asks_for_the_token_and_then_shows_the_pages() {
    const TOKEN: &str = "0123456789abcdef0123";
    let Some(mut browser) = Browser::start() else { return };
    let daemon = Daemon::start_with("", |directory, _| {
        let token = directory.join("token");
        secret(&token, TOKEN);
        let config = watching(&["nothing-at-all"], "").replace("127.0.0.1:0", "0.0.0.0:0");
        std::fs::write(directory.join("agent.toml"), format!("{config}token_file = {token:?}\n")).unwrap();
    });
    assert_eq!((daemon.get("/").status, daemon.get("/pages/main.js").status), (401, 401));
    browser.log_in_with(TOKEN);
    browser.open(&format!("http://127.0.0.1:{}/", daemon.address.port()));
    assert!(browser.text("main").contains("Memory of this machine's processes"));
    // Another site's page cannot make the browser send requests with the user's credentials.
    let answer = daemon.ask(&format!(
        "GET /api/v1/processes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\nConnection: close\r\n\r\n"
    ));
    assert_eq!(answer.status, 403);
}
