//! The only constructors of HTTP clients. Which provider does the cryptography is decided here, once.

#![allow(clippy::disallowed_methods)]

use std::sync::Once;
use std::time::Duration;

/// Makes ring the process's TLS provider; called by every constructor here and by the binary before it connects anywhere.
pub fn install_crypto() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Only fails where somebody installed one before, which then serves.
        if rustls::crypto::ring::default_provider().install_default().is_err() {
            tracing::debug!("a tls provider was already installed");
        }
    });
}

/// The event feed says something every ten seconds; a peer that is silent for longer than this is gone.
const API_SILENCE: Duration = Duration::from_secs(30);

/// For cfq's own API: a proxy must never see the token.
pub fn api_client() -> Result<reqwest::Client, reqwest::Error> {
    install_crypto();
    reqwest::Client::builder().no_proxy().connect_timeout(Duration::from_secs(5)).read_timeout(API_SILENCE).build()
}

/// For model endpoints the user configured. No redirects: a key must not follow one elsewhere. No overall timeout, since a
/// generation may take long; silence between two reads is bounded instead.
pub fn endpoint_client(silence: Duration) -> Result<reqwest::Client, reqwest::Error> {
    install_crypto();
    reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(Duration::from_secs(10))
        .read_timeout(silence)
        .build()
}

/// For model hubs: large public files. Redirects are the caller's, who decides how far a token goes. `secure` refuses
/// everything but https, also after a redirect; `here` is for a hub on this machine, which no proxy must be asked for.
/// Silence is the caller's to bound too, since only it knows how much was expected.
pub fn hub_client(secure: bool, here: bool, connect: Duration) -> Result<reqwest::Client, reqwest::Error> {
    install_crypto();
    let client = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(connect)
        .https_only(secure)
        .user_agent(concat!("cfq/", env!("CARGO_PKG_VERSION")));
    if here { client.no_proxy().build() } else { client.build() }
}
