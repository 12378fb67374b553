//! Settings of a hub: its address, the token, timeouts and retries. The environment variables have the same names as
//! those of the hub's own tools, so that existing settings apply. A token is read only when it is needed and is never
//! written to a file or a log.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_link::secret::{Secret, SecretError};
use cfq_link::stop::Stop;
use serde::{Deserialize, Serialize};

use super::error::HubError;

/// Address of the default hub.
const HUGGING_FACE: &str = "https://huggingface.co";

/// The `[hub]` table of the configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HubConfig {
    /// Address of the hub, if not Hugging Face; `HF_ENDPOINT` overrides it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The token, as `env:NAME` or `file:PATH`; `HF_TOKEN` overrides it. The token that `hf auth login` stored is used
    /// if neither is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Timeouts and retries.
    #[serde(alias = "patience")]
    pub retry: HubRetryPolicy,
}

/// Timeouts and retries of requests to a hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HubRetryPolicy {
    /// Timeout for establishing a connection, in ms.
    #[serde(alias = "connect_ms")]
    pub connect_timeout_ms: u64,
    /// Length of the stall window, in ms: a connection that transfers less than `stall_bytes` within it is closed, and
    /// the transfer is retried.
    #[serde(alias = "stall_ms")]
    pub stall_timeout_ms: u64,
    /// Minimum number of bytes that a connection must transfer within `stall_timeout_ms`.
    pub stall_bytes: u64,
    /// Maximum number of consecutive attempts that transfer less than `stall_bytes` each.
    #[serde(alias = "tries")]
    pub max_attempts: u32,
    /// Wait before the second attempt, in ms; it doubles with each further attempt, up to `max_backoff_ms`.
    #[serde(alias = "first_wait_ms")]
    pub initial_backoff_ms: u64,
    /// Maximum wait between two attempts, in ms. A fetch fails immediately if the hub demands a longer wait.
    #[serde(alias = "longest_wait_ms")]
    pub max_backoff_ms: u64,
}

impl Default for HubRetryPolicy {
    fn default() -> Self {
        Self {
            connect_timeout_ms: 15_000,
            stall_timeout_ms: 30_000,
            // 1 KiB/s: a slower connection would need weeks for a model anyway.
            stall_bytes: 30 << 10,
            max_attempts: 6,
            initial_backoff_ms: 1_000,
            // The hub counts requests in windows of five minutes.
            max_backoff_ms: 300_000,
        }
    }
}

impl HubRetryPolicy {
    pub(super) fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
    }

    pub(super) fn stall_timeout(&self) -> Duration {
        Duration::from_millis(self.stall_timeout_ms)
    }

    pub(super) fn max_backoff(&self) -> Duration {
        Duration::from_millis(self.max_backoff_ms)
    }

    /// Wait after the `n`-th consecutive failed attempt, counted from 1.
    pub(super) fn backoff(&self, n: u32) -> Duration {
        let doubled = self.initial_backoff_ms.saturating_mul(1 << n.saturating_sub(1).min(20));
        Duration::from_millis(doubled).min(self.max_backoff())
    }
}

/// A hub and its settings. Creating one reads no file and makes no request.
#[derive(Debug, Clone)]
pub struct Hub {
    endpoint: String,
    token: TokenSource,
    pub(super) retry: HubRetryPolicy,
    pub(super) stop: Option<Stop>,
}

#[derive(Debug, Clone)]
enum TokenSource {
    /// A token from the environment.
    Environment(Secret),
    /// A reference to a token, for [`Secret::load`].
    Reference(String),
    /// The token file of the hub's own tools, which may not exist.
    Login(Option<PathBuf>),
}

/// A token, and a description of its source for messages.
#[derive(Debug)]
pub(super) struct HubToken {
    pub secret: Secret,
    pub from: String,
}

impl Hub {
    /// Creates a hub with the settings of the configuration. Environment variables, which `variable` looks up by name,
    /// override them.
    pub fn new(config: &HubConfig, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).and_then(|value| value.into_string().ok());
        let endpoint =
            text("HF_ENDPOINT").or_else(|| config.endpoint.clone()).unwrap_or_else(|| HUGGING_FACE.to_owned());
        let token = match (text("HF_TOKEN"), &config.token) {
            (Some(token), _) => TokenSource::Environment(Secret::new(token.trim())),
            (None, Some(reference)) => TokenSource::Reference(reference.clone()),
            (None, None) => {
                let home = set("HF_HOME").map(PathBuf::from).or_else(|| {
                    let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
                    Some(cache.or_else(|| Some(Path::new(&set("HOME")?).join(".cache")))?.join("huggingface"))
                });
                let file = set("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home?.join("token")));
                TokenSource::Login(file)
            }
        };
        Self { endpoint: endpoint.trim_end_matches('/').to_owned(), token, retry: config.retry, stop: None }
    }

    /// Same as [`Self::new`], with the environment of this process.
    pub fn from_environment(config: &HubConfig) -> Self {
        Self::new(config, |name| std::env::var_os(name))
    }

    /// Sets a signal that stops a running fetch. The partial download is kept, and the next fetch resumes it.
    pub fn with_stop(self, stop: Stop) -> Self {
        Self { stop: Some(stop), ..self }
    }

