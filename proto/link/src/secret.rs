//! Secrets, which are never printed in logs, errors or events.

use std::fmt;
use std::path::PathBuf;

/// A secret text. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text; only for sending it to the server it is meant for.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// True if `other` is equal to the secret; compares in constant time. An empty secret matches nothing.
    pub fn matches(&self, other: &str) -> bool {
        let (a, b) = (self.0.as_bytes(), other.as_bytes());
        let differ = a.iter().zip(b).fold(u8::from(a.len() != b.len()), |acc, (x, y)| acc | (x ^ y));
        differ == 0 && !a.is_empty()
    }

    /// Checks that a source has the form `env:NAME` or `file:PATH`.
    ///
    /// # Errors
    /// [`SecretError::Form`].
    pub fn check_form(source: &str) -> Result<(), SecretError> {
        let has_form = ["env:", "file:"].iter().any(|kind| source.strip_prefix(kind).is_some_and(|at| !at.is_empty()));
        if has_form { Ok(()) } else { Err(SecretError::Form) }
    }

    /// Loads a secret from `env:NAME` or `file:PATH`.
    ///
    /// # Errors
    /// [`SecretError::Form`] for any other text, [`SecretError::Unset`] if the variable is not set,
    /// [`SecretError::Read`] if the file cannot be read.
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

/// A secret that cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The configured text is neither `env:NAME` nor `file:PATH`.
    #[error("a secret must be configured as env:NAME or file:PATH, not as the secret itself")]
    Form,
    /// The environment variable is not set.
    #[error("environment variable {name} is not set: set it before starting cfq, or use file:PATH")]
    Unset { name: String },
    /// The file cannot be read.
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
    fn debug_hides_the_secret_and_matches_compares_all_of_it() {
        let secret = Secret::new("abc");
        assert_eq!(format!("{secret:?}"), "Secret(***)");
        assert!(secret.matches("abc"));
        for other in ["", "ab", "abcd", "abd"] {
            assert!(!secret.matches(other), "{other}");
        }
        assert!(!Secret::new("").matches(""));
    }

    #[test]
    fn bare_key_in_the_configuration_is_rejected() {
        assert!(matches!(Secret::load("sk-123"), Err(SecretError::Form)));
    }
}
