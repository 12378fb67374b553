//! Constrained decoding: which tokens may come next, so that the text fits a JSON schema, a regular expression or a grammar.
//!
//! llguidance needs the bytes of every token once per model; a grammar is then compiled per request. The factory is built
//! on the first constrained request, since it takes a moment and many models never need it.

use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};

use cfq_proto::job::OutputFormat;

use crate::models::tokenizer::Vocabulary;

#[derive(Debug, Clone, thiserror::Error)]
pub enum GrammarError {
    #[error("the tokens of this model cannot be used for constrained output: {reason}")]
    Tokens { reason: String },
    #[error("this {kind} cannot constrain the output: {reason}")]
    Unusable { kind: &'static str, reason: String },
    #[error("constrained decoding failed: {reason}")]
    Step { reason: String },
}

/// Lists of the vocabulary's size that its trie, and those of the slices that llguidance cuts it into, come to; measured.
const TRIES: u64 = 14;

struct Tokens {
    trie: TokTrie,
    vocabulary: Arc<Vocabulary>,
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Where text is opened with a space of the tokenizer's own, the tokens of a piece in the middle are not those of the
    /// whole, and must not be forced.
    fn tokenize_is_canonical(&self) -> bool {
        !self.vocabulary.opens_with_space()
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        // Text that cannot be tokenized as a whole is still covered byte by byte.
        self.trie.tokenize_with_greedy_fallback(bytes, |text| match self.vocabulary.encode(text) {
            Ok(ids) => ids,
            Err(_) => self.trie.greedy_tokenize(text.as_bytes()),
        })
    }
}

/// Makes grammars for one model.
pub struct Grammars {
    vocabulary: Arc<Vocabulary>,
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
}

impl Grammars {
    pub fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self { vocabulary, factory: OnceLock::new() }
    }

    /// Bytes of what the first constrained request made, about; 0 before it.
    pub fn bytes(&self) -> u64 {
        match self.factory.get() {
            Some(Ok(factory)) => trie_bytes(factory.tok_env().tok_trie()),
            Some(Err(_)) | None => 0,
        }
    }

    fn factory(&self) -> Result<&ParserFactory, GrammarError> {
        self.factory.get_or_init(|| build(&self.vocabulary)).as_ref().map_err(Clone::clone)
    }

    /// What `format` asks for; `None` for free text. Takes milliseconds, the first time longer.
    pub fn of(&self, format: &OutputFormat) -> Result<Option<Grammar>, GrammarError> {
        match format {
            OutputFormat::Text => Ok(None),
            OutputFormat::JsonSchema { schema } => self.json_schema(schema).map(Some),
            OutputFormat::Regex { pattern } => {
                self.compile("regular expression", TopLevelGrammar::from_regex(pattern)).map(Some)
            }
            OutputFormat::Grammar { lark } => {
                self.compile("grammar", TopLevelGrammar::from_lark(lark.clone())).map(Some)
            }
        }
    }

    fn json_schema(&self, schema: &serde_json::Value) -> Result<Grammar, GrammarError> {
        let mut schema = schema.clone();
        if let Some(object) = schema.as_object_mut() {
            // One canonical spacing: a model that may choose can spend its whole budget on blanks.
            let spacing =
                serde_json::json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
            object.insert("x-guidance".to_owned(), spacing);
        }
        self.compile("JSON schema", TopLevelGrammar::from_json_schema(schema))
    }

    fn compile(&self, kind: &'static str, grammar: TopLevelGrammar) -> Result<Grammar, GrammarError> {
        let parser = self
            .factory()?
            .create_parser(grammar)
            .map_err(|error| GrammarError::Unusable { kind, reason: error.to_string() })?;
        let matcher = Matcher::new(Ok(parser));
        match matcher.get_error() {
            Some(reason) => Err(GrammarError::Unusable { kind, reason }),
            None => Ok(Grammar { matcher, eos: self.vocabulary.eos() }),
        }
    }
}

fn build(vocabulary: &Arc<Vocabulary>) -> Result<ParserFactory, GrammarError> {
    let mut words: Vec<Vec<u8>> = (0..vocabulary.len() as u32).map(|t| vocabulary.bytes_of(t).to_vec()).collect();
    for (token, name) in vocabulary.control() {
        // llguidance's mark for tokens that are not text.
        words[*token as usize] = [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat();
    }
    let info = TokRxInfo::new(words.len() as u32, vocabulary.eos());
    let env: TokEnv = Arc::new(Tokens { trie: TokTrie::from(&info, &words), vocabulary: vocabulary.clone() });
    let mut factory = ParserFactory::new_simple(&env).map_err(|e| GrammarError::Tokens { reason: e.to_string() })?;
    factory.quiet();
    Ok(factory)
}

/// The vocabulary's trie and those of its slices, which are parts of it: each has lists as long as the vocabulary.
fn trie_bytes(trie: &TokTrie) -> u64 {
    let words: u64 = (0..trie.vocab_size() as u32).map(|token| trie.token(token).len() as u64).sum();
    TRIES * (trie.vocab_size() as u64 * 12 + words + 8 * trie.root().subtree_size() as u64)
}

/// The state of one constrained sequence.
pub struct Grammar {
    matcher: Matcher,
    eos: u32,
}

impl Grammar {
    /// Whether `token` may come next; far cheaper than the mask of all tokens.
    pub fn allows(&mut self, token: u32) -> Result<bool, GrammarError> {
        let valid = self.matcher.validate_tokens(&[token]);
        valid.map(|count| count > 0).map_err(|e| GrammarError::Step { reason: e.to_string() })
    }

    /// What must come next whatever the model would say, as the tokenizer cuts it; [`Self::accept`] takes it up. Empty where
    /// there is a choice, or where what follows may change how the text is cut.
    pub fn forced(&mut self) -> Vec<u32> {
        if self.matcher.is_stopped() { Vec::new() } else { self.matcher.compute_ff_tokens() }
    }

    /// Leaves only what may come next.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), GrammarError> {
        let allowed: SimpleVob =
            self.matcher.compute_mask_or_eos().map_err(|e| GrammarError::Step { reason: e.to_string() })?;
        for (token, logit) in (0u32..).zip(logits) {
            // Padding rows of the output matrix have no token.
            if token as usize >= allowed.len() || !allowed.is_allowed(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Takes up the chosen token; true when the text is complete.
    pub fn accept(&mut self, token: u32) -> Result<bool, GrammarError> {
        if token == self.eos {
            return Ok(true);
        }
        self.matcher.consume_token(token).map_err(|e| GrammarError::Step { reason: e.to_string() })?;
        Ok(self.matcher.is_stopped())
    }
}
