//! The environment variables of the processes that `cfq up` starts. `cfq up` is started from a shell, whose environment
//! may contain secrets; every process gets only the secrets that it needs.

use std::collections::BTreeSet;
use std::ffi::OsString;

/// Variables that every process gets. `LD_*` and `DYLD_*` are needed to start a program that is linked to libraries in
/// other folders. libgit2 reads the git configuration below `HOME` and `XDG_CONFIG_HOME`, and opens repositories of the user
/// `SUDO_UID`.
const SHARED: [&str; 21] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SUDO_UID",
    "TMPDIR",
    "TZ",
    "LANG",
    "LC_ALL",
    "XDG_CONFIG_HOME",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "DYLD_LIBRARY_PATH",
    "RUST_BACKTRACE",
    "RUST_LIB_BACKTRACE",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
    "LLVM_PROFILE_FILE",
    "CFQ_LOG",
    "CFQ_FAILPOINT",
    "CFQ_FAILPOINT_ONCE",
];

/// Variable of the hub's own programs with the token for the hub.
const HUB_TOKEN: &str = "HF_TOKEN";

/// Ends of the names of variables that usually contain a secret.
const SECRET_ENDS: [&str; 12] = [
    "TOKEN",
    "KEY",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "_PASS",
    "_PWD",
    "_PAT",
    "CREDENTIAL",
    "CREDENTIALS",
    "_AUTH",
];

type Variables = Vec<(OsString, OsString)>;

/// Environment of a process that needs no secret from it: the scheduler and the runner.
pub fn shared(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Variables {
    variables.into_iter().filter(|(name, _)| name.to_str().is_some_and(|name| SHARED.contains(&name))).collect()
}

/// Environment of the node: everything except secrets, because GPU libraries read many variables; of the secrets, those
/// that its configuration `names`, and the token for the hub.
pub fn of_node<'a>(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
    names: impl IntoIterator<Item = &'a str>,
) -> Variables {
    let needed: BTreeSet<&str> = names.into_iter().chain([HUB_TOKEN]).collect();
    variables
        .into_iter()
        .filter(|(name, value)| {
            let is_secret = |name| is_secret_name(name) || (!is_proxy(name) && has_password(&value.to_string_lossy()));
            name.to_str().is_some_and(|name| needed.contains(name) || !is_secret(name))
        })
        .collect()
}

fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    SECRET_ENDS.iter().any(|end| name.ends_with(end))
}

/// The node needs the address of a proxy even if it contains a password.
fn is_proxy(name: &str) -> bool {
    name.to_ascii_uppercase().ends_with("_PROXY")
}

/// Whether the value is a URL with a password.
fn has_password(value: &str) -> bool {
    let authority = value.split_once("://").map(|(_, rest)| rest.split('/').next().unwrap_or(rest));
    authority.and_then(|authority| authority.rsplit_once('@')).is_some_and(|(user, _)| user.contains(':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(variables: Variables) -> Vec<String> {
        variables.into_iter().map(|(name, _)| name.into_string().unwrap()).collect()
    }

    fn shell() -> Variables {
        let names = "PATH CFQ_TOKEN BOX_KEY HUB_TOKEN HF_TOKEN HF_TOKEN_PATH HF_HOME AWS_SECRET_ACCESS_KEY \
                     github_token CUDA_VISIBLE_DEVICES HTTPS_PROXY CFQ_LOG";
        names.split_whitespace().map(|name| (name.into(), "value".into())).collect()
    }

    #[test]
    fn scheduler_and_runner_get_no_secret() {
        assert_eq!(names(shared(shell())), ["PATH", "CFQ_LOG"]);
    }

    #[test]
    fn node_gets_only_the_configured_secrets() {
        let public = ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "CUDA_VISIBLE_DEVICES", "HTTPS_PROXY", "CFQ_LOG"];
        let without = of_node(shell(), []);
        assert_eq!(names(without), [&["PATH"][..], &public].concat());
        let with = of_node(shell(), ["BOX_KEY", "HUB_TOKEN"]);
        assert_eq!(names(with), [&["PATH", "BOX_KEY", "HUB_TOKEN"][..], &public].concat());
    }

    #[test]
    fn secrets_are_recognized_by_name_and_value() {
        for name in ["PGPASSWORD", "OPENAI_APIKEY", "GITHUB_PAT", "DB_PASS", "github_token"] {
            assert!(is_secret_name(name), "{name}");
        }
        for name in ["PATH", "HF_TOKEN_PATH", "PWD", "CUDA_VISIBLE_DEVICES"] {
            assert!(!is_secret_name(name), "{name}");
        }
        assert!(has_password("postgres://me:secret@db/x"));
        assert!(!has_password("postgres://db/x?a=b:c@d") && !has_password("/a:b@c"));
        let variables = [("DATABASE_URL", "postgres://me:secret@db/x"), ("HTTPS_PROXY", "http://me:secret@proxy")];
        let variables = variables.map(|(name, value)| (name.into(), value.into()));
        assert_eq!(names(of_node(variables, [])), ["HTTPS_PROXY"]);
    }
}
