//! A headless Chromium, controlled over its DevTools protocol: JSON messages that end in a zero byte, on file descriptors 3 and 4 of the
//! browser. It needs no port and no other program.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::LIMIT;
use crate::support::build::tool;

/// The browser itself makes no network requests, and needs no GPU, no sandbox (which root may not have) and no existing profile.
const FLAGS: [&str; 13] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
];

/// How the page is viewed.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    pub width: u32,
    pub height: u32,
    pub is_phone: bool,
    pub is_dark: bool,
    /// As CDP's `Emulation.setEmulatedVisionDeficiency` names it.
    pub vision: &'static str,
}

/// A desktop screen.
pub const DESK: Look = Look { width: 1280, height: 900, is_phone: false, is_dark: false, vision: "none" };
/// The same with the dark theme.
pub const DARK: Look = Look { is_dark: true, ..DESK };
/// A phone.
pub const PHONE: Look = Look { width: 390, height: 844, is_phone: true, ..DESK };

/// A browser with one page. It ends when dropped.
pub struct Browser {
    child: Child,
    input: Option<ChildStdin>,
    messages: Receiver<Value>,
    events: VecDeque<Value>,
    next_id: u64,
    session: String,
    token: Option<String>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts one; skips the test if there is no Chromium.
    pub fn start() -> Option<Self> {
        let program = tool("chromium")?;
        let profile = tempfile::tempdir().unwrap();
        // The shell moves the pipes from 0 and 1 to 3 and 4, and becomes the browser.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>/dev/null"])
            .arg(program)
            .args(FLAGS)
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.stdout.take().unwrap();
        let (sender, messages) = channel();
        let read = move || {
            for message in BufReader::new(output).split(0).map_while(Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { continue };
                if sender.send(message).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("test-browser".into()).spawn(read).unwrap();
        let input = child.stdin.take();
        let mut browser =
            Self { child, input, messages, events: VecDeque::new(), next_id: 0, session: String::new(), token: None, _profile: profile };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        browser.session = attached["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser.look(DESK);
        Some(browser)
    }

    /// Sends a command and returns its result.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params);
        let deadline = Instant::now() + LIMIT;
        loop {
            let message = self.receive(deadline.saturating_duration_since(Instant::now()));
            let message = message.unwrap_or_else(|| panic!("the browser did not answer {method}"));
            if message["id"] == id {
                assert!(message.get("error").is_none(), "{method}: {}", message["error"]);
                return message["result"].clone();
            }
            self.note(message);
        }
    }

    fn send(&mut self, method: &str, params: Value) -> u64 {
        self.next_id += 1;
        let mut message = json!({ "id": self.next_id, "method": method, "params": params });
        if !self.session.is_empty() && !method.starts_with("Target.") && !method.starts_with("Browser.") {
            message["sessionId"] = json!(self.session);
        }
        let mut bytes = serde_json::to_vec(&message).unwrap();
        bytes.push(0);
        self.input.as_mut().unwrap().write_all(&bytes).unwrap();
        self.next_id
    }

    fn receive(&self, within: Duration) -> Option<Value> {
        match self.messages.recv_timeout(within) {
            Ok(message) => Some(message),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("the browser ended"),
        }
    }

    /// Stores an event; requests that wait for a response get one.
    fn note(&mut self, event: Value) {
        let request = event["params"]["requestId"].clone();
        match event["method"].as_str() {
            Some("Fetch.requestPaused") => {
                self.send("Fetch.continueRequest", json!({ "requestId": request }));
            }
            Some("Fetch.authRequired") => {
                let answer = json!({ "response": "ProvideCredentials", "username": "fragprof", "password": self.token });
                self.send("Fetch.continueWithAuth", json!({ "requestId": request, "authChallengeResponse": answer }));
            }
            _ => {}
        }
        self.events.push_back(event);
    }

    /// Answers the browser's login dialog with this token, as a user would.
    pub fn log_in_with(&mut self, token: &str) {
        self.token = Some(token.to_owned());
        self.call("Fetch.enable", json!({ "handleAuthRequests": true }));
    }

    /// Sets the screen size, the theme and the simulated vision deficiency.
    pub fn look(&mut self, look: Look) {
        let Look { width, height, is_phone, is_dark, vision } = look;
        let scale = if is_phone { 2 } else { 1 };
        self.call(
            "Emulation.setDeviceMetricsOverride",
            json!({ "width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_phone }),
        );
        let scheme = if is_dark { "dark" } else { "light" };
        self.call("Emulation.setEmulatedMedia", json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] }));
        self.call("Emulation.setEmulatedVisionDeficiency", json!({ "type": vision }));
    }

    /// Opens a page and waits until it shows its contents.
    pub fn open(&mut self, url: &str) {
        // By way of an empty page: a change of the fragment alone would not load anything.
        self.call("Page.navigate", json!({ "url": "about:blank" }));
        let went = self.call("Page.navigate", json!({ "url": url }));
        assert!(went.get("errorText").is_none(), "{url}: {}", went["errorText"]);
        self.wait("the page's contents", "document.documentElement?.dataset.content === 'shown'");
    }

    /// Opens a page that is not a view of the agent, and returns the milliseconds until it was loaded.
    pub fn load_ms(&mut self, url: &str) -> f64 {
        self.call("Page.navigate", json!({ "url": "about:blank" }));
        self.call("Page.navigate", json!({ "url": url }));
        let loaded = "location.protocol !== 'about:' && performance.getEntriesByType('navigation')[0]?.loadEventEnd > 0";
        self.wait("the load", loaded);
        self.eval("performance.getEntriesByType('navigation')[0].loadEventEnd").as_f64().unwrap()
    }

    /// The value of an expression; a promise is awaited.
    pub fn eval(&mut self, expression: &str) -> Value {
        let done = self.call("Runtime.evaluate", json!({ "expression": expression, "awaitPromise": true, "returnByValue": true }));
        assert!(done.get("exceptionDetails").is_none(), "{expression}: {}", done["exceptionDetails"]);
        done["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub fn wait(&mut self, what: &str, expression: &str) {
        let deadline = Instant::now() + LIMIT;
        loop {
            // While the page is changing, there is no context to evaluate an expression in.
            let done = self.call("Runtime.evaluate", json!({ "expression": expression, "returnByValue": true }));
            if done["result"]["value"] == true {
                return;
            }
            if Instant::now() > deadline {
                let text = self.eval("document.body.innerText");
                panic!("timed out waiting for {what}; the page shows:\n{}\n{:?}", text.as_str().unwrap_or_default(), self.complaints());
            }
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }

    /// The text of the first element that matches a selector.
    pub fn text(&mut self, selector: &str) -> String {
        self.eval(&format!("document.querySelector({selector:?})?.innerText ?? ''")).as_str().unwrap().to_owned()
    }

    /// Presses a key, as CDP names it.
    pub fn press(&mut self, key: &str) {
        let code = match key {
            "Enter" => 13,
            "Escape" => 27,
            "Home" => 36,
            "ArrowLeft" => 37,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            _ => 0,
        };
        let text = match key {
            "Enter" => Some("\r"),
            key if key.len() == 1 => Some(key),
            _ => None,
        };
        let mut down = json!({ "type": "keyDown", "key": key, "windowsVirtualKeyCode": code });
        if let Some(text) = text {
            down["text"] = json!(text);
        }
        self.call("Input.dispatchKeyEvent", down);
        self.call("Input.dispatchKeyEvent", json!({ "type": "keyUp", "key": key, "windowsVirtualKeyCode": code }));
    }

    /// Moves the pointer over an element, to these fractions of its width and height.
    pub fn point_at(&mut self, selector: &str, across: f64, down: f64) {
        let script = format!(
            "(() => {{ const node = document.querySelector({selector:?}); node.scrollIntoView({{ block: 'center', behavior: 'instant' }}); const box = node.getBoundingClientRect(); return [box.x + box.width * {across}, box.y + box.height * {down}]; }})()"
        );
        let place = self.eval(&script);
        self.call("Input.dispatchMouseEvent", json!({ "type": "mouseMoved", "x": place[0], "y": place[1] }));
    }

    /// Types a text into the focused element.
    pub fn type_text(&mut self, text: &str) {
        self.call("Input.insertText", json!({ "text": text }));
    }

    /// Saves the whole page as a PNG, `clip` of it if given.
    pub fn screenshot(&mut self, path: &Path, clip: Option<Value>) {
        let mut params = json!({ "format": "png", "captureBeyondViewport": true });
        if let Some(clip) = clip {
            params["clip"] = clip;
        }
        let data = self.call("Page.captureScreenshot", params)["data"].as_str().unwrap().to_owned();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, base64(&data)).unwrap();
    }

    /// Errors that the browser has reported since the start: exceptions, blocked or failed loads, violations of the page's policy.
    pub fn complaints(&mut self) -> Vec<String> {
        self.eval("0");
        let text = |event: &Value| match event["method"].as_str()? {
            "Runtime.exceptionThrown" => Some(event["params"]["exceptionDetails"].to_string()),
            "Runtime.consoleAPICalled" if event["params"]["type"] == "error" => Some(event["params"]["args"].to_string()),
            "Log.entryAdded" if event["params"]["entry"]["level"] == "error" => Some(event["params"]["entry"].to_string()),
            _ => None,
        };
        self.events.iter().filter_map(text).collect()
    }

    /// Addresses that were requested since the start.
    pub fn requests(&mut self) -> Vec<String> {
        self.eval("0");
        let sent = self.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        sent.filter_map(|event| event["params"]["request"]["url"].as_str().map(str::to_owned)).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Closing the pipe ends the browser with all its processes; one that does not react is killed.
        self.input = None;
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.child.try_wait().is_ok_and(|status| status.is_none()) && Instant::now() < deadline {
            std::thread::park_timeout(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Decodes the browser's base64.
fn base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = text.bytes().filter(|&byte| byte != b'=').map(digit).collect();
    let bytes = |four: &[u8]| {
        let word = four.iter().fold(0u32, |word, &digit| word << 6 | u32::from(digit)) << (6 * (4 - four.len()));
        word.to_be_bytes()[1..four.len()].to_vec()
    };
    digits.chunks(4).flat_map(bytes).collect()
}
