//! TLS for the TCP listener. Clients on this machine may also use plain HTTP; those on other machines may not.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// First byte of a TLS connection: the type of a handshake record (RFC 8446, section 5.1). No HTTP request begins with
/// it.
const HANDSHAKE_RECORD: u8 = 0x16;

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {path}: {reason}")]
    Read { path: PathBuf, reason: String },
    #[error("the certificate in {certificate} cannot be used with the key in {key}")]
    Unusable {
        certificate: PathBuf,
        key: PathBuf,
        #[source]
        source: tokio_rustls::rustls::Error,
    },
}

/// Certificate and key of the server.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl Tls {
    /// Reads the certificates, the server's first, and the private key (PEM).
    pub fn load(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        cfq_link::outbound::install_crypto();
        let unreadable = |path: &Path, reason: String| TlsError::Read { path: path.to_owned(), reason };
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_file_iter(certificate).and_then(|certificates| certificates.collect());
        let chain = chain.map_err(|error| unreadable(certificate, error.to_string()))?;
        let private = PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable(key, error.to_string()))?;
        let mut config =
            ServerConfig::builder().with_no_client_auth().with_single_cert(chain, private).map_err(|source| {
                TlsError::Unusable { certificate: certificate.to_owned(), key: key.to_owned(), source }
            })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    /// Does the handshake if the client begins one.
    pub async fn accept<I: AsyncRead + AsyncWrite + Unpin>(&self, mut io: I) -> io::Result<Accepted<I>> {
        let first = io.read_u8().await?;
        let io = Rewind { first: Some(first), io };
        if first != HANDSHAKE_RECORD {
            return Ok(Accepted::Plain(io));
        }
        Ok(Accepted::Tls(Box::new(self.0.accept(io).await?)))
    }
}

/// A connection whose client has sent something.
pub enum Accepted<I> {
    Tls(Box<TlsStream<Rewind<I>>>),
    Plain(Rewind<I>),
}

/// A connection whose first byte was read, and is read again.
pub struct Rewind<I> {
    first: Option<u8>,
    io: I,
}

impl<I: AsyncRead + Unpin> AsyncRead for Rewind<I> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if buf.remaining() > 0
            && let Some(first) = self.first.take()
        {
            buf.put_slice(&[first]);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Rewind<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
