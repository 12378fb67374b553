//! Byte-level BPE tokenizers, as introduced by GPT-2.
//!
//! A GGUF file holds the vocabulary and the merges. Of the pre-tokenizer, which is the rule that splits text into words
//! before merging, it holds only the name (`tokenizer.ggml.pre`). A wrong rule gives plausible token ids and worse
//! answers, so unknown names are rejected. The rules below are those of the models' own tokenizer.json files.

use tokenizers::Tokenizer;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

/// Pre-tokenizer pattern of Qwen 2: splits digits one by one.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Pre-tokenizer pattern of Llama 3: splits digits into groups of up to three.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Pre-tokenizer pattern of Mistral's Tekken: a word may change from upper to lower case once, and combining marks
/// belong to it.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Builds the tokenizer; `pre` is the pre-tokenizer's name.
pub(super) fn build(tokens: &[&str], merges: &[&str], pre: &str) -> Result<Tokenizer, String> {
    let (pre_tokenizer, nfc, ignore_merges) = pre_tokenizer(pre)?;
    let vocabulary: tokenizers::models::bpe::Vocab = tokens.iter().map(|t| (*t).to_owned()).zip(0u32..).collect();
    let merges = merges
        .iter()
        .map(|merge| {
            // Byte-level vocabularies spell a space as another character, so the first space separates the halves.
            let (left, right) = merge.split_once(' ').ok_or_else(|| format!("its merge {merge:?} is not a pair"))?;
            Ok((left.to_owned(), right.to_owned()))
        })
        .collect::<Result<Vec<_>, String>>()?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .ignore_merges(ignore_merges)
        .build()
        .map_err(|error| format!("its merges do not match its vocabulary: {error}"))?;
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    if nfc {
        tokenizer.with_normalizer(Some(NFC)).map_err(|error| error.to_string())?;
    }
    Ok(tokenizer)
}

/// The pre-tokenizer called `name`; whether text is first normalized to NFC; and whether a word that is itself a token
/// is taken as a whole instead of being merged from parts.
fn pre_tokenizer(name: &str) -> Result<(PreTokenizerWrapper, bool, bool), String> {
    let split = |regex: &str| -> Result<PreTokenizerWrapper, String> {
        let split = Split::new(SplitPattern::Regex(regex.to_owned()), SplitDelimiterBehavior::Isolated, false)
            .map_err(|error| error.to_string())?;
        Ok(Sequence::new(vec![split.into(), ByteLevel::new(false, true, false).into()]).into())
    };
    match name {
        "smollm" | "starcoder" | "refact" | "command-r" => {
            let steps = vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
            Ok((Sequence::new(steps).into(), false, false))
        }
        "gpt-2" | "gpt2" => Ok((ByteLevel::new(false, true, true).into(), false, false)),
        "qwen2" | "deepseek-r1-qwen" => Ok((split(QWEN2)?, true, false)),
        "llama-bpe" | "llama3" | "llama-v3" => Ok((split(LLAMA3)?, false, true)),
        "tekken" => Ok((split(TEKKEN)?, false, true)),
        other => Err(format!(
            "its pre-tokenizer is {other:?}; this version supports smollm, starcoder, refact, command-r, gpt-2, qwen2, \
             deepseek-r1-qwen, llama-bpe and tekken"
        )),
    }
}

/// GPT-2's byte-to-character table (`bytes_to_unicode`), inverted. Every byte has a printable character; bytes that are
/// not printable have the characters from U+0100 on.
pub fn char_to_byte() -> std::collections::HashMap<char, u8> {
    let mut next = 0x100u32;
    (0..=255u8)
        .filter_map(|byte| {
            let printable = char::from(byte);
            if matches!(printable, '!'..='~' | '\u{A1}'..='\u{AC}' | '\u{AE}'..='\u{FF}') {
                return Some((printable, byte));
            }
            let substitute = char::from_u32(next);
            next += 1;
            substitute.map(|c| (c, byte))
        })
        .collect()
}

/// The bytes that a token's spelling in the vocabulary stands for; characters outside `map` stand for themselves.
pub(super) fn token_bytes(token: &str, map: &std::collections::HashMap<char, u8>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    for c in token.chars() {
        match map.get(&c) {
            Some(byte) => bytes.push(*byte),
            None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    /// The words of `text`, joined by bars.
    fn words(pre: &str, text: &str) -> String {
        let (rule, _, _) = pre_tokenizer(pre).unwrap();
        let mut split = PreTokenizedString::from(text);
        rule.pre_tokenize(&mut split).unwrap();
        let map = char_to_byte();
        let words = split.get_splits(OffsetReferential::Original, OffsetType::Byte).into_iter();
        let words = words.map(|(word, _, _)| String::from_utf8_lossy(&token_bytes(word, &map)).into_owned());
        words.collect::<Vec<_>>().join("|")
    }

    // Expected words: the pattern of each model's tokenizer.json, run by Python's `regex` module.
    #[test]
    fn words_are_split_by_each_familys_rule() {
        let text = "I'LL pay 1234 €\r\n\n  x+=1";
        assert_eq!(words("smollm", text), "I|'|LL| pay| |1|2|3|4| €|\r\n\n | x|+=|1");
        assert_eq!(words("gpt-2", text), "I|'|LL| pay| 1234| €|\r\n\n | x|+=|1");
        assert_eq!(words("qwen2", text), "I|'LL| pay| |1|2|3|4| €\r\n\n| | x|+=|1");
        assert_eq!(words("llama-bpe", text), "I|'LL| pay| |123|4| €\r\n\n| | x|+=|1");
        assert_eq!(words("tekken", text), "I|'LL| pay| |1|2|3|4| €\r\n\n| | x|+=|1");

        let text = "fn parseHTTPHeader(naïve: &str) -> 日本語 { // don't\n\treturn x[12345]; }   \n\nПривет,мир! e\u{301} ½ ①\t\u{a0}क्षि a\u{200d}b";
        assert_eq!(
            words("qwen2", text),
            "fn| parseHTTPHeader|(naïve|:| &|str|)| ->| 日本語| {| //| don|'t|\n|\treturn| x|[|1|2|3|4|5|];| }|   \n\n|Привет|,мир|!| e|\u{301}| |½| |①|\t|\u{a0}क|्ष|ि| a|\u{200d}b"
        );
        assert_eq!(
            words("llama-bpe", text),
            "fn| parseHTTPHeader|(naïve|:| &|str|)| ->| 日本語| {| //| don|'t|\n|\treturn| x|[|123|45|];| }|   \n\n|Привет|,мир|!| e|\u{301}| |½| |①|\t|\u{a0}क|्ष|ि| a|\u{200d}b"
        );
        assert_eq!(
            words("tekken", text),
            "fn| parse|HTTPHeader|(naïve|:| &|str|)| ->| 日本語| {| //| don|'t|\n|\treturn| x|[|1|2|3|4|5|];| }|   \n\n|Привет|,мир|!| e\u{301}| |½| |①|\t|\u{a0}क्षि| a|\u{200d}b"
        );
    }

    #[test]
    fn unknown_pre_tokenizer_is_rejected_by_name() {
        assert!(pre_tokenizer("jais").unwrap_err().contains("\"jais\""));
    }

    #[test]
    fn byte_table_covers_every_byte_once() {
        let map = char_to_byte();
        let bytes: BTreeSet<u8> = map.values().copied().collect();
        assert_eq!((map.len(), bytes.len()), (256, 256));
        assert_eq!(map[&'Ġ'], b' ');
    }
}
