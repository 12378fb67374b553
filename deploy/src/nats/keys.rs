//! One nkey per identity: the seed is in a private file, the public key in the server's configuration.

use std::path::{Path, PathBuf};

use cfq_proto::subject::Identity;
use nkeys::KeyPair;

use super::NatsError;
use crate::files;

pub fn seed_file(keys: &Path, identity: &Identity) -> PathBuf {
    keys.join(match identity {
        Identity::Scheduler => "scheduler.seed".to_owned(),
        Identity::Node(id) => format!("node-{id}.seed"),
        Identity::Runner(id) => format!("runner-{id}.seed"),
    })
}

/// The public key of an identity. Generates the seed if the identity has none yet.
pub fn public_key(keys: &Path, identity: &Identity) -> Result<String, NatsError> {
    public_key_in(&seed_file(keys, identity))
}

/// The public key of the seed in a file. Generates the seed if there is no such file.
pub fn public_key_in(path: &Path) -> Result<String, NatsError> {
    let failed = |source| NatsError::Key { path: path.to_owned(), source };
    if let Some(seed) = files::read_if_exists(path)? {
        return Ok(KeyPair::from_seed(seed.trim()).map_err(failed)?.public_key());
    }
    let pair = KeyPair::new_user();
    files::write_private(path, pair.seed().map_err(failed)?.as_bytes(), None)?;
    Ok(pair.public_key())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_is_generated_once_and_a_damaged_one_is_reported() {
        let keys = tempfile::tempdir().unwrap();
        let first = public_key(keys.path(), &Identity::Scheduler).unwrap();
        assert!(first.starts_with('U'));
        assert_eq!(public_key(keys.path(), &Identity::Scheduler).unwrap(), first);
        std::fs::write(seed_file(keys.path(), &Identity::Scheduler), "torn").unwrap();
        let message = public_key(keys.path(), &Identity::Scheduler).unwrap_err().to_string();
        assert!(message.contains("scheduler.seed"), "{message}");
    }
}
