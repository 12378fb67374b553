//! A tokenizer.json, as the hub's folders carry it, with the settings files beside it.

use std::collections::BTreeSet;

use cfq_memory::VocabularySize;
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::models::header::HeaderError;
use crate::models::safetensors::Folder;
use crate::models::tokenizer::{Vocabulary, byte_level, sentence_piece};

/// The largest real vocabularies have 300 thousand tokens; a table for absurd numbers would be allocated.
const MOST_TOKENS: usize = 1 << 22;

/// How the text of a token is spelled in the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spelling {
    ByteLevel,
    SentencePiece,
}

pub fn read(folder: &Folder) -> Result<Vocabulary, HeaderError> {
    let missing = |what: &str| folder.unsupported(format!("it has no {what}"));
    let json = folder.json("tokenizer.json")?.ok_or_else(|| missing("tokenizer.json"))?;
    let spelling = spelling(&json)
        .ok_or_else(|| folder.unsupported("its tokenizer.json decodes neither byte-level nor SentencePiece tokens"))?;
    let mut tokenizer: Tokenizer = serde_json::from_value(json)
        .map_err(|e| folder.unsupported(format!("its tokenizer.json cannot be read: {e}")))?;
    let plain = tokenizer.with_truncation(None).map(|t| t.with_padding(None).clone());
    let tokenizer: Tokenizer = plain.map_err(|e| folder.unsupported(e.to_string()))?.into();

    let added = tokenizer.get_added_tokens_decoder();
    let count = tokenizer.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1);
    if count > MOST_TOKENS {
        return Err(folder.unsupported(format!("its tokenizer.json numbers a token {}", count - 1)));
    }
    let map = byte_level::byte_map();
    let bytes = (0..count as u32).map(|id| match (added.get(&id), tokenizer.id_to_token(id)) {
        (Some(token), _) if spelling == Spelling::SentencePiece && !token.special => {
            sentence_piece::bytes(&token.content, false)
        }
        (Some(token), _) => token.content.as_bytes().to_vec(),
        (None, Some(text)) if spelling == Spelling::ByteLevel => byte_level::decode_bytes(&text, &map),
        (None, Some(text)) => sentence_piece::bytes(&text, true),
        (None, None) => Vec::new(),
    });
    let bytes = bytes.collect();

    let settings = folder.json("tokenizer_config.json")?.unwrap_or(Value::Null);
    let generation = folder.json("generation_config.json")?.unwrap_or(Value::Null);
    let named = |name: &str| {
        let token = settings.get(name)?;
        let text = token.as_str().or_else(|| token.get("content").and_then(Value::as_str))?;
        tokenizer.token_to_id(text)
    };
    let mut ends: BTreeSet<u32> = named("eos_token").into_iter().collect();
    for place in [generation.get("eos_token_id"), folder.config.get("eos_token_id")] {
        ends.extend(place.into_iter().flat_map(ids));
    }
    ends.retain(|id| (*id as usize) < count);
    let eos = named("eos_token").or_else(|| ends.first().copied()).ok_or_else(|| missing("eos_token"))?;
    let mut control: Vec<(u32, String)> = added
        .iter()
        .filter(|(id, token)| token.special || ends.contains(id))
        .map(|(id, token)| (*id, token.content.clone()))
        .collect();
    control.sort_unstable();
    // Chat templates of the hub write the opening token themselves.
    Ok(Vocabulary::new(tokenizer.clone(), bytes, control, ends, eos, None, named("bos_token")))
}

/// The same as [`super::vocabulary_size`], of a tokenizer.json; nothing where there is none.
pub fn size(folder: &Folder) -> Result<VocabularySize, HeaderError> {
    let json = folder.json("tokenizer.json")?.unwrap_or(Value::Null);
    let model = json.get("model");
    let words = model.and_then(|m| m.get("vocab")).and_then(Value::as_object);
    let merges = model.and_then(|m| m.get("merges")).and_then(Value::as_array);
    Ok(VocabularySize {
        tokens: words.map_or(0, serde_json::Map::len) as u64,
        text: words.into_iter().flatten().map(|(word, _)| word.len() as u64).sum(),
        merges: merges.map_or(0, Vec::len) as u64,
    })
}

fn spelling(json: &Value) -> Option<Spelling> {
    let decoder = json.get("decoder")?;
    let steps = decoder.get("decoders").and_then(Value::as_array).cloned().unwrap_or_else(|| vec![decoder.clone()]);
    let has = |name: &str| steps.iter().any(|s| s.get("type").and_then(Value::as_str) == Some(name));
    if has("ByteLevel") {
        Some(Spelling::ByteLevel)
    } else if has("ByteFallback") || has("Metaspace") {
        Some(Spelling::SentencePiece)
    } else {
        None
    }
}

/// One id, or a list of them.
fn ids(value: &Value) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match value.as_array() {
        Some(all) => all.iter().filter_map(one).collect(),
        None => one(value).into_iter().collect(),
    }
}
