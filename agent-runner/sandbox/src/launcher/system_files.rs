//! Files of the system that every program may read: programs, libraries, and settings without secrets.

use std::path::PathBuf;

/// Folders with programs and libraries. `/nix/store` and `/run/current-system` are those of NixOS; `/gnu/store` of Guix.
const PROGRAM_FOLDERS: [&str; 11] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix/store",
    "/gnu/store",
    "/run/current-system",
    "/etc/alternatives",
];

/// Settings that programs and libraries read.
const SETTINGS: [&str; 16] = [
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/ssl",
    "/etc/pki",
    "/etc/ca-certificates",
    "/etc/mime.types",
    "/etc/protocols",
    "/etc/services",
    "/etc/magic",
    "/etc/magic.mime",
    "/etc/perl",
    "/etc/fonts",
    // Its `settings.xml`, which may contain passwords, is not among them.
    "/etc/maven/m2.conf",
    "/etc/maven/logging",
];

/// Start of the names of Java's folders of settings in `/etc`.
const JAVA_SETTINGS: &str = "java";

/// Device files that every program may read and write.
pub(super) const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// The files and folders of the system that exist on this machine.
pub(super) fn system_files() -> Vec<PathBuf> {
    let java = std::fs::read_dir("/etc").into_iter().flatten().flatten();
    let java = java.filter(|entry| entry.file_name().to_string_lossy().starts_with(JAVA_SETTINGS));
    let named = PROGRAM_FOLDERS.iter().chain(&SETTINGS).map(PathBuf::from);
    named.chain(java.map(|entry| entry.path())).filter(|path| path.symlink_metadata().is_ok()).collect()
}
