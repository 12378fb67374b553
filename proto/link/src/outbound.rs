//! The only constructors of HTTP clients, and the choice of the TLS crypto provider.

#![allow(clippy::disallowed_methods)]

use std::sync::Once;
use std::time::Duration;

/// Makes ring the process's TLS crypto provider. Every constructor here calls it, and the binary before its first
/// connection.
pub fn install_crypto() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Fails only if a provider is installed already, which then serves.
        if rustls::crypto::ring::default_provider().install_default().is_err() {
            tracing::debug!("a tls provider was already installed");
        }
    });
}

/// Maximum silence of cfq's API. The event feed sends something every ten seconds, so a longer silence means that the
/// peer is gone.
const API_READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Creates a client for cfq's own API. It uses no proxy, which must not see the token.
///
/// # Errors
/// reqwest's error if the client cannot be built.
pub fn api_client() -> Result<reqwest::Client, reqwest::Error> {
    install_crypto();
    reqwest::Client::builder().no_proxy().connect_timeout(Duration::from_secs(5)).read_timeout(API_READ_TIMEOUT).build()
}

/// Creates a client for the model endpoints that the user configured. It follows no redirects, because an API key must
/// not be sent to another server. It has no overall timeout, because a generation may take long; `read_timeout` bounds
/// the silence between two reads instead.
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

/// Creates a client for model hubs with large public files. The caller follows redirects, because it decides which
/// servers get the token. `https_only` refuses everything else, also after a redirect; `loopback` is for a hub on this
/// machine, which is not reached through a proxy. The caller also bounds silence, because only it knows how much data
/// is expected.
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
