//! The scenario file, which defines the fake GPUs. The library reads it again for each query, so that a test can change
//! it while a program runs.
//!
//! ```text
//! init = 0                      return code of nvmlInit; 18 is a driver of another version
//! driver = 580.95.05
//! [gpu]
//! name = NVIDIA GeForce RTX 3060
//! uuid = GPU-3060
//! capability = 8.6
//! total = 12884901888           bytes, as the next two values
//! reserved = 268435456
//! used = 1342177280
//! temperature = 45
//! power = 31500                 milliwatts, as is the limit
//! limit = 170000
//! throttle = 4                  bits of nvml.h
//! compute = 4711 1073741824     process id and bytes; `self` is the querying process
//! graphics = 4712 268435456
//! fails = temperature 15        return code of a query; 15 is a lost GPU, `all` stands for every query
//! ```

use std::collections::BTreeMap;

/// Environment variable with the path of the scenario file.
pub const FILE_VARIABLE: &str = "CFQ_FAKE_NVML";

/// The parsed scenario file.
pub struct Scenario {
    pub init: u32,
    pub driver: String,
    pub gpus: Vec<FakeGpu>,
}

/// One fake GPU: a `[gpu]` section of the scenario file.
#[derive(Default)]
pub struct FakeGpu {
    properties: BTreeMap<String, String>,
    pub compute: Vec<(u32, u64)>,
    pub graphics: Vec<(u32, u64)>,
    errors: BTreeMap<String, u32>,
}

impl Scenario {
    /// Reads the scenario file. `None` if there is no such file, which represents a machine without a driver.
    pub fn read() -> Option<Self> {
        let text = std::fs::read_to_string(std::env::var_os(FILE_VARIABLE)?).ok()?;
        let mut scenario = Self { init: 0, driver: String::new(), gpus: Vec::new() };
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if line == "[gpu]" {
                scenario.gpus.push(FakeGpu::default());
                continue;
            }
            let (key, value) = line.split_once('=')?;
            let (key, value) = (key.trim(), value.trim());
            match scenario.gpus.last_mut() {
                Some(gpu) => gpu.set(key, value)?,
                None if key == "init" => scenario.init = value.parse().ok()?,
                None => scenario.driver = value.to_owned(),
            }
        }
        Some(scenario)
    }
}

impl FakeGpu {
    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            "compute" | "graphics" => {
                let (pid, bytes) = value.split_once(' ')?;
                let pid = if pid == "self" { std::process::id() } else { pid.parse().ok()? };
                let list = if key == "compute" { &mut self.compute } else { &mut self.graphics };
                list.push((pid, bytes.parse().ok()?));
            }
            "fails" => {
                let (query, code) = value.split_once(' ')?;
                self.errors.insert(query.to_owned(), code.parse().ok()?);
            }
            _ => {
                self.properties.insert(key.to_owned(), value.to_owned());
            }
        }
        Some(())
    }

    /// The error code that the scenario sets for a query; `None` if the query succeeds.
    pub fn error_of(&self, query: &str) -> Option<u32> {
        self.errors.get(query).or_else(|| self.errors.get("all")).copied()
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        self.properties.get(key).map(String::as_str)
    }

    pub fn number(&self, key: &str) -> Option<u64> {
        self.text(key)?.parse().ok()
    }
}
