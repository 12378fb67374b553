//! Text to token ids, in the steps of the tokenizers library, with two additions: names of control tokens in a
//! message's content are text, and every step checks a time limit.
//!
//! The library finds added tokens before it normalizes, splits and merges the rest. A name that must be text gets a
//! stand-in for one of its characters while added tokens are searched. The character is restored right after that, so
//! that the other steps see the text as it is. All other text has the same tokens as in the library.

use std::borrow::Cow;

use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::tokenizer::{Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Token};

use crate::model::prompt_text::PromptText;
use crate::model::stand_ins::StandIns;
use crate::model::time_limit::{Stopped, TimeLimit};
use crate::model::tokenizer::Vocabulary;
use crate::model::tokenizer::split_regex::SplitRegex;

type LibraryError = Box<dyn std::error::Error + Send + Sync>;

/// The tokenizer cannot encode a text.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// The tokenizer fails on this text.
    #[error("the prompt cannot be tokenized: {reason}")]
    Failed {
        /// The tokenizer's error.
        reason: String,
    },
    /// The time limit ended, or the caller no longer waits for the tokens.
    #[error("the prompt was not tokenized: {0}")]
    Stopped(Stopped),
}

impl From<LibraryError> for TokenizeError {
    fn from(error: LibraryError) -> Self {
        match error.downcast_ref::<Stopped>() {
            Some(stopped) => Self::Stopped(*stopped),
            None => Self::Failed { reason: error.to_string() },
        }
    }
}

/// One step of the pre-tokenizer.
#[derive(Debug)]
pub(super) enum SplitStep {
    /// A regular expression of the model's file.
    Regex(SplitRegex),
    /// A rule of the tokenizers library, which takes linear time.
    Rule(PreTokenizerWrapper),
}

/// The steps of a pre-tokenizer.
///
/// # Errors
/// If a regular expression cannot be compiled within the limits of [`SplitRegex`].
pub(super) fn split_steps(pre_tokenizer: Option<&PreTokenizerWrapper>) -> Result<Vec<SplitStep>, String> {
    match pre_tokenizer {
        None => Ok(Vec::new()),
        Some(PreTokenizerWrapper::Sequence(steps)) => {
            let steps = steps.as_ref().iter().map(|step| split_steps(Some(step)));
            Ok(steps.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
        }
        Some(PreTokenizerWrapper::Split(split)) => Ok(vec![SplitStep::Regex(SplitRegex::new(split)?)]),
        Some(rule) => Ok(vec![SplitStep::Rule(rule.clone())]),
    }
}

impl Vocabulary {
    /// Token ids of `prompt`. Names of control tokens become those tokens, unless one of their characters comes from a
    /// message's content.
    pub(super) fn encode_text(&self, prompt: &PromptText, limit: &TimeLimit) -> Result<Vec<u32>, TokenizeError> {
        limit.check().map_err(TokenizeError::Stopped)?;
        let (text, stand_ins) = self.hide_content_names(prompt)?;
        let added = self.tokenizer.get_added_vocabulary();
        let mut words = added.extract_and_normalize(self.tokenizer.get_normalizer(), &text);
        if let Some(stand_ins) = &stand_ins {
            words.normalize(|word| {
                word.map(|c| stand_ins.restore(c));
                Ok(())
            })?;
        }
        for step in &self.split_steps {
            limit.check().map_err(TokenizeError::Stopped)?;
            match step {
                SplitStep::Regex(regex) => regex.split(&mut words, limit)?,
                SplitStep::Rule(rule) => rule.pre_tokenize(&mut words)?,
            }
        }
        words.tokenize(|word| {
            limit.check()?;
            self.merge(word.get())
        })?;
        Ok(ids(&words))
    }

    /// The tokens of one word. Merging never gives a control token.
    fn merge(&self, word: &str) -> Result<Vec<Token>, LibraryError> {
        let model = self.tokenizer.get_model();
        let tokens = model.tokenize(word)?;
        if !tokens.iter().any(|token| self.unmergeable.contains(&token.id)) {
            return Ok(tokens);
        }
        let chars = word.char_indices().map(|(at, c)| model.tokenize(&word[at..at + c.len_utf8()]));
        Ok(chars.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
    }

    /// The text in which every name of a control token that contains characters of a message's content has a stand-in
    /// for the first of them; and the stand-ins, if there are any.
    fn hide_content_names<'a>(
        &self,
        prompt: &'a PromptText,
    ) -> Result<(Cow<'a, str>, Option<StandIns>), TokenizeError> {
        let text = prompt.as_str();
        let mut hidden: Vec<usize> =
            self.control_names.find(text).filter_map(|name| prompt.first_from_content(name)).collect();
        if hidden.is_empty() {
            return Ok((Cow::Borrowed(text), None));
        }
        hidden.sort_unstable();
        hidden.dedup();
        let chars = hidden.iter().filter_map(|at| text[*at..].chars().next());
        let stand_ins = StandIns::new(chars, [text]).ok_or_else(|| TokenizeError::Failed {
            reason: "it contains all private-use characters of Unicode".to_owned(),
        })?;
        let mut hidden = hidden.into_iter().peekable();
        let chars = text.char_indices().map(|(at, c)| match hidden.next_if_eq(&at) {
            Some(_) => stand_ins.hide(c),
            None => c,
        });
        Ok((Cow::Owned(chars.collect()), Some(stand_ins)))
    }
}

fn ids(words: &PreTokenizedString) -> Vec<u32> {
    let words = words.get_splits(OffsetReferential::Normalized, OffsetType::None).into_iter();
    words.filter_map(|(_, _, tokens)| tokens.as_ref()).flatten().map(|token| token.id).collect()
}
