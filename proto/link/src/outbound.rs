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

/// For cfq's own API: a proxy must never see the token.
pub fn api_client() -> Result<reqwest::Client, reqwest::Error> {
    install_crypto();
    reqwest::Client::builder().no_proxy().connect_timeout(Duration::from_secs(5)).build()
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
