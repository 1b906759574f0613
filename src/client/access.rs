//! Credentials of a request, and the authorities it trusts. Contains secrets: nothing here is printed.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue};
use rustls::ClientConfig;
use thiserror::Error;

use super::tls;

/// The header by which multi-tenant servers distinguish tenants (Pyroscope, Mimir, Loki).
const TENANT: HeaderName = HeaderName::from_static("x-scope-orgid");

/// How a request is authenticated.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Credentials {
    /// Not at all.
    #[default]
    None,
    /// A bearer token.
    Token(String),
    /// Basic authentication.
    Basic {
        /// The user's name.
        user: String,
        /// The password.
        password: String,
    },
}

/// A client certificate with its key, as PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    /// The certificate, followed by those up to its authority.
    pub certificates: Vec<u8>,
    /// Its key.
    pub key: Vec<u8>,
}

/// Everything needed to access a server, except its address.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// Credentials sent with each request.
    pub credentials: Credentials,
    /// The tenant, if the server has several.
    pub tenant: Option<String>,
    /// Certificates of the only trusted authorities, as PEM; `None` = those of the system.
    pub authorities: Option<Vec<u8>>,
    /// The client certificate, if the server requests one.
    pub identity: Option<Identity>,
}

/// The part of an [`Access`] that cannot be used, and why.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum AccessError {
    /// The token, user or password.
    #[error("{0}")]
    Credentials(&'static str),
    /// The tenant.
    #[error("{0}")]
    Tenant(&'static str),
    /// The authorities' certificates.
    #[error("{0}")]
    Authorities(String),
    /// The system has no root certificates.
    #[error("this system has no root certificates{0}: install them (ca-certificates), or name a file with the server's authority")]
    NoRoots(String),
    /// The client's certificate.
    #[error("{0}")]
    Certificate(String),
    /// Its key.
    #[error("{0}")]
    Key(String),
}

/// The parts of an [`Access`] in the form that requests use.
#[derive(Clone)]
pub(super) struct Prepared {
    pub headers: HeaderMap,
    /// Texts that must never appear in a message, whatever its source.
    secrets: Vec<String>,
    /// For an address with TLS.
    pub tls: Option<Arc<ClientConfig>>,
}

impl Prepared {
    pub fn new(access: &Access, is_tls: bool) -> Result<Self, AccessError> {
        let mut headers = HeaderMap::new();
        let mut secrets = Vec::new();
        let authorization = match &access.credentials {
            Credentials::None => None,
            Credentials::Token(token) => {
                if token.is_empty() {
                    return Err(AccessError::Credentials("it is empty"));
                }
                secrets.push(token.clone());
                Some(format!("Bearer {token}"))
            }
            Credentials::Basic { user, password } => {
                if user.contains(':') {
                    return Err(AccessError::Credentials("the user's name has a colon"));
                }
                let pair = STANDARD.encode(format!("{user}:{password}"));
                secrets.extend([pair.clone(), password.clone()]);
                Some(format!("Basic {pair}"))
            }
        };
        if let Some(text) = authorization {
            let mut value =
                HeaderValue::from_str(&text).map_err(|_| AccessError::Credentials("it has characters other than printable ASCII"))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        if let Some(tenant) = &access.tenant {
            let value = HeaderValue::from_str(tenant).map_err(|_| AccessError::Tenant("it has characters other than printable ASCII"))?;
            headers.insert(TENANT, value);
        }
        secrets.retain(|secret| !secret.is_empty());
        let tls = if is_tls { Some(Arc::new(tls::config(access.authorities.as_deref(), access.identity.as_ref())?)) } else { None };
        Ok(Self { headers, secrets, tls })
    }

    /// A server's message without the secrets that it was sent: some servers repeat the request in their errors.
    pub fn without_secrets(&self, text: &str) -> String {
        self.secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret, "[secret]"))
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").finish_non_exhaustive()
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn prepared(credentials: Credentials) -> Result<Prepared, AccessError> {
        Prepared::new(&Access { credentials, tenant: Some("team-a".into()), ..Access::default() }, false)
    }

    #[test]
    fn credentials_are_those_of_rfc_7617_and_rfc_6750() {
        let basic = prepared(Credentials::Basic { user: "Aladdin".into(), password: "open sesame".into() }).unwrap();
        assert_eq!(basic.headers[AUTHORIZATION], "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        let bearer = prepared(Credentials::Token("mF_9.B5f-4.1JqM".into())).unwrap();
        assert_eq!(
            (&bearer.headers[AUTHORIZATION], &bearer.headers["X-Scope-OrgID"]),
            (&"Bearer mF_9.B5f-4.1JqM".parse().unwrap(), &"team-a".parse().unwrap())
        );
    }

    #[test]
    fn credentials_that_make_no_valid_header_are_refused() {
        for token in ["", "a\nb", "a\r\nX: y"] {
            assert!(matches!(prepared(Credentials::Token(token.into())), Err(AccessError::Credentials(_))), "{token:?}");
        }
        let basic = Credentials::Basic { user: "a:b".into(), password: String::new() };
        assert!(matches!(prepared(basic), Err(AccessError::Credentials(_))));
        let access = Access { tenant: Some("a\nb".into()), ..Access::default() };
        assert_eq!(Prepared::new(&access, false).unwrap_err(), AccessError::Tenant("it has characters other than printable ASCII"));
    }

    #[test]
    fn secrets_are_neither_shown_nor_repeated() {
        let access = Access {
            credentials: Credentials::Basic { user: "me".into(), password: "hunter2".into() },
            identity: Some(Identity { certificates: Vec::new(), key: b"hunter2".to_vec() }),
            ..Access::default()
        };
        let prepared = Prepared::new(&access, false).unwrap();
        assert_eq!(prepared.without_secrets("Basic bWU6aHVudGVyMg== is hunter2"), "Basic [secret] is [secret]");
        let shown = format!("{access:?} {prepared:?} {:?}", prepared.headers);
        assert!(!shown.contains("hunter2") && !shown.contains("bWU6") && !shown.contains("104, 117"), "{shown}");
    }
}
