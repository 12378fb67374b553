//! The folders where the machine's own Postgres and NATS may be installed: PATH first, then the folders that packages
//! use. Debian keeps `initdb` out of PATH, so its versioned folders are searched too, newest first.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::ServiceKind;

/// Folders in which packages install programs, searched after PATH.
const PROGRAM_FOLDERS: &[&str] = &["/usr/local/bin", "/usr/bin", "/usr/sbin", "/opt/homebrew/bin", "/snap/bin"];

/// Folders that contain one subfolder per Postgres version. Each entry consists of the folder, the prefix of the
/// subfolders' names, and the path of the programs inside a subfolder.
const VERSIONED_FOLDERS: &[(&str, &str, &str)] = &[
    ("/usr/lib/postgresql", "", "bin"),
    ("/usr", "pgsql-", "bin"),
    ("/opt/homebrew/opt", "postgresql@", "bin"),
    ("/usr/local/opt", "postgresql@", "bin"),
    ("/Applications/Postgres.app/Contents/Versions", "", "bin"),
];

/// Candidates in order of preference: folders for Postgres, programs for NATS.
pub fn candidates(kind: ServiceKind) -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    candidates_in(kind, &path, Path::new("/"))
}

fn candidates_in(kind: ServiceKind, path: &OsStr, root: &Path) -> Vec<PathBuf> {
    let at = |absolute: &str| root.join(absolute.trim_start_matches('/'));
    // A relative entry of PATH would depend on where cfq is started.
    let on_path = std::env::split_paths(path).filter(|folder| folder.is_absolute());
    let folders = on_path.chain(PROGRAM_FOLDERS.iter().map(|folder| at(folder)));
    let mut found: Vec<PathBuf> = Vec::new();
    match kind {
        ServiceKind::Nats => {
            for program in folders.map(|folder| folder.join("nats-server")).filter(|program| program.is_file()) {
                push_unique(&mut found, program.canonicalize().unwrap_or(program));
            }
        }
        ServiceKind::Postgres => {
            let versioned = VERSIONED_FOLDERS.iter().flat_map(|(top, prefix, bin)| newest_first(&at(top), prefix, bin));
            for folder in folders.chain([at("/usr/local/pgsql/bin")]).chain(versioned) {
                if has_postgres_programs(&folder) {
                    push_unique(&mut found, real_folder(folder));
                }
            }
        }
    }
    found
}

fn push_unique(found: &mut Vec<PathBuf>, path: PathBuf) {
    if !found.contains(&path) {
        found.push(path);
    }
}

fn has_postgres_programs(folder: &Path) -> bool {
    folder.join("postgres").is_file() && folder.join("initdb").is_file()
}

/// If `folder` contains only links to the Postgres programs, returns the folder of the programs; else returns `folder`.
fn real_folder(folder: PathBuf) -> PathBuf {
    let real = folder.join("postgres").canonicalize().ok().and_then(|program| program.parent().map(Path::to_owned));
    real.filter(|real| has_postgres_programs(real)).unwrap_or(folder)
}

fn newest_first(top: &Path, prefix: &str, bin: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(top) else { return Vec::new() };
    let mut versions: Vec<(u32, PathBuf)> = entries
        .filter_map(Result::ok)
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?;
            Some((number, entry.path().join(bin)))
        })
        .collect();
    versions.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    versions.into_iter().map(|(_, path)| path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn path_comes_first_then_versions_newest_first() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let put = |folder: &str| {
            fs::create_dir_all(root.join(folder)).unwrap();
            fs::write(root.join(folder).join("postgres"), "").unwrap();
            fs::write(root.join(folder).join("initdb"), "").unwrap();
        };
        put("usr/lib/postgresql/9/bin");
        put("usr/lib/postgresql/17/bin");
        put("usr/pgsql-16/bin");
        put("mine");
        fs::create_dir_all(root.join("links")).unwrap();
        for program in ["postgres", "initdb"] {
            std::os::unix::fs::symlink(
                root.join("usr/lib/postgresql/9/bin").join(program),
                root.join("links").join(program),
            )
            .unwrap();
        }
        let path = std::env::join_paths([PathBuf::from("relative"), root.join("mine"), root.join("links")]).unwrap();
        let expected = ["mine", "usr/lib/postgresql/9/bin", "usr/lib/postgresql/17/bin", "usr/pgsql-16/bin"];
        assert_eq!(candidates_in(ServiceKind::Postgres, &path, &root), expected.map(|folder| root.join(folder)));
    }
}
