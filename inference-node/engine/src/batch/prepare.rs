//! Preparation of a prompt: converts its messages into the tokens, grammar and draft source of a sequence.

use cfq_proto::job::{ChatMessage, ChatRole, GeneratedTokens, JobFailure, OutputFormat, Prompt, Sampling};

use crate::batch::prompt_lookup::PromptLookup;
use crate::batch::resume::{ResumeError, SequenceInit};
use crate::model::chat_template::{ChatTemplate, TemplateError};
use crate::model::time_limit::TimeLimit;
use crate::model::tokenizer::{TokenizeError, Vocabulary};
use crate::sampling::grammar::{GrammarError, Grammars};

/// A prompt ready for admission.
pub struct PreparedPrompt {
    /// Initial state of the sequence: its tokens, grammar and detokenizer.
    pub init: SequenceInit,
    /// Source of draft tokens.
    pub lookup: PromptLookup,
    /// Total size of the messages' contents, in bytes.
    pub bytes: usize,
    /// The prompt's sampling parameters, without those that do not apply to its output format.
    pub sampling: Sampling,
}

/// Renders the chat template, tokenizes, compiles the grammar and indexes [`Sampling::previous`] for prompt lookup.
/// Takes from milliseconds to seconds of CPU time, so it must not run on an async thread.
///
/// # Errors
/// [`JobFailure::Rejected`] if no engine can run the prompt. [`JobFailure::Engine`] if this engine cannot: its
/// vocabulary cannot be used for constrained output, the output cannot resume after the `generated` tokens, or `limit`
/// stopped the preparation.
pub fn prepare(
    template: &ChatTemplate,
    vocabulary: &Vocabulary,
    grammars: &Grammars,
    prompt: Prompt,
    generated: &GeneratedTokens,
    limit: &TimeLimit,
) -> Result<PreparedPrompt, JobFailure> {
    let rejected = |reason: String| JobFailure::Rejected { reason };
    let text = template.render(&prompt.messages, limit).map_err(template_failure)?;
    let tokens = vocabulary.encode_prompt(&text, limit).map_err(tokenize_failure)?;
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
            let mut previous = vocabulary.encode_content(previous, limit).map_err(tokenize_failure)?;
            // The output has at most `max_tokens` tokens, so it cannot repeat more of the previous text.
            previous.truncate(prompt.sampling.max_tokens as usize);
            PromptLookup::new(previous, init.prompt_len).indexed(&init.tokens)
        }
        false => PromptLookup::new(Vec::new(), init.prompt_len),
    };
    let mut sampling = prompt.sampling;
    if !matches!(prompt.format, OutputFormat::JsonSchema { .. }) {
        // Early stop needs constrained output: unconstrained output may contain a preliminary answer before the final
        // one.
        sampling.early_stop.clear();
    }
    let bytes = prompt.messages.iter().map(|m| m.content.len()).sum();
    Ok(PreparedPrompt { init, lookup, bytes, sampling })
}

fn template_failure(error: TemplateError) -> JobFailure {
    let reason = error.to_string();
    match error {
        TemplateError::Rejected { .. } | TemplateError::OutOfFuel | TemplateError::NoFreeCharacters => {
            JobFailure::Rejected { reason }
        }
        TemplateError::Thread { .. } | TemplateError::Stopped(_) => JobFailure::Engine { reason },
    }
}

fn tokenize_failure(error: TokenizeError) -> JobFailure {
    let reason = error.to_string();
    match error {
        TokenizeError::Failed { .. } => JobFailure::Rejected { reason },
        TokenizeError::Stopped(_) => JobFailure::Engine { reason },
    }
}

/// Maximum part of [`Sampling::previous`] that is used for drafting, in bytes; longer than any output.
const MAX_PREVIOUS_BYTES: usize = 1 << 20;

/// The first [`MAX_PREVIOUS_BYTES`] of `text`, cut at a character boundary.
fn truncate_previous(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_PREVIOUS_BYTES)]
}

/// The tokens at the beginning of the rendered prompt that do not depend on how the last message, which is incomplete,
/// will continue. They are found by rendering two different continuations and taking the common prefix. The text that
/// the chat template appends after the message is not included. `None` if the last message is not a user message.
pub fn stable_prefix(
    template: &ChatTemplate,
    vocabulary: &Vocabulary,
    mut messages: Vec<ChatMessage>,
    limit: &TimeLimit,
) -> Option<Vec<u32>> {
    let tokens = |messages: &[_]| vocabulary.encode_prompt(&template.render(messages, limit).ok()?, limit).ok();
    if messages.last()?.role != ChatRole::User {
        return None;
    }
    let mut known = tokens(&messages)?;
    messages.last_mut()?.content.push('x');
    let other = tokens(&messages)?;
    known.truncate(known.iter().zip(&other).take_while(|(a, b)| a == b).count());
    Some(known)
}
