//! Make-believe graphics cards: the library of `tests/fake-nvml` in a folder of the test's, and the file it reads.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

pub use cfq_fake_nvml::scenario::FILE;

const GIB: u64 = 1 << 30;

/// One card, as lines of the scenario; more may be added.
pub fn rtx_3060() -> String {
    card("NVIDIA GeForce RTX 3060", "GPU-3060", "8.6", 12, 31_500, 170_000)
}

pub fn rtx_3090() -> String {
    card("NVIDIA GeForce RTX 3090", "GPU-3090", "8.6", 24, 110_000, 350_000)
}

pub fn rtx_4090() -> String {
    card("NVIDIA GeForce RTX 4090", "GPU-4090", "8.9", 24, 60_000, 450_000)
}

fn card(name: &str, uuid: &str, capability: &str, gib: u64, power: u32, limit: u32) -> String {
    let (total, reserved) = (gib * GIB, GIB / 4);
    format!(
        "[card]\nname = {name}\nuuid = {uuid}\ncapability = {capability}\ntotal = {total}\nreserved = {reserved}\n\
         temperature = 45\npower = {power}\nlimit = {limit}\n"
    )
}

/// A machine with such a library.
pub struct Cards {
    folder: PathBuf,
}

impl Cards {
    /// In `folder`. `None`, with the reason on stderr, where such a library cannot be put in the way.
    pub fn new(folder: &Path, scenario: &str) -> Option<Self> {
        if !cfg!(target_os = "linux") {
            eprintln!("skipped: the NVIDIA library has this name and this way in only on Linux");
            return None;
        }
        // target/PROFILE/deps/suite-...: cargo puts the library of a dependency beside it.
        let test = std::env::current_exe().unwrap();
        let built = test.parent().unwrap().join("libcfq_fake_nvml.so");
        assert!(built.exists(), "{} was not built", built.display());
        let folder = folder.join("nvml");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::copy(&built, folder.join("libnvidia-ml.so.1")).unwrap();
        let cards = Self { folder };
        cards.change_to(scenario);
        Some(cards)
    }

    /// From now on; whole or not at all, since somebody reads it all the time.
    pub fn change_to(&self, scenario: &str) {
        let next = self.folder.join("next");
        std::fs::write(&next, format!("driver = 580.95.05\n{scenario}")).unwrap();
        std::fs::rename(next, self.folder.join("scenario")).unwrap();
    }

    /// For a program that shall find these cards.
    pub fn environment(&self) -> Vec<(String, String)> {
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        vec![
            ("LD_LIBRARY_PATH".to_owned(), text(self.folder.clone())),
            (FILE.to_owned(), text(self.folder.join("scenario"))),
        ]
    }
}

/// Somebody else's program.
pub struct Other(Child);

impl Other {
    pub fn start() -> Self {
        Self(Command::new("sleep").arg("600").spawn().unwrap())
    }

    pub fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
