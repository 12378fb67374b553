//! Fuzz target for GGUF headers and the tokenizers in them: any input must result in a model or an error. libFuzzer's
//! limits (see `just fuzz`) bound the memory, since no file may cause allocations much larger than itself.

#![no_main]

use std::io::{Seek, Write};
use std::sync::{LazyLock, Mutex};

use cfq_engine::testing::ChatTemplate;
use cfq_engine::{EngineLimits, ModelFile, Vocabulary, estimate_memory};
use libfuzzer_sys::fuzz_target;
use tempfile::NamedTempFile;

static FILE: LazyLock<Mutex<NamedTempFile>> = LazyLock::new(|| {
    // Each input is written to a file, which is cheap on a file system in memory.
    let memory = std::path::Path::new("/dev/shm");
    let folder = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    Mutex::new(tempfile::Builder::new().suffix(".gguf").tempfile_in(folder).unwrap())
});

fuzz_target!(|bytes: &[u8]| {
    let mut file = FILE.lock().unwrap();
    file.as_file().set_len(0).unwrap();
    file.rewind().unwrap();
    file.write_all(bytes).unwrap();
    let _ = estimate_memory(file.path(), EngineLimits { memory_bytes: 1 << 30, max_sequences: 2 }, 0);
    if let Ok(model) = ModelFile::read(file.path())
        && let Ok(vocabulary) = Vocabulary::read(&model)
    {
        let _ = vocabulary.encode("def add(a, b):\n    return a + b  # ü 🙂 <|im_end|>");
        let _ = ChatTemplate::read(&model, &vocabulary);
    }
});
