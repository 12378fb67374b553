//! The tokenizer in a model's file: text to token ids and back.
//!
//! A GGUF file holds a vocabulary and the name of its tokenizer's kind; a folder in the Hugging Face layout holds a
//! whole tokenizer.json. Both give the same result: the ids that the model was trained on, and the bytes of each id,
//! which streaming, stop strings and constrained decoding work on.

mod byte_level;
mod encode;
mod json;
mod sentence_piece;
mod split_regex;
mod untrusted_rules;

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use cfq_memory::VocabularySize;
use sha2::{Digest, Sha256};
use tokenizers::tokenizer::Model;
use tokenizers::{AddedToken, Tokenizer};

use crate::model::control_names::{ControlNames, is_control_name};
use crate::model::file::ModelFile;
use crate::model::gguf::{GgufHeader, HeaderError};
use crate::model::prompt_text::PromptText;
use crate::model::time_limit::TimeLimit;
pub(crate) use crate::model::tokenizer::byte_level::char_to_byte;
use crate::model::tokenizer::encode::SplitStep;
pub use crate::model::tokenizer::encode::TokenizeError;

/// Names of tokens that end a turn. They are listed here because a file often declares only one of several tokens with
/// which its model ends a turn.
const END_TOKEN_NAMES: [&str; 8] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<|eom_id|>", "</s>", "<end_of_turn>"];

/// Creates an added token. Added tokens are recognized in the text before it is split and merged. All but three of
/// Phi-3's added tokens also take the white space after them (`rstrip` in its tokenizer.json), which GGUF cannot
/// express; llama.cpp excepts the same three.
fn added_token(text: &str, kind: i64, phi3: bool) -> AddedToken {
    let rstrip = phi3 && !matches!(text, "<unk>" | "<s>" | "<|endoftext|>");
    AddedToken::from(text.to_owned(), kind != USER_DEFINED).normalized(false).rstrip(rstrip)
}

/// Encodes text to token ids and maps token ids to bytes.
#[derive(Debug)]
pub struct Vocabulary {
    tokenizer: Tokenizer,
    /// The steps of its pre-tokenizer.
    split_steps: Vec<SplitStep>,
    /// Names that are text if they occur in a message's content: those of the control tokens, and turn markers that
    /// are declared as text.
    control_names: Arc<ControlNames>,
    /// Control tokens that merging must not give.
    unmergeable: HashSet<u32>,
    /// The bytes of each token; empty for control tokens.
    bytes: Vec<Vec<u8>>,
    /// Ids and names of the control tokens.
    control: Vec<(u32, String)>,
    /// Tokens that end the generation.
    end_tokens: BTreeSet<u32>,
    eos: u32,
    bos: Option<u32>,
    /// BOS token to insert before a sequence that does not begin with it; `None` if the model expects no BOS token.
    sequence_prefix: Option<u32>,
    /// BOS token to insert before a text that no chat template has rendered; `None` if the model expects no BOS token
    /// there.
    text_prefix: Option<u32>,
    fingerprint: i64,
}

/// The BOS token, and where it is inserted.
#[derive(Debug, Clone, Copy, Default)]
struct Bos {
    token: Option<u32>,
    before_prompts: bool,
    before_texts: bool,
}

// Token types of llama.cpp (`enum llama_token_type`). Unknown, control (3) and unused (5) tokens are never text here.
const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// Size of the vocabulary, for the memory estimate. Does not build the tokenizer.
///
/// # Errors
/// Errors of reading tokenizer.json.
pub fn vocabulary_size(file: &ModelFile) -> Result<VocabularySize, HeaderError> {
    let header = match file {
        ModelFile::Gguf(header) => header,
        ModelFile::Folder(folder) => return json::size(folder),
    };
    let tokens = header.get_strs("tokenizer.ggml.tokens").unwrap_or_default();
    let text = tokens.iter().map(|t| t.len() as u64).sum();
    let merges = match header.get_strs("tokenizer.ggml.merges") {
        Some(merges) => merges.len(),
        // SentencePiece: its merges are derived from the pieces, about two per piece, since many pieces can be split in
        // more than one way.
        None => tokens.len() * 2,
    };
    Ok(VocabularySize { tokens: tokens.len() as u64, text, merges: merges as u64 })
}

