//! Making the data folder. initdb works in a sibling that is renamed when it is complete, so one that was interrupted
//! is thrown away by the next start and a folder of the right name is always whole.

use std::fs;
use std::path::Path;

use cfq_link::child;

use super::{Postgres, PostgresError, TAIL};
use crate::files;
use crate::paths::Paths;

/// The superuser, which only this crate uses.
pub(super) const ADMIN: &str = "postgres";

impl Postgres {
    pub(super) async fn initialise(&self, paths: &Paths) -> Result<(), PostgresError> {
        for path in [self.password_file(), self.admin_password_file()] {
            if files::read_if_there(&path)?.is_none() {
                files::write_private(&path, files::random_password()?.as_bytes(), None)?;
            }
        }
        let work = paths.data.join("postgres.new");
        remove(&work)?;
        files::folder(&work, 0o700, self.account)?;
        let password = work.join("password");
        files::write_private(&password, self.secret(&self.admin_password_file())?.as_bytes(), self.account)?;
        let made = work.join("data");
        let log = paths.log("initdb");
        let mut spec = self.child("initdb", &self.bin.join("initdb"), &log, &paths.pidfile("initdb"));
        spec.args = vec!["--pgdata".into(), made.clone().into(), "--pwfile".into(), password.into()];
        let rest = [
            "--username",
            ADMIN,
            "--auth-local=scram-sha-256",
            "--auth-host=scram-sha-256",
            "--data-checksums",
            "--encoding=UTF8",
            // Sorts the same on every machine, whatever its C library; nothing of ours sorts for a human's eye.
            "--locale=C",
        ];
        spec.args.extend(rest.map(Into::into));
        let exit = child::spawn(spec)?.ended().await;
        if !exit.is_success() {
            let tail = child::log_tail(&log, TAIL);
            remove(&work)?;
            return Err(PostgresError::Initialise { exit, tail });
        }
        if self.data.is_dir() {
            // Only an empty one can be replaced; anything in it without PG_VERSION is not ours to judge.
            fs::remove_dir(&self.data).map_err(files::failed("replace", &self.data))?;
        }
        fs::rename(&made, &self.data).map_err(files::failed("write", &self.data))?;
        files::sync_folder(&paths.data)?;
        remove(&work)
    }

    pub(super) fn secret(&self, path: &Path) -> Result<String, PostgresError> {
        files::read_if_there(path)?.ok_or_else(|| PostgresError::PasswordLost { path: path.to_owned() })
    }
}

fn remove(path: &Path) -> Result<(), PostgresError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(files::failed("remove", path)(error).into()),
        _ => Ok(()),
    }
}
