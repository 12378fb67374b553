//! Prefix hashes: two prompts share a cached prefix as far as their chains agree.
//!
//! A salted hash chain over fixed-size blocks of the *unrendered* (role, content) bytes, so that the scheduler needs no
//! tokenizer and no chat template. Each link covers everything before it; a message boundary is part of the bytes, so
//! equal text split differently over messages does not collide. Only whole blocks get a link.

use sha2::{Digest, Sha256};

use crate::job::ChatMessage;

/// Bytes of one block: around 128 tokens of code.
pub const BLOCK: usize = 512;

/// One link for each whole block of the prompt. `salt` separates what must not share (a model, a tenant).
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
        .chunks_exact(BLOCK)
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

/// Links two chains have in common at their start.
pub fn shared(a: &[u64], b: &[u64]) -> usize {
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
    fn chains_agree_exactly_as_far_as_the_text_does() {
        let shared_text = "x".repeat(3 * BLOCK);
        let a = chain("m", &[user(format!("{shared_text}{}", "a".repeat(BLOCK)))]);
        let b = chain("m", &[user(format!("{shared_text}{}", "b".repeat(BLOCK)))]);
        assert_eq!(shared(&a, &b), 3);
        assert_eq!(shared(&a, &chain("other", &[user(shared_text)])), 0);
    }

    #[test]
    fn a_message_boundary_is_part_of_the_text() {
        let one = chain("m", &[user("x".repeat(2 * BLOCK))]);
        let two = chain("m", &[user("x".repeat(BLOCK)), user("x".repeat(BLOCK))]);
        assert!(shared(&one, &two) < one.len().min(two.len()));
    }
}
