//! `tls_server_config`: versions, ciphers and curves by their names in Go, which the format uses.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_saphyr::Spanned;

use super::Switch;
use crate::config::ConfigError;
use crate::config::yaml::{error_at, line_of};

/// A value with its line in the file, counted from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At<T> {
    /// The value.
    pub value: T,
    /// The line.
    pub line: usize,
}

/// PEM text, or the file that contains it.
#[derive(Clone, PartialEq, Eq)]
pub enum Pem {
    /// The text.
    Inline(String),
    /// The path of a file.
    File(PathBuf),
}

impl std::fmt::Debug for Pem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Inline(_) => f.write_str("Inline(..)"), // may be a key
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

/// The certificate required of clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientAuth {
    /// No certificate.
    #[default]
    None,
    /// An optional certificate, which must be signed by the CA.
    VerifyIfGiven,
    /// A certificate signed by the CA.
    RequireAndVerify,
}

impl<'de> Deserialize<'de> for ClientAuth {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match String::deserialize(deserializer)?.as_str() {
            "" | "NoClientCert" => Ok(Self::None),
            "VerifyClientCertIfGiven" => Ok(Self::VerifyIfGiven),
            "RequireAndVerifyClientCert" => Ok(Self::RequireAndVerify),
            // Go knows them, and the last one is an old name of the one before
            "RequestClientCert" | "RequireAnyClientCert" | "RequireClientCert" => Err(D::Error::custom(
                "this type verifies no certificate, so it protects nothing; set RequireAndVerifyClientCert and client_ca_file",
            )),
            _ => Err(D::Error::custom(
                "client_auth_type: allowed are NoClientCert, VerifyClientCertIfGiven, RequireAndVerifyClientCert",
            )),
        }
    }
}

impl ClientAuth {
    /// Returns whether a client without a certificate is rejected.
    pub fn is_mandatory(self) -> bool {
        self == Self::RequireAndVerify
    }
}

/// An offered version of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub enum TlsVersion {
    /// TLS 1.2.
    #[serde(rename = "TLS12")]
    Tls12,
    /// TLS 1.3.
    #[serde(rename = "TLS13")]
    Tls13,
}

/// A cipher suite, by its IANA number.
pub type CipherSuite = u16;

/// A group of a key exchange, by its IANA number.
pub type Group = u16;

/// `tls_server_config`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSettings {
    /// The server's certificate and its chain to a root.
    pub certificate: At<Pem>,
    /// The private key of the certificate.
    pub key: At<Pem>,
    /// The CA of client certificates.
    pub client_ca: Option<At<Pem>>,
    /// The certificate required of clients.
    pub client_auth: ClientAuth,
    /// Names of which a client certificate must have one; empty: any.
    pub client_names: Vec<String>,
    /// Lowest version.
    pub lowest: TlsVersion,
    /// Highest version.
    pub highest: TlsVersion,
    /// Cipher suites of TLS 1.2 by preference; empty: all. Those of TLS 1.3 are always on, as in Go.
    pub cipher_suites: Vec<CipherSuite>,
    /// Prefer the server's order of cipher suites to the client's.
    pub servers_order: bool,
    /// Groups of the key exchange by preference; empty: all.
    pub groups: Vec<Group>,
}

/// The cipher suites of ring.
const CIPHER_SUITES: &[(&str, CipherSuite)] = &[
    ("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", 0xc02c),
    ("TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", 0xc02b),
    ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256", 0xcca9),
    ("TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", 0xc030),
    ("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", 0xc02f),
    ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256", 0xcca8),
    ("TLS_AES_256_GCM_SHA384", 0x1302),
    ("TLS_AES_128_GCM_SHA256", 0x1301),
    ("TLS_CHACHA20_POLY1305_SHA256", 0x1303),
];

const GROUPS: &[(&str, Group)] = &[("X25519", 29), ("CurveP256", 23), ("CurveP384", 24)];

/// The section as it is written.
#[derive(Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TlsFile {
    cert_file: Option<Spanned<String>>,
    key_file: Option<Spanned<String>>,
    cert: Option<Spanned<String>>,
    key: Option<Spanned<String>>,
    client_ca_file: Option<Spanned<String>>,
    client_ca: Option<Spanned<String>>,
    client_auth_type: Option<Spanned<ClientAuth>>,
    client_allowed_sans: Option<Vec<Spanned<String>>>,
    min_version: Option<Spanned<TlsVersion>>,
    max_version: Option<Spanned<TlsVersion>>,
    cipher_suites: Option<Vec<Spanned<String>>>,
    prefer_server_cipher_suites: Option<Switch>,
    curve_preferences: Option<Vec<Spanned<String>>>,
}

