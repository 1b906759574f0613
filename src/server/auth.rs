//! Who may ask.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::ServerState;
use super::api::error;

/// Counts every answer.
pub async fn count(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    state.requests.fetch_add(1, Ordering::Relaxed);
    next.run(request).await
}

/// For paths that do not exist.
pub async fn not_found() -> Response {
    error(StatusCode::NOT_FOUND, "no such path")
}

/// Lets a request pass that has the token. Where there is none (loopback only), one that was addressed to this machine by number or as
/// localhost: a page from elsewhere whose name was pointed at 127.0.0.1 is not to read the API through a browser.
pub async fn check(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let token = state.token.read().unwrap_or_else(PoisonError::into_inner).clone();
    match token {
        Some(token) if !has_token(request.headers(), &token) => {
            state.unauthorized.fetch_add(1, Ordering::Relaxed);
            let mut answer = error(StatusCode::UNAUTHORIZED, "send the agent's token: Authorization: Bearer TOKEN (server.token_file)");
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
            answer
        }
        None if !is_addressed_locally(request.headers()) => {
            state.unauthorized.fetch_add(1, Ordering::Relaxed);
            error(StatusCode::FORBIDDEN, "without server.token_file only requests to localhost or an address are answered").into_response()
        }
        _ => next.run(request).await,
    }
}

fn has_token(headers: &HeaderMap, token: &str) -> bool {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return false };
    let Some((scheme, given)) = value.as_bytes().split_at_checked(7) else { return false };
    scheme.eq_ignore_ascii_case(b"Bearer ") && is_equal(given, token.as_bytes())
}

/// Compares in a time that does not tell how much was right.
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
