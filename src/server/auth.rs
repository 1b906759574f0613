//! Access control: with the token, or from this machine; never from a page of another site.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::ServerState;
use super::api::error;
use super::listener::Peer;
use super::throttle::DELAY;
use crate::agent::worker::lock;

/// Counts every answer.
pub async fn count(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    state.requests.fetch_add(1, Ordering::Relaxed);
    next.run(request).await
}

/// For paths that do not exist.
pub async fn not_found() -> Response {
    error(StatusCode::NOT_FOUND, "no such path")
}

/// Answers only health requests on the connections reserved for them.
pub async fn keep_reserve(ConnectInfo(peer): ConnectInfo<Peer>, request: Request, next: Next) -> Response {
    if !peer.reserved || matches!(request.uri().path(), "/healthz" | "/readyz") {
        return next.run(request).await;
    }
    let mut answer = error(StatusCode::SERVICE_UNAVAILABLE, "too many requests are being answered (server.connections_max)");
    answer.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("close"));
    answer
}

/// Accepts a request that has the token. If no token is configured (loopback only), accepts one addressed to this machine by IP address or as
/// localhost: a foreign page whose name resolves to 127.0.0.1 must not read the API through a browser.
pub async fn check(State(state): State<Arc<ServerState>>, ConnectInfo(peer): ConnectInfo<Peer>, request: Request, next: Next) -> Response {
    let token = state.token.read().unwrap_or_else(PoisonError::into_inner).clone();
    match token {
        Some(token) if !has_token(request.headers(), &token) => {
            state.unauthorized.fetch_add(1, Ordering::Relaxed);
            slow_down(&state, &peer).await;
            let mut answer = error(StatusCode::UNAUTHORIZED, "send the agent's token: Authorization: Bearer TOKEN (server.token_file)");
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
            // For browsers, which ask for a name and a password: the password is the token, the name is ignored.
            answer
                .headers_mut()
                .append(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Basic realm=\"fragprof\", charset=\"UTF-8\""));
            answer
        }
        _ if is_made_by_another_page(request.headers()) => {
            state.unauthorized.fetch_add(1, Ordering::Relaxed);
            error(StatusCode::FORBIDDEN, "requests from pages of other sites are refused")
        }
        None if !is_addressed_locally(request.headers()) => {
            state.unauthorized.fetch_add(1, Ordering::Relaxed);
            error(StatusCode::FORBIDDEN, "without server.token_file only requests addressed to localhost or an IP address are answered")
                .into_response()
        }
        _ => next.run(request).await,
    }
}

/// Delays the answer to a client that was refused too often, and logs it once a minute.
async fn slow_down(state: &ServerState, peer: &Peer) {
    let verdict = lock(&state.throttle).wrong(peer.client, Instant::now());
    if let Some(count) = verdict.say {
        let client = peer.client.map_or_else(|| "the socket".to_owned(), |address| address.to_string());
        tracing::warn!(
            "requests without a valid token (server.token_file): {count} since the last such message, the newest from {client}; further \
             ones are answered a second late"
        );
    }
    if verdict.is_slowed {
        state.slowed.fetch_add(1, Ordering::Relaxed);
        peer.hold_back(DELAY).await;
    }
}

/// Accepts a request for metrics unless a browser sends it for another site: on loopback the host must be a local name. On other addresses
/// scrapers may use any name.
pub async fn check_metrics(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    if is_made_by_another_page(headers) {
        state.unauthorized.fetch_add(1, Ordering::Relaxed);
        return error(StatusCode::FORBIDDEN, "requests from pages of other sites are refused");
    }
    if !is_addressed_locally(headers) {
        state.unauthorized.fetch_add(1, Ordering::Relaxed);
        return error(
            StatusCode::FORBIDDEN,
            "on loopback only requests addressed to localhost or an IP address are answered (for others use server.metrics_listen)",
        );
    }
    next.run(request).await
}

/// Whether a browser's headers show that a foreign page caused the request: the browser would send the user's token along. Following a link
/// to a page is fine. Older browsers have no `Sec-Fetch` headers, only `Origin`.
fn is_made_by_another_page(headers: &HeaderMap) -> bool {
    let is = |name: &str, value: &str| headers.get(name).is_some_and(|given| given.as_bytes() == value.as_bytes());
    let by_fetch = (is("sec-fetch-site", "cross-site") || is("sec-fetch-site", "same-site"))
        && !(is("sec-fetch-mode", "navigate") && is("sec-fetch-dest", "document"));
    by_fetch || headers.get(header::ORIGIN).is_some_and(|origin| !is_origin_of(origin, headers.get(header::HOST)))
}

/// Whether an origin (`http://HOST[:PORT]`) is the requested host. `null`, the origin of sandboxed pages, is not. The scheme may differ,
/// because a proxy may use TLS.
fn is_origin_of(origin: &header::HeaderValue, host: Option<&header::HeaderValue>) -> bool {
    let (Ok(origin), Some(Ok(host))) = (origin.to_str(), host.map(header::HeaderValue::to_str)) else { return false };
    let Some((scheme, authority)) = origin.split_once("://") else { return false };
    let usual_port = if scheme.eq_ignore_ascii_case("https") { ":443" } else { ":80" };
    let without = |text: &str| text.strip_suffix(usual_port).unwrap_or(text).to_ascii_lowercase();
    without(authority) == without(host)
}