/// Validates the section; `None` if it is empty.
pub(super) fn read(path: &Path, section: Spanned<TlsFile>) -> Result<Option<TlsSettings>, ConfigError> {
    if section.value == TlsFile::default() {
        return Ok(None);
    }
    let section = Section { path, line: line_of(&section), file: section.value };
    let file = &section.file;
    let (certificate, key) = section.pair()?;
    let names = file.client_allowed_sans.iter().flatten();
    let settings = TlsSettings {
        certificate,
        key,
        client_ca: section.pem(&file.client_ca_file, &file.client_ca, "client_ca")?,
        client_auth: file.client_auth_type.as_ref().map(|auth| auth.value).unwrap_or_default(),
        client_names: names.map(|name| section.client_name(name)).collect::<Result<_, _>>()?,
        lowest: file.min_version.as_ref().map_or(TlsVersion::Tls12, |version| version.value),
        highest: file.max_version.as_ref().map_or(TlsVersion::Tls13, |version| version.value),
        cipher_suites: section.words("cipher_suites", &file.cipher_suites, CIPHER_SUITES)?,
        servers_order: file.prefer_server_cipher_suites.as_ref().is_none_or(|switch| switch.0),
        groups: section.words("curve_preferences", &file.curve_preferences, GROUPS)?,
    };
    section.check_consistency(&settings)?;
    Ok(Some(settings))
}

struct Section<'a> {
    path: &'a Path,
    line: usize,
    file: TlsFile,
}

impl Section<'_> {
    fn error(&self, line: usize, what: impl Into<String>) -> ConfigError {
        error_at(self.path, line, what)
    }

    /// Returns the line of a value, or of the section.
    fn line<T>(&self, value: &Option<Spanned<T>>) -> usize {
        value.as_ref().map_or(self.line, line_of)
    }

    /// Returns an allowed name of a client. Mail addresses and wildcards are not read from certificates.
    fn client_name(&self, name: &Spanned<String>) -> Result<String, ConfigError> {
        let is_uri = name.value.contains("://");
        if !is_uri && name.value.contains(['@', '*']) {
            let what = format!(
                "client_allowed_sans: {:?}: whole DNS names, URIs and IP addresses are compared, no mail addresses and no wildcards",
                name.value
            );
            return Err(self.error(line_of(name), what));
        }
        Ok(name.value.clone())
    }

    fn words(
        &self,
        key: &str,
        list: &Option<Vec<Spanned<String>>>,
        words: &[(&str, u16)],
    ) -> Result<Vec<u16>, ConfigError> {
        let word = |text: &Spanned<String>| {
            let found = words.iter().find(|(word, _)| *word == text.value);
            found.map(|(_, number)| *number).ok_or_else(|| {
                let allowed: Vec<_> = words.iter().map(|(word, _)| *word).collect();
                let what = format!(
                    "{key}: {:?} is unknown or not offered; allowed: {}",
                    text.value,
                    allowed.join(", ")
                );
                self.error(line_of(text), what)
            })
        };
        list.iter().flatten().map(word).collect()
    }

    /// Returns the PEM of either of two keys; an empty text is none.
    fn pem(
        &self,
        file: &Option<Spanned<String>>,
        inline: &Option<Spanned<String>>,
        name: &str,
    ) -> Result<Option<At<Pem>>, ConfigError> {
        let text = |value: &Option<Spanned<String>>| {
            value.as_ref().map(|value| value.value.clone()).filter(|text| !text.is_empty())
        };
        Ok(match (text(file), text(inline)) {
            (Some(_), Some(_)) => {
                let what = format!("\"{name}\" and \"{name}_file\" set the same thing; leave one out");
                return Err(self.error(self.line(inline), what));
            }
            (Some(path), None) => {
                let folder = self.path.parent().unwrap_or(Path::new(""));
                Some(At { value: Pem::File(folder.join(path)), line: self.line(file) })
            }
            (None, Some(text)) => Some(At { value: Pem::Inline(text), line: self.line(inline) }),
            (None, None) => None,
        })
    }

    fn pair(&self) -> Result<(At<Pem>, At<Pem>), ConfigError> {
        let file = &self.file;
        let (line, what) = match (
            self.pem(&file.cert_file, &file.cert, "cert")?,
            self.pem(&file.key_file, &file.key, "key")?,
        ) {
            (Some(certificate), Some(key)) => return Ok((certificate, key)),
            (Some(half), None) => (half.line, "the key of this certificate is missing; set key_file or key"),
            (None, Some(half)) => {
                (half.line, "the certificate of this key is missing; set cert_file or cert")
            }
            (None, None) => (
                self.line,
                "TLS needs a certificate; set cert_file and key_file, or leave out tls_server_config",
            ),
        };
        Err(self.error(line, what))
    }

    /// Rejects settings that contradict each other.
    fn check_consistency(&self, settings: &TlsSettings) -> Result<(), ConfigError> {
        let verifies = settings.client_auth != ClientAuth::None;
        if let Some(ca) = &settings.client_ca
            && settings.client_auth == ClientAuth::None
        {
            let what = "a client CA has no effect without client_auth_type; set RequireAndVerifyClientCert";
            return Err(self.error(ca.line, what));
        }
        if verifies && settings.client_ca.is_none() {
            let what =
                "client certificates are verified against client_ca_file or client_ca; set one of them";
            return Err(self.error(self.line(&self.file.client_auth_type), what));
        }
        if !settings.client_names.is_empty() && !settings.client_auth.is_mandatory() {
            let what = "a client without a certificate has no name; set client_auth_type to RequireAndVerifyClientCert";
            return Err(self.error(
                self.file.client_allowed_sans.iter().flatten().next().map_or(self.line, line_of),
                what,
            ));
        }
        if settings.lowest > settings.highest {
            let what = "min_version is above max_version: no version is left";
            return Err(self.error(self.line(&self.file.min_version), what));
        }
        Ok(())
    }
}