impl Vocabulary {
    /// Builds the tokenizer of `file`.
    ///
    /// # Errors
    /// [`HeaderError::Unsupported`] for a tokenizer of an unsupported kind or with missing parts; errors of reading
    /// tokenizer.json.
    pub fn read(file: &ModelFile) -> Result<Self, HeaderError> {
        match file {
            ModelFile::Gguf(header) => Self::from_header(header),
            ModelFile::Folder(folder) => json::read(folder),
        }
    }

    /// Builds the tokenizer of a model with `embedding_rows` embeddings.
    ///
    /// # Errors
    /// The errors of [`Self::read`]; [`HeaderError::Unsupported`] if the tokenizer has more tokens than embeddings.
    pub(crate) fn read_for(file: &ModelFile, embedding_rows: u64) -> Result<Self, HeaderError> {
        let vocabulary = Self::read(file)?;
        if vocabulary.len() as u64 > embedding_rows {
            let tokens = vocabulary.len();
            let what = format!("its tokenizer has {tokens} tokens, but the model only {embedding_rows} embeddings");
            return Err(file.unsupported(what));
        }
        Ok(vocabulary)
    }

    fn from_header(header: &GgufHeader) -> Result<Self, HeaderError> {
        let missing = |key: &str| header.unsupported(format!("its header has no usable {key}"));
        let model = header.get_str("tokenizer.ggml.model").ok_or_else(|| missing("tokenizer.ggml.model"))?;
        let tokens = header.get_strs("tokenizer.ggml.tokens").ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
        let kinds = match header.get_i64s("tokenizer.ggml.token_type") {
            Some(kinds) if kinds.len() == tokens.len() => kinds,
            Some(_) => return Err(missing("tokenizer.ggml.token_type")),
            None => vec![NORMAL; tokens.len()],
        };
        let token_id = |key: &str| {
            let id = u32::try_from(header.get_u64(key)?).ok()?;
            ((id as usize) < tokens.len()).then_some(id)
        };
        let eos = token_id("tokenizer.ggml.eos_token_id").ok_or_else(|| missing("tokenizer.ggml.eos_token_id"))?;
        let bos = token_id("tokenizer.ggml.bos_token_id");
        let sentence_piece = match model {
            "gpt2" => false,
            "llama" => true,
            other => {
                return Err(header.unsupported(format!(
                    "its tokenizer is {other:?}; this version supports byte-level BPE (\"gpt2\") and SentencePiece \
                     (\"llama\")"
                )));
            }
        };
        let built = if sentence_piece {
            let scores = header.get_f32s("tokenizer.ggml.scores").filter(|s| s.len() == tokens.len());
            let scores = scores.ok_or_else(|| missing("tokenizer.ggml.scores"))?;
            let prefix = header.get_bool("tokenizer.ggml.add_space_prefix").unwrap_or(true);
            sentence_piece::build(&tokens, &scores, &kinds, prefix)
        } else {
            let merges = header.get_strs("tokenizer.ggml.merges").ok_or_else(|| missing("tokenizer.ggml.merges"))?;
            let pre = header.get_str("tokenizer.ggml.pre").unwrap_or("default");
            byte_level::build(&tokens, &merges, pre)
        };
        let mut tokenizer = built.map_err(|what| header.unsupported(what))?;
        let mut end_tokens: BTreeSet<u32> = [eos].into();
        end_tokens.extend(token_id("tokenizer.ggml.eot_token_id"));
        end_tokens.extend(token_id("tokenizer.ggml.eom_token_id"));
        // Some files declare BOS as an ordinary token, and some name a letter as BOS, which must stay one.
        let is_bos =
            |id: u32, text: &str| bos == Some(id) && text.len() > 2 && text.starts_with('<') && text.ends_with('>');
        let phi3 = sentence_piece && header.get_str("general.architecture") == Some("phi3");
        let special: Vec<AddedToken> = tokens
            .iter()
            .zip(&kinds)
            .zip(0u32..)
            .filter(|((text, kind), id)| {
                // Some files declare a token that ends a turn as an ordinary one.
                matches!(**kind, 2..=5) && !text.is_empty()
                    || end_tokens.contains(id) && is_control_name(text)
                    || is_bos(*id, text)
            })
            .map(|((text, kind), _)| added_token(text, *kind, phi3))
            .collect();
        tokenizer.add_tokens(special).map_err(|error| header.unsupported(error.to_string()))?;

        let control: Vec<(u32, String)> = (0u32..)
            .zip(tokens.iter().zip(&kinds))
            .filter(|(id, (text, kind))| {
                !matches!(**kind, NORMAL | USER_DEFINED | BYTE) || end_tokens.contains(id) || is_bos(*id, text)
            })
            .map(|(id, (text, _))| (id, (*text).to_owned()))
            .collect();
        let map = byte_level::char_to_byte();
        let bytes = tokens.iter().zip(&kinds).map(|(text, kind)| match *kind {
            USER_DEFINED if !sentence_piece => text.as_bytes().to_vec(),
            _ if sentence_piece => sentence_piece::piece_bytes(text, *kind == BYTE),
            _ => byte_level::token_bytes(text, &map),
        });
        // The default is to add BOS for SentencePiece models only.
        let add_bos = header.get_bool("tokenizer.ggml.add_bos_token").unwrap_or(sentence_piece);
        // llama.cpp adds it for these tokenizers, too. The chat templates of their models contain it.
        let pre = header.get_str("tokenizer.ggml.pre").unwrap_or_default();
        let before_texts = header
            .get_bool("tokenizer.ggml.add_bos_token")
            .unwrap_or(sentence_piece || matches!(pre, "llama3" | "llama-v3" | "llama-bpe" | "tekken"));
        let bos = Bos { token: bos, before_prompts: add_bos, before_texts };
        let built = Self::new(tokenizer, bytes.collect(), control, end_tokens, eos, bos);
        built.map_err(|what| header.unsupported(what))
    }

