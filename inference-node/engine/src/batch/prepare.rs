//! Preparation of a prompt: converts its tokens into the initial state, the grammar and the draft source of a sequence.

use cfq_proto::job::{ChatMessage, ChatRole, GeneratedTokens, JobFailure, OutputFormat, Prompt, PromptForm, Sampling};

use crate::batch::prompt_lookup::PromptLookup;
use crate::batch::resume::{ResumeError, SequenceInit};
use crate::model::tokenizer::Vocabulary;
use crate::prompts::{PromptRequest, PromptTokenizer, PromptTokens};
use crate::sampling::grammar::{GrammarError, Grammars};

/// A prompt ready for admission.
pub struct PreparedPrompt {
    /// Initial state of the sequence: its tokens, grammar and detokenizer.
    pub init: SequenceInit,
    /// Source of draft tokens.
    pub lookup: PromptLookup,
    /// The prompt's sampling parameters, without those that do not apply to its output format.
    pub sampling: Sampling,
}

/// What has to be tokenized for `prompt`. Takes its messages.
pub fn request(prompt: &mut Prompt) -> PromptRequest {
    let previous = match prompt.sampling.prompt_lookup {
        true => truncate_previous(&prompt.sampling.previous).to_owned(),
        false => String::new(),
    };
    PromptRequest { form: prompt.form, messages: std::mem::take(&mut prompt.messages), previous }
}

/// Checks that the tokens belong to `vocabulary`: they may have been created by another process, from a file that was
/// replaced in the meantime.
///
/// # Errors
/// [`JobFailure::Engine`].
pub fn check_vocabulary(tokens: &PromptTokens, vocabulary: &Vocabulary) -> Result<(), JobFailure> {
    let is_known = |token: &u32| (*token as usize) < vocabulary.len();
    if tokens.vocabulary == vocabulary.fingerprint() && tokens.prompt.iter().chain(&tokens.previous).all(is_known) {
        return Ok(());
    }
    let reason = "the model's file was replaced after the model was loaded; unload the model and load it again";
    Err(JobFailure::Engine { reason: reason.to_owned() })
}

/// Compiles the grammar and indexes [`Sampling::previous`] for prompt lookup. Takes from milliseconds to seconds of CPU
/// time, so it must not run on an async thread.
///
/// # Errors
/// [`JobFailure::Rejected`] if no engine can run the prompt. [`JobFailure::Engine`] if this engine cannot: its
/// vocabulary cannot be used for constrained output, or the output cannot resume after the `generated` tokens.
pub fn prepare(
    vocabulary: &Vocabulary,
    grammars: &Grammars,
    prompt: Prompt,
    tokens: PromptTokens,
    generated: &GeneratedTokens,
) -> Result<PreparedPrompt, JobFailure> {
    let rejected = |reason: String| JobFailure::Rejected { reason };
    if tokens.prompt.is_empty() {
        return Err(rejected("the prompt is empty".to_owned()));
    }
    let init = SequenceInit::new(tokens.prompt, &prompt.sampling, &prompt.format, generated, (vocabulary, grammars));
    let init = init.map_err(|error| match error {
        ResumeError::Grammar(GrammarError::Unusable { .. } | GrammarError::Step { .. }) => rejected(error.to_string()),
        ResumeError::Grammar(GrammarError::Tokens { .. }) | ResumeError::Conflict { .. } => {
            JobFailure::Engine { reason: error.to_string() }
        }
    })?;
    let lookup = match prompt.sampling.prompt_lookup {
        true => {
            let mut previous = tokens.previous;
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
    Ok(PreparedPrompt { init, lookup, sampling })
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
pub async fn stable_prefix(
    prompts: &dyn PromptTokenizer,
    vocabulary: &Vocabulary,
    mut messages: Vec<ChatMessage>,
) -> Option<Vec<u32>> {
    let tokens = async |messages: &[ChatMessage]| {
        let request = PromptRequest { form: PromptForm::Chat, messages: messages.to_vec(), previous: String::new() };
        let tokens = prompts.tokenize(request).await.ok()?;
        check_vocabulary(&tokens, vocabulary).ok()?;
        Some(tokens.prompt)
    };
    if messages.last()?.role != ChatRole::User {
        return None;
    }
    let mut known = tokens(&messages).await?;
    messages.last_mut()?.content.push('x');
    let other = tokens(&messages).await?;
    known.truncate(known.iter().zip(&other).take_while(|(a, b)| a == b).count());
    Some(known)
}
