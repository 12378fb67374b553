//! Reads tokenizer.json of a folder in the Hugging Face layout, with tokenizer_config.json and generation_config.json.

use std::collections::BTreeSet;

use cfq_memory::VocabularySize;
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::model::control_names::is_control_name;
use crate::model::gguf::HeaderError;
use crate::model::safetensors::ModelFolder;
use crate::model::tokenizer::{Bos, Vocabulary, byte_level, sentence_piece, untrusted_rules};

/// Maximum number of token ids. The table of token bytes has an entry for every id up to the largest one; the largest
/// published vocabularies have 300 thousand tokens.
const MAX_TOKENS: usize = 1 << 22;

/// How the vocabulary spells a token's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// One character per byte, see [`byte_level::char_to_byte`].
    ByteLevel,
    /// Text with U+2581 for spaces, and `<0xNN>` for single bytes.
    SentencePiece,
}

/// Builds the tokenizer of a model folder.
pub(super) fn read(folder: &ModelFolder) -> Result<Vocabulary, HeaderError> {
    let missing = |what: &str| folder.unsupported(format!("it has no {what}"));
    let mut json = folder.json("tokenizer.json")?.ok_or_else(|| missing("tokenizer.json"))?;
    let spelling = spelling(&json).ok_or_else(|| {
        folder.unsupported("the decoder in its tokenizer.json is neither byte-level nor SentencePiece")
    })?;
    untrusted_rules::check(&json).map_err(|what| folder.unsupported(what))?;
    let config = folder.json("tokenizer_config.json")?.unwrap_or(Value::Null);
    let generation = folder.json("generation_config.json")?.unwrap_or(Value::Null);
    let end_ids: Vec<u32> = [generation.get("eos_token_id"), folder.config.get("eos_token_id")]
        .into_iter()
        .flatten()
        .flat_map(ids)
        .collect();
    let names = [token_name(&config, "bos_token"), token_name(&config, "eos_token")];
    let before_texts = adds_bos(&config, &json);
    match_before_normalization(&mut json, |id, name| end_ids.contains(&id) || names.contains(&Some(name)));
    let mut tokenizer: Tokenizer = serde_json::from_value(json)
        .map_err(|e| folder.unsupported(format!("its tokenizer.json cannot be parsed: {e}")))?;
    let plain = tokenizer.with_truncation(None).map(|t| t.with_padding(None).clone());
    let tokenizer: Tokenizer = plain.map_err(|e| folder.unsupported(e.to_string()))?.into();

    let added = tokenizer.get_added_tokens_decoder();
    let count = tokenizer.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1);
    if count > MAX_TOKENS {
        let what = format!("its tokenizer.json has the token id {}, the limit is {MAX_TOKENS}", count - 1);
        return Err(folder.unsupported(what));
    }
    let map = byte_level::char_to_byte();
    let bytes = (0..count as u32).map(|id| match (added.get(&id), tokenizer.id_to_token(id)) {
        (Some(token), _) if spelling == Spelling::SentencePiece && !token.special => {
            sentence_piece::piece_bytes(&token.content, false)
        }
        (Some(token), _) => token.content.as_bytes().to_vec(),
        (None, Some(text)) if spelling == Spelling::ByteLevel => byte_level::token_bytes(&text, &map),
        (None, Some(text)) => sentence_piece::piece_bytes(&text, true),
        (None, None) => Vec::new(),
    });
    let bytes = bytes.collect();

    let named_token = |name: &str| tokenizer.token_to_id(token_name(&config, name)?);
    let mut end_tokens: BTreeSet<u32> = named_token("eos_token").into_iter().chain(end_ids).collect();
    end_tokens.retain(|id| (*id as usize) < count);
    let eos = named_token("eos_token").or_else(|| end_tokens.first().copied()).ok_or_else(|| missing("eos_token"))?;
    let bos = named_token("bos_token");
    let mut control: Vec<(u32, String)> = added
        .iter()
        .filter(|(id, token)| token.special || end_tokens.contains(id) || bos == Some(**id))
        .map(|(id, token)| (*id, token.content.clone()))
        .collect();
    control.sort_unstable();
    // The chat templates of this layout contain the BOS token.
    let bos = Bos { token: bos, before_prompts: false, before_texts };
    let built = Vocabulary::new(tokenizer.clone(), bytes, control, end_tokens, eos, bos);
    built.map_err(|what| folder.unsupported(what))
}