    fn new(
        tokenizer: Tokenizer,
        mut bytes: Vec<Vec<u8>>,
        control: Vec<(u32, String)>,
        mut end_tokens: BTreeSet<u32>,
        eos: u32,
        bos: Bos,
    ) -> Result<Self, String> {
        let named_ends = control.iter().filter(|(_, text)| END_TOKEN_NAMES.contains(&text.as_str()));
        end_tokens.extend(named_ends.map(|(id, _)| *id));
        for (id, _) in &control {
            if let Some(bytes) = bytes.get_mut(*id as usize) {
                bytes.clear();
            }
        }
        let fingerprint = fingerprint(&bytes);
        let split_steps = encode::split_steps(tokenizer.get_pre_tokenizer())?;
        let added = tokenizer.get_added_tokens_decoder();
        let markers = added.values().map(|token| token.content.clone()).filter(|name| is_control_name(name));
        let names = control.iter().map(|(_, name)| name.clone()).chain(markers);
        let control_names = Arc::new(ControlNames::new(names.collect::<BTreeSet<_>>()));
        // The token for unknown characters is a control token that merging gives.
        let unknown = tokenizer.get_model().tokenize("\u{10FFFF}").unwrap_or_default();
        let is_unknown = |id: u32| unknown.iter().any(|token| token.id == id);
        let unmergeable = control.iter().map(|(id, _)| *id).filter(|id| !is_unknown(*id)).collect();
        Ok(Self {
            tokenizer,
            split_steps,
            control_names,
            unmergeable,
            bytes,
            control,
            end_tokens,
            eos,
            bos: bos.token,
            sequence_prefix: bos.token.filter(|_| bos.before_prompts),
            text_prefix: bos.token.filter(|_| bos.before_texts),
            fingerprint,
        })
    }

    /// Token ids of `text`, in which names of control tokens become those tokens.
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizeError> {
        self.encode_text(&PromptText::of_template(text), &TimeLimit::none())
    }

    /// Token ids of `text`, in which names of control tokens are text.
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text, or the limit stops it.
    pub fn encode_content(&self, text: &str, limit: &TimeLimit) -> Result<Vec<u32>, TokenizeError> {
        self.encode_text(&PromptText::of_content(text), limit)
    }

