//! Index of the positions where a context (a few consecutive tokens) occurs in a text, with constant memory per token.

use super::NGRAM_TOKENS;

/// Maximum number of positions that a lookup returns; of more positions, it returns the latest.
const MAX_MATCHES: usize = 8;
/// Maximum number of positions that a lookup examines: more than it returns, because other contexts may have the same
/// hash.
const MAX_CANDIDATES: usize = 4 * MAX_MATCHES;
/// Hash bits of the smallest table; fewer bits make longer chains.
const MIN_TABLE_BITS: u32 = 10;
/// Hash bits of the largest table, which takes 256 KiB.
const MAX_TABLE_BITS: u32 = 16;

/// Hash chains over all contexts of a text.
#[derive(Debug, Default)]
pub struct ContextIndex {
    /// For each hash, the end of the latest context with that hash: the position of its last token plus one; 0 if there
    /// is none.
    heads: Vec<u32>,
    /// For each position at which a context ends, the end of the previous context in the same chain, in the form of
    /// `heads`.
    chain: Vec<u32>,
}

impl ContextIndex {
    /// Indexes the part of `text` that is not indexed yet, except for its last token, which has no successor yet.
    pub fn extend(&mut self, text: &[u32]) {
        let known = text.len().saturating_sub(1);
        if known > 2 * self.heads.len() && self.heads.len() < 1 << MAX_TABLE_BITS {
            let bits = known.ilog2().saturating_add(1).clamp(MIN_TABLE_BITS, MAX_TABLE_BITS);
            self.heads = vec![0; 1 << bits];
            self.chain.clear();
        }
        for last in self.chain.len()..known {
            let before = match text[..=last].last_chunk::<NGRAM_TOKENS>() {
                Some(context) => {
                    let head = self.bucket(context);
                    std::mem::replace(&mut self.heads[head], last as u32 + 1)
                }
                None => 0,
            };
            self.chain.push(before);
        }
    }

    /// Positions directly after the occurrences of `context`, latest first.
    pub fn positions_after(&self, text: &[u32], context: &[u32; NGRAM_TOKENS]) -> Vec<usize> {
        if self.heads.is_empty() {
            return Vec::new();
        }
        let after = |position: u32| (position > 0).then_some(position);
        let chain = std::iter::successors(after(self.heads[self.bucket(context)]), |position| {
            after(self.chain[*position as usize - 1])
        });
        let same = |position: &usize| text[..*position].ends_with(context);
        chain.take(MAX_CANDIDATES).map(|position| position as usize).filter(same).take(MAX_MATCHES).collect()
    }

    /// Bucket of a context in `heads`, by Fibonacci hashing: Knuth, The Art of Computer Programming, volume 3, section
    /// 6.4.
    fn bucket(&self, context: &[u32; NGRAM_TOKENS]) -> usize {
        let mixed = context
            .iter()
            .fold(0u64, |hash, token| (hash.rotate_left(21) ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        (mixed >> (u64::BITS - self.heads.len().ilog2())) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The index finds the same positions as a linear search, also if the text is indexed in parts as it grows.
        #[test]
        fn latest_positions_equal_those_of_a_linear_search(
            text in prop::collection::vec(0u32..6, 0..400), parts in prop::collection::vec(0usize..400, 0..5),
        ) {
            let mut index = ContextIndex::default();
            parts.iter().for_each(|end| index.extend(&text[..(*end).min(text.len())]));
            index.extend(&text);
            for context in text.windows(NGRAM_TOKENS).filter_map(|w| w.first_chunk::<NGRAM_TOKENS>()) {
                let all = (NGRAM_TOKENS..text.len()).rev().filter(|position| text[..*position].ends_with(context));
                prop_assert_eq!(index.positions_after(&text, context), all.take(MAX_MATCHES).collect::<Vec<usize>>());
            }
        }
    }

    #[test]
    fn index_takes_a_few_bytes_per_token() {
        let text: Vec<u32> = (0..262_144u32).map(|i| i.wrapping_mul(2_654_435_761) >> 12).collect();
        let mut index = ContextIndex::default();
        index.extend(&text);
        assert!(4 * (index.heads.capacity() + index.chain.capacity()) <= 8 * text.len() + (4 << MAX_TABLE_BITS));
        // The latest of many positions with the same hash is still found.
        let end = text.len() - 1;
        assert_eq!(index.positions_after(&text, text[..end].last_chunk().unwrap()), [end]);
    }
}
