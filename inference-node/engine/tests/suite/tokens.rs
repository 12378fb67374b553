//! Compares token ids with those of llama.cpp's tokenizer.
//!
//! The script fixtures/make_token_ids.py made the fixture with llama.cpp's tokenizer from the same model file. Its
//! texts are prose, code in several languages, blanks, digits, scripts, emoji, control tokens written in text, and
//! random mixtures.

use cfq_engine::testing::{Grammars, vocabulary_size};
use cfq_engine::{ModelFile, Vocabulary};
use cfq_proto::job::OutputFormat;

use crate::{allocations, smollm};

#[derive(serde::Deserialize)]
struct Line {
    text: String,
    ids: Vec<u32>,
}

#[test]
fn token_ids_equal_the_reference() {
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
        let bytes: Vec<u8> = line.ids.iter().flat_map(|id| vocabulary.token_bytes(*id)).copied().collect();
        let control =
            vocabulary.control_tokens().iter().fold(line.text.clone(), |text, (_, name)| text.replace(name, ""));
        assert_eq!(String::from_utf8_lossy(&bytes), control, "the bytes of the tokens are the text");
    }
}

/// Compares the estimated sizes of the vocabulary (memory estimate) and of the grammars' tries (weight cache) with the
/// bytes that the allocator counted.
#[test]
fn estimated_sizes_of_tables_match_the_allocator() {
    let file = ModelFile::read(&smollm::file()).unwrap();
    let counted = vocabulary_size(&file).unwrap().bytes();
    let (taken, vocabulary) = allocations::kept(|| std::sync::Arc::new(Vocabulary::read(&file).unwrap()));
    assert!(taken <= counted && counted <= taken * 2, "vocabulary: {counted} estimated, {taken} allocated");
    let grammars = Grammars::new(vocabulary);
    assert_eq!(grammars.bytes(), 0, "no constrained output was requested yet");
    let format = OutputFormat::Regex { pattern: "[ab]+".to_owned() };
    let (taken, grammar) = allocations::kept(|| grammars.compile(&format).unwrap());
    drop(grammar);
    let counted = grammars.bytes();
    assert!(taken <= counted && counted <= taken * 2, "tries: {counted} estimated, {taken} allocated");
}
