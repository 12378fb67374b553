//! A secret never prints itself: not in logs, errors or events.

use std::fmt;
use std::path::PathBuf;

#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself: only where it leaves for the party it is meant for.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Equal, in a time that does not tell where they differ.
    pub fn matches(&self, other: &str) -> bool {
        let (a, b) = (self.0.as_bytes(), other.as_bytes());
        let differ = a.iter().zip(b).fold(u8::from(a.len() != b.len()), |acc, (x, y)| acc | (x ^ y));
        differ == 0 && !a.is_empty()
    }

    /// From `env:NAME` or `file:PATH`.
    pub fn load(source: &str) -> Result<Self, SecretError> {
        if let Some(name) = source.strip_prefix("env:") {
            let text = std::env::var(name).map_err(|_| SecretError::Unset { name: name.to_owned() })?;
            return Ok(Self(text));
        }
        let Some(path) = source.strip_prefix("file:") else {
            return Err(SecretError::Form);
        };
        let path = PathBuf::from(path);
        let text = std::fs::read_to_string(&path).map_err(|source| SecretError::Read { path, source })?;
        Ok(Self(text.trim().to_owned()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    #[error("a secret is written env:NAME or file:PATH, not as itself")]
    Form,
    #[error("environment variable {name} is not set: set it before starting cfq, or use file:PATH")]
    Unset { name: String },
    #[error("cannot read the secret in {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_never_prints_and_compares_whole() {
        let secret = Secret::new("abc");
        assert_eq!(format!("{secret:?}"), "Secret(***)");
        assert!(secret.matches("abc"));
        for other in ["", "ab", "abcd", "abd"] {
            assert!(!secret.matches(other), "{other}");
        }
        assert!(!Secret::new("").matches(""));
    }

    #[test]
    fn a_bare_key_in_the_configuration_is_refused() {
        assert!(matches!(Secret::load("sk-123"), Err(SecretError::Form)));
    }
}
