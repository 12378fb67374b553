//! What a sequence begins with: its prompt, and perhaps what an earlier attempt wrote before its node was lost.
//!
//! The earlier tokens go through the same grammar and the same text stream as if they had been drawn here. If they do not
//! pass (another vocabulary, another grammar, an end in the middle), they are not this model's answer to this prompt.
//! Somebody may have read them already, so that is an error: beginning anew in silence would contradict them. The attempt
//! fails with the reason, and the one after it begins with the prompt alone.

use cfq_proto::job::{OutputFormat, Sampling, Written};

use crate::engine::grammar::{Grammar, GrammarError, Grammars};
use crate::engine::text::TextStream;
use crate::models::tokenizer::Vocabulary;

#[derive(Debug, thiserror::Error)]
pub enum OpeningError {
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    #[error("{tokens} tokens of the answer that an earlier attempt delivered cannot be gone on from here: {why}")]
    Contradicts { tokens: usize, why: &'static str },
}

pub struct Opening {
    /// The prompt's, then those written already.
    pub tokens: Vec<u32>,
    pub prompt: usize,
    pub grammar: Option<Grammar>,
    pub stream: TextStream,
    /// What those written already say, as far as it is final.
    pub text: String,
}

impl Opening {
    pub fn new(
        prompt: Vec<u32>,
        sampling: &Sampling,
        format: &OutputFormat,
        written: &Written,
        (vocabulary, grammars): (&Vocabulary, &Grammars),
    ) -> Result<Self, OpeningError> {
        let mut opening = Self {
            prompt: prompt.len(),
            tokens: prompt,
            grammar: grammars.of(format)?,
            stream: TextStream::new(&sampling.stop),
            text: String::new(),
        };
        // The last one is drawn again: whatever ends a text is seen then, and as it always is.
        let Some((_, kept)) = written.tokens.split_last() else { return Ok(opening) };
        let contradicts = |why| Err(OpeningError::Contradicts { tokens: written.tokens.len(), why });
        if written.vocabulary != vocabulary.name() {
            return contradicts("they are of another vocabulary");
        }
        if kept.len() >= sampling.max_tokens as usize {
            return contradicts("they are more than were asked for");
        }
        if !kept.iter().all(|token| opening.replay(*token, vocabulary)) {
            return contradicts("they do not fit what was asked for");
        }
        Ok(opening)
    }

    pub fn resumed(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// False if no text goes on after this token.
    fn replay(&mut self, token: u32, vocabulary: &Vocabulary) -> bool {
        if token as usize >= vocabulary.len() || vocabulary.is_end(token) {
            return false;
        }
        let goes_on = self.grammar.as_mut().is_none_or(|grammar| matches!(grammar.accept(token), Ok(false)));
        let piece = self.stream.push(vocabulary.bytes_of(token));
        self.text.push_str(&piece.text);
        self.tokens.push(token);
        goes_on && !piece.stopped
    }
}
