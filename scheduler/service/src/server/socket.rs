//! A connection that knows whether its client has closed it. While a request is executed, hyper does not read, so bytes
//! that a client sent after the request hide the end of the connection from it.

use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::FutureExt;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, Ready};
use tokio::net::{TcpStream, UnixStream};

/// The methods that TCP and Unix streams have in common. Each needs only a shared reference.
pub trait Stream: AsFd + Send + Sync + Unpin + 'static {
    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    fn read_now(&self, buf: &mut [u8]) -> io::Result<usize>;
    fn write_now(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize>;
    /// The known readiness; `None` if nothing is known.
    fn readiness(&self) -> Option<Ready>;
    /// Whether the client is on this machine.
    fn is_local(&self) -> bool;
}

macro_rules! stream {
    ($stream:ty, $is_local:expr) => {
        impl Stream for $stream {
            fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.poll_read_ready(cx)
            }
            fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.poll_write_ready(cx)
            }
            fn read_now(&self, buf: &mut [u8]) -> io::Result<usize> {
                self.try_read(buf)
            }
            fn write_now(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
                self.try_write_vectored(bufs)
            }
            fn readiness(&self) -> Option<Ready> {
                self.ready(Interest::READABLE).now_or_never()?.ok()
            }
            fn is_local(&self) -> bool {
                $is_local(self)
            }
        }
    };
}

stream!(TcpStream, |stream: &TcpStream| match (stream.peer_addr(), stream.local_addr()) {
    (Ok(peer), Ok(own)) => peer.ip().to_canonical().is_loopback() || peer.ip() == own.ip(),
    _ => false,
});
stream!(UnixStream, |_| true);

/// A connection, of which a [`ClosedByClient`] can be made.
pub struct Socket<S>(Arc<S>);

/// Tells whether the client has closed a connection.
pub struct ClosedByClient<S>(Arc<S>);

impl<S: Stream> Socket<S> {
    pub fn new(stream: S) -> (Self, ClosedByClient<S>) {
        let stream = Arc::new(stream);
        (Self(stream.clone()), ClosedByClient(stream))
    }
}

impl<S: Stream> ClosedByClient<S> {
    /// Whether the client sends nothing any more. Bytes that it sent before may be unread.
    pub fn check(&self) -> bool {
        self.0.readiness().is_some_and(|ready| ready.is_read_closed())
    }
}

impl<S: Stream> AsyncRead for Socket<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_readable(cx))?;
            match self.0.read_now(buf.initialize_unfilled()) {
                Ok(read) => {
                    buf.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl<S: Stream> AsyncWrite for Socket<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_writable(cx))?;
            match self.0.write_now(bufs) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match socket2::SockRef::from(&*self.0).shutdown(Shutdown::Write) {
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
            done => Poll::Ready(done),
        }
    }
}
