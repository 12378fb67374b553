//! TLS with a private certificate authority: the fingerprint by which a joining machine recognizes it, and the client
//! configurations that trust nothing else.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use sha2::{Digest, Sha256};

use crate::outbound::install_crypto;

/// A certificate that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateFileError {
    /// The file cannot be read, or contains no certificate in PEM.
    #[error("cannot read a certificate in {path}: {reason}")]
    Read { path: PathBuf, reason: String },
    /// The certificate is not one of a certificate authority.
    #[error("the certificate in {path} cannot be used as a certificate authority")]
    Authority {
        path: PathBuf,
        #[source]
        source: rustls::Error,
    },
}

/// SHA-256 of a certificate.
pub fn fingerprint(certificate: &CertificateDer<'_>) -> [u8; 32] {
    Sha256::digest(certificate.as_ref()).into()
}

/// SHA-256 of the first certificate in a PEM file.
///
/// # Errors
/// [`CertificateFileError::Read`].
pub fn fingerprint_of_file(path: &Path) -> Result<[u8; 32], CertificateFileError> {
    Ok(fingerprint(&read_certificate(path)?))
}

fn read_certificate(path: &Path) -> Result<CertificateDer<'static>, CertificateFileError> {
    CertificateDer::from_pem_file(path)
        .map_err(|error| CertificateFileError::Read { path: path.to_owned(), reason: error.to_string() })
}

/// Name in the certificate of every cfq server. Clients that trust only the cluster's authority check this name instead of
/// the address that they connect to, because a server's address may change. The authority issues no other certificates.
pub const SERVER_NAME: &str = "server.cfq.internal";

/// A client configuration that accepts only the server whose certificate was issued by the authority in `file` (PEM).
///
/// # Errors
/// [`CertificateFileError`].
pub fn trust_only(file: &Path) -> Result<ClientConfig, CertificateFileError> {
    install_crypto();
    let certificate = read_certificate(file)?;
    // Reports a file that is no certificate of an authority before the first connection.
    webpki_verifier(&certificate)
        .map_err(|source| CertificateFileError::Authority { path: file.to_owned(), source })?;
    Ok(client_config(AuthorityVerifier {
        authority: Authority::Certificate(certificate),
        seen: SeenAuthority::default(),
    }))
}

/// A client configuration that accepts only the server whose certificate was issued by the authority with this fingerprint.
/// The server sends that authority's certificate with its own. The returned handle gives the authority's certificate
/// after a connection.
pub fn trust_only_fingerprint(authority: [u8; 32]) -> (ClientConfig, SeenAuthority) {
    install_crypto();
    let seen = SeenAuthority::default();
    let verifier = AuthorityVerifier { authority: Authority::Fingerprint(authority), seen: seen.clone() };
    (client_config(verifier), seen)
}

fn client_config(verifier: AuthorityVerifier) -> ClientConfig {
    ClientConfig::builder().dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth()
}

/// The certificate of the authority that issued a server's certificate. Use it only after a request has succeeded: it is set
/// before the server has proved that it has the private key of its certificate.
#[derive(Debug, Clone, Default)]
pub struct SeenAuthority(Arc<std::sync::OnceLock<CertificateDer<'static>>>);

impl SeenAuthority {
    /// The authority's certificate in PEM; `None` before the first handshake.
    pub fn pem(&self) -> Option<String> {
        let encoded = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, self.0.get()?.as_ref());
        let mut lines = String::from("-----BEGIN CERTIFICATE-----\n");
        for (index, character) in encoded.chars().enumerate() {
            if index > 0 && index % 64 == 0 {
                lines.push('\n');
            }
            lines.push(character);
        }
        lines.push_str("\n-----END CERTIFICATE-----\n");
        Some(lines)
    }
}

/// Why the server's certificate was not accepted, if that is the cause of an error.
pub fn certificate_problem(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    match rustls_error(error)? {
        rustls::Error::InvalidCertificate(problem) => Some(match problem {
            // All authorities of cfq have the same name, so another one is noticed by the signature.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "it was not issued by the expected authority".to_owned()
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                "it was issued for other names and addresses".to_owned()
            }
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. } => {
                "it is not valid at this time, or the clock of this machine is wrong".to_owned()
            }
            other => other.to_string(),
        }),
        _ => None,
    }
}

/// Whether an error is that the server does not speak TLS.
pub fn is_not_tls(error: &(dyn std::error::Error + 'static)) -> bool {
    matches!(rustls_error(error), Some(rustls::Error::InvalidMessage(_)))
}

/// The error of TLS among the causes of an error. The error in an [`std::io::Error`] is not its source; its source is that
/// of the error in it.
fn rustls_error<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e rustls::Error> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        cause = match error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    None
}

/// Verifies the server's certificate as rustls does, with one trusted authority, and with [`SERVER_NAME`] instead of the
/// name or address that the client connected to.
#[derive(Debug)]
struct AuthorityVerifier {
    authority: Authority,
    seen: SeenAuthority,
}

/// The trusted authority.
#[derive(Debug)]
enum Authority {
    Certificate(CertificateDer<'static>),
    /// The authority with this fingerprint, whose certificate the server sends.
    Fingerprint([u8; 32]),
}

/// The verifier of rustls, with one trusted authority.
fn webpki_verifier(authority: &CertificateDer<'_>) -> Result<Arc<WebPkiServerVerifier>, rustls::Error> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone().into_owned())?;
    let verifier = WebPkiServerVerifier::builder(Arc::new(roots)).build();
    verifier.map_err(|error| rustls::Error::General(error.to_string()))
}

fn signature_algorithms() -> WebPkiSupportedAlgorithms {
    rustls::crypto::ring::default_provider().signature_verification_algorithms
}

impl ServerCertVerifier for AuthorityVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let authority = match &self.authority {
            Authority::Certificate(certificate) => certificate,
            Authority::Fingerprint(wanted) => intermediates
                .iter()
                .find(|certificate| fingerprint(certificate) == *wanted)
                .ok_or(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer))?,
        };
        let name = ServerName::try_from(SERVER_NAME).map_err(|error| rustls::Error::General(error.to_string()))?;
        let verified =
            webpki_verifier(authority)?.verify_server_cert(end_entity, intermediates, &name, ocsp_response, now)?;
        // An earlier connection has set it, or this one does; it is the same certificate.
        let _ = self.seen.0.set(authority.clone().into_owned());
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &signature_algorithms())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &signature_algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        signature_algorithms().supported_schemes()
    }
}
