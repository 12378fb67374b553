//! The only constructors of HTTP clients, and the choice of the TLS crypto provider.

#![allow(clippy::disallowed_methods)]

use std::path::Path;
use std::sync::Once;
use std::time::Duration;

/// Installs ring as the TLS crypto provider of the process. Every constructor in this module calls this function, and
/// the binary calls it before its first connection.
pub fn install_crypto() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // The installation fails only if a provider is already installed; that provider is then used.
        if rustls::crypto::ring::default_provider().install_default().is_err() {
            tracing::debug!("a tls provider was already installed");
        }
    });
}

/// Read timeout for cfq's API: maximum time without received data. The event feed sends something every ten seconds, so
/// a longer silence means that the peer is gone.
const API_READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Creates a client for cfq's own API. It uses no proxy, because a proxy must not see the API token.
///
/// # Errors
/// reqwest's error if the client cannot be built.
pub fn api_client() -> Result<reqwest::Client, reqwest::Error> {
    api_client_builder().build()
}

/// Creates a client for cfq's own API at a server whose certificate `tls` accepts; see [`crate::tls`]. It sends nothing
/// over plain HTTP and follows no redirects.
///
/// # Errors
/// reqwest's error if the client cannot be built.
pub fn tls_api_client(tls: rustls::ClientConfig) -> Result<reqwest::Client, reqwest::Error> {
    api_client_builder()
        .tls_backend_preconfigured(tls)
        .https_only(true)
        .redirect(reqwest::redirect::Policy::none())
        .build()
}

/// Creates a client that reaches cfq's own API only through the Unix socket `path`; the host that a request names is ignored. The
/// path must be short enough ([`crate::unix_socket::short_path`]).
///
/// # Errors
/// reqwest's error if the client cannot be built.
pub fn local_api_client(path: &Path) -> Result<reqwest::Client, reqwest::Error> {
    api_client_builder().unix_socket(path).build()
}

fn api_client_builder() -> reqwest::ClientBuilder {
    install_crypto();
    reqwest::Client::builder().no_proxy().connect_timeout(Duration::from_secs(5)).read_timeout(API_READ_TIMEOUT)
}

/// Creates a client for the model endpoints that the user configured. It follows no redirects, because an API key must
/// not be sent to another server. It has no overall timeout, because a generation may take long; `read_timeout` limits
/// the time between two reads instead.
///
/// # Errors
/// reqwest's error if the client cannot be built.
pub fn endpoint_client(read_timeout: Duration) -> Result<reqwest::Client, reqwest::Error> {
    install_crypto();
    reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(Duration::from_secs(10))
        .read_timeout(read_timeout)
        .build()
}

/// Creates a client for model hubs, which serve large public files. The client follows no redirects: the caller follows
/// them itself and decides which servers receive the token. With `https_only`, requests over plain HTTP fail. With
/// `loopback`, for a hub on this machine, no proxy is used. The client has no read timeout: the caller limits the time
/// without data, because only the caller knows how much data is expected.
///
/// # Errors
/// reqwest's error if the client cannot be built.
pub fn hub_client(
    https_only: bool,
    loopback: bool,
    connect_timeout: Duration,
) -> Result<reqwest::Client, reqwest::Error> {
    install_crypto();
    let client = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(connect_timeout)
        .https_only(https_only)
        .user_agent(concat!("cfq/", env!("CARGO_PKG_VERSION")));
    if loopback { client.no_proxy().build() } else { client.build() }
}
