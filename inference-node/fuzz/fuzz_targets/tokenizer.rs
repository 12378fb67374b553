//! Fuzz target for tokenizer.json: any input must result in a tokenizer that encodes and decodes, or in an error.

#![no_main]

mod model_files;

use std::sync::LazyLock;

use cfq_engine::testing::vocabulary_size;
use cfq_engine::{ModelFile, Vocabulary};
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(model_files::model_folder);
static MODEL: LazyLock<ModelFile> = LazyLock::new(|| ModelFile::read(FOLDER.path()).unwrap());

fuzz_target!(|bytes: &[u8]| {
    std::fs::write(FOLDER.path().join("tokenizer.json"), bytes).unwrap();
    let _ = vocabulary_size(&MODEL);
    let Ok(vocabulary) = Vocabulary::read(&MODEL) else { return };
    for text in ["", " ", model_files::MESSAGE] {
        for id in vocabulary.encode(text).unwrap_or_default() {
            let _ = vocabulary.token_bytes(id);
        }
    }
});
