//! Constrained decoding: restricts the next token so that the text matches a JSON schema, a regular expression or a
//! grammar.
//!
//! llguidance builds one parser factory per model, from the bytes of every token, and with it compiles a grammar per
//! request. The factory is built at the first constrained request, because building it takes a moment and many models
//! never need it.

use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};

use cfq_proto::job::OutputFormat;

use crate::model::time_limit::TimeLimit;
use crate::model::tokenizer::Vocabulary;

/// Why constrained decoding failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GrammarError {
    /// llguidance rejects the vocabulary.
    #[error("the tokens of this model cannot be used for constrained output: {reason}")]
    Tokens {
        /// llguidance's error.
        reason: String,
    },
    /// The schema, expression or grammar of the request is invalid or not supported.
    #[error("this {kind} cannot constrain the output: {reason}")]
    Unusable {
        /// "JSON schema", "regular expression" or "grammar".
        kind: &'static str,
        /// llguidance's error.
        reason: String,
    },
    /// llguidance failed at a token.
    #[error("constrained decoding failed: {reason}")]
    Step {
        /// llguidance's error.
        reason: String,
    },
}

/// Memory of all tries that llguidance builds for a vocabulary and its slices, in multiples of the vocabulary's own
/// trie; measured.
const TRIES_PER_VOCABULARY: u64 = 14;

/// Adapter through which llguidance accesses the vocabulary.
struct TokenizerAdapter {
    trie: TokTrie,
    vocabulary: Arc<Vocabulary>,
}

impl TokenizerEnv for TokenizerAdapter {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Returns false if the tokenizer adds a space before the text: then a fragment tokenizes differently from the same
    /// characters within the whole text, and its tokens must not be forced.
    fn tokenize_is_canonical(&self) -> bool {
        !self.vocabulary.adds_space_prefix()
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        // Text that the tokenizer cannot encode is split greedily into the longest matching tokens.
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            match self.vocabulary.encode_content(text, &TimeLimit::none()) {
                Ok(ids) => ids,
                Err(_) => self.trie.greedy_tokenize(text.as_bytes()),
            }
        })
    }
}

/// Compiles grammars for one model.
pub struct Grammars {
    vocabulary: Arc<Vocabulary>,
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
}

impl Grammars {
    /// Creates the compiler. The parser factory is built on the first constrained request.
    pub fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self { vocabulary, factory: OnceLock::new() }
    }

    /// Estimated memory of the parser factory, in bytes; 0 until the first constrained request builds it.
    pub fn bytes(&self) -> u64 {
        match self.factory.get() {
            Some(Ok(factory)) => trie_bytes(factory.tok_env().tok_trie()),
            Some(Err(_)) | None => 0,
        }
    }

    fn factory(&self) -> Result<&ParserFactory, GrammarError> {
        self.factory.get_or_init(|| build_factory(&self.vocabulary)).as_ref().map_err(Clone::clone)
    }

    /// Compiles the constraint of `format`; `None` for free text. Takes milliseconds, or longer on the first
    /// constrained request, which builds the parser factory.
    ///
    /// # Errors
    /// `GrammarError::Unusable` if the request's schema, expression or grammar cannot be used,
    /// `GrammarError::Tokens` if the model's vocabulary cannot.
    pub fn compile(&self, format: &OutputFormat) -> Result<Option<Grammar>, GrammarError> {
        match format {
            OutputFormat::Text => Ok(None),
            OutputFormat::JsonSchema { schema } => self.json_schema(schema).map(Some),
            OutputFormat::Regex { pattern } => {
                self.compile_grammar("regular expression", TopLevelGrammar::from_regex(pattern)).map(Some)
            }
            OutputFormat::Grammar { lark } => {
                self.compile_grammar("grammar", TopLevelGrammar::from_lark(lark.clone())).map(Some)
            }
        }
    }

    fn json_schema(&self, schema: &serde_json::Value) -> Result<Grammar, GrammarError> {
        let mut schema = schema.clone();
        if let Some(object) = schema.as_object_mut() {
            // The spacing is fixed: if it were free, a model could spend its whole token budget on white space.
            let spacing =
                serde_json::json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
            object.insert("x-guidance".to_owned(), spacing);
        }
        self.compile_grammar("JSON schema", TopLevelGrammar::from_json_schema(schema))
    }

    fn compile_grammar(&self, kind: &'static str, grammar: TopLevelGrammar) -> Result<Grammar, GrammarError> {
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

fn build_factory(vocabulary: &Arc<Vocabulary>) -> Result<ParserFactory, GrammarError> {
    let mut words: Vec<Vec<u8>> = (0..vocabulary.len() as u32).map(|t| vocabulary.token_bytes(t).to_vec()).collect();
    for (token, name) in vocabulary.control_tokens() {
        // llguidance recognizes control tokens by this marker.
        words[*token as usize] = [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat();
    }
    let info = TokRxInfo::new(words.len() as u32, vocabulary.eos());
    let env: TokEnv = Arc::new(TokenizerAdapter { trie: TokTrie::from(&info, &words), vocabulary: vocabulary.clone() });
    let mut factory = ParserFactory::new_simple(&env).map_err(|e| GrammarError::Tokens { reason: e.to_string() })?;
    factory.quiet();
    Ok(factory)
}

/// Estimated bytes of the vocabulary's trie and of the tries of its slices.
fn trie_bytes(trie: &TokTrie) -> u64 {
    let words: u64 = (0..trie.vocab_size() as u32).map(|token| trie.token(token).len() as u64).sum();
    TRIES_PER_VOCABULARY * (trie.vocab_size() as u64 * 12 + words + 8 * trie.root().subtree_size() as u64)
}

/// The state of one constrained sequence.
pub struct Grammar {
    matcher: Matcher,
    eos: u32,
}

impl Grammar {
    /// Whether `token` may come next; far cheaper than [`Self::mask`].
    ///
    /// # Errors
    /// [`GrammarError::Step`].
    pub fn allows(&mut self, token: u32) -> Result<bool, GrammarError> {
        let valid = self.matcher.validate_tokens(&[token]);
        valid.map(|count| count > 0).map_err(|e| GrammarError::Step { reason: e.to_string() })
    }

    /// The tokens that must come next, in the tokenizer's own segmentation; [`Self::accept`] must be called for each.
    /// Empty if more than one token is possible, or if the text that follows may change the segmentation.
    pub fn forced_tokens(&mut self) -> Vec<u32> {
        if self.matcher.is_stopped() { Vec::new() } else { self.matcher.compute_ff_tokens() }
    }

    /// Sets the logits of all tokens that may not come next to minus infinity.
    ///
    /// # Errors
    /// [`GrammarError::Step`].
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), GrammarError> {
        let allowed: SimpleVob =
            self.matcher.compute_mask_or_eos().map_err(|e| GrammarError::Step { reason: e.to_string() })?;
        for (token, logit) in (0u32..).zip(logits) {
            // The output matrix may have padding rows without a token.
            if token as usize >= allowed.len() || !allowed.is_allowed(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Advances the grammar by the sampled token. Returns true if the text is complete.
    ///
    /// # Errors
    /// [`GrammarError::Step`] if the token is not allowed.
    pub fn accept(&mut self, token: u32) -> Result<bool, GrammarError> {
        if token == self.eos {
            return Ok(true);
        }
        self.matcher.consume_token(token).map_err(|e| GrammarError::Step { reason: e.to_string() })?;
        Ok(self.matcher.is_stopped())
    }
}
