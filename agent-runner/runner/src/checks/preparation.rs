//! `[[prepare]]` in `.cfq/checks.toml`: how a project installs what its checks need.

use std::path::Path;
use std::time::Duration;

use cfq_edits::repo_path;
use serde::{Deserialize, Serialize};

/// Time limit of a preparation that has none, in s.
const DEFAULT_TIMEOUT_S: u64 = 1800;
/// Maximum time limit of a preparation, in s.
const MAX_TIMEOUT_S: u64 = 3 * 3600;
/// Maximum number of preparations.
const MAX_PREPARATIONS: usize = 10;
/// Maximum length of a preparation's name, in characters.
const MAX_NAME_CHARS: usize = 100;
/// Start of the path of a folder in the home folder.
const HOME_PREFIX: &str = "~/";

/// A command that installs what the checks need, for example packages. It runs once for each content of its lock files,
/// on the base commit, with access to registries.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preparation {
    /// Name in errors.
    pub name: String,
    /// Program and arguments.
    pub run: Vec<String>,
    /// Files of the repository that decide what is installed.
    pub lock_files: Vec<String>,
    /// Folders that the checks get: `FOLDER/` in the checkout, `~/FOLDER/` in the home folder.
    pub keep: Vec<KeptFolder>,
    #[serde(default = "default_timeout_s")]
    timeout_s: u64,
}

/// A folder that a preparation creates for the checks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct KeptFolder {
    /// Whether the path begins in the home folder, not in the checkout.
    pub is_in_home: bool,
    /// Path without `/` at its end.
    pub path: String,
}

/// On what a preparation runs.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct LockedContent {
    pub(super) repository: String,
    /// Paths of the lock files and the ids of their contents in a commit.
    pub(super) files: Vec<(String, String)>,
}

fn default_timeout_s() -> u64 {
    DEFAULT_TIMEOUT_S
}

impl Preparation {
    /// Time limit.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }

    /// Whether a file decides what is installed, or is in the place of a folder that is installed.
    pub(super) fn affects(&self, path: &str) -> bool {
        self.lock_files.iter().any(|file| file == path)
            || self.keep.iter().any(|kept| {
                let (path, kept_path) = (Path::new(path), Path::new(&kept.path));
                // A file in the place of a folder above it, too.
                !kept.is_in_home && (path.starts_with(kept_path) || kept_path.starts_with(path))
            })
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Checks the preparations of a file.
///
/// # Errors
/// Says what is wrong.
pub(super) fn validate(preparations: &[Preparation]) -> Result<(), String> {
    if preparations.len() > MAX_PREPARATIONS {
        return Err(format!(
            "it declares {} preparations, and at most {MAX_PREPARATIONS} are possible",
            preparations.len()
        ));
    }
    for (index, preparation) in preparations.iter().enumerate() {
        let name = &preparation.name;
        if name.is_empty() || name.chars().any(char::is_control) || name.chars().count() > MAX_NAME_CHARS {
            return Err(format!(
                "the name of a preparation is empty, has a control character, or is longer than {MAX_NAME_CHARS} characters"
            ));
        }
        if preparations[..index].iter().any(|other| other.name == *name) {
            return Err(format!("two preparations have the name {name:?}"));
        }
        if preparation.run.first().is_none_or(String::is_empty) {
            return Err(format!("`run` of the preparation {name:?} names no program"));
        }
        if !(1..=MAX_TIMEOUT_S).contains(&preparation.timeout_s) {
            return Err(format!("`timeout_s` of the preparation {name:?} must be from 1 to {MAX_TIMEOUT_S}"));
        }
        if preparation.lock_files.is_empty() || preparation.keep.is_empty() {
            return Err(format!("`lock_files` or `keep` of the preparation {name:?} is empty"));
        }
        let is_file = |path: &str| repo_path(path).is_ok_and(|valid| valid == path);
        if let Some(path) = preparation.lock_files.iter().find(|path| !is_file(path)) {
            return Err(format!(
                "`lock_files` of the preparation {name:?} has {path:?}, which is no path in the repository"
            ));
        }
    }
    let kept: Vec<&KeptFolder> = preparations.iter().flat_map(|preparation| &preparation.keep).collect();
    for (index, folder) in kept.iter().enumerate() {
        let others = kept.iter().enumerate().filter(|(other, _)| *other != index).map(|(_, other)| other);
        if let Some(outer) = others.into_iter().find(|other| folder.is_below(other)) {
            return Err(format!(
                "`keep` names {:?} and {:?}, of which one contains the other",
                outer.to_string(),
                folder.to_string()
            ));
        }
    }
    Ok(())
}

impl KeptFolder {
    /// Whether this is the other folder or in it.
    fn is_below(&self, other: &Self) -> bool {
        self.is_in_home == other.is_in_home && Path::new(&self.path).starts_with(&other.path)
    }
}

impl std::fmt::Display for KeptFolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}/", if self.is_in_home { HOME_PREFIX } else { "" }, self.path)
    }
}