    pub(super) fn endpoint(&self) -> Result<reqwest::Url, HubError> {
        let invalid = || HubError::InvalidEndpoint { endpoint: self.endpoint.clone() };
        let url = reqwest::Url::parse(&self.endpoint).map_err(|_| invalid())?;
        let valid = matches!(url.scheme(), "http" | "https") && url.has_host() && url.query().is_none();
        if valid { Ok(url) } else { Err(invalid()) }
    }

    pub(super) fn token(&self) -> Result<Option<HubToken>, HubError> {
        let load = |reference: &str| {
            Secret::load(reference).map_err(|error| HubError::UnreadableToken { reason: with_cause(&error) })
        };
        match &self.token {
            TokenSource::Environment(secret) => {
                Ok(Some(HubToken { secret: secret.clone(), from: "HF_TOKEN".to_owned() }))
            }
            TokenSource::Reference(reference) => {
                // If a token was written here in place of a reference, loading fails before the value is copied into
                // `from`, so no message shows it.
                Ok(Some(HubToken { secret: load(reference)?, from: reference.clone() }))
            }
            TokenSource::Login(Some(path)) if path.exists() => {
                let secret = load(&format!("file:{}", path.display()))?;
                let present = !secret.reveal().is_empty();
                Ok(present.then(|| HubToken { secret, from: path.display().to_string() }))
            }
            TokenSource::Login(_) => Ok(None),
        }
    }
}

fn with_cause(error: &SecretError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Whether the host of a URL is this machine.
pub(super) fn is_loopback(url: &reqwest::Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(config: &HubConfig, variables: &[(&str, &str)]) -> Hub {
        let variables: Vec<(String, String)> = variables.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        Hub::new(config, |name| variables.iter().find(|(k, _)| k == name).map(|(_, v)| v.into()))
    }

    #[test]
    fn environment_overrides_configuration_and_login_is_last() {
        let folder = tempfile::tempdir().unwrap();
        let (named, login) = (folder.path().join("named"), folder.path().join("token"));
        std::fs::write(&named, "from-file\n").unwrap();
        std::fs::write(&login, "from-login\n").unwrap();
        let home = folder.path().to_str().unwrap();
        let config = HubConfig {
            endpoint: Some("https://mirror.example/".into()),
            token: Some(format!("file:{}", named.display())),
            ..HubConfig::default()
        };
        let token = |hub: Hub| hub.token().unwrap().map(|t| t.secret.reveal().to_owned());
        let hub = with(&config, &[("HF_HOME", home)]);
        assert_eq!(hub.endpoint().unwrap().as_str(), "https://mirror.example/");
        assert_eq!(token(hub).as_deref(), Some("from-file"));
        let hub = with(&config, &[("HF_TOKEN", "here"), ("HF_ENDPOINT", "http://[::1]:8080")]);
        assert!(is_loopback(&hub.endpoint().unwrap()));
        assert_eq!(token(hub).as_deref(), Some("here"));
        assert_eq!(token(with(&HubConfig::default(), &[("HF_HOME", home)])).as_deref(), Some("from-login"));
        assert_eq!(token(with(&HubConfig::default(), &[("HOME", home)])), None);
    }

    #[test]
    fn unreadable_token_is_named_but_never_shown() {
        let config = |token: &str| HubConfig { token: Some(token.into()), ..HubConfig::default() };
        let error = |token: &str| with(&config(token), &[]).token().unwrap_err().to_string();
        assert!(error("env:CFQ_NO_SUCH_TOKEN").contains("CFQ_NO_SUCH_TOKEN"));
        assert!(error("file:/no/such/token").contains("/no/such/token"));
        assert!(!error("hf_abcdef").contains("hf_abcdef"));
        assert!(!format!("{:?}", with(&HubConfig::default(), &[("HF_TOKEN", "hf_abc")])).contains("hf_abc"));
    }

    #[test]
    fn invalid_endpoint_is_refused() {
        for endpoint in ["huggingface.co", "file:///etc", "https://", "https://h/?x=1"] {
            let hub = with(&HubConfig { endpoint: Some(endpoint.into()), ..HubConfig::default() }, &[]);
            assert!(hub.endpoint().is_err(), "{endpoint}");
        }
    }

    #[test]
    fn backoff_doubles_up_to_the_maximum() {
        let policy = HubRetryPolicy { initial_backoff_ms: 100, max_backoff_ms: 350, ..HubRetryPolicy::default() };
        let waits: Vec<u128> = (1..=4).map(|n| policy.backoff(n).as_millis()).collect();
        assert_eq!(waits, [100, 200, 350, 350]);
        assert_eq!(policy.backoff(u32::MAX).as_millis(), 350);
    }

    #[test]
    fn keys_of_0_1_still_load() {
        let old = serde_json::json!({ "patience": { "connect_ms": 1, "stall_ms": 2, "stall_bytes": 3, "tries": 4,
            "first_wait_ms": 5, "longest_wait_ms": 6 } });
        let policy = HubRetryPolicy {
            connect_timeout_ms: 1,
            stall_timeout_ms: 2,
            stall_bytes: 3,
            max_attempts: 4,
            initial_backoff_ms: 5,
            max_backoff_ms: 6,
        };
        assert_eq!(serde_json::from_value::<HubConfig>(old).unwrap().retry, policy);
    }
}
