//! Token ids against llama.cpp.
//!
//! The fixture was made with llama.cpp's tokenizer on the same file (fixtures/make_token_ids.py): prose, code
//! in several languages, blanks, digits, scripts, emoji, control tokens written in text, and random mixtures.

use cfq_inference_node::models::file::ModelFile;
use cfq_inference_node::models::tokenizer::Vocabulary;

use crate::smollm;

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
