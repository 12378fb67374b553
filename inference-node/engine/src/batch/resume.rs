//! The initial state of a sequence: its prompt, and the tokens that an earlier generation delivered before it was
//! lost.
//!
//! The delivered tokens are replayed through the grammar and the text stream as if they were sampled here. If they are
//! not valid (another vocabulary, rejected by the grammar, or an end token among them), this model cannot have
//! generated them for this prompt. A silent restart could contradict text that readers have already received. Therefore
//! the call fails with the reason; the caller can repeat it with the prompt alone.

use cfq_proto::job::{GeneratedTokens, OutputFormat, Sampling};

use crate::model::tokenizer::Vocabulary;
use crate::sampling::grammar::{Grammar, GrammarError, Grammars};
use crate::sampling::text::TextStream;

/// Why a sequence cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// The output format has no usable grammar.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The sequence cannot resume after the delivered tokens.
    #[error("cannot resume after the {tokens} tokens already delivered: {conflict}")]
    Conflict {
        /// Number of delivered tokens.
        tokens: usize,
        /// Why the output cannot continue after the delivered tokens.
        conflict: ResumeConflict,
    },
}

/// Why an output cannot continue after the delivered tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ResumeConflict {
    /// The ids of the delivered tokens belong to another vocabulary than that of the loaded model.
    #[error("they belong to another vocabulary than the model's")]
    Vocabulary,
    /// There are more delivered tokens than `max_tokens`.
    #[error("they are more than the request allows (max_tokens)")]
    TooMany,
    /// The grammar rejects the delivered tokens, or they contain an end token or a stop string.
    #[error("they do not match the request: its output format forbids them, or one of them already ends the output")]
    Mismatch,
    /// The KV pool holds the prompt, but not the prompt and the delivered tokens.
    #[error("the KV pool is too small for the prompt together with them")]
    PoolTooSmall,
}

/// The state of a sequence before its first pass.
pub struct SequenceInit {
    /// Tokens of the prompt, then the delivered tokens that are kept ([`Self::resumed_tokens`]).
    pub tokens: Vec<u32>,
    /// Number of prompt tokens.
    pub prompt_len: usize,
    /// Grammar of the output, advanced past the delivered tokens; `None` if the output is not constrained.
    pub grammar: Option<Grammar>,
    /// Detokenizer, advanced past the delivered tokens.
    pub stream: TextStream,
    /// Final text of the delivered tokens, without withheld bytes.
    pub text: String,
}

impl SequenceInit {
    /// Compiles the grammar and replays the `generated` tokens.
    ///
    /// # Errors
    /// [`ResumeError`]: the grammar is unusable, or the output cannot continue after the tokens.
    pub fn new(
        prompt: Vec<u32>,
        sampling: &Sampling,
        format: &OutputFormat,
        generated: &GeneratedTokens,
        (vocabulary, grammars): (&Vocabulary, &Grammars),
    ) -> Result<Self, ResumeError> {
        let mut init = Self {
            prompt_len: prompt.len(),
            tokens: prompt,
            grammar: grammars.compile(format)?,
            stream: TextStream::new(&sampling.stop),
            text: String::new(),
        };
        // The last delivered token is dropped and sampled again, so that an end after it is detected as in any other
        // step.
        let Some((_, kept)) = generated.tokens.split_last() else { return Ok(init) };
        let fail = |conflict| Err(ResumeError::Conflict { tokens: generated.tokens.len(), conflict });
        if generated.vocabulary != vocabulary.fingerprint() {
            return fail(ResumeConflict::Vocabulary);
        }
        if kept.len() >= sampling.max_tokens as usize {
            return fail(ResumeConflict::TooMany);
        }
        if !kept.iter().all(|token| init.replay(*token, vocabulary)) {
            return fail(ResumeConflict::Mismatch);
        }
        Ok(init)
    }

    /// Number of delivered tokens that are kept: all but the last, which is sampled again.
    pub fn resumed_tokens(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Appends a delivered token. Returns false if the output cannot continue after it.
    fn replay(&mut self, token: u32, vocabulary: &Vocabulary) -> bool {
        if token as usize >= vocabulary.len() || vocabulary.is_end_token(token) {
            return false;
        }
        let continues = self.grammar.as_mut().is_none_or(|grammar| matches!(grammar.accept(token), Ok(false)));
        let piece = self.stream.push(vocabulary.token_bytes(token));
        self.text.push_str(&piece.text);
        self.tokens.push(token);
        continues && !piece.stopped
    }
}
