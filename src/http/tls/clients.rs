//! Verification of client certificates.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::verify_server_name;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};

use crate::config::pem::certificates;
use crate::config::web::{ClientAuth, TlsSettings};

/// Returns the verifier of the settings; `None` if clients are not asked for a certificate.
///
/// # Errors
/// The CA or an allowed name is invalid.
pub fn verifier(
    settings: &TlsSettings,
    ca: &[u8],
    provider: &Arc<CryptoProvider>,
) -> Result<Option<Arc<dyn ClientCertVerifier>>, String> {
    let is_mandatory = settings.client_auth.is_mandatory();
    let chain = match settings.client_auth {
        ClientAuth::None => return Ok(None),
        ClientAuth::Request | ClientAuth::RequireAny => None,
        ClientAuth::VerifyIfGiven | ClientAuth::RequireAndVerify => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(ca)? {
                roots.add(certificate).map_err(|error| error.to_string())?;
            }
            let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
            Some(builder.build().map_err(|error| error.to_string())?)
        }
    };
    let name = |name: &String| {
        ServerName::try_from(name.clone())
            .map_err(|_| format!("client_allowed_sans: {name:?} is neither a DNS name nor an IP address"))
    };
    let allowed = settings.client_names.iter().map(name).collect::<Result<_, _>>()?;
    Ok(Some(Arc::new(ClientVerifier { is_mandatory, chain, allowed, provider: Arc::clone(provider) })))
}

/// Verifies the certificate of a client, beyond that the client has its private key.
#[derive(Debug)]
struct ClientVerifier {
    is_mandatory: bool,
    /// Verifies the chain up to the clients' CA; `None`: any certificate.
    chain: Option<Arc<dyn ClientCertVerifier>>,
    /// Names of which it must be valid for one, as a server's would have to be; empty: any.
    allowed: Vec<ServerName<'static>>,
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.is_mandatory
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.as_ref().map_or(&[], |chain| chain.root_hint_subjects())
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if let Some(chain) = &self.chain {
            chain.verify_client_cert(end_entity, intermediates, now)?;
        }
        if !self.allowed.is_empty() {
            let certificate = ParsedCertificate::try_from(end_entity)?;
            if !self.allowed.iter().any(|name| verify_server_name(&certificate, name).is_ok()) {
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
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
