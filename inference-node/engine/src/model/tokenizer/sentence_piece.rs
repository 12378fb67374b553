//! SentencePiece tokenizers (Llama 2, Mistral, Phi-3, Gemma) from GGUF files, which hold pieces with scores but no
//! merges.
//!
//! SentencePiece's BPE merges the pair whose result has the best score. This equals ordinary BPE with a list of all
//! pairs that form a piece, ordered by the piece's score; the models' own tokenizer.json files were converted in the
//! same way. A character that is not in the vocabulary falls back to its bytes.

use std::collections::HashMap;

use tokenizers::Tokenizer;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};

use crate::model::tokenizer::{NORMAL, UNKNOWN, USER_DEFINED};

/// The character that stands for a space.
const SPACE: &str = "\u{2581}";
/// Maximum length of a piece that is formed by merging, in bytes. Each piece is split at every position, which would
/// take unbounded time for a crafted file; SentencePiece's default maximum is 16 characters.
const MAX_PIECE_BYTES: usize = 256;

/// Builds the tokenizer; `space_prefix`: whether a space is added before the text.
pub(super) fn build(tokens: &[&str], scores: &[f32], kinds: &[i64], space_prefix: bool) -> Result<Tokenizer, String> {
    let ids: HashMap<&str, u32> = tokens.iter().copied().zip(0u32..).collect();
    // User-defined pieces are recognized as a whole before anything is merged, and may be longer.
    let is_merged = |token: &str, kind: i64| match kind {
        NORMAL => true,
        USER_DEFINED => token.len() <= MAX_PIECE_BYTES,
        _ => false,
    };
    let pieces = tokens.iter().zip(scores).zip(kinds).filter(|((token, _), kind)| is_merged(token, **kind));
    let pieces = pieces.map(|((token, score), _)| (*token, *score));
    let mut merges = Vec::new();
    let length = |text: &str| text.chars().count();
    for (piece, score) in pieces {
        if piece.len() > MAX_PIECE_BYTES {
            return Err(format!("a piece of its vocabulary has {} bytes, more than {MAX_PIECE_BYTES}", piece.len()));
        }
        let pairs = piece.char_indices().skip(1).map(|(at, _)| piece.split_at(at));
        let mut pairs: Vec<_> =
            pairs.filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?, left, right))).collect();
        pairs.sort_unstable();
        merges.extend(pairs.into_iter().map(|(_, _, left, right)| (score, [length(left), length(right)], left, right)));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| b.1.cmp(&a.1)));
    let merges = merges.into_iter().map(|(_, _, left, right)| (left.to_owned(), right.to_owned())).collect();
    let unknown = tokens.iter().zip(kinds).find(|(_, kind)| **kind == UNKNOWN).map(|(token, _)| (*token).to_owned());
    let vocabulary: tokenizers::models::bpe::Vocab =
        ids.into_iter().map(|(token, id)| (token.to_owned(), id)).collect();
    let mut bpe = BPE::builder().vocab_and_merges(vocabulary, merges).byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = unknown {
        bpe = bpe.unk_token(unknown);
    }
    let bpe = bpe.build().map_err(|error| format!("its vocabulary cannot be used: {error}"))?;
    let mut tokenizer = Tokenizer::new(bpe);
    let spaces = Replace::new(" ", SPACE).map_err(|error| error.to_string())?;
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if space_prefix {
        steps.push(Prepend::new(SPACE.to_owned()).into());
    }
    steps.push(spaces.into());
    tokenizer.with_normalizer(Some(Sequence::new(steps))).map_err(|error| error.to_string())?;
    Ok(tokenizer)
}

/// The bytes that a piece stands for; `is_byte`: whether the piece is a single byte like `<0x0A>`.
pub(super) fn piece_bytes(piece: &str, is_byte: bool) -> Vec<u8> {
    match byte(piece).filter(|_| is_byte) {
        Some(byte) => vec![byte],
        None => piece.replace(SPACE, " ").into_bytes(),
    }
}

/// The value of a piece like `<0x0A>`.
fn byte(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_score_is_merged_first_and_unknown_characters_become_bytes() {
        let tokens = ["<unk>", "<0xC3>", "<0xA9>", "\u{2581}", "a", "b", "ab", "\u{2581}a", "ba"];
        let kinds = [2, 6, 6, 1, 1, 1, 1, 1, 1];
        let scores = [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -3.0, -1.0];
        let tokenizer = build(&tokens, &scores, &kinds, true).unwrap();
        let ids = |text: &str| tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec();
        assert_eq!(ids("ab"), [3, 6], "ab has a better score than the space with a");
        assert_eq!(ids("aba"), [7, 8], "ba has a better score than ab");
        assert_eq!(ids("\u{e9}"), [3, 1, 2]);
        assert_eq!((piece_bytes("<0xA9>", true), piece_bytes("\u{2581}a", false)), (vec![0xA9], b" a".to_vec()));
        assert_eq!(piece_bytes("<0xA9>", false), b"<0xA9>");
    }

    #[test]
    fn oversized_piece_is_rejected_unless_it_is_user_defined() {
        let long = "a".repeat(1 << 20);
        let tokens = ["<unk>", "a", long.as_str()];
        let error = build(&tokens, &[0.0; 3], &[2, 1, NORMAL], true).unwrap_err();
        assert!(error.contains("1048576 bytes"), "{error}");
        assert!(build(&tokens, &[0.0; 3], &[2, 1, USER_DEFINED], true).is_ok());
    }
}
