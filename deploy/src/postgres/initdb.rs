//! Creation of Postgres's data folder. initdb writes to a temporary sibling folder, which gets the final name once it
//! is complete. A folder with the final name is therefore always complete; the temporary folder of an interrupted
//! initdb is deleted at the next start.

use std::fs;
use std::path::Path;

use cfq_link::child;

use super::{LOG_TAIL_BYTES, Postgres, PostgresError};
use crate::files;
use crate::paths::Paths;

/// Name of the superuser role, which only this crate uses.
pub(super) const ADMIN_ROLE: &str = "postgres";

impl Postgres {
    pub(super) async fn initialize(&self, paths: &Paths) -> Result<(), PostgresError> {
        for path in [self.password_file(), self.admin_password_file()] {
            if files::read_if_exists(&path)?.is_none() {
                files::write_private(&path, files::random_password()?.as_bytes(), None)?;
            }
        }
        let work = paths.data.join("postgres.new");
        remove(&work)?;
        files::create_folder(&work, 0o700, self.account)?;
        let password = work.join("password");
        files::write_private(&password, self.read_secret(&self.admin_password_file())?.as_bytes(), self.account)?;
        let created = work.join("data");
        let log = paths.log("initdb");
        let mut spec = self.program_spec("initdb", &self.bin.join("initdb"), &log, &paths.pidfile("initdb"));
        spec.args = vec!["--pgdata".into(), created.clone().into(), "--pwfile".into(), password.into()];
        let rest = [
            "--username",
            ADMIN_ROLE,
            "--auth-local=scram-sha-256",
            "--auth-host=scram-sha-256",
            "--data-checksums",
            "--encoding=UTF8",
            // Text sorts identically on every machine, whatever its C library. cfq sorts no text for display, so it
            // needs no language's sort order.
            "--locale=C",
        ];
        spec.args.extend(rest.map(Into::into));
        let exit = child::spawn(spec)?.ended().await;
        if !exit.is_success() {
            let tail = child::log_tail(&log, LOG_TAIL_BYTES);
            remove(&work)?;
            // Postgres reports the last as a partial write.
            if ["No space left on device", "Disk quota exceeded", "could not extend file"]
                .iter()
                .any(|e| tail.contains(e))
            {
                return Err(PostgresError::NoSpace { folder: paths.data.clone() });
            }
            return Err(PostgresError::Initialize { exit, tail });
        }
        if self.data.is_dir() {
            // Only an empty folder is replaced: content without PG_VERSION may belong to something else.
            fs::remove_dir(&self.data).map_err(files::error("replace", &self.data))?;
        }
        fs::rename(&created, &self.data).map_err(files::error("write", &self.data))?;
        files::sync_folder(&paths.data)?;
        remove(&work)
    }

    pub(super) fn read_secret(&self, path: &Path) -> Result<String, PostgresError> {
        files::read_if_exists(path)?.ok_or_else(|| PostgresError::PasswordLost { path: path.to_owned() })
    }
}

/// Removes a folder tree, if it exists.
fn remove(path: &Path) -> Result<(), PostgresError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(files::error("remove", path)(error).into()),
        _ => Ok(()),
    }
}
