//! The two kinds of checksum by which a hub identifies a file: the SHA-256 of the bytes for large files (LFS), and
//! git's blob id for small ones, which is the SHA-1 of `blob <size>\0` and the bytes. Both also appear as the entity
//! tag of a response.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// A checksum of a whole file. As text: `sha256:HEX` or `git-sha1:HEX`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub enum Checksum {
    /// SHA-256, in lower-case hexadecimal.
    Sha256(String),
    /// Git blob id, in lower-case hexadecimal.
    GitBlob(String),
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

impl Checksum {
    /// Creates a SHA-256 checksum; `None` if `hex` is not 64 lower-case hexadecimal digits.
    pub fn sha256(hex: &str) -> Option<Self> {
        is_hex(hex, 64).then(|| Self::Sha256(hex.to_owned()))
    }

    /// Creates a git blob id; `None` if `hex` is not 40 lower-case hexadecimal digits.
    pub fn git_blob(hex: &str) -> Option<Self> {
        is_hex(hex, 40).then(|| Self::GitBlob(hex.to_owned()))
    }

    /// The checksum in an `ETag` or `X-Linked-ETag`; `None` if the tag is of another kind.
    pub fn from_etag(tag: &str) -> Option<Self> {
        let tag = tag.trim().trim_start_matches("W/").trim_matches('"');
        Self::sha256(tag).or_else(|| Self::git_blob(tag))
    }

    /// The hexadecimal digits, which also name partial files.
    pub fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitBlob(hex) => hex,
        }
    }

    /// Whether the file at `path` has this checksum. Reads the whole file.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn matches_file(&self, path: &Path) -> io::Result<bool> {
        let mut file = File::open(path)?;
        let mut sum = ChecksumHasher::new(self, file.metadata()?.len());
        let mut chunk = vec![0; 1 << 20];
        loop {
            match file.read(&mut chunk)? {
                0 => return Ok(sum.finish() == *self),
                n => sum.update(&chunk[..n]),
            }
        }
    }

    /// Whether both checksums are of the same kind and differ, so that the contents certainly differ.
    pub fn contradicts(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other) && self != other
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sha256(hex) => write!(f, "sha256:{hex}"),
            Self::GitBlob(hex) => write!(f, "git-sha1:{hex}"),
        }
    }
}

impl From<Checksum> for String {
    fn from(sum: Checksum) -> String {
        sum.to_string()
    }
}

impl TryFrom<String> for Checksum {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.strip_prefix("sha256:")
            .and_then(Self::sha256)
            .or_else(|| text.strip_prefix("git-sha1:").and_then(Self::git_blob))
            .ok_or_else(|| format!("invalid checksum {text:?}"))
    }
}

/// Computes a checksum from the bytes of a file, chunk by chunk.
pub enum ChecksumHasher {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl ChecksumHasher {
    /// Creates a hasher of the same kind as `like`, for a file of `size` bytes.
    pub fn new(like: &Checksum, size: u64) -> Self {
        match like {
            Checksum::Sha256(_) => Self::Sha256(Sha256::new()),
            Checksum::GitBlob(_) => {
                let mut sum = Sha1::new();
                sum.update(format!("blob {size}\0"));
                Self::GitBlob(sum)
            }
        }
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(sum) => sum.update(bytes),
            Self::GitBlob(sum) => sum.update(bytes),
        }
    }

    /// Returns the checksum of all bytes.
    pub fn finish(self) -> Checksum {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect();
        match self {
            Self::Sha256(sum) => Checksum::Sha256(hex(&sum.finalize())),
            Self::GitBlob(sum) => Checksum::GitBlob(hex(&sum.finalize())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_equal_sha256sum_and_git_hash_object() {
        let git = Checksum::git_blob("ce013625030ba8dba906f756967f9e9ca394464a").unwrap();
        let sha = Checksum::sha256("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03").unwrap();
        for expected in [git, sha] {
            let mut sum = ChecksumHasher::new(&expected, 6);
            sum.update(b"hel");
            sum.update(b"lo\n");
            assert_eq!(sum.finish(), expected);
        }
    }

    #[test]
    fn entity_tags_are_parsed_if_they_are_checksums() {
        let hex = "ab".repeat(32);
        for tag in [format!("\"{hex}\""), format!("W/\"{hex}\""), hex.clone()] {
            assert_eq!(Checksum::from_etag(&tag), Checksum::sha256(&hex), "{tag}");
        }
        assert_eq!(Checksum::from_etag("\"d41d8cd98f00b204e9800998ecf8427e-12\""), None);
        assert!(Checksum::try_from(format!("sha256:{}", "zz".repeat(32))).is_err());
    }

    #[test]
    fn only_checksums_of_one_kind_contradict() {
        let one = Checksum::sha256(&"a".repeat(64)).unwrap();
        let other = Checksum::sha256(&"b".repeat(64)).unwrap();
        assert!(one.contradicts(&other) && !one.contradicts(&one));
        assert!(!one.contradicts(&Checksum::git_blob(&"b".repeat(40)).unwrap()));
    }
}
