//! Fuzz target for chat templates: any input must result in a template that has rendered a message, or in an error.

#![no_main]

mod model_files;

use std::sync::LazyLock;

use cfq_engine::testing::ChatTemplate;
use cfq_engine::{ModelFile, Vocabulary};
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(model_files::model_folder);
static MODEL: LazyLock<(ModelFile, Vocabulary)> = LazyLock::new(|| {
    let model = ModelFile::read(FOLDER.path()).unwrap();
    let vocabulary = Vocabulary::read(&model).unwrap();
    (model, vocabulary)
});

fuzz_target!(|bytes: &[u8]| {
    let (model, vocabulary) = &*MODEL;
    std::fs::write(FOLDER.path().join("chat_template.jinja"), bytes).unwrap();
    let _ = ChatTemplate::read(model, vocabulary);
});
