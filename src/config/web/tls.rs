//! `tls_server_config`: versions, ciphers and curves by the names that Go gives them, as the format has it.

use std::path::{Path, PathBuf};

use super::super::yaml::{Entry, Yaml};
use crate::config::ConfigError;

/// A value, and the line of the file where it stands, counted from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At<T> {
    /// The value.
    pub value: T,
    /// The line.
    pub line: usize,
}

/// PEM text, or where it is.
#[derive(Clone, PartialEq, Eq)]
pub enum Pem {
    /// In the file itself.
    Inline(String),
    /// In another one.
    File(PathBuf),
}

impl std::fmt::Debug for Pem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Inline(_) => f.write_str("Inline(..)"), // it may be a key
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

/// What is asked of clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientAuth {
    /// No certificate.
    #[default]
    None,
    /// A certificate, which need not come and is not verified.
    Request,
    /// Some certificate, whoever made it.
    RequireAny,
    /// A certificate need not come, but must be of the CA if it does.
    VerifyIfGiven,
    /// A certificate of the CA.
    RequireAndVerify,
}

/// A version of TLS that is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TlsVersion {
    /// TLS 1.2.
    Tls12,
    /// TLS 1.3.
    Tls13,
}

/// A cipher suite, by its IANA number.
pub type CipherSuite = u16;

/// A group of a key exchange, by its IANA number.
pub type Group = u16;

/// `tls_server_config`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSettings {
    /// The server's certificate, and those that lead from it to a root.
    pub certificate: At<Pem>,
    /// Its private key.
    pub key: At<Pem>,
    /// Who must have made clients' certificates.
    pub client_ca: Option<At<Pem>>,
    /// What is asked of clients.
    pub client_auth: ClientAuth,
    /// Names of which a client's certificate must have one; empty: any.
    pub client_names: Vec<String>,
    /// Lowest version.
    pub lowest: TlsVersion,
    /// Highest version.
    pub highest: TlsVersion,
    /// Cipher suites of TLS 1.2, best first; empty: all. Those of TLS 1.3 are always on, as in Go.
    pub cipher_suites: Vec<CipherSuite>,
    /// The server's order of cipher suites counts, not the client's.
    pub servers_order: bool,
    /// Groups of the key exchange, best first; empty: all.
    pub groups: Vec<Group>,
}

const KEYS: &[&str] = &[
    "cert_file",
    "key_file",
    "cert",
    "key",
    "client_ca_file",
    "client_ca",
    "client_auth_type",
    "client_allowed_sans",
    "min_version",
    "max_version",
    "cipher_suites",
    "prefer_server_cipher_suites",
    "curve_preferences",
];

const CLIENT_AUTH: &[(&str, ClientAuth)] = &[
    ("NoClientCert", ClientAuth::None),
    ("RequestClientCert", ClientAuth::Request),
    ("RequireAnyClientCert", ClientAuth::RequireAny),
    ("VerifyClientCertIfGiven", ClientAuth::VerifyIfGiven),
    ("RequireAndVerifyClientCert", ClientAuth::RequireAndVerify),
];

const VERSIONS: &[(&str, TlsVersion)] = &[("TLS12", TlsVersion::Tls12), ("TLS13", TlsVersion::Tls13)];

/// Those that ring has.
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

/// Reads the section; `None` if it is empty.
pub(super) fn read(yaml: Yaml<'_>, section: &Entry<'_>) -> Result<Option<TlsSettings>, ConfigError> {
    let entries = yaml.entries(section.key, section.value, KEYS)?;
    if entries.is_empty() {
        return Ok(None);
    }
    let section = Section { yaml, entries, line: section.line };
    let (certificate, key) = section.pair()?;
    let settings = TlsSettings {
        certificate,
        key,
        client_ca: section.pem("client_ca_file", "client_ca")?,
        client_auth: section.word("client_auth_type", CLIENT_AUTH)?.unwrap_or_default(),
        client_names: match section.find("client_allowed_sans") {
            Some(entry) => yaml.list(entry)?.into_iter().map(|(name, _)| name).collect(),
            None => vec![],
        },
        lowest: section.word("min_version", VERSIONS)?.unwrap_or(TlsVersion::Tls12),
        highest: section.word("max_version", VERSIONS)?.unwrap_or(TlsVersion::Tls13),
        cipher_suites: section.words("cipher_suites", CIPHER_SUITES)?,
        servers_order: match section.find("prefer_server_cipher_suites") {
            Some(entry) => yaml.switch(entry)?,
            None => true,
        },
        groups: section.words("curve_preferences", GROUPS)?,
    };
    section.contradictions(&settings)?;
    Ok(Some(settings))
}

