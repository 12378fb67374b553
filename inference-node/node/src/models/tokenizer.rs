//! The tokenizer a GGUF file carries: byte-level BPE, as GPT-2 introduced it.
//!
//! Vocabulary and merges are in the file, but the rule that cuts text into words before merging is only named there
//! (`tokenizer.ggml.pre`). A wrong rule gives text that looks right and answers that are worse, so names this build does
//! not know are refused instead of guessed at. The rules below are those of the models' own tokenizer.json files.

use std::collections::BTreeSet;

use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, Tokenizer};

use crate::models::header::{Header, HeaderError};

const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Ends of a turn, by name: files often declare only one of the tokens their models end with.
const END_NAMES: [&str; 7] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<|eom_id|>", "</s>"];

/// Text to token ids and back.
#[derive(Debug)]
pub struct Vocabulary {
    tokenizer: Tokenizer,
    /// The bytes each token stands for; empty for control tokens.
    bytes: Vec<Vec<u8>>,
    /// Names of the tokens that are not text, as the template writes them.
    control: Vec<(u32, String)>,
    ends: BTreeSet<u32>,
    eos: u32,
    bos: Option<u32>,
    add_bos: bool,
}

impl Vocabulary {
    pub fn from_header(header: &Header) -> Result<Self, HeaderError> {
        let missing = |key: &str| header.unsupported(format!("its header has no usable {key}"));
        let model = header.text("tokenizer.ggml.model").ok_or_else(|| missing("tokenizer.ggml.model"))?;
        if model != "gpt2" {
            return Err(
                header.unsupported(format!("its tokenizer is {model:?}; this version reads byte-level BPE (\"gpt2\")"))
            );
        }
        let tokens = header.texts("tokenizer.ggml.tokens").ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
        let merges = header.texts("tokenizer.ggml.merges").ok_or_else(|| missing("tokenizer.ggml.merges"))?;
        let kinds = match header.numbers("tokenizer.ggml.token_type") {
            Some(kinds) if kinds.len() == tokens.len() => kinds,
            Some(_) => return Err(missing("tokenizer.ggml.token_type")),
            None => vec![NORMAL; tokens.len()],
        };
        let named = |key: &str| {
            let id = u32::try_from(header.number(key)?).ok()?;
            ((id as usize) < tokens.len()).then_some(id)
        };
        let eos = named("tokenizer.ggml.eos_token_id").ok_or_else(|| missing("tokenizer.ggml.eos_token_id"))?;
        let bos = named("tokenizer.ggml.bos_token_id");
        let pre = header.text("tokenizer.ggml.pre").unwrap_or("default");
        let tokenizer = build(&tokens, &merges, &kinds, pre).map_err(|what| header.unsupported(what))?;

        let mut ends: BTreeSet<u32> = [eos].into();
        ends.extend(named("tokenizer.ggml.eot_token_id"));
        ends.extend(named("tokenizer.ggml.eom_token_id"));
        let control: Vec<(u32, String)> = (0u32..)
            .zip(tokens.iter().zip(&kinds))
            .filter(|(id, (_, kind))| **kind != NORMAL && **kind != USER_DEFINED || ends.contains(id))
            .map(|(id, (text, _))| (id, (*text).to_owned()))
            .collect();
        ends.extend(control.iter().filter(|(_, text)| END_NAMES.contains(&text.as_str())).map(|(id, _)| *id));
        let is_control: BTreeSet<u32> = control.iter().map(|(id, _)| *id).collect();
        let map = byte_map();
        let bytes = (0u32..)
            .zip(tokens.iter().zip(&kinds))
            .map(|(id, (text, kind))| match *kind {
                _ if is_control.contains(&id) => Vec::new(),
                USER_DEFINED => text.as_bytes().to_vec(),
                _ => decode_bytes(text, &map),
            })
            .collect();
        let add_bos = header.flag("tokenizer.ggml.add_bos_token").unwrap_or(false);
        Ok(Self { tokenizer, bytes, control, ends, eos, bos, add_bos })
    }

