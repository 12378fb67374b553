//! Builds the real `cfq` binary, once per test run and with the profile of the tests.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// Builds `cfq` if this test run has not built it yet, and returns its path.
pub fn cfq() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        // target/PROFILE/deps/suite-... or target/PROFILE/chaos -> target/PROFILE
        let program = std::env::current_exe().unwrap();
        let folder = program.ancestors().skip(1).find(|folder| !folder.ends_with("deps")).unwrap();
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--package", "cfq", "--bin", "cfq"]).current_dir(env!("CARGO_MANIFEST_DIR"));
        if folder.ends_with("release") {
            build.arg("--release");
        }
        // `cargo test` sets these variables for the package under test. With them, build scripts that read them (such
        // as that of ring) would run again and cause a rebuild of all dependent crates, both here and at the next cargo
        // command in a shell, which does not set them.
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|n| n.starts_with("CARGO_PKG_") || n.starts_with("CARGO_MANIFEST_")) {
                build.env_remove(name);
            }
        }
        let built = build.status().expect("cargo can be run");
        assert!(built.success(), "the cfq binary could not be built");
        let path = folder.join("cfq");
        assert!(path.exists(), "{} does not exist", path.display());
        path
    })
    .clone()
}
