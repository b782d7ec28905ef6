//! Verification of client certificates.

use std::net::IpAddr;
use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};

use webpki::EndEntityCert;

use crate::config::pem::certificates;
use crate::config::web::{ClientAuth, TlsSettings};

/// Returns the verifier of the settings; `None` if clients are not asked for a certificate.
///
/// # Errors
/// The CA is invalid.
pub fn verifier(
    settings: &TlsSettings,
    ca: &[u8],
    provider: &Arc<CryptoProvider>,
) -> Result<Option<Arc<dyn ClientCertVerifier>>, String> {
    if settings.client_auth == ClientAuth::None {
        return Ok(None);
    }
    let mut roots = RootCertStore::empty();
    for certificate in certificates(ca)? {
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
    let builder = if settings.client_auth.is_mandatory() { builder } else { builder.allow_unauthenticated() };
    let chain = builder.build().map_err(|error| error.to_string())?;
    Ok(Some(Arc::new(ClientVerifier { chain, allowed: settings.client_names.clone() })))
}

/// Verifies the certificate of a client, beyond that the client has its private key.
#[derive(Debug)]
struct ClientVerifier {
    /// Verifies the chain up to the clients' CA.
    chain: Arc<dyn ClientCertVerifier>,
    /// Names of which it must have one, exactly as written: DNS names, URIs, IP addresses; empty: any.
    allowed: Vec<String>,
}

impl ClientVerifier {
    fn is_allowed(&self, certificate: &EndEntityCert<'_>) -> bool {
        let has_address = |name: &String| {
            let address = name.parse::<IpAddr>().map(|address| ServerName::IpAddress(address.into()));
            address.is_ok_and(|address| certificate.verify_is_valid_for_subject_name(&address).is_ok())
        };
        self.allowed.iter().any(|name| {
            certificate.valid_dns_names().any(|dns| dns.eq_ignore_ascii_case(name))
                || certificate.valid_uri_names().any(|uri| uri == name)
                || has_address(name)
        })
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.chain.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.chain.verify_client_cert(end_entity, intermediates, now)?;
        if !self.allowed.is_empty() {
            let certificate =
                EndEntityCert::try_from(end_entity).map_err(|_| CertificateError::BadEncoding)?;
            if !self.is_allowed(&certificate) {
                return Err(CertificateError::ApplicationVerificationFailure.into());
            }
        }
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
