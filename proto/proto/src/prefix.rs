//! Prefix hashes: a hash chain per prompt. Two prompts can share a cached prefix up to the first block at which their
//! chains differ.
//!
//! The chain is salted and covers fixed-size blocks of the *unrendered* (role, content) bytes, so that the scheduler
//! needs neither tokenizer nor chat template. Each link is a hash over its block and all blocks before it. The message
//! boundaries are part of the hashed bytes, so the same text split differently into messages gets different links. Only
//! whole blocks get a link.

use sha2::{Digest, Sha256};

use crate::job::{ChatMessage, Prompt, PromptForm};

/// Size of a block in bytes, around 128 tokens of code.
pub const PREFIX_BLOCK_BYTES: usize = 512;

/// Returns the chain of a prompt for `model`. Prompts of different forms share no cached prefix.
pub fn of_prompt(model: &str, prompt: &Prompt) -> Vec<u64> {
    match prompt.form {
        PromptForm::Chat => chain(model, &prompt.messages),
        // Names of models have no line break.
        PromptForm::Text => chain(&format!("{model}\ntext"), &prompt.messages),
    }
}

/// Returns one link per whole block of the messages. `salt` separates prompts that must not share cached prefixes (of
/// different models or tenants).
pub fn chain(salt: &str, messages: &[ChatMessage]) -> Vec<u64> {
    let mut bytes = Vec::with_capacity(messages.iter().map(|m| m.content.len() + 16).sum());
    for message in messages {
        bytes.extend_from_slice(message.role.as_str().as_bytes());
        bytes.push(0);
        bytes.extend_from_slice(message.content.as_bytes());
        bytes.push(0xff);
    }
    let mut state: [u8; 32] = Sha256::digest(salt.as_bytes()).into();
    bytes
        .chunks_exact(PREFIX_BLOCK_BYTES)
        .map(|block| {
            let mut hash = Sha256::new();
            hash.update(state);
            hash.update(block);
            state = hash.finalize().into();
            let mut link = [0u8; 8];
            link.copy_from_slice(&state[..8]);
            u64::from_be_bytes(link)
        })
        .collect()
}

/// Number of leading links that two chains have in common.
pub fn shared_len(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::ChatRole;

    fn user(content: String) -> ChatMessage {
        ChatMessage { role: ChatRole::User, content }
    }

    #[test]
    fn chains_agree_for_exactly_the_shared_text() {
        let shared_text = "x".repeat(3 * PREFIX_BLOCK_BYTES);
        let a = chain("m", &[user(format!("{shared_text}{}", "a".repeat(PREFIX_BLOCK_BYTES)))]);
        let b = chain("m", &[user(format!("{shared_text}{}", "b".repeat(PREFIX_BLOCK_BYTES)))]);
        assert_eq!(shared_len(&a, &b), 3);
        assert_eq!(shared_len(&a, &chain("other", &[user(shared_text)])), 0);
    }

    #[test]
    fn message_boundary_changes_the_chain() {
        let one = chain("m", &[user("x".repeat(2 * PREFIX_BLOCK_BYTES))]);
        let two = chain("m", &[user("x".repeat(PREFIX_BLOCK_BYTES)), user("x".repeat(PREFIX_BLOCK_BYTES))]);
        assert!(shared_len(&one, &two) < one.len().min(two.len()));
    }
}
