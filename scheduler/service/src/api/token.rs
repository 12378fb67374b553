//! The bearer token of the API, in a file. Whoever can write the file can rotate the token: the file is checked at each
//! request, and its new content replaces the old token at once.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Minimum length of a bearer token, in bytes.
const MIN_TOKEN_BYTES: usize = 16;

/// Why the bearer token cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ApiTokenError {
    #[error("cannot read the bearer token in {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "other users can read the token file {path} (mode {mode:o}): run chmod 600 on the file, or delete it to get a new \
         token"
    )]
    Permissions { path: PathBuf, mode: u32 },
    #[error(
        "the token in {path} has {length} bytes but needs at least {MIN_TOKEN_BYTES}: delete the file to get a new token"
    )]
    TooShort { path: PathBuf, length: usize },
}

/// The bearer token. `Debug` does not print it.
#[derive(Clone)]
struct ApiToken(String);

impl std::fmt::Debug for ApiToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl ApiToken {
    fn load(path: &Path) -> Result<Self, ApiTokenError> {
        use std::os::unix::fs::PermissionsExt;
        let read = |source| ApiTokenError::Read { path: path.to_owned(), source };
        let mode = std::fs::metadata(path).map_err(read)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(ApiTokenError::Permissions { path: path.to_owned(), mode });
        }
        let text = std::fs::read_to_string(path).map_err(read)?.trim().to_owned();
        if text.len() < MIN_TOKEN_BYTES {
            return Err(ApiTokenError::TooShort { path: path.to_owned(), length: text.len() });
        }
        Ok(Self(text))
    }

    /// Whether `offered` is the token. The time of the comparison depends only on the length of `offered`.
    fn matches(&self, offered: &str) -> bool {
        let own = self.0.as_bytes();
        let differ = offered
            .bytes()
            .enumerate()
            .fold(0u8, |differ, (i, byte)| differ | (byte ^ own.get(i % own.len().max(1)).copied().unwrap_or(0)));
        (differ == 0) & (offered.len() == own.len())
    }
}

/// Number of token changes since the scheduler started. Requests with tokens of an earlier epoch are refused, and feeds
/// that were opened with one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenEpoch(u64);

/// The file that holds the bearer token.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    current: Mutex<CurrentToken>,
}

#[derive(Debug)]
struct CurrentToken {
    token: ApiToken,
    epoch: TokenEpoch,
    /// Version of the file that was read last, whether or not it held a valid token.
    version: FileVersion,
}

/// Values that change when a file is replaced or written: inode, size, and time of the last change in ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileVersion(u64, u64, i128);

impl FileVersion {
    fn of(path: &Path) -> std::io::Result<Self> {
        let meta = std::fs::metadata(path)?;
        let changed = i128::from(meta.ctime()) * 1_000_000_000 + i128::from(meta.ctime_nsec());
        Ok(Self(meta.ino(), meta.size(), changed))
    }
}

impl TokenFile {
    /// Reads the token. Fails if the file cannot be read, is open to other users, or has a token that is too short.
    pub fn load(path: &Path) -> Result<Self, ApiTokenError> {
        let read = |source| ApiTokenError::Read { path: path.to_owned(), source };
        // The version is read first: if the file is replaced in between, the next request reads it again.
        let version = FileVersion::of(path).map_err(read)?;
        let token = ApiToken::load(path)?;
        let current = CurrentToken { token, epoch: TokenEpoch(0), version };
        Ok(Self { path: path.to_owned(), current: Mutex::new(current) })
    }

    /// The current epoch if `offered` is the current token.
    pub fn check(&self, offered: &str) -> Option<TokenEpoch> {
        let current = self.current();
        current.token.matches(offered).then_some(current.epoch)
    }

    /// Epoch of the current token.
    pub fn epoch(&self) -> TokenEpoch {
        self.current().epoch
    }

    /// The current token, read again if the file has changed. While the file is missing or its content is not a valid
    /// token, the last valid token stays in use.
    fn current(&self) -> MutexGuard<'_, CurrentToken> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(version) = FileVersion::of(&self.path) else { return current };
        if version == current.version {
            return current;
        }
        let loaded = ApiToken::load(&self.path);
        // A file that could not be read is tried again with the next request.
        if !matches!(loaded, Err(ApiTokenError::Read { .. })) {
            current.version = version;
        }
        match loaded {
            Ok(token) if token.0 != current.token.0 => {
                current.token = token;
                current.epoch.0 += 1;
                tracing::info!("api token was rotated");
            }
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, cause = ?std::error::Error::source(&error), "the last valid api token stays in use");
            }
        }
        current
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{replace_token, token_file};

    #[test]
    fn token_matches_only_itself() {
        let token = ApiToken("0123456789abcdef".into());
        assert!(token.matches("0123456789abcdef"));
        for other in ["", "0", "0123456789abcdeg", "0123456789abcdef0", "0123456789abcdef0123456789abcdef"] {
            assert!(!token.matches(other), "{other}");
        }
        assert_eq!(format!("{token:?}"), "***");
    }

    #[test]
    fn token_file_readable_by_others_is_refused_with_the_fix() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = ApiToken::load(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(ApiToken::load(&path).unwrap().matches("0123456789abcdef"));
    }

    #[test]
    fn replaced_token_is_used_at_once_and_an_invalid_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = token_file(&folder);
        let file = TokenFile::load(&path).unwrap();
        let first = file.check("0123456789abcdef").unwrap();
        assert_eq!(file.epoch(), first);
        replace_token(&path, "fedcba9876543210");
        assert_eq!(file.check("0123456789abcdef"), None);
        let second = file.check("fedcba9876543210").unwrap();
        assert_ne!(first, second);
        replace_token(&path, "short");
        assert_eq!(file.check("short"), None);
        assert_eq!(file.check("fedcba9876543210"), Some(second));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(file.check("fedcba9876543210"), Some(second));
        replace_token(&path, "fedcba9876543210");
        assert_eq!(file.epoch(), second, "the same token again is no rotation");
    }
}
