//! The tokenizer a model's file carries: text to token ids and back.
//!
//! GGUF files hold a vocabulary and name the kind of tokenizer it is for; folders in the hub's layout hold a whole
//! tokenizer.json. Either way the result is the same: ids as the model was trained on, and for each id the bytes it
//! stands for, which is what streaming, stop strings and constrained decoding work on.

mod byte_level;
mod json;
mod sentence_piece;

use std::collections::BTreeSet;

use cfq_memory::VocabularySize;
use sha2::{Digest, Sha256};
use tokenizers::{AddedToken, Tokenizer};

use crate::models::file::ModelFile;
use crate::models::header::{Header, HeaderError};
pub use crate::models::tokenizer::byte_level::byte_map;

/// Ends of a turn, by name: files often declare only one of the tokens their models end with.
const END_NAMES: [&str; 8] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<|eom_id|>", "</s>", "<end_of_turn>"];

/// A token found in the text before anything is cut or merged. Phi-3's take the blanks after them along; the GGUF format has
/// no place for that, so it is known here, as llama.cpp knows it. Which ones: the added tokens of the model's tokenizer.json.
fn added(text: &str, kind: i64, phi3: bool) -> AddedToken {
    let takes_blanks = phi3 && !matches!(text, "<unk>" | "<s>" | "<|endoftext|>");
    AddedToken::from(text.to_owned(), kind != USER_DEFINED).normalized(false).rstrip(takes_blanks)
}

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
    /// Put before a sequence that does not begin with it.
    opening: Option<u32>,
    name: i64,
}

// llama.cpp's token types; the others (unknown 2, control 3, unused 5) never stand for text here.
const NORMAL: i64 = 1;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// How large the vocabulary is, without building it: for the ledger.
pub fn vocabulary_size(file: &ModelFile) -> Result<VocabularySize, HeaderError> {
    let header = match file {
        ModelFile::Gguf(header) => header,
        ModelFile::Folder(folder) => return json::size(folder),
    };
    let tokens = header.texts("tokenizer.ggml.tokens").unwrap_or_default();
    let text = tokens.iter().map(|t| t.len() as u64).sum();
    let merges = match header.texts("tokenizer.ggml.merges") {
        Some(merges) => merges.len(),
        // SentencePiece: one for most pieces, and another for every other way to cut them.
        None => tokens.len() * 2,
    };
    Ok(VocabularySize { tokens: tokens.len() as u64, text, merges: merges as u64 })
}

impl Vocabulary {
    pub fn read(file: &ModelFile) -> Result<Self, HeaderError> {
        match file {
            ModelFile::Gguf(header) => Self::from_header(header),
            ModelFile::Folder(folder) => json::read(folder),
        }
    }

    fn from_header(header: &Header) -> Result<Self, HeaderError> {
        let missing = |key: &str| header.unsupported(format!("its header has no usable {key}"));
        let model = header.text("tokenizer.ggml.model").ok_or_else(|| missing("tokenizer.ggml.model"))?;
        let tokens = header.texts("tokenizer.ggml.tokens").ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
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
        let sentence_piece = match model {
            "gpt2" => false,
            "llama" => true,
            other => {
                return Err(header.unsupported(format!(
                    "its tokenizer is {other:?}; this version reads byte-level BPE (\"gpt2\") and SentencePiece (\"llama\")"
                )));
            }
        };
        let built = if sentence_piece {
            let scores = header.reals("tokenizer.ggml.scores").filter(|s| s.len() == tokens.len());
            let scores = scores.ok_or_else(|| missing("tokenizer.ggml.scores"))?;
            let prefix = header.flag("tokenizer.ggml.add_space_prefix").unwrap_or(true);
            sentence_piece::build(&tokens, &scores, &kinds, prefix)
        } else {
            let merges = header.texts("tokenizer.ggml.merges").ok_or_else(|| missing("tokenizer.ggml.merges"))?;
            let pre = header.text("tokenizer.ggml.pre").unwrap_or("default");
            byte_level::build(&tokens, &merges, pre)
        };
        let mut tokenizer = built.map_err(|what| header.unsupported(what))?;
        let phi3 = sentence_piece && header.text("general.architecture") == Some("phi3");
        let special: Vec<AddedToken> = tokens
            .iter()
            .zip(&kinds)
            .filter(|(text, kind)| matches!(**kind, 2..=5) && !text.is_empty())
            .map(|(text, kind)| added(text, *kind, phi3))
            .collect();
        tokenizer.add_tokens(special).map_err(|error| header.unsupported(error.to_string()))?;

        let mut ends: BTreeSet<u32> = [eos].into();
        ends.extend(named("tokenizer.ggml.eot_token_id"));
        ends.extend(named("tokenizer.ggml.eom_token_id"));
        let control: Vec<(u32, String)> = (0u32..)
            .zip(tokens.iter().zip(&kinds))
            .filter(|(id, (_, kind))| !matches!(**kind, NORMAL | USER_DEFINED | BYTE) || ends.contains(id))
            .map(|(id, (text, _))| (id, (*text).to_owned()))
            .collect();
        let map = byte_level::byte_map();
        let bytes = tokens.iter().zip(&kinds).map(|(text, kind)| match *kind {
            USER_DEFINED if !sentence_piece => text.as_bytes().to_vec(),
            _ if sentence_piece => sentence_piece::bytes(text, *kind == BYTE),
            _ => byte_level::decode_bytes(text, &map),
        });
        // SentencePiece models want their opening token unless they say otherwise.
        let add_bos = header.flag("tokenizer.ggml.add_bos_token").unwrap_or(sentence_piece);
        Ok(Self::new(tokenizer, bytes.collect(), control, ends, eos, bos.filter(|_| add_bos), bos))
    }

