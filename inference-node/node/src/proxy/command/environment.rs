//! The environment of a program: what it needs to run, and the variables with the keys of its own provider. The secrets
//! of the node do not reach it.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Variables that every program gets.
const SHARED: [&str; 16] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TZ",
    "XDG_CONFIG_HOME",
    "XDG_CACHE_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "NODE_EXTRA_CA_CERTS",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];
/// End of the names of variables with the address of a proxy, in capital letters.
const PROXY_END: &str = "_PROXY";
/// Variables of every program that ask for plain text.
const PLAIN_TEXT: [(&str, &str); 2] = [("NO_COLOR", "1"), ("TERM", "dumb")];

/// Whether this can be the name of an environment variable.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// The variables for a program, of the node's `variables`: the shared ones and those in `names`. If the home folder
/// belongs to another account, because root started cfq, the program gets `home` in its place.
pub(super) fn of_program(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
    names: &[String],
    home: &Path,
) -> Vec<(OsString, OsString)> {
    let is_passed = |name: &str| {
        SHARED.contains(&name) || name.to_ascii_uppercase().ends_with(PROXY_END) || names.iter().any(|own| own == name)
    };
    let mut passed: Vec<(OsString, OsString)> =
        variables.into_iter().filter(|(name, _)| name.to_str().is_some_and(is_passed)).collect();
    let user = rustix::process::geteuid().as_raw();
    let is_own_home = |folder: &OsString| std::fs::metadata(folder).is_ok_and(|folder| folder.uid() == user);
    if !passed.iter().any(|(name, value)| name == "HOME" && is_own_home(value)) {
        passed.retain(|(name, _)| name != "HOME");
        passed.push(("HOME".into(), home.into()));
    }
    passed.extend(PLAIN_TEXT.map(|(name, value)| (name.into(), value.into())));
    passed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_gets_its_own_keys_and_a_home_of_its_account() {
        let shell = |home: &Path| {
            let names = ["PATH", "HF_TOKEN", "BOX_KEY", "ANTHROPIC_API_KEY", "https_proxy", "CFQ_LOG"];
            let mut variables: Vec<(OsString, OsString)> =
                names.map(|name| (name.into(), "value".into())).into_iter().collect();
            variables.push(("HOME".into(), home.into()));
            variables
        };
        let own = tempfile::tempdir().unwrap();
        let scratch = Path::new("/scratch");
        let names = ["ANTHROPIC_API_KEY".to_owned()];
        let of = |home: &Path| -> Vec<(String, String)> {
            let passed = of_program(shell(home), &names, scratch).into_iter();
            passed.map(|(name, value)| (name.into_string().unwrap(), value.into_string().unwrap())).collect()
        };
        let passed = of(own.path());
        let keys: Vec<&str> = passed.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(keys, ["PATH", "ANTHROPIC_API_KEY", "https_proxy", "HOME", "NO_COLOR", "TERM"]);
        assert_eq!(passed[3].1, own.path().to_str().unwrap());
        assert!(of(Path::new("/no/such/folder")).contains(&("HOME".to_owned(), "/scratch".to_owned())));
    }

    #[test]
    fn invalid_names_of_variables_are_refused() {
        assert!(is_name("A_KEY2"));
        for wrong in ["", "2A", "A=b", "A B"] {
            assert!(!is_name(wrong), "{wrong}");
        }
    }
}
