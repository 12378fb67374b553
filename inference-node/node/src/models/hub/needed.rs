//! Which files of a repository a model needs: a GGUF file is whole by itself; safetensors weights need the architecture's
//! configuration and the tokenizer beside them, and all the shards that their index names. Nothing else is fetched.

use std::collections::BTreeSet;

use cfq_proto::model::is_relative_path;
use serde::Deserialize;

/// What safetensors weights are loaded with, where the repository has it.
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
const INDEX: &str = ".safetensors.index.json";
/// Files named in an error.
const CHOICES: usize = 12;

#[derive(Debug, PartialEq, Eq)]
pub enum Fault {
    /// No such file; these are what could have been meant.
    Absent {
        choices: Vec<String>,
    },
    /// One part of several; the name that stands for all of them, if there is one.
    Part {
        whole: Option<String>,
    },
    NoModel,
    /// The index of the shards cannot be used.
    Index(String),
}

/// `file` first, then what goes with it. For an index, the shards come from [`shards`].
pub fn beside(file: &str, names: &BTreeSet<&str>) -> Result<Vec<String>, Fault> {
    if !names.contains(file) {
        let choices = names.iter().filter(|n| is_model(n) && !is_part(n)).take(CHOICES);
        return Err(Fault::Absent { choices: choices.map(|n| (*n).to_owned()).collect() });
    }
    if is_part(file) {
        // `model-00001-of-00002.safetensors` belongs to `model.safetensors.index.json`; split GGUF files have no such.
        let stem = file.strip_suffix(".safetensors").and_then(|stem| stem.get(..stem.len() - PART));
        let whole = stem.map(|stem| format!("{stem}{INDEX}")).filter(|name| names.contains(name.as_str()));
        return Err(Fault::Part { whole });
    }
    let mut wanted = vec![file.to_owned()];
    if file.ends_with(".gguf") {
        return Ok(wanted);
    }
    if !is_model(file) {
        return Err(Fault::NoModel);
    }
    let folder = folder(file);
    let companions = COMPANIONS.iter().map(|name| format!("{folder}{name}"));
    wanted.extend(companions.filter(|name| names.contains(name.as_str())));
    Ok(wanted)
}

pub fn is_index(file: &str) -> bool {
    file.ends_with(INDEX)
}

/// The shards that an index names, each once.
pub fn shards(file: &str, index: &[u8], names: &BTreeSet<&str>) -> Result<Vec<String>, Fault> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(index).map_err(|error| Fault::Index(error.to_string()))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    let folder = folder(file);
    shards
        .into_iter()
        .map(|shard| {
            let path = format!("{folder}{shard}");
            let fits = is_relative_path(&shard) && shard.ends_with(".safetensors") && names.contains(path.as_str());
            if fits { Ok(path) } else { Err(Fault::Index(format!("it names {shard:?}, which is not there"))) }
        })
        .collect()
}

/// With its slash; empty at the top.
fn folder(file: &str) -> &str {
    file.rfind('/').map_or("", |at| &file[..=at])
}

fn is_model(name: &str) -> bool {
    name.ends_with(".gguf") || name.ends_with(".safetensors") || is_index(name)
}

/// Length of `-00001-of-00002`.
const PART: usize = 15;

fn is_part(name: &str) -> bool {
    let stem = name.strip_suffix(".gguf").or_else(|| name.strip_suffix(".safetensors"));
    let Some(tail) = stem.and_then(|stem| stem.len().checked_sub(PART).and_then(|at| stem.get(at..))) else {
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
    fn a_gguf_file_comes_alone() {
        let all = names(&["README.md", "q4.gguf", "q8.gguf", "config.json"]);
        assert_eq!(beside("q4.gguf", &all).unwrap(), ["q4.gguf"]);
        let absent = beside("q5.gguf", &all).unwrap_err();
        assert_eq!(absent, Fault::Absent { choices: vec!["q4.gguf".into(), "q8.gguf".into()] });
        assert_eq!(beside("README.md", &all), Err(Fault::NoModel));
    }

    #[test]
    fn safetensors_come_with_configuration_tokenizer_and_the_shards_of_their_index() {
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
        assert_eq!(beside(index, &all).unwrap(), [index, "config.json", "tokenizer.json"]);
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
            assert!(matches!(shards(index, hostile, &all), Err(Fault::Index(_))));
        }
    }

    #[test]
    fn one_part_of_several_is_refused_with_the_name_of_the_whole() {
        let all = names(&["m-00001-of-00003.gguf", "s-00001-of-00002.safetensors", "s.safetensors.index.json"]);
        assert_eq!(beside("m-00001-of-00003.gguf", &all), Err(Fault::Part { whole: None }));
        let whole = Some("s.safetensors.index.json".to_owned());
        assert_eq!(beside("s-00001-of-00002.safetensors", &all), Err(Fault::Part { whole }));
        assert!(!is_part("é-0001-of-00002.gguf") && !is_part("x.gguf"));
    }
}
