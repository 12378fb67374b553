//! Fuzz target for GGUF headers and the tokenizers in them: any input must result in a model or an error. libFuzzer's
//! limits (see `just fuzz`) bound the memory, since no file may cause allocations much larger than itself.

#![no_main]

mod model_files;

use std::sync::{LazyLock, Mutex};

use cfq_engine::testing::ChatTemplate;
use cfq_engine::{EngineLimits, ModelFile, Vocabulary, estimate_memory};
use libfuzzer_sys::fuzz_target;
use tempfile::NamedTempFile;

static FILE: LazyLock<Mutex<NamedTempFile>> = LazyLock::new(|| Mutex::new(model_files::file(".gguf")));

fuzz_target!(|bytes: &[u8]| {
    let mut file = FILE.lock().unwrap();
    model_files::write(&mut file, bytes);
    let _ = ModelFile::read(file.path());
    model_files::extend(file.as_file());
    let _ = estimate_memory(file.path(), EngineLimits { memory_bytes: 1 << 30, max_sequences: 2 }, 0);
    if let Ok(model) = ModelFile::read(file.path())
        && let Ok(vocabulary) = Vocabulary::read(&model)
    {
        let _ = vocabulary.encode(model_files::MESSAGE);
        let _ = ChatTemplate::read(&model, &vocabulary);
    }
});
