//! Fuzz target for safetensors headers and config.json: any input must result in a model or an error. An input that
//! begins with `{` is the config.json of a valid safetensors file; any other is a safetensors file.

#![no_main]

mod model_files;

use std::fs::{self, File};
use std::path::Path;
use std::sync::LazyLock;

use cfq_engine::{EngineLimits, ModelFile, estimate_memory, summarize_model};
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static WITH_WEIGHTS: LazyLock<TempDir> = LazyLock::new(model_files::model_folder);
static WITH_CONFIG: LazyLock<TempDir> = LazyLock::new(model_files::model_folder);

fn read(folder: &Path) {
    let _ = estimate_memory(folder, EngineLimits { memory_bytes: 1 << 30, max_sequences: 2 }, 0);
    let _ = summarize_model(folder, 2);
}

fuzz_target!(|bytes: &[u8]| {
    if bytes.starts_with(b"{") {
        fs::write(WITH_CONFIG.path().join("config.json"), bytes).unwrap();
        return read(WITH_CONFIG.path());
    }
    let weights = WITH_WEIGHTS.path().join("model.safetensors");
    fs::write(&weights, bytes).unwrap();
    let _ = ModelFile::read(WITH_WEIGHTS.path());
    model_files::extend(&File::options().write(true).open(&weights).unwrap());
    read(WITH_WEIGHTS.path());
});
