//! The address of a server: `http://`, `https://`, or a unix socket. Pure.

use std::fmt;
use std::path::PathBuf;

use http::Uri;

use super::ClientError;

/// Prefix of the address of a unix socket.
const UNIX: &str = "unix:";
/// Default ports.
const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;

/// What connections are made to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// A host, by name or address; an IPv6 address without its brackets.
    Tcp { host: String, port: u16 },
    /// A socket's path.
    Unix(PathBuf),
}

/// The address of a server, and the prefix of all paths on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    pub(super) place: Place,
    pub(super) prefix: String,
    is_tls: bool,
}

impl Address {
    /// Parses `http://HOST:PORT[/PREFIX]`, `https://HOST:PORT[/PREFIX]` or `unix:PATH`.
    ///
    /// # Errors
    /// If it is not such an address.
    pub fn parse(url: &str) -> Result<Self, ClientError> {
        let wrong = || ClientError::Address(without_user(url));
        if let Some(path) = url.strip_prefix(UNIX) {
            let is_path = path.starts_with('/') && !path.contains('\0');
            let place = Place::Unix(path.into());
            return if is_path { Ok(Self { place, prefix: String::new(), is_tls: false }) } else { Err(wrong()) };
        }
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong()),
        };
        let authority = uri.authority().map(http::uri::Authority::as_str).unwrap_or_default();
        // A query would end up in the middle of the paths, and the text before an @ may be a secret, but addresses are printed.
        if authority.contains('@') || uri.query().is_some() || url.contains('#') {
            return Err(wrong());
        }
        let usual = if is_tls { HTTPS_PORT } else { HTTP_PORT };
        let host = uri.host().unwrap_or_default();
        let port = match authority.strip_prefix(host) {
            Some("") => usual,
            Some(rest) => rest.strip_prefix(':').and_then(|port| port.parse().ok()).ok_or_else(wrong)?,
            None => return Err(wrong()),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        // With a percent sign it is a name that no resolver knows, and not the same URL with a port.
        if host.is_empty() || host.contains('%') {
            return Err(wrong());
        }
        Ok(Self { place: Place::Tcp { host: host.to_owned(), port }, prefix: uri.path().trim_end_matches('/').to_owned(), is_tls })
    }

    /// Whether it uses TLS.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// Scheme, host and port, or `unix:` and a path.
    #[must_use]
    pub fn url(&self) -> String {
        match &self.place {
            Place::Tcp { .. } => format!("{}://{self}", if self.is_tls { "https" } else { "http" }),
            Place::Unix(_) => self.to_string(),
        }
    }

    /// The origin of requests in the form of HTTP/2: a scheme and a host, for a unix socket too.
    pub(crate) fn origin(&self) -> String {
        format!("{}://{}", if self.is_tls { "https" } else { "http" }, self.host_header())
    }

    /// The `Host` of requests, without the port if it is the default one.
    pub(super) fn host_header(&self) -> String {
        match &self.place {
            Place::Tcp { host, port } if *port == if self.is_tls { HTTPS_PORT } else { HTTP_PORT } => in_url(host),
            Place::Tcp { .. } => self.to_string(),
            Place::Unix(_) => "localhost".to_owned(),
        }
    }
}

impl fmt::Display for Address {
    /// Host and port, or `unix:` and a path.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Tcp { host, port } => write!(f, "{}:{port}", in_url(host)),
            Place::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

/// A host in the form used in a URL.
fn in_url(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

/// A URL for display: the text before an @ may be a password.
fn without_user(url: &str) -> String {
    let Some((before, after)) = url.rsplit_once('@') else { return url.to_owned() };
    let scheme = before.split_once("://").map(|(scheme, _)| format!("{scheme}://")).unwrap_or_default();
    format!("{scheme}…@{after}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn place(host: &str, port: u16) -> Place {
        Place::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn addresses_are_checked() {
        let address = Address::parse("http://h:1/x/").unwrap();
        assert_eq!((&address.place, address.prefix.as_str()), (&place("h", 1), "/x"));
        assert_eq!(Address::parse("http://h").unwrap().place, place("h", 80));
        assert_eq!(Address::parse("unix:/run/x y.sock").unwrap().url(), "unix:/run/x y.sock");
        for wrong in ["ftp://h", "unix:", "unix:relative", "h:1", "http://", "http://a b", "http://u@h", "http://%m", "http://h/\r\nX: y"] {
            assert!(Address::parse(wrong).is_err(), "{wrong}");
        }
        for wrong in ["https://", "https://:1", "https://h:", "https://h:65536", "https://h:x", "https://h/?a=b", "https://h/#a", "/x", ""]
        {
            assert!(Address::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn https_has_a_port_of_its_own() {
        let address = Address::parse("https://h/x").unwrap();
        assert_eq!((&address.place, address.is_tls(), address.url()), (&place("h", 443), true, "https://h:443".to_owned()));
        assert!(!Address::parse("http://h:443").unwrap().is_tls());
        assert_eq!(Address::parse("https://h:80").unwrap().place, place("h", 80));
    }

    #[test]
    fn an_ipv6_address_has_brackets_in_text_alone() {
        let address = Address::parse("https://[::1]:8443").unwrap();
        assert_eq!((&address.place, address.url()), (&place("::1", 8443), "https://[::1]:8443".to_owned()));
        assert_eq!(Address::parse("http://[::1]").unwrap().to_string(), "[::1]:80");
    }

    #[test]
    fn requests_name_the_port_only_where_it_is_not_the_usual_one() {
        for (url, host) in [("http://h", "h"), ("https://h:443", "h"), ("https://h:80", "h:80"), ("http://[::1]:80", "[::1]")] {
            assert_eq!(Address::parse(url).unwrap().host_header(), host);
        }
        assert_eq!(Address::parse("unix:/x").unwrap().host_header(), "localhost");
    }

    #[test]
    fn a_password_in_a_url_is_not_repeated() {
        for url in ["https://me:hunter2@h", "http://me:hunter2@h/x", "me:hunter2@h", "https://a@b:hunter2@h"] {
            let error = Address::parse(url).unwrap_err().to_string();
            assert!(!error.contains("hunter2") && error.contains("@h"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_url_makes_it_panic(text in any::<String>(), url in "(https?|unix)://?[a-z@:\\[\\]0-9/?#%.]{0,20}") {
            let _ = Address::parse(&text);
            if let Ok(address) = Address::parse(&url) {
                // The displayed URL leads to the same server.
                prop_assert_eq!(Address::parse(&address.url()).unwrap().place, address.place);
            }
        }
    }
}
