//! GGUF headers and the tokenizer's metadata in them: whatever the bytes are, the answer is a model or a reason. Memory is
//! bounded by libFuzzer's own limits (see `just fuzz`): no file may ask for much more than it holds.

#![no_main]

use std::io::{Seek, Write};
use std::sync::{LazyLock, Mutex};

use cfq_inference_node::engine::candle::{Limits, need};
use cfq_inference_node::models::file::ModelFile;
use cfq_inference_node::models::template::ChatTemplate;
use cfq_inference_node::models::tokenizer::Vocabulary;
use libfuzzer_sys::fuzz_target;
use tempfile::NamedTempFile;

static FILE: LazyLock<Mutex<NamedTempFile>> = LazyLock::new(|| {
    // Where there is a file system in memory, a file an input costs little.
    let memory = std::path::Path::new("/dev/shm");
    let folder = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    Mutex::new(tempfile::Builder::new().suffix(".gguf").tempfile_in(folder).unwrap())
});

fuzz_target!(|bytes: &[u8]| {
    let mut file = FILE.lock().unwrap();
    file.as_file().set_len(0).unwrap();
    file.rewind().unwrap();
    file.write_all(bytes).unwrap();
    let _ = need(file.path(), Limits { memory: 1 << 30, max_sequences: 2 });
    if let Ok(read) = ModelFile::read(file.path())
        && let Ok(vocabulary) = Vocabulary::read(&read)
    {
        let _ = vocabulary.encode("def add(a, b):\n    return a + b  # ü 🙂 <|im_end|>");
        let _ = ChatTemplate::read(&read, &vocabulary);
    }
});