    /// Token ids of a prompt: with a BOS token, if the model expects one and the prompt does not begin with it. Names
    /// of control tokens become those tokens, unless one of their characters comes from a message's content.
    ///
    /// # Errors
    /// The errors of [`Self::encode_content`].
    pub fn encode_prompt(&self, prompt: &PromptText, limit: &TimeLimit) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = self.encode_text(prompt, limit)?;
        if let Some(bos) = self.sequence_prefix.filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Token ids of a text that the model continues, without a chat template: with a BOS token, if the model expects one.
    /// Names of control tokens are text.
    ///
    /// # Errors
    /// The errors of [`Self::encode_content`].
    pub fn encode_plain(&self, text: &str, limit: &TimeLimit) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = self.encode_content(text, limit)?;
        if let Some(bos) = self.text_prefix {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Whether encoding adds a space before the text.
    pub(crate) fn adds_space_prefix(&self) -> bool {
        let ids = self.encode("x").unwrap_or_default();
        ids.first().is_some_and(|id| self.token_bytes(*id).starts_with(b" "))
    }

    /// Hash of all tokens' bytes in order of their ids: equal for equal vocabularies, on any machine and from any file.
    pub fn fingerprint(&self) -> i64 {
        self.fingerprint
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the vocabulary has no tokens.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The bytes of a token, which may end within a character. Empty for control tokens and unknown ids.
    pub fn token_bytes(&self, token: u32) -> &[u8] {
        self.bytes.get(token as usize).map_or(&[], Vec::as_slice)
    }

    /// Whether the token ends the generation.
    pub fn is_end_token(&self, token: u32) -> bool {
        self.end_tokens.contains(&token)
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// Control tokens, which are not text, with their names.
    pub fn control_tokens(&self) -> &[(u32, String)] {
        &self.control
    }

    /// Names that are text if they occur in a message's content.
    pub(crate) fn control_names(&self) -> &Arc<ControlNames> {
        &self.control_names
    }

    fn name_of(&self, token: u32) -> &str {
        self.control.iter().find(|(id, _)| *id == token).map_or("", |(_, text)| text)
    }

    /// Name of the end-of-sequence token.
    pub(crate) fn eos_name(&self) -> &str {
        self.name_of(self.eos)
    }

    /// Name of the beginning-of-sequence token; empty if there is none.
    pub(crate) fn bos_name(&self) -> &str {
        self.bos.map_or("", |bos| self.name_of(bos))
    }
}

/// The first eight bytes of the SHA-256 of all tokens.
fn fingerprint(bytes: &[Vec<u8>]) -> i64 {
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

    // Expected: the `tokenizers` package, on the same vocabulary with the added tokens of Phi-3's tokenizer.json.
    #[test]
    fn phi3_added_tokens_take_the_white_space_after_them() {
        let tokens = ["<unk>", "<s>", "</s>", "\u{2581}", "a", "\u{2581}a", "<|user|>", "<|end|>", "\n", "<0x0A>"];
        let kinds = [2, 3, 3, 1, 1, 1, 3, 3, 1, 6];
        let ids = |phi3: bool, text: &str| {
            let scores: Vec<f32> = (0..tokens.len()).map(|at| -(at as f32)).collect();
            let mut tokenizer = sentence_piece::build(&tokens, &scores, &kinds, true).unwrap();
            let special = tokens.iter().zip(kinds).filter(|(_, kind)| matches!(kind, 2..=5));
            tokenizer.add_tokens(special.map(|(text, kind)| added_token(text, kind, phi3))).unwrap();
            tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
        };
        assert_eq!(ids(true, "<|user|>\na<|end|>\n<|user|>"), [6, 5, 7, 6]);
        assert_eq!(ids(true, "<|user|>  a"), [6, 5]);
        assert_eq!(ids(true, "<s>\na"), [1, 3, 8, 4], "the three exceptions do not");
        assert_eq!(ids(false, "<|user|>\na<|end|>\n<|user|>"), [6, 3, 8, 4, 7, 3, 8, 6]);
    }
}
