//! Selection of the files that a model needs from a repository. A GGUF file is complete by itself; safetensors weights
//! also need the architecture's configuration, the tokenizer, and all the shards that their index names. Nothing else
//! is fetched.

use std::collections::BTreeSet;

use cfq_proto::model::is_relative_path;
use serde::Deserialize;

/// Files that safetensors weights are loaded with, if the repository has them.
const COMPANIONS: [&str; 11] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];
const INDEX_SUFFIX: &str = ".safetensors.index.json";
/// Maximum number of files that an error names.
const MAX_CHOICES: usize = 12;

/// Why a file cannot be fetched as a model.
#[derive(Debug, PartialEq, Eq)]
pub enum SelectionError {
    /// The repository has no such file; `choices` are model files that it has.
    FileNotFound { choices: Vec<String> },
    /// The file is one part of a split model. `whole` is the index of the safetensors shards, which can be fetched
    /// instead; `None` if the repository has no index for them.
    SplitPart { whole: Option<String> },
    /// The file is not a model.
    NotAModelFile,
    /// The index of the shards cannot be used, for this reason.
    InvalidIndex(String),
}

/// Returns `file`, followed by its companions. If `file` is an index, its shards are not included; [`shards`] returns
/// them.
///
/// # Errors
/// A [`SelectionError`].
pub fn with_companions(file: &str, names: &BTreeSet<&str>) -> Result<Vec<String>, SelectionError> {
    if !names.contains(file) {
        let choices = names.iter().filter(|n| is_model(n) && !is_part(n)).take(MAX_CHOICES);
        return Err(SelectionError::FileNotFound { choices: choices.map(|n| (*n).to_owned()).collect() });
    }
    if is_part(file) {
        // `model-00001-of-00002.safetensors` belongs to `model.safetensors.index.json`; split GGUF files have no
        // index.
        let stem = file.strip_suffix(".safetensors").and_then(|stem| stem.get(..stem.len() - PART_SUFFIX_BYTES));
        let whole = stem.map(|stem| format!("{stem}{INDEX_SUFFIX}")).filter(|name| names.contains(name.as_str()));
        return Err(SelectionError::SplitPart { whole });
    }
    let mut wanted = vec![file.to_owned()];
    if file.ends_with(".gguf") {
        return Ok(wanted);
    }
    if !is_model(file) {
        return Err(SelectionError::NotAModelFile);
    }
    let folder = folder(file);
    let companions = COMPANIONS.iter().map(|name| format!("{folder}{name}"));
    wanted.extend(companions.filter(|name| names.contains(name.as_str())));
    Ok(wanted)
}

/// Whether the file is an index of safetensors shards.
pub fn is_index(file: &str) -> bool {
    file.ends_with(INDEX_SUFFIX)
}

/// Returns the shards that an index names, each once.
///
/// # Errors
/// [`SelectionError::InvalidIndex`].
pub fn shards(file: &str, index: &[u8], names: &BTreeSet<&str>) -> Result<Vec<String>, SelectionError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let index: Index =
        serde_json::from_slice(index).map_err(|error| SelectionError::InvalidIndex(error.to_string()))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    let folder = folder(file);
    shards
        .into_iter()
        .map(|shard| {
            let path = format!("{folder}{shard}");
            let valid = is_relative_path(&shard) && shard.ends_with(".safetensors") && names.contains(path.as_str());
            if valid {
                Ok(path)
            } else {
                Err(SelectionError::InvalidIndex(format!("it names {shard:?}, which the repository does not have")))
            }
        })
        .collect()
}

/// The folder part of a path with its slash; empty at the top level.
fn folder(file: &str) -> &str {
    file.rfind('/').map_or("", |at| &file[..=at])
}

fn is_model(name: &str) -> bool {
    name.ends_with(".gguf") || name.ends_with(".safetensors") || is_index(name)
}

/// Length of the suffix of a part's name, such as `-00001-of-00002`, in bytes.
const PART_SUFFIX_BYTES: usize = 15;

fn is_part(name: &str) -> bool {
    let stem = name.strip_suffix(".gguf").or_else(|| name.strip_suffix(".safetensors"));
    let Some(tail) = stem.and_then(|stem| stem.len().checked_sub(PART_SUFFIX_BYTES).and_then(|at| stem.get(at..)))
    else {
        return false;
    };
    let digits = |range: std::ops::Range<usize>| tail[range].bytes().all(|b| b.is_ascii_digit());
    tail.is_ascii() && tail.starts_with('-') && &tail[6..10] == "-of-" && digits(1..6) && digits(10..15)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names<'a>(list: &[&'a str]) -> BTreeSet<&'a str> {
        list.iter().copied().collect()
    }

    #[test]
    fn gguf_file_needs_no_other_file() {
        let all = names(&["README.md", "q4.gguf", "q8.gguf", "config.json"]);
        assert_eq!(with_companions("q4.gguf", &all).unwrap(), ["q4.gguf"]);
        let missing = with_companions("q5.gguf", &all).unwrap_err();
        assert_eq!(missing, SelectionError::FileNotFound { choices: vec!["q4.gguf".into(), "q8.gguf".into()] });
        assert_eq!(with_companions("README.md", &all), Err(SelectionError::NotAModelFile));
    }

    #[test]
    fn safetensors_need_configuration_tokenizer_and_shards() {
        let all = names(&[
            "config.json",
            "tokenizer.json",
            "pytorch_model.bin",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "other/config.json",
        ]);
        let index = "model.safetensors.index.json";
        assert_eq!(with_companions(index, &all).unwrap(), [index, "config.json", "tokenizer.json"]);
        let map = br#"{"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors",
            "c":"model-00001-of-00002.safetensors"}}"#;
        let both = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        assert_eq!(shards(index, map, &all).unwrap(), both);
        for hostile in [
            &br#"{"weight_map":{"a":"../../etc/x.safetensors"}}"#[..],
            br#"{"weight_map":{"a":"config.json"}}"#,
            br#"{"weight_map":{"a":"gone.safetensors"}}"#,
            b"[]",
        ] {
            assert!(matches!(shards(index, hostile, &all), Err(SelectionError::InvalidIndex(_))));
        }
    }

    #[test]
    fn part_of_a_split_model_is_refused_with_the_name_of_its_index() {
        let all = names(&["m-00001-of-00003.gguf", "s-00001-of-00002.safetensors", "s.safetensors.index.json"]);
        assert_eq!(with_companions("m-00001-of-00003.gguf", &all), Err(SelectionError::SplitPart { whole: None }));
        let whole = Some("s.safetensors.index.json".to_owned());
        assert_eq!(with_companions("s-00001-of-00002.safetensors", &all), Err(SelectionError::SplitPart { whole }));
        assert!(!is_part("é-0001-of-00002.gguf") && !is_part("x.gguf"));
    }
}
