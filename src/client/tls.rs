//! TLS: the trusted authorities, the client's identity, and descriptions of failures.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore};

use super::access::{AccessError, Identity};

/// A configuration that trusts these authorities (PEM), or those of the system if there are none, and has a client identity if given.
pub(super) fn config(authorities: Option<&[u8]>, identity: Option<&Identity>) -> Result<ClientConfig, AccessError> {
    let roots = match authorities {
        Some(pem) => roots_of(pem)?,
        None => roots_of_system()?,
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider())).with_safe_default_protocol_versions();
    // The provider is fixed and supports these versions.
    let builder = builder.map_err(|error| AccessError::Authorities(error.to_string()))?.with_root_certificates(roots);
    let Some(identity) = identity else { return Ok(builder.with_no_client_auth()) };
    let certificates = certificates(&identity.certificates).map_err(AccessError::Certificate)?;
    let key = PrivateKeyDer::from_pem_slice(&identity.key).map_err(|error| match error {
        rustls::pki_types::pem::Error::NoItemsFound => {
            AccessError::Key("it holds no private key in PEM (an encrypted one cannot be used)".into())
        }
        error => AccessError::Key(format!("it is not a private key in PEM: {error}")),
    })?;
    builder.with_client_auth_cert(certificates, key).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => AccessError::Key("it is not the key of the certificate".into()),
        rustls::Error::InvalidCertificate(error) => {
            AccessError::Certificate(format!("it holds a certificate that cannot be read: {error}"))
        }
        error => AccessError::Key(format!("it cannot be used: {error}")),
    })
}

fn roots_of(pem: &[u8]) -> Result<RootCertStore, AccessError> {
    let mut roots = RootCertStore::empty();
    for (at, certificate) in certificates(pem).map_err(AccessError::Authorities)?.into_iter().enumerate() {
        let added = roots.add(certificate);
        added.map_err(|error| AccessError::Authorities(format!("its certificate {} cannot be used: {error}", at + 1)))?;
    }
    Ok(roots)
}

fn roots_of_system() -> Result<RootCertStore, AccessError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // Bundles contain certificates of all ages; those that cannot be parsed are not trusted.
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        return Err(AccessError::NoRoots(found.errors.first().map(|error| format!(" ({error})")).unwrap_or_default()));
    }
    Ok(roots)
}

/// The certificates in a text; it must contain at least one.
fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(certificates) if certificates.is_empty() => Err("it holds no certificate in PEM".into()),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(format!("it is not PEM: {error}")),
    }
}

/// A TLS failure as a sentence, so that error messages show the sentence.
#[derive(Debug)]
pub(super) struct TlsFault(pub String);

impl fmt::Display for TlsFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for TlsFault {}

/// The same error, described by a sentence if it is a TLS error.
pub(super) fn in_words(error: io::Error) -> io::Error {
    let fault = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).map(words);
    fault.map_or(error, |fault| io::Error::other(TlsFault(fault)))
}

/// Describes an error. The sentence continues the server's address.
fn words(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(error) => format!("its certificate is refused: {}", of_certificate(error)),
        rustls::Error::AlertReceived(alert) => of_alert(*alert),
        rustls::Error::InvalidMessage(_) => "it does not speak TLS (is it http:// instead of https://?)".into(),
        rustls::Error::PeerIncompatible(why) => format!("it and this program have no version or cipher of TLS in common: {why:?}"),
        error => error.to_string(),
    }
}

fn of_certificate(error: &CertificateError) -> String {
    match error {
        CertificateError::UnknownIssuer => "none of the trusted authorities has signed it".into(),
        CertificateError::BadSignature => {
            "none of the trusted authorities has signed it; one has the name of the authority that did, but another key".into()
        }
        CertificateError::ExpiredContext { time, not_after } => format!("it expired {} ago", between(*not_after, *time)),
        CertificateError::NotValidYetContext { time, not_before } => format!("it becomes valid in {}", between(*time, *not_before)),
        CertificateError::Other(other) if other.to_string().contains("CaUsedAsEndEntity") => {
            "it is an authority's own (CA:TRUE), not one for a server".into()
        }
        error => error.to_string(),
    }
}

fn between(from: UnixTime, until: UnixTime) -> String {
    match until.as_secs().saturating_sub(from.as_secs()) {
        seconds @ 0..7200 => format!("{seconds} s"),
        seconds @ 7200..172_800 => format!("{} hours", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

fn of_alert(alert: AlertDescription) -> String {
    use AlertDescription::{
        AccessDenied, BadCertificate, CertificateExpired, CertificateRequired, CertificateRevoked, CertificateUnknown, DecryptError,
        HandshakeFailure, NoApplicationProtocol, UnknownCA, UnsupportedCertificate,
    };
    match alert {
        CertificateRequired => "it demands a client certificate".into(),
        BadCertificate
        | UnknownCA
        | CertificateExpired
        | CertificateRevoked
        | CertificateUnknown
        | UnsupportedCertificate
        | DecryptError
        | AccessDenied => format!("it refuses the client certificate, or requires one ({alert:?})"),
        HandshakeFailure => "it ends the handshake: it has no cipher in common with this program, or demands a client certificate".into(),
        NoApplicationProtocol => "it does not offer the protocol that is needed (HTTP/2 for gRPC, else HTTP/1.1)".into(),
        alert => format!("it ends the connection ({alert:?})"),
    }
}
