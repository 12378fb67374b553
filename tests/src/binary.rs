//! The real binary, built once a run with the profile the tests themselves were built with.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

pub fn cfq() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--package", "cfq", "--bin", "cfq"]).current_dir(env!("CARGO_MANIFEST_DIR"));
        // What cargo tells a test about its own package. ring's build script asks to be run again when these change, and
        // with it half of the workspace would be built anew, here and again in the next build by hand.
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|of_test| name.starts_with(of_test)) {
                build.env_remove(name);
            }
        }
        let built = build.status().expect("cargo can be run");
        assert!(built.success(), "the cfq binary could not be built");
        // target/debug/deps/suite-... -> target/debug/cfq
        let test = std::env::current_exe().unwrap();
        let path = test.parent().unwrap().parent().unwrap().join("cfq");
        assert!(path.exists(), "{} does not exist", path.display());
        path
    })
    .clone()
}
