//! TLS to services (`https://`), with the certificates that the system trusts.

use super::pool::Failure;
use crate::error::{Error, Result};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use rustls_native_certs::ErrorKind;
use std::env;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

/// The remedy if a server is not trusted.
pub const HINT: &str = "export SSL_CERT_FILE=FILE with the certificate of the server or its authority on all ranks, or \
                        write http:// if the server does not use TLS (see `rlhf-hpc help services`)";

/// The certificates of trusted authorities.
pub struct Trusted(Vec<CertificateDer<'static>>);

impl Trusted {
    /// Loads the files of `SSL_CERT_FILE` and `SSL_CERT_DIR`, or without them the files of the system.
    ///
    /// # Errors
    /// `Usage` if there are no certificates, or if the file of `SSL_CERT_FILE` cannot be read.
    pub fn load() -> Result<Self> {
        let found = rustls_native_certs::load_native_certs();
        let file = env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty());
        let is_named = |error: &rustls_native_certs::Error| match &error.kind {
            ErrorKind::Io { path, .. } => file.as_ref().is_some_and(|file| path == file),
            _ => false,
        };
        let wrong = found.errors.iter().find(|error| found.certs.is_empty() || is_named(error));
        if found.certs.is_empty() || wrong.is_some() {
            let why = wrong.map_or_else(|| "the system has none".to_owned(), ToString::to_string);
            return Err(Error::usage(format!("https needs trusted certificates: {why}")).hint(HINT));
        }
        Ok(Self(found.certs))
    }

    /// The configuration of requests.
    pub fn for_requests(&self) -> TlsConfig {
        TlsConfig::builder()
            .root_certs(RootCerts::from(self.0.iter().map(|one| Certificate::from_der(one).to_owned())))
            .unversioned_rustls_crypto_provider(Arc::new(default_provider()))
            .build()
    }

    /// Checks that the server at the other end of `stream` has a certificate for `host`.
    pub fn check(&self, host: &str, mut stream: TcpStream) -> std::result::Result<(), Failure> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(self.0.iter().cloned());
        let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let name = host.to_owned().try_into().map_err(|e| Failure::lasting(format!("{e}")))?;
        let connection = ClientConnection::new(Arc::new(config), name);
        let mut connection = connection.map_err(|e| Failure::lasting(e.to_string()))?;
        connection.complete_io(&mut stream).map(drop).map_err(|e| match e.get_ref() {
            Some(inner) if inner.is::<rustls::Error>() => Failure::lasting(e.to_string()),
            _ if e.kind() == io::ErrorKind::WouldBlock => Failure::from("it does not answer with TLS".to_owned()),
            _ => Failure::from(e.to_string()),
        })
    }
}