    /// Token ids of `text`; control tokens written in it become themselves.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizeError> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|e| TokenizeError { reason: e.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Like [`Self::encode`], opened the way the model expects a sequence to open.
    pub fn encode_sequence(&self, text: &str) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = self.encode(text)?;
        if let Some(bos) = self.bos.filter(|bos| self.add_bos && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The bytes of one token; part of a character, perhaps.
    pub fn bytes_of(&self, token: u32) -> &[u8] {
        self.bytes.get(token as usize).map_or(&[], Vec::as_slice)
    }

    pub fn is_end(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }

    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// Tokens that are not text, with their names.
    pub fn control(&self) -> &[(u32, String)] {
        &self.control
    }

    fn name_of(&self, token: u32) -> &str {
        self.control.iter().find(|(id, _)| *id == token).map_or("", |(_, text)| text)
    }

    pub fn eos_name(&self) -> &str {
        self.name_of(self.eos)
    }

    pub fn bos_name(&self) -> &str {
        self.bos.map_or("", |bos| self.name_of(bos))
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the prompt cannot be tokenized: {reason}")]
pub struct TokenizeError {
    reason: String,
}

// llama.cpp's token types; the others (unknown 2, control 3, unused 5, byte 6) never stand for text here.
const NORMAL: i64 = 1;
const USER_DEFINED: i64 = 4;

fn build(tokens: &[&str], merges: &[&str], kinds: &[i64], pre: &str) -> Result<Tokenizer, String> {
    let (rule, normalize, ignore_merges) = pre_tokenizer(pre)?;
    let vocabulary: tokenizers::models::bpe::Vocab = tokens.iter().map(|t| (*t).to_owned()).zip(0u32..).collect();
    let merges = merges
        .iter()
        .map(|merge| {
            // A merge's first half may be a space only in files that do not map bytes to characters: not byte-level.
            let (left, right) = merge.split_once(' ').ok_or_else(|| format!("its merge {merge:?} is no pair"))?;
            Ok((left.to_owned(), right.to_owned()))
        })
        .collect::<Result<Vec<_>, String>>()?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .ignore_merges(ignore_merges)
        .build()
        .map_err(|error| format!("its merges do not match its vocabulary: {error}"))?;
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(rule));
    if normalize {
        tokenizer.with_normalizer(Some(NFC)).map_err(|error| error.to_string())?;
    }
    let special: Vec<AddedToken> = tokens
        .iter()
        .zip(kinds)
        .filter(|(text, kind)| matches!(**kind, 2..=5) && !text.is_empty())
        .map(|(text, kind)| AddedToken::from((*text).to_owned(), *kind != USER_DEFINED).normalized(false))
        .collect();
    tokenizer.add_tokens(special).map_err(|error| error.to_string())?;
    Ok(tokenizer)
}

/// The cutting rule, whether text is put into NFC first, and whether a whole word in the vocabulary wins over merging.
fn pre_tokenizer(name: &str) -> Result<(PreTokenizerWrapper, bool, bool), String> {
    let split = |regex: &str| -> Result<PreTokenizerWrapper, String> {
        let split = Split::new(SplitPattern::Regex(regex.to_owned()), SplitDelimiterBehavior::Isolated, false)
            .map_err(|error| error.to_string())?;
        Ok(Sequence::new(vec![split.into(), ByteLevel::new(false, true, false).into()]).into())
    };
    match name {
        "smollm" | "starcoder" | "refact" | "command-r" => {
            let steps = vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
            Ok((Sequence::new(steps).into(), false, false))
        }
        "gpt-2" | "gpt2" => Ok((ByteLevel::new(false, true, true).into(), false, false)),
        "qwen2" | "deepseek-r1-qwen" => Ok((split(QWEN2)?, true, false)),
        "llama-bpe" | "llama3" | "llama-v3" => Ok((split(LLAMA3)?, false, true)),
        other => Err(format!(
            "its pre-tokenizer is {other:?}; this version knows smollm, starcoder, refact, command-r, gpt-2, qwen2, \
             deepseek-r1-qwen and llama-bpe"
        )),
    }
}

/// GPT-2's table: every byte has a printable character; bytes without one of their own take those from U+0100 on.
fn byte_map() -> std::collections::HashMap<char, u8> {
    let mut next = 0x100u32;
    (0..=255u8)
        .filter_map(|byte| {
            let own = char::from(byte);
            if matches!(own, '!'..='~' | '\u{A1}'..='\u{AC}' | '\u{AE}'..='\u{FF}') {
                return Some((own, byte));
            }
            let taken = char::from_u32(next);
            next += 1;
            taken.map(|c| (c, byte))
        })
        .collect()
}

fn decode_bytes(token: &str, map: &std::collections::HashMap<char, u8>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    for c in token.chars() {
        match map.get(&c) {
            Some(byte) => bytes.push(*byte),
            None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    fn words(pre: &str, text: &str) -> Vec<String> {
        let (rule, _, _) = pre_tokenizer(pre).unwrap();
        let mut cut = PreTokenizedString::from(text);
        rule.pre_tokenize(&mut cut).unwrap();
        let map = byte_map();
        cut.get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .map(|(word, _, _)| String::from_utf8_lossy(&decode_bytes(word, &map)).into_owned())
            .collect()
    }

    // Expected words: the pattern of each model's tokenizer.json, run by Python's `regex` module.
    #[test]
    fn words_are_cut_as_each_family_does() {
        let text = "I'LL pay 1234 €\r\n\n  x+=1";
        assert_eq!(
            words("smollm", text),
            ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", " €", "\r\n\n ", " x", "+=", "1"]
        );
        assert_eq!(words("gpt-2", text), ["I", "'", "LL", " pay", " 1234", " €", "\r\n\n ", " x", "+=", "1"]);
        assert_eq!(
            words("qwen2", text),
            ["I", "'LL", " pay", " ", "1", "2", "3", "4", " €\r\n\n", " ", " x", "+=", "1"]
        );
        assert_eq!(words("llama-bpe", text), ["I", "'LL", " pay", " ", "123", "4", " €\r\n\n", " ", " x", "+=", "1"]);
    }

    #[test]
    fn an_unknown_rule_is_refused_by_name() {
        assert!(pre_tokenizer("tekken").unwrap_err().contains("\"tekken\""));
    }

    #[test]
    fn the_byte_table_is_whole() {
        let map = byte_map();
        let bytes: BTreeSet<u8> = map.values().copied().collect();
        assert_eq!((map.len(), bytes.len()), (256, 256));
        assert_eq!(map[&'Ġ'], b' ');
    }
}