fn has_token(headers: &HeaderMap, token: &str) -> bool {
    let Some((scheme, given)) = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.split_once(' ')) else {
        return false;
    };
    if scheme.eq_ignore_ascii_case("Bearer") {
        return is_equal(given.as_bytes(), token.as_bytes());
    }
    if !scheme.eq_ignore_ascii_case("Basic") {
        return false;
    }
    let Some(decoded) = from_base64(given) else { return false };
    let Some(colon) = decoded.iter().position(|&byte| byte == b':') else { return false };
    decoded.get(colon + 1..).is_some_and(|password| is_equal(password, token.as_bytes()))
}

/// Decodes padded base64 (RFC 4648); `None` if it is invalid.
fn from_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for four in digits.as_bytes().chunks(4) {
        let mut word = 0u32;
        for &digit in four {
            let value = match digit {
                b'A'..=b'Z' => digit - b'A',
                b'a'..=b'z' => digit - b'a' + 26,
                b'0'..=b'9' => digit - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            word = word << 6 | u32::from(value);
        }
        let [_, first, second, third] = (word << (6 * (4 - four.len()))).to_be_bytes();
        bytes.extend([first, second, third].iter().take(four.len() - 1));
    }
    Some(bytes)
}

/// Compares in constant time.
fn is_equal(given: &[u8], token: &[u8]) -> bool {
    let differences = given.iter().zip(token).fold(0u8, |sum, (a, b)| sum | (a ^ b));
    std::hint::black_box(differences) == 0 && given.len() == token.len()
}

fn is_addressed_locally(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else { return true };
    let Ok(host) = host.to_str() else { return false };
    let is_port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let name = host.rsplit_once(':').filter(|(_, port)| is_port(port)).map_or(host, |(name, _)| name);
    name.eq_ignore_ascii_case("localhost") || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn headers(name: header::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, header::HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn only_the_whole_token_passes() {
        let has = |value: &str| has_token(&headers(header::AUTHORIZATION, value), "0123456789abcdef");
        assert!(has("Bearer 0123456789abcdef") && has("bearer 0123456789abcdef"));
        for wrong in
            ["Bearer 0123456789abcde", "Bearer 0123456789abcdef0", "Bearer ", "Basic 0123456789abcdef", "0123456789abcdef", "Bearer"]
        {
            assert!(!has(wrong), "{wrong}");
        }
        assert!(!has_token(&HeaderMap::new(), "0123456789abcdef"));
    }

    #[test]
    fn a_browser_gives_the_token_as_a_password() {
        let has = |value: &str| has_token(&headers(header::AUTHORIZATION, value), "0123456789abcdef");
        // printf 'me:0123456789abcdef' | base64, and with other names.
        assert!(has("Basic bWU6MDEyMzQ1Njc4OWFiY2RlZg==") && has("basic OjAxMjM0NTY3ODlhYmNkZWY="));
        for wrong in [
            "Basic bWU6MDEyMzQ1Njc4OWFiY2Rl",
            "Basic MDEyMzQ1Njc4OWFiY2RlZg==",
            "Basic bWU6MDEyMzQ1Njc4OWFiY2RlZg",
            "Basic ====",
            "Basic",
            "Basic !!!!",
        ] {
            assert!(!has(wrong), "{wrong}");
        }
    }

    #[test]
    fn a_page_of_another_site_cannot_ask_but_may_link() {
        let asks = |site: &str, mode: &str, dest: &str| {
            let pairs = [("sec-fetch-site", site), ("sec-fetch-mode", mode), ("sec-fetch-dest", dest)];
            let map = pairs.map(|(name, value)| (header::HeaderName::from_static(name), header::HeaderValue::from_str(value).unwrap()));
            is_made_by_another_page(&HeaderMap::from_iter(map))
        };
        assert!(asks("cross-site", "no-cors", "image") && asks("same-site", "cors", "empty") && asks("cross-site", "navigate", "iframe"));
        assert!(
            !asks("same-origin", "cors", "empty") && !asks("none", "navigate", "document") && !asks("cross-site", "navigate", "document")
        );
        assert!(!is_made_by_another_page(&HeaderMap::new()));
        let from = |origin: &str, host: &str| {
            let pairs = [(header::ORIGIN, origin), (header::HOST, host)];
            let map = pairs.map(|(name, value)| (name, header::HeaderValue::from_str(value).unwrap()));
            is_made_by_another_page(&HeaderMap::from_iter(map))
        };
        for (origin, host) in [
            ("http://localhost:9746", "localhost:9746"),
            ("https://Node.example", "node.example"),
            ("https://node.example", "node.example:443"),
            ("http://[::1]:9746", "[::1]:9746"),
        ] {
            assert!(!from(origin, host), "{origin} {host}");
        }
        for origin in ["http://evil.example", "http://localhost:1", "null", "", "localhost:9746", "http://localhost:9746.evil.example"] {
            assert!(from(origin, "localhost:9746"), "{origin}");
        }
        assert!(is_made_by_another_page(&headers(header::ORIGIN, "http://localhost")), "a request without a host");
    }

    #[test]
    fn a_foreign_name_for_this_machine_is_noticed() {
        let local = |host: &str| is_addressed_locally(&headers(header::HOST, host));
        for host in ["localhost", "localhost:9746", "127.0.0.1:9746", "127.0.0.1", "[::1]:9746", "[::1]"] {
            assert!(local(host), "{host}");
        }
        for host in ["evil.example", "evil.example:9746", "localhost.evil.example", "127.0.0.1.evil.example:80", ""] {
            assert!(!local(host), "{host}");
        }
    }
}
