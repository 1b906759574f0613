//! The pages for browsers. Static files in the binary, drawn from the API by hand-written JavaScript; nothing is loaded from elsewhere, and
//! no text of a watched process is ever parsed as markup.
//!
//! | file | job |
//! |---|---|
//! | `index.html`, `style.css`, `dark.css`, `icon.svg` | the frame, its style, the colours of the dark theme, the icon |
//! | `early.js` | requests a view's data while the modules load |
//! | `main.js` | the view named in the URL, refreshing, theme |
//! | `list.js`, `process.js`, `event.js` | the views: all processes; one process; one flight record |
//! | `facts.js`, `time.js`, `stacks.js` | parts of a view: verdict and memory; time axis and difference; call stacks |
//! | `ladder.js`, `chart.js`, `map.js`, `flame.js` | the graphics: bar, time chart, map of the address space, flame graph |
//! | `api.js`, `dom.js`, `parts.js`, `units.js`, `words.js` | requests, elements, shared pieces, numbers, names |

use std::sync::LazyLock;

use axum::Router;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// Scripts, styles, images and requests only from this agent. No inline script or style; pages cannot be framed.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A file of the pages.
struct Asset {
    path: &'static str,
    content_type: &'static str,
    text: &'static str,
}

macro_rules! asset {
    ($path:literal, $file:literal, $content_type:literal) => {
        Asset { path: $path, content_type: $content_type, text: include_str!(concat!("assets/", $file)) }
    };
}

const ASSETS: [Asset; 21] = [
    asset!("/", "index.html", "text/html; charset=utf-8"),
    asset!("/pages/style.css", "style.css", "text/css; charset=utf-8"),
    asset!("/pages/dark.css", "dark.css", "text/css; charset=utf-8"),
    asset!("/pages/early.js", "early.js", "text/javascript; charset=utf-8"),
    asset!("/pages/icon.svg", "icon.svg", "image/svg+xml"),
    asset!("/pages/main.js", "main.js", "text/javascript; charset=utf-8"),
    asset!("/pages/api.js", "api.js", "text/javascript; charset=utf-8"),
    asset!("/pages/chart.js", "chart.js", "text/javascript; charset=utf-8"),
    asset!("/pages/dom.js", "dom.js", "text/javascript; charset=utf-8"),
    asset!("/pages/event.js", "event.js", "text/javascript; charset=utf-8"),
    asset!("/pages/facts.js", "facts.js", "text/javascript; charset=utf-8"),
    asset!("/pages/flame.js", "flame.js", "text/javascript; charset=utf-8"),
    asset!("/pages/ladder.js", "ladder.js", "text/javascript; charset=utf-8"),
    asset!("/pages/list.js", "list.js", "text/javascript; charset=utf-8"),
    asset!("/pages/map.js", "map.js", "text/javascript; charset=utf-8"),
    asset!("/pages/parts.js", "parts.js", "text/javascript; charset=utf-8"),
    asset!("/pages/process.js", "process.js", "text/javascript; charset=utf-8"),
    asset!("/pages/stacks.js", "stacks.js", "text/javascript; charset=utf-8"),
    asset!("/pages/time.js", "time.js", "text/javascript; charset=utf-8"),
    asset!("/pages/units.js", "units.js", "text/javascript; charset=utf-8"),
    asset!("/pages/words.js", "words.js", "text/javascript; charset=utf-8"),
];

/// The pages' paths. The page names its files by paths with a tag, which browsers cache forever: only the page itself is requested again.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    ASSETS.iter().fold(Router::new(), |router, asset| {
        let router = router.route(asset.path, get(move |headers: HeaderMap| answer(asset, headers)));
        match asset.path.strip_prefix(FILES) {
            Some(file) => router.route(&format!("{FILES}{}/{file}", *TAG), get(move || lasting(asset))),
            None => router,
        }
    })
}

/// Where the files of the page are.
const FILES: &str = "/pages/";

async fn answer(asset: &'static Asset, asked: HeaderMap) -> Response {
    let tag = format!("\"{}\"", *TAG);
    // A file changes only with the agent: the browser asks each time, and gets 304 if nothing changed.
    let is_known = asked.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let text = if asset.path == "/" { PAGE.as_str() } else { asset.text };
    let answer = if is_known { StatusCode::NOT_MODIFIED.into_response() } else { text.into_response() };
    let mut answer = with_policy(answer, asset);
    let headers = answer.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(header::ETAG, tag);
    }
    answer
}

/// A file under a path with its tag: its contents never change.
async fn lasting(asset: &'static Asset) -> Response {
    let mut answer = with_policy(asset.text.into_response(), asset);
    answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("private, max-age=31536000, immutable"));
    answer
}

fn with_policy(mut answer: Response, asset: &Asset) -> Response {
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(asset.content_type));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
    headers.insert("cross-origin-opener-policy", HeaderValue::from_static("same-origin"));
    answer
}

/// One tag for all files: a hash of their texts.
static TAG: LazyLock<String> = LazyLock::new(|| {
    // FNV-1a, 64 bits: it only has to differ between builds.
    let fold = |sum: u64, byte: u8| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", ASSETS.iter().flat_map(|asset| asset.text.bytes()).fold(0xcbf2_9ce4_8422_2325, fold))
});

/// The page with the paths of its files.
static PAGE: LazyLock<String> = LazyLock::new(|| {
    let page = ASSETS.iter().find(|asset| asset.path == "/").map_or("", |asset| asset.text);
    page.replace("\"pages/", &format!("\"pages/{}/", *TAG))
});

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn text(path: &str) -> &'static str {
        ASSETS.iter().find(|asset| asset.path == path).unwrap().text
    }

    #[test]
    fn every_file_that_a_page_names_is_served() {
        for asset in &ASSETS {
            for named in
                asset.text.split(['"', '\'']).filter(|text| text.ends_with(".js") || text.ends_with(".css") || text.ends_with(".svg"))
            {
                let path = format!("/pages/{}", named.trim_start_matches("./").trim_start_matches("pages/"));
                assert!(ASSETS.iter().any(|other| other.path == path), "{} names {named}", asset.path);
            }
        }
    }

    #[test]
    fn nothing_is_loaded_from_elsewhere_and_nothing_is_parsed_as_markup() {
        for asset in &ASSETS {
            let foreign = asset.text.split("://").skip(1).filter(|rest| !rest.starts_with("www.w3.org/2000/svg"));
            assert_eq!(foreign.count(), 0, "{} names another host", asset.path);
            for way in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "DOMParser",
                "eval(",
                "new Function",
                "setHTML",
                "srcdoc",
            ] {
                assert!(!asset.text.contains(way), "{} uses {way}", asset.path);
            }
        }
        let page = text("/");
        assert!(!page.contains("<style") && !page.contains(" style=") && !page.contains("onclick"), "the policy allows nothing inline");
    }
}
