//! The TLS server configuration from `--web.config.file`, with rustls and ring.

mod clients;

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::{ServerConfig, version};

use crate::config::ConfigError;
use crate::config::pem::{certificates, private_key};
use crate::config::web::{At, Pem, TlsVersion, WebConfig};

/// The contents of the configuration file and of the files that it names. Equal contents need no new TLS configuration.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ConfigFiles {
    /// Settings of the file.
    pub config: WebConfig,
    certificate: Vec<u8>,
    key: Vec<u8>,
    /// The CA of client certificates.
    client_ca: Vec<u8>,
}

impl ConfigFiles {
    /// Reads the file at `path` and the files that it names.
    ///
    /// # Errors
    /// A file is unreadable, or the settings are invalid.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let what = "the web configuration";
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable {
            what,
            path: path.to_path_buf(),
            source,
        })?;
        let config = WebConfig::parse(path, &text)?;
        let pem = |pem: Option<&At<Pem>>| pem.map_or(Ok(vec![]), |pem| read(path, pem));
        let tls = config.tls.as_ref();
        Ok(Self {
            certificate: pem(tls.map(|tls| &tls.certificate))?,
            key: pem(tls.map(|tls| &tls.key))?,
            client_ca: pem(tls.and_then(|tls| tls.client_ca.as_ref()))?,
            config,
        })
    }

    /// Returns whether `other` admits the same clients: users, CA, and the TLS settings that decide who may connect.
    pub fn admits_same_clients(&self, other: &Self) -> bool {
        let tls = |files: &Self| {
            let tls = files.config.tls.clone();
            tls.map(|tls| (tls.client_auth, tls.client_names, tls.lowest..=tls.highest))
        };
        self.client_ca == other.client_ca
            && self.config.users == other.config.users
            && tls(self) == tls(other)
    }

    /// Builds the TLS configuration; `None` if the settings have none. Errors name `path`.
    ///
    /// # Errors
    /// A certificate or key is invalid, or they do not belong together.
    pub fn server_config(&self, path: &Path) -> Result<Option<Arc<ServerConfig>>, ConfigError> {
        let Some(settings) = &self.config.tls else { return Ok(None) };
        let wrong = |line, what: String| ConfigError::InFile { path: path.to_path_buf(), line, what };
        let provider = Arc::new(ring::default_provider());
        let chain = certificates(&self.certificate)
            .map_err(|what| wrong(settings.certificate.line, format!("certificate: {what}")))?;
        let key = private_key(&self.key).map_err(|what| wrong(settings.key.line, format!("key: {what}")))?;
        let clients = clients::verifier(settings, &self.client_ca, &provider).map_err(|what| {
            wrong(settings.client_ca.as_ref().map_or(0, |ca| ca.line), format!("client certificates: {what}"))
        })?;
        let versions: Vec<_> = [(TlsVersion::Tls12, &version::TLS12), (TlsVersion::Tls13, &version::TLS13)]
            .into_iter()
            .filter(|(version, _)| (settings.lowest..=settings.highest).contains(version))
            .map(|(_, version)| version)
            .collect();
        let unusable =
            |error| wrong(settings.certificate.line, format!("certificate and key are unusable: {error}"));
        let builder = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)
            .map_err(unusable)?;
        let builder = match clients {
            Some(clients) => builder.with_client_cert_verifier(clients),
            None => builder.with_no_client_auth(),
        };
        let mut server = builder.with_single_cert(chain, key).map_err(unusable)?;
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Some(Arc::new(server)))
    }
}

fn read(file: &Path, pem: &At<Pem>) -> Result<Vec<u8>, ConfigError> {
    match &pem.value {
        Pem::Inline(text) => Ok(text.clone().into_bytes()),
        Pem::File(path) => std::fs::read(path).map_err(|error| ConfigError::InFile {
            path: file.to_path_buf(),
            line: pem.line,
            what: format!("cannot read {}: {error}", path.display()),
        }),
    }
}
