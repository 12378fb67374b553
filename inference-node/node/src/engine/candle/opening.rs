//! What a sequence begins with: its prompt, and perhaps what an earlier attempt wrote before its node was lost.
//!
//! The earlier tokens go through the same grammar and the same text stream as if they had been drawn here. If they do not
//! pass (another vocabulary, another grammar, an end in the middle), they are not this prompt's, and the sequence begins
//! with the prompt alone.

use cfq_proto::job::{OutputFormat, Sampling, Written};

use crate::engine::grammar::{Grammar, GrammarError, Grammars};
use crate::engine::text::TextStream;
use crate::models::tokenizer::Vocabulary;

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
    ) -> Result<Self, GrammarError> {
        // The last one is drawn again: whatever ends a text is seen then, and as it always is.
        let kept = match written.tokens.split_last() {
            Some((_, kept)) if written.vocabulary == vocabulary.name() && kept.len() < sampling.max_tokens as usize => {
                kept
            }
            Some(_) | None => &[],
        };
        let begin = |tokens| -> Result<Self, GrammarError> {
            let stream = TextStream::new(&sampling.stop);
            Ok(Self { prompt: prompt.len(), tokens, grammar: grammars.of(format)?, stream, text: String::new() })
        };
        let mut opening = begin(prompt.clone())?;
        if kept.iter().all(|token| opening.replay(*token, vocabulary)) {
            return Ok(opening);
        }
        tracing::warn!(tokens = kept.len(), "what an earlier attempt wrote does not fit this prompt, beginning anew");
        begin(prompt.clone())
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
