//! What a tokenizer's tables take, from what a header says of its vocabulary.
//!
//! Three hash tables (text to id, id to text, pair to merge) and the bytes of each token. Small beside a large model, a
//! tenth of a small one, so they are counted and not left to a reserve.

/// A vocabulary as its file describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VocabularySize {
    pub tokens: u64,
    /// Bytes of all tokens as the file spells them.
    pub text: u64,
    pub merges: u64,
}

/// Bytes of a string's own fields, as of any growing list.
const STRING: u64 = 24;
/// Words the tokenizer remembers the pieces of: it takes the room for all of them at once.
const REMEMBERED: u64 = 10_000;

impl VocabularySize {
    pub fn bytes(&self) -> u64 {
        let words = table(self.tokens, STRING + 4 + 4).saturating_mul(2).saturating_add(self.text.saturating_mul(2));
        let merges = table(self.merges, 16);
        let bytes = self.tokens.saturating_mul(STRING).saturating_add(self.text);
        [words, merges, bytes, table(REMEMBERED, 2 * STRING)].into_iter().fold(0, u64::saturating_add)
    }
}

/// A hash table of so many entries: a power of two of places, seven of eight filled at most, and a byte each to search by.
fn table(entries: u64, entry: u64) -> u64 {
    if entries == 0 {
        return 0;
    }
    let places = (entries.saturating_mul(8) / 7 + 1).checked_next_power_of_two().unwrap_or(u64::MAX);
    places.saturating_mul(entry + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_grow_by_doubling_and_absurd_ones_do_not_wrap() {
        assert_eq!((table(7, 9), table(8, 9), table(14, 9), table(15, 9)), (160, 160, 320, 320));
        let absurd = VocabularySize { tokens: u64::MAX, text: u64::MAX, merges: u64::MAX };
        assert_eq!(absurd.bytes(), u64::MAX);
    }
}
