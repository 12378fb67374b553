//! The API token that a client sends.

use std::fmt;
use std::path::PathBuf;

use super::ClientError;

/// Where the token comes from. `Debug` does not print the token.
#[derive(Clone)]
pub(super) enum TokenSource {
    /// The token itself.
    Text(String),
    /// A file that holds the token.
    File(PathBuf),
}

impl TokenSource {
    /// The current token.
    pub(super) fn read(&self) -> Result<String, ClientError> {
        match self {
            Self::Text(token) => Ok(token.clone()),
            Self::File(path) => match std::fs::read_to_string(path) {
                Ok(text) => Ok(text.trim().to_owned()),
                Err(source) => Err(ClientError::TokenFile { path: path.clone(), source }),
            },
        }
    }
}

impl fmt::Debug for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(_) => f.write_str("***"),
            Self::File(path) => path.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_hides_the_token() {
        assert_eq!(format!("{:?}", TokenSource::Text("secret".into())), "***");
    }
}
