//! From a prompt's messages to the tokens, grammar and draft source of a sequence.

use cfq_proto::job::{ChatMessage, ChatRole, GeneratedTokens, JobFailure, OutputFormat, Prompt, Sampling};

use crate::batch::prompt_lookup::PromptLookup;
use crate::batch::resume::{ResumeError, SequenceInit};
use crate::model::chat_template::ChatTemplate;
use crate::model::tokenizer::Vocabulary;
use crate::sampling::grammar::{GrammarError, Grammars};

/// A prompt ready for admission.
pub struct PreparedPrompt {
    /// Tokens, grammar and detokenizer.
    pub init: SequenceInit,
    /// The source of draft tokens.
    pub lookup: PromptLookup,
    /// Bytes of the messages' contents.
    pub bytes: usize,
    /// The prompt's sampling parameters, without those that do not apply to its output format.
    pub sampling: Sampling,
}

/// Renders the chat template, tokenizes, compiles the grammar and indexes the previous text for prompt lookup. Takes
/// milliseconds to seconds of one core, so it must not run on an async thread.
///
/// # Errors
/// [`JobFailure::Rejected`] if no engine can run the prompt, [`JobFailure::Engine`] if the answer cannot resume.
pub fn prepare(
    template: &ChatTemplate,
    vocabulary: &Vocabulary,
    grammars: &Grammars,
    prompt: Prompt,
    generated: &GeneratedTokens,
) -> Result<PreparedPrompt, JobFailure> {
    let rejected = |reason: String| JobFailure::Rejected { reason };
    let text = template.render(&prompt.messages).map_err(|e| rejected(e.to_string()))?;
    let tokens = vocabulary.encode_sequence(&text).map_err(|e| rejected(e.to_string()))?;
    if tokens.is_empty() {
        return Err(rejected("the prompt is empty".to_owned()));
    }
    let init = SequenceInit::new(tokens, &prompt.sampling, &prompt.format, generated, (vocabulary, grammars));
    let init = init.map_err(|error| match error {
        ResumeError::Grammar(GrammarError::Unusable { .. }) => rejected(error.to_string()),
        ResumeError::Grammar(GrammarError::Tokens { .. } | GrammarError::Step { .. })
        | ResumeError::Conflict { .. } => JobFailure::Engine { reason: error.to_string() },
    })?;
    let lookup = match prompt.sampling.prompt_lookup {
        true => {
            let previous = truncate_previous(&prompt.sampling.previous);
            let mut previous = vocabulary.encode(previous).map_err(|e| rejected(e.to_string()))?;
            // Text longer than the answer cannot be repeated in it.
            previous.truncate(prompt.sampling.max_tokens as usize);
            PromptLookup::new(previous, init.prompt_len).indexed(&init.tokens)
        }
        false => PromptLookup::new(Vec::new(), init.prompt_len),
    };
    let mut sampling = prompt.sampling;
    if !matches!(prompt.format, OutputFormat::JsonSchema { .. }) {
        // Unconstrained output may contain a draft of the answer first.
        sampling.early_stop.clear();
    }
    let bytes = prompt.messages.iter().map(|m| m.content.len()).sum();
    Ok(PreparedPrompt { init, lookup, bytes, sampling })
}

/// Maximum bytes of the previous text used for drafting; longer than any answer.
const MAX_PREVIOUS_BYTES: usize = 1 << 20;

/// At most [`MAX_PREVIOUS_BYTES`] of `text`, cut between characters.
fn truncate_previous(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_PREVIOUS_BYTES)]
}

/// Token prefix of the rendered prompt that does not depend on how the last message continues, found by comparing two
/// continuations. It ends before the first token that could change, so it contains nothing of the chat template's end.
/// `None` if the last message is not a user message.
pub fn stable_prefix(
    template: &ChatTemplate,
    vocabulary: &Vocabulary,
    mut messages: Vec<ChatMessage>,
) -> Option<Vec<u32>> {
    let tokens = |messages: &[_]| vocabulary.encode_sequence(&template.render(messages).ok()?).ok();
    if messages.last()?.role != ChatRole::User {
        return None;
    }
    let mut known = tokens(&messages)?;
    messages.last_mut()?.content.push('x');
    let other = tokens(&messages)?;
    known.truncate(known.iter().zip(&other).take_while(|(a, b)| a == b).count());
    Some(known)
}
