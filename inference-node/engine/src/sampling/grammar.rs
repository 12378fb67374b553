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
    /// llguidance failed at a token: the constraint is too complex, or it allows no text. A retry fails in the same way.
    #[error("constrained decoding failed, because the constraint is too complex or allows no text: {reason}")]
    Step {
        /// llguidance's error.
        reason: String,
    },
}

/// Maximum size of a constraint, in bytes of its text. Compiling takes time and memory in proportion to it.
const MAX_CONSTRAINT_BYTES: usize = 64 * 1024;
/// Maximum number of states of a constraint's lexer. Each takes 1 to 2 kB, which no memory estimate contains.
const MAX_LEXER_STATES: usize = 50_000;
/// Maximum length of a forced text that is split into tokens as the tokenizer splits it, in bytes; longer texts are split
/// greedily, in linear time, because this runs on the batcher's thread.
const MAX_CANONICAL_BYTES: usize = 4 * 1024;
/// Maximum length of llguidance's errors, in characters; they may quote the constraint.
const MAX_REASON_CHARS: usize = 300;

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
        if bytes.len() > MAX_CANONICAL_BYTES {
            return self.trie.greedy_tokenize(bytes);
        }
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
        check_size(format)?;
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
        let unusable = |reason: String| GrammarError::Unusable { kind, reason: shortened(&reason) };
        let parser = self.factory()?.create_parser(grammar).map_err(|error| unusable(error.to_string()))?;
        let mut matcher = Matcher::new(Ok(parser));
        // The first mask shows, away from the batcher's thread, whether the constraint allows any text.
        let first = matcher.compute_mask_or_eos();
        match matcher.get_error().or(first.err().map(|error| error.to_string())) {
            Some(reason) => Err(unusable(reason)),
            None => Ok(Grammar { matcher, eos: self.vocabulary.eos() }),
        }
    }
}

/// Refuses a constraint whose text is too long.
fn check_size(format: &OutputFormat) -> Result<(), GrammarError> {
    let (kind, bytes) = match format {
        OutputFormat::Text => return Ok(()),
        OutputFormat::JsonSchema { schema } => ("JSON schema", schema.to_string().len()),
        OutputFormat::Regex { pattern } => ("regular expression", pattern.len()),
        OutputFormat::Grammar { lark } => ("grammar", lark.len()),
    };
    if bytes <= MAX_CONSTRAINT_BYTES {
        return Ok(());
    }
    let reason = format!("it has {bytes} bytes, and at most {MAX_CONSTRAINT_BYTES} are possible");
    Err(GrammarError::Unusable { kind, reason })
}

/// The first line of an error of llguidance, without its state, cut to [`MAX_REASON_CHARS`].
fn shortened(reason: &str) -> String {
    let line = reason.split("<non-verbose/>").next().unwrap_or_default().trim();
    match line.char_indices().nth(MAX_REASON_CHARS) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line.to_owned(),
    }
}

fn step_error(error: impl std::fmt::Display) -> GrammarError {
    GrammarError::Step { reason: shortened(&error.to_string()) }
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
    let limits = factory.limits_mut();
    // The state of the parser contains generated text.
    limits.verbose_errors = false;
    limits.max_lexer_states = MAX_LEXER_STATES;
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
        valid.map(|count| count > 0).map_err(step_error)
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
        let allowed: SimpleVob = self.matcher.compute_mask_or_eos().map_err(step_error)?;
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
        self.matcher.consume_token(token).map_err(step_error)?;
        Ok(self.matcher.is_stopped())
    }
}
