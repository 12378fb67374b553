//! Token ids against llama.cpp.
//!
//! The fixture was made with llama.cpp's tokenizer on the same file (fixtures/make_token_ids.py): prose, code
//! in several languages, blanks, digits, scripts, emoji, control tokens written in text, and random mixtures.

use cfq_inference_node::engine::grammar::Grammars;
use cfq_inference_node::models::file::ModelFile;
use cfq_inference_node::models::tokenizer::{Vocabulary, vocabulary_size};
use cfq_proto::job::OutputFormat;

use crate::{allocations, smollm};

#[derive(serde::Deserialize)]
struct Line {
    text: String,
    ids: Vec<u32>,
}

#[test]
fn ids_equal_the_reference() {
    let vocabulary = Vocabulary::read(&ModelFile::read(&smollm::file()).unwrap()).unwrap();
    let lines: Vec<Line> = include_str!("../fixtures/smollm2-token-ids.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(lines.len() >= 1000);
    let wrong: Vec<String> = lines
        .iter()
        .filter_map(|line| {
            let ids = vocabulary.encode(&line.text).unwrap();
            (ids != line.ids).then(|| format!("{:?}: {ids:?}, reference {:?}", line.text, line.ids))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {} lines differ:\n{}", wrong.len(), lines.len(), wrong.join("\n"));
    for line in &lines {
        let bytes: Vec<u8> = line.ids.iter().flat_map(|id| vocabulary.bytes_of(*id)).copied().collect();
        let control = vocabulary.control().iter().fold(line.text.clone(), |text, (_, name)| text.replace(name, ""));
        assert_eq!(String::from_utf8_lossy(&bytes), control, "the bytes of the tokens are the text");
    }
}

/// What the ledger counts for a vocabulary, and what parked weights are said to keep beside themselves, held against the
/// allocator's own count.
#[test]
fn the_tables_take_what_is_counted_for_them() {
    let file = ModelFile::read(&smollm::file()).unwrap();
    let counted = vocabulary_size(&file).unwrap().bytes();
    let (taken, vocabulary) = allocations::kept(|| std::sync::Arc::new(Vocabulary::read(&file).unwrap()));
    assert!(taken <= counted && counted <= taken * 2, "the vocabulary: {counted} counted, {taken} taken");
    let grammars = Grammars::new(vocabulary);
    assert_eq!(grammars.bytes(), 0, "nobody asked for constrained output yet");
    let format = OutputFormat::Regex { pattern: "[ab]+".to_owned() };
    let (taken, grammar) = allocations::kept(|| grammars.of(&format).unwrap());
    drop(grammar);
    let counted = grammars.bytes();
    assert!(taken <= counted && counted <= taken * 2, "the tries: {counted} counted, {taken} taken");
}
