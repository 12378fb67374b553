//! The addresses on which the API is served: a TCP address, and a Unix socket for clients of the same user.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, UnixListener};

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen on {bind}: another program may use this address; set http.bind to a free address")]
    Tcp {
        bind: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error(
        "{bind} is reachable from the network, but there is no TLS, so the API token could be intercepted: set http.bind \
         to a loopback address, or set http.allow_plaintext to true to accept this"
    )]
    Plaintext { bind: SocketAddr },
    #[error("cannot listen on the Unix socket {path}")]
    Socket {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("other users can enter {folder} (mode {mode:o}), the folder of the API's socket: run chmod 700 on it")]
    SocketFolder { folder: PathBuf, mode: u32 },
}

/// Listens on the TCP address. An address other than loopback is an error unless `allow_plaintext` is set.
pub async fn bind_tcp(bind: SocketAddr, allow_plaintext: bool) -> Result<TcpListener, ListenError> {
    if !bind.ip().to_canonical().is_loopback() && !allow_plaintext {
        return Err(ListenError::Plaintext { bind });
    }
    TcpListener::bind(bind).await.map_err(|source| ListenError::Tcp { bind, source })
}

/// Listens on the Unix socket `path`, and replaces the socket of a process that ended. Only the owner of the socket's
/// folder may be able to enter it, so that no other user can put a socket there.
pub fn bind_socket(path: &Path) -> Result<UnixListener, ListenError> {
    let error = |source| ListenError::Socket { path: path.to_owned(), source };
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mode = std::fs::metadata(folder).map_err(error)?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(ListenError::SocketFolder { folder: folder.to_owned(), mode });
    }
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(error(source)),
        _ => {}
    }
    let short = cfq_link::unix_socket::short_path(path).map_err(error)?;
    let listener = UnixListener::bind(short).map_err(error)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(error)?;
    Ok(listener)
}
