//! Memory of a tokenizer's tables, from the vocabulary in a model's header.
//!
//! A tokenizer has three hash tables (text to id, id to text, pair to merge) and the bytes of each token. They are
//! negligible for a large model but a tenth of the size of a small one, so they are counted separately and not covered
//! by the reserve.

/// Size of a vocabulary as its file describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VocabularySize {
    /// Number of tokens.
    pub tokens: u64,
    /// Total length of all tokens as the file spells them, in bytes.
    pub text: u64,
    /// Number of merges of byte-level BPE.
    pub merges: u64,
}

/// Size of a `String` or `Vec` itself, in bytes, without its heap contents.
const STRING_BYTES: u64 = 24;
/// Number of entries in the tokenizer's word cache, which is allocated at full size.
const WORD_CACHE_ENTRIES: u64 = 10_000;

impl VocabularySize {
    /// Estimated memory of the tokenizer's tables for this vocabulary, in bytes.
    pub fn bytes(&self) -> u64 {
        let words = table_bytes(self.tokens, STRING_BYTES + 4 + 4)
            .saturating_mul(2)
            .saturating_add(self.text.saturating_mul(2));
        let merges = table_bytes(self.merges, 16);
        let bytes = self.tokens.saturating_mul(STRING_BYTES).saturating_add(self.text);
        let cache = table_bytes(WORD_CACHE_ENTRIES, 2 * STRING_BYTES);
        [words, merges, bytes, cache].into_iter().fold(0, u64::saturating_add)
    }
}

/// Bytes of a hash table (hashbrown): the number of buckets is a power of two, at most 7/8 of them are filled, and each
/// has one control byte.
fn table_bytes(entries: u64, entry_bytes: u64) -> u64 {
    if entries == 0 {
        return 0;
    }
    let buckets = (entries.saturating_mul(8) / 7 + 1).checked_next_power_of_two().unwrap_or(u64::MAX);
    buckets.saturating_mul(entry_bytes + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_grow_by_doubling_and_absurd_sizes_do_not_wrap() {
        let sizes = [7, 8, 14, 15].map(|entries| table_bytes(entries, 9));
        assert_eq!(sizes, [160, 160, 320, 320]);
        let absurd = VocabularySize { tokens: u64::MAX, text: u64::MAX, merges: u64::MAX };
        assert_eq!(absurd.bytes(), u64::MAX);
    }
}