struct Section<'a> {
    yaml: Yaml<'a>,
    entries: Vec<Entry<'a>>,
    line: usize,
}

impl Section<'_> {
    fn find(&self, key: &str) -> Option<&Entry<'_>> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    /// The line of a key, or of the section.
    fn line(&self, key: &str) -> usize {
        self.find(key).map_or(self.line, |entry| entry.line)
    }

    fn word<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Result<Option<T>, ConfigError> {
        let Some(entry) = self.find(key) else { return Ok(None) };
        let text = self.yaml.text(entry)?;
        if text.is_empty() {
            return Ok(None);
        }
        self.yaml.word((&text, entry.line), key, words).map(Some)
    }

    fn words<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Result<Vec<T>, ConfigError> {
        let Some(entry) = self.find(key) else { return Ok(vec![]) };
        let list = self.yaml.list(entry)?;
        list.iter().map(|(text, line)| self.yaml.word((text, *line), key, words)).collect()
    }

    /// PEM text by either of two keys.
    fn pem(&self, file: &str, inline: &str) -> Result<Option<At<Pem>>, ConfigError> {
        let text = |key| match self.find(key) {
            Some(entry) => self.yaml.text(entry).map(|text| Some(text).filter(|text| !text.is_empty())),
            None => Ok(None),
        };
        Ok(match (text(file)?, text(inline)?) {
            (Some(_), Some(_)) => {
                let what = format!("{inline:?} and {file:?} are two ways to give the same; leave one out");
                return Err(self.yaml.at(self.line(inline), what));
            }
            (Some(path), None) => {
                let folder = self.yaml.path.parent().unwrap_or(Path::new(""));
                Some(At { value: Pem::File(folder.join(path)), line: self.line(file) })
            }
            (None, Some(text)) => Some(At { value: Pem::Inline(text), line: self.line(inline) }),
            (None, None) => None,
        })
    }

    fn pair(&self) -> Result<(At<Pem>, At<Pem>), ConfigError> {
        match (self.pem("cert_file", "cert")?, self.pem("key_file", "key")?) {
            (Some(certificate), Some(key)) => Ok((certificate, key)),
            (Some(half), None) => {
                Err(self.yaml.at(half.line, "the key of this certificate is missing; set key_file or key"))
            }
            (None, Some(half)) => {
                Err(self.yaml.at(half.line, "the certificate of this key is missing; set cert_file or cert"))
            }
            (None, None) => {
                let what =
                    "TLS needs a certificate; set cert_file and key_file, or leave out tls_server_config";
                Err(self.yaml.at(self.line, what))
            }
        }
    }

    /// Settings that are fine one by one, and not together.
    fn contradictions(&self, settings: &TlsSettings) -> Result<(), ConfigError> {
        let verifies =
            matches!(settings.client_auth, ClientAuth::VerifyIfGiven | ClientAuth::RequireAndVerify);
        let requires = matches!(settings.client_auth, ClientAuth::RequireAny | ClientAuth::RequireAndVerify);
        if let Some(ca) = &settings.client_ca
            && settings.client_auth == ClientAuth::None
        {
            let what =
                "a CA of clients is of no use without client_auth_type; set RequireAndVerifyClientCert";
            return Err(self.yaml.at(ca.line, what));
        }
        if verifies && settings.client_ca.is_none() {
            let what =
                "clients' certificates are verified against client_ca_file or client_ca; set one of them";
            return Err(self.yaml.at(self.line("client_auth_type"), what));
        }
        if !settings.client_names.is_empty() && !requires {
            let what = "a client without a certificate has no name; set client_auth_type to RequireAndVerifyClientCert";
            return Err(self.yaml.at(self.line("client_allowed_sans"), what));
        }
        if settings.lowest > settings.highest {
            let what = "min_version is above max_version: no version is left";
            return Err(self.yaml.at(self.line("min_version"), what));
        }
        Ok(())
    }
}
