//! Which hub, as whom, and how patiently. The variables are those of the hub's own tools, so that what works with them
//! works here; a token is read when it is needed and never written anywhere.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_link::secret::{Secret, SecretError};
use cfq_link::stop::Stop;
use serde::{Deserialize, Serialize};

use super::error::HubError;

const HUGGING_FACE: &str = "https://huggingface.co";

/// The `[hub]` table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HubConfig {
    /// Another hub than Hugging Face's; `HF_ENDPOINT` wins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// `env:NAME` or `file:PATH`; `HF_TOKEN` wins, and what `hf auth login` left serves where neither is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    pub patience: Patience,
}

/// How long to wait for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Patience {
    pub connect_ms: u64,
    /// A connection that brings less than `stall_bytes` in this time is given up and made anew.
    pub stall_ms: u64,
    pub stall_bytes: u64,
    /// Connections in a row that may end without having brought `stall_bytes`.
    pub tries: u32,
    /// Wait before the second connection; it doubles from then on, up to `longest_wait_ms`.
    pub first_wait_ms: u64,
    pub longest_wait_ms: u64,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect_ms: 15_000,
            stall_ms: 30_000,
            // 1 KiB/s: whoever has less than that waits for weeks anyway.
            stall_bytes: 30 << 10,
            tries: 6,
            first_wait_ms: 1_000,
            // The hub counts requests in windows of five minutes.
            longest_wait_ms: 300_000,
        }
    }
}

impl Patience {
    pub(super) fn connect(&self) -> Duration {
        Duration::from_millis(self.connect_ms)
    }

    pub(super) fn stall(&self) -> Duration {
        Duration::from_millis(self.stall_ms)
    }

    pub(super) fn longest_wait(&self) -> Duration {
        Duration::from_millis(self.longest_wait_ms)
    }

    /// After the `n`-th try in vain, from 1.
    pub(super) fn wait(&self, n: u32) -> Duration {
        let doubled = self.first_wait_ms.saturating_mul(1 << n.saturating_sub(1).min(20));
        Duration::from_millis(doubled).min(self.longest_wait())
    }
}

/// A hub, and how it is spoken to. Nothing is read or reached before it is used.
#[derive(Debug, Clone)]
pub struct Hub {
    endpoint: String,
    token: TokenSource,
    pub(super) patience: Patience,
    pub(super) stop: Option<Stop>,
}

#[derive(Debug, Clone)]
enum TokenSource {
    /// In the environment itself.
    Here(Secret),
    /// As [`Secret::load`] takes it.
    Named(String),
    /// The hub's own tools keep one there; it need not exist.
    LoggedIn(Option<PathBuf>),
}

/// A token and where it is from, as people know it.
#[derive(Debug)]
pub(super) struct Token {
    pub secret: Secret,
    pub from: String,
}

impl Hub {
    /// `variable` is the environment; it wins over the configuration.
    pub fn new(config: &HubConfig, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).and_then(|value| value.into_string().ok());
        let endpoint =
            text("HF_ENDPOINT").or_else(|| config.endpoint.clone()).unwrap_or_else(|| HUGGING_FACE.to_owned());
        let token = match (text("HF_TOKEN"), &config.token) {
            (Some(token), _) => TokenSource::Here(Secret::new(token.trim())),
            (None, Some(named)) => TokenSource::Named(named.clone()),
            (None, None) => {
                let home = set("HF_HOME").map(PathBuf::from).or_else(|| {
                    let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
                    Some(cache.or_else(|| Some(Path::new(&set("HOME")?).join(".cache")))?.join("huggingface"))
                });
                let file = set("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home?.join("token")));
                TokenSource::LoggedIn(file)
            }
        };
        Self { endpoint: endpoint.trim_end_matches('/').to_owned(), token, patience: config.patience, stop: None }
    }

    /// Of this process's environment.
    pub fn from_environment(config: &HubConfig) -> Self {
        Self::new(config, |name| std::env::var_os(name))
    }

    /// What is being fetched ends when `stop` is raised, and goes on from there another time.
    pub fn until(self, stop: Stop) -> Self {
        Self { stop: Some(stop), ..self }
    }

    pub(super) fn endpoint(&self) -> Result<reqwest::Url, HubError> {
        let wrong = || HubError::Endpoint { endpoint: self.endpoint.clone() };
        let url = reqwest::Url::parse(&self.endpoint).map_err(|_| wrong())?;
        let fits = matches!(url.scheme(), "http" | "https") && url.has_host() && url.query().is_none();
        if fits { Ok(url) } else { Err(wrong()) }
    }

    pub(super) fn token(&self) -> Result<Option<Token>, HubError> {
        let loaded = |named: &str| Secret::load(named).map_err(|error| HubError::Token { why: explain(&error) });
        match &self.token {
            TokenSource::Here(secret) => Ok(Some(Token { secret: secret.clone(), from: "HF_TOKEN".to_owned() })),
            TokenSource::Named(named) => {
                // A key written in place of its name must not be repeated in a message.
                Ok(Some(Token { secret: loaded(named)?, from: named.clone() }))
            }
            TokenSource::LoggedIn(Some(path)) if path.exists() => {
                let secret = loaded(&format!("file:{}", path.display()))?;
                let there = !secret.reveal().is_empty();
                Ok(there.then(|| Token { secret, from: path.display().to_string() }))
            }
            TokenSource::LoggedIn(_) => Ok(None),
        }
    }
}

fn explain(error: &SecretError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Whether the name can only be this machine's own.
pub(super) fn is_here(url: &reqwest::Url) -> bool {
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
    fn the_environment_wins_over_the_file_and_the_login_serves_last() {
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
        assert!(is_here(&hub.endpoint().unwrap()));
        assert_eq!(token(hub).as_deref(), Some("here"));
        assert_eq!(token(with(&HubConfig::default(), &[("HF_HOME", home)])).as_deref(), Some("from-login"));
        assert_eq!(token(with(&HubConfig::default(), &[("HOME", home)])), None);
    }

    #[test]
    fn a_token_that_cannot_be_read_is_named_but_never_shown() {
        let config = |token: &str| HubConfig { token: Some(token.into()), ..HubConfig::default() };
        let why = |token: &str| with(&config(token), &[]).token().unwrap_err().to_string();
        assert!(why("env:CFQ_NO_SUCH_TOKEN").contains("CFQ_NO_SUCH_TOKEN"));
        assert!(why("file:/no/such/token").contains("/no/such/token"));
        assert!(!why("hf_abcdef").contains("hf_abcdef"));
        assert!(!format!("{:?}", with(&HubConfig::default(), &[("HF_TOKEN", "hf_abc")])).contains("hf_abc"));
    }

    #[test]
    fn an_endpoint_that_is_none_is_named() {
        for endpoint in ["huggingface.co", "file:///etc", "https://", "https://h/?x=1"] {
            let hub = with(&HubConfig { endpoint: Some(endpoint.into()), ..HubConfig::default() }, &[]);
            assert!(hub.endpoint().is_err(), "{endpoint}");
        }
    }

    #[test]
    fn waits_double_up_to_the_longest() {
        let patience = Patience { first_wait_ms: 100, longest_wait_ms: 350, ..Patience::default() };
        let waits: Vec<u128> = (1..=4).map(|n| patience.wait(n).as_millis()).collect();
        assert_eq!(waits, [100, 200, 350, 350]);
        assert_eq!(patience.wait(u32::MAX).as_millis(), 350);
    }
}
