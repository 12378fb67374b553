//! The addresses on which the API is served: a TCP address, and a Unix socket for clients of the same user.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net;
use std::path::{Path, PathBuf};
use std::time::Duration;

use socket2::TcpKeepalive;
use tokio::net::{TcpListener, UnixListener};

/// Time without a packet after which the kernel asks whether the client still exists.
const KEEPALIVE_TIME: Duration = Duration::from_secs(15);
/// Interval of these questions; a client that answers none of three is gone.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Time after which a connection with unacknowledged data is closed. It is longer than the limit for a client that accepts
/// no data, which has a message of its own.
const USER_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen on {bind}: another program may use this address; set http.bind to a free address")]
    Tcp {
        bind: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error(
        "{bind} is reachable from the network, but http.lan is not set, so the API token could be intercepted: set it, or \
         set http.bind to a loopback address, or set http.allow_plaintext to true to accept this"
    )]
    Plaintext { bind: SocketAddr },
    #[error("cannot listen on the Unix socket {path}")]
    Socket {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot listen on the Unix socket that the supervisor gave to this process")]
    Inherited(#[source] io::Error),
    #[error("other users can enter {folder} (mode {mode:o}), the folder of the API's socket: run chmod 700 on it")]
    SocketFolder { folder: PathBuf, mode: u32 },
}

/// Listens on the TCP address. An address other than loopback is an error unless `may_be_remote` is set, because
/// connections are encrypted or the user accepted that they are not.
pub async fn bind_tcp(bind: SocketAddr, may_be_remote: bool) -> Result<TcpListener, ListenError> {
    if !bind.ip().to_canonical().is_loopback() && !may_be_remote {
        return Err(ListenError::Plaintext { bind });
    }
    let tcp = |source| ListenError::Tcp { bind, source };
    let listener = TcpListener::bind(bind).await.map_err(tcp)?;
    close_dead_connections(&listener).map_err(tcp)?;
    Ok(listener)
}

/// Lets the kernel close connections whose client has vanished without closing them, because a model may generate for it.
/// Accepted connections inherit these options.
fn close_dead_connections(listener: &TcpListener) -> io::Result<()> {
    let socket = socket2::SockRef::from(listener);
    let probes = TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_INTERVAL).with_retries(3);
    socket.set_tcp_keepalive(&probes)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    Ok(())
}

/// Listens on the Unix socket `path`, and replaces the socket of a process that ended. Only the owner of the socket's
/// folder may be able to enter it, so that no other user can put a socket there.
pub fn bind_socket(path: &Path) -> Result<UnixListener, ListenError> {
    let listener = bind_in_folder(path, 0o077)?;
    from_std(listener).map_err(|source| ListenError::Socket { path: path.to_owned(), source })
}

/// Creates the Unix socket `path` of a scheduler that runs as another account, and replaces an existing one. That
/// account, as the group of the folder, may enter it, but nobody but its owner may list it or put a socket there.
pub fn create_socket(path: &Path) -> Result<net::UnixListener, ListenError> {
    bind_in_folder(path, 0o067)
}

/// The Unix socket that the supervisor has created, from stdin.
pub fn inherited_socket() -> Result<UnixListener, ListenError> {
    let socket = io::stdin().as_fd().try_clone_to_owned().map_err(ListenError::Inherited)?;
    from_std(net::UnixListener::from(socket)).map_err(ListenError::Inherited)
}

fn from_std(listener: net::UnixListener) -> io::Result<UnixListener> {
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Binds to `path` if the mode of its folder has none of the bits in `forbidden`.
fn bind_in_folder(path: &Path, forbidden: u32) -> Result<net::UnixListener, ListenError> {
    let error = |source| ListenError::Socket { path: path.to_owned(), source };
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mode = std::fs::metadata(folder).map_err(error)?.mode() & 0o777;
    if mode & forbidden != 0 {
        return Err(ListenError::SocketFolder { folder: folder.to_owned(), mode });
    }
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(error(source)),
        _ => {}
    }
    let short = cfq_link::unix_socket::short_path(path).map_err(error)?;
    let listener = net::UnixListener::bind(short).map_err(error)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(error)?;
    Ok(listener)
}
