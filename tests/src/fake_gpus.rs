//! Fake GPUs for a test: the fake NVML library of `tests/fake-nvml` and the scenario file that it reads, installed in a
//! folder of the test.

use std::path::{Path, PathBuf};

pub use cfq_fake_nvml::scenario::FILE_VARIABLE;
use cfq_test_skip::skip;

const GIB: u64 = 1 << 30;

/// Scenario lines of an RTX 3060; the test may append further lines for this GPU.
pub fn rtx_3060() -> String {
    gpu("NVIDIA GeForce RTX 3060", "GPU-3060", "8.6", 12, 31_500, 170_000)
}

/// Scenario lines of an RTX 3090, like [`rtx_3060`].
pub fn rtx_3090() -> String {
    gpu("NVIDIA GeForce RTX 3090", "GPU-3090", "8.6", 24, 110_000, 350_000)
}

/// Scenario lines of an RTX 4090, like [`rtx_3060`].
pub fn rtx_4090() -> String {
    gpu("NVIDIA GeForce RTX 4090", "GPU-4090", "8.9", 24, 60_000, 450_000)
}

fn gpu(name: &str, uuid: &str, capability: &str, gib: u64, power: u32, limit: u32) -> String {
    let (total, reserved) = (gib * GIB, GIB / 4);
    format!(
        "[gpu]\nname = {name}\nuuid = {uuid}\ncapability = {capability}\ntotal = {total}\nreserved = {reserved}\n\
         temperature = 45\npower = {power}\nlimit = {limit}\n"
    )
}

/// An installed fake NVML library.
pub struct FakeGpus {
    folder: PathBuf,
}

impl FakeGpus {
    /// Installs the library below `folder`. If the fake library cannot replace the real one on this machine, reports
    /// `test` as skipped and returns `None`.
    pub fn install(test: &str, folder: &Path, scenario: &str) -> Option<Self> {
        if !cfg!(target_os = "linux") {
            skip(test, "LD_LIBRARY_PATH replaces the NVML library on Linux only");
            return None;
        }
        // The test runs from target/PROFILE/deps, where cargo also puts the fake library, because it is a dependency.
        let test = std::env::current_exe().unwrap();
        let built = test.parent().unwrap().join("libcfq_fake_nvml.so");
        assert!(built.exists(), "{} was not built", built.display());
        let folder = folder.join("nvml");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::copy(&built, folder.join("libnvidia-ml.so.1")).unwrap();
        let gpus = Self { folder };
        gpus.set_scenario(scenario);
        Some(gpus)
    }

    /// Replaces the scenario file with a rename, because programs may read it at any time.
    pub fn set_scenario(&self, scenario: &str) {
        let next = self.folder.join("next");
        std::fs::write(&next, format!("driver = 580.95.05\n{scenario}")).unwrap();
        std::fs::rename(next, self.folder.join("scenario")).unwrap();
    }

    /// Environment variables for a program that is to find these GPUs.
    pub fn environment(&self) -> Vec<(String, String)> {
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        vec![
            ("LD_LIBRARY_PATH".to_owned(), text(self.folder.clone())),
            (FILE_VARIABLE.to_owned(), text(self.folder.join("scenario"))),
        ]
    }
}