    fn new(
        tokenizer: Tokenizer,
        mut bytes: Vec<Vec<u8>>,
        control: Vec<(u32, String)>,
        mut ends: BTreeSet<u32>,
        eos: u32,
        opening: Option<u32>,
        bos: Option<u32>,
    ) -> Self {
        ends.extend(control.iter().filter(|(_, text)| END_NAMES.contains(&text.as_str())).map(|(id, _)| *id));
        for (id, _) in &control {
            if let Some(bytes) = bytes.get_mut(*id as usize) {
                bytes.clear();
            }
        }
        let name = name(&bytes);
        Self { tokenizer, bytes, control, ends, eos, bos, opening, name }
    }

    /// Token ids of `text`; control tokens written in it become themselves.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizeError> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|e| TokenizeError { reason: e.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Like [`Self::encode`], opened the way the model expects a sequence to open.
    pub fn encode_sequence(&self, text: &str) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = self.encode(text)?;
        if let Some(bos) = self.opening.filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Whether text is encoded with a space before it that was not there.
    pub fn opens_with_space(&self) -> bool {
        let ids = self.encode("x").unwrap_or_default();
        ids.first().is_some_and(|id| self.bytes_of(*id).starts_with(b" "))
    }

    /// The same for the same tokens under the same numbers, whatever file or machine they come from.
    pub fn name(&self) -> i64 {
        self.name
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

fn name(bytes: &[Vec<u8>]) -> i64 {
    let mut hasher = Sha256::new();
    for token in bytes {
        hasher.update((token.len() as u64).to_le_bytes());
        hasher.update(token);
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize()[..8]);
    i64::from_le_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expected: the `tokenizers` package, on the same vocabulary with the added tokens as Phi-3's tokenizer.json has them.
    #[test]
    fn phi3s_tokens_take_the_blanks_after_them_along() {
        let tokens = ["<unk>", "<s>", "</s>", "\u{2581}", "a", "\u{2581}a", "<|user|>", "<|end|>", "\n", "<0x0A>"];
        let kinds = [2, 3, 3, 1, 1, 1, 3, 3, 1, 6];
        let ids = |phi3: bool, text: &str| {
            let scores: Vec<f32> = (0..tokens.len()).map(|at| -(at as f32)).collect();
            let mut tokenizer = sentence_piece::build(&tokens, &scores, &kinds, true).unwrap();
            let special = tokens.iter().zip(kinds).filter(|(_, kind)| matches!(kind, 2..=5));
            tokenizer.add_tokens(special.map(|(text, kind)| added(text, kind, phi3))).unwrap();
            tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
        };
        assert_eq!(ids(true, "<|user|>\na<|end|>\n<|user|>"), [6, 5, 7, 6]);
        assert_eq!(ids(true, "<|user|>  a"), [6, 5]);
        assert_eq!(ids(true, "<s>\na"), [1, 3, 8, 4], "but those three do not");
        assert_eq!(ids(false, "<|user|>\na<|end|>\n<|user|>"), [6, 3, 8, 4, 7, 3, 8, 6]);
    }
}
