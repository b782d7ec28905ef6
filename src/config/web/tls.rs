//! `tls_server_config`: certificates, who is admitted, and the versions by their names in Go, which the format uses.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_saphyr::Spanned;

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
}

/// Keys of the format that are refused: lists of Go's names, and the preference among them, which Go itself ignores since 1.17.
pub(super) const REFUSED: [&str; 3] = ["cipher_suites", "curve_preferences", "prefer_server_cipher_suites"];
/// Why, and what to do.
pub(super) const REFUSAL: &str = "is not supported: the cipher suites and curves are those of rustls, all with forward secrecy; \
     remove the key, and set min_version: TLS13 to exclude the suites of TLS 1.2";

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
