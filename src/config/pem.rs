//! Certificates and keys in PEM text. An error is a description of what is expected.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Parses all certificates of a text, at least one.
///
/// # Errors
/// There is none, or one is invalid.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let found = found.map_err(|error| format!("invalid PEM: {error}"))?;
    if found.is_empty() { Err("no certificate found; must be PEM".to_owned()) } else { Ok(found) }
}

/// Parses the first private key of a text.
///
/// # Errors
/// There is none, or it is invalid or encrypted.
pub fn private_key(text: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(text)
        .map_err(|error| format!("{error}; must be an unencrypted private key in PEM format"))
}