impl From<KeptFolder> for String {
    fn from(folder: KeptFolder) -> Self {
        folder.to_string()
    }
}

impl TryFrom<String> for KeptFolder {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (is_in_home, folder) = text.strip_prefix(HOME_PREFIX).map_or((false, text.as_str()), |rest| (true, rest));
        match folder.strip_suffix('/') {
            Some(path) if repo_path(path).is_ok_and(|valid| valid == path) => {
                Ok(Self { is_in_home, path: path.to_owned() })
            }
            _ => Err(format!("`keep` has {text:?}, which is neither `FOLDER/` nor `~/FOLDER/`")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Declared {
        prepare: Vec<Preparation>,
    }

    fn declared(text: &str) -> Result<Vec<Preparation>, String> {
        let declared: Declared = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        validate(&declared.prepare).map(|()| declared.prepare)
    }

    fn with(keep: &str, lock_files: &str) -> String {
        format!("[[prepare]]\nname = \"npm\"\nrun = [\"npm\", \"ci\"]\nlock_files = {lock_files}\nkeep = {keep}\n")
    }

    #[test]
    fn preparations_are_read_and_wrong_ones_are_named() {
        let [npm] = &declared(&with("[\"node_modules/\", \"~/.cache/x/\", \"vendor/js/\"]", "[\"package-lock.json\"]"))
            .unwrap()[..]
        else {
            panic!("one preparation")
        };
        assert_eq!(npm.timeout(), Duration::from_secs(1800));
        let kept = |is_in_home, path: &str| KeptFolder { is_in_home, path: path.to_owned() };
        assert_eq!(npm.keep, [kept(false, "node_modules"), kept(true, ".cache/x"), kept(false, "vendor/js")]);
        for (path, expected) in [
            ("package-lock.json", true),
            ("node_modules/a/b.js", true),
            ("node_modules", true),
            ("node_modules2/a", false),
            ("src/package-lock.json", false),
            (".cache/x/a", false),
            ("vendor", true),
            ("vendor/js/a", true),
            ("vendor/jsx", false),
        ] {
            assert_eq!(npm.affects(path), expected, "{path}");
        }
        let good = "[\"package-lock.json\"]";
        for (text, expected) in [
            (with("[]", good), "`keep` of the preparation \"npm\" is empty"),
            (with("[\"a/\"]", "[]"), "is empty"),
            (with("[\"a\"]", good), "\"a\", which is neither `FOLDER/` nor"),
            (with("[\"~/\"]", good), "\"~/\""),
            (with("[\"../a/\"]", good), "\"../a/\""),
            (with("[\"/a/\"]", good), "\"/a/\""),
            (with("[\".git/\"]", good), "\".git/\""),
            (with("[\"a/\", \"a/b/\"]", good), "one contains the other"),
            (with("[\"a/\", \"a/\"]", good), "one contains the other"),
            (with("[\"a/\"]", "[\"../x\"]"), "no path in the repository"),
            (with("[\"a/\"]", good).repeat(2), "two preparations"),
            (with("[\"a/\"]", good).replace("run = [\"npm\", \"ci\"]", "run = []"), "names no program"),
            (with("[\"a/\"]", good) + "timeout_s = 0\n", "from 1 to 10800"),
            (with("[\"a/\"]", good) + "shell = true\n", "unknown field"),
        ] {
            let error = declared(&text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(declared(&with("[\"a/\", \"~/a/\", \"ab/\"]", good)).is_ok());
    }
}