/// The name of BOS or EOS in tokenizer_config.json: a string, or an object with the string.
fn token_name<'a>(config: &'a Value, key: &str) -> Option<&'a str> {
    let token = config.get(key)?;
    token.as_str().or_else(|| token.get("content").and_then(Value::as_str))
}

/// Whether the tokenizer begins a text with BOS: the setting in tokenizer_config.json, else the template of the
/// post-processor in tokenizer.json.
fn adds_bos(config: &Value, json: &Value) -> bool {
    if let Some(adds_bos) = config.get("add_bos_token").and_then(Value::as_bool) {
        return adds_bos;
    }
    let bos = token_name(config, "bos_token");
    let begins_with_bos = |processor: &Value| {
        let first = &processor["single"][0]["SpecialToken"]["id"];
        processor["type"] == "TemplateProcessing" && bos.is_some_and(|bos| first == bos)
    };
    let processor = &json["post_processor"];
    begins_with_bos(processor) || processor["processors"].as_array().is_some_and(|all| all.iter().any(begins_with_bos))
}

/// Makes the added tokens that are control tokens match the text as it is. Otherwise a text that has none of their names
/// could contain one after the normalization, which changes case and forms of letters. `is_named`: whether the id or the
/// name of a token belongs to a control token that is not declared as special.
fn match_before_normalization(json: &mut Value, is_named: impl Fn(u32, &str) -> bool) {
    for token in json.get_mut("added_tokens").and_then(Value::as_array_mut).into_iter().flatten() {
        let id = token.get("id").and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
        let name = token.get("content").and_then(Value::as_str).unwrap_or_default();
        let is_special = token.get("special").and_then(Value::as_bool) == Some(true);
        if (is_special || is_control_name(name) || id.is_some_and(|id| is_named(id, name)))
            && let Some(normalized) = token.get_mut("normalized")
        {
            *normalized = Value::Bool(false);
        }
    }
}

/// The size of the vocabulary in tokenizer.json; zero if there is none. See [`super::vocabulary_size`].
pub(super) fn size(folder: &ModelFolder) -> Result<VocabularySize, HeaderError> {
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

/// How the tokens are spelled, derived from the type of the decoder in tokenizer.json; `None` if no spelling is known
/// for that type.
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

/// The ids in a value that is one id or a list of ids.
fn ids(value: &Value) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match value.as_array() {
        Some(all) => all.iter().filter_map(one).collect(),
        None => one(value).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn bos_before_texts_is_a_setting_or_part_of_the_post_processor() {
        let template = json!({
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        });
        let inside = json!({ "type": "Sequence", "processors": [{ "type": "ByteLevel" }, template] });
        let ends = json!({ "type": "TemplateProcessing", "single": [{ "Sequence": { "id": "A", "type_id": 0 } }] });
        for (config, processor, expected) in [
            (json!({ "bos_token": "<s>", "add_bos_token": true }), json!(null), true),
            (json!({ "bos_token": "<s>", "add_bos_token": false }), template.clone(), false),
            (json!({ "bos_token": "<s>", "add_bos_token": null }), template.clone(), true),
            (json!({ "bos_token": { "content": "<s>" } }), inside, true),
            (json!({ "bos_token": "<bos>" }), template.clone(), false),
            (json!({}), template, false),
            (json!({ "bos_token": "<s>" }), ends, false),
            (json!({ "bos_token": "<s>" }), json!(null), false),
        ] {
            assert_eq!(adds_bos(&config, &json!({ "post_processor": processor })), expected, "{config} {processor}");
        }
    }
}
