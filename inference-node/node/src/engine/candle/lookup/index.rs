//! Where in a text some tokens stood together, in memory of fixed size a token.

use super::CONTEXT;

/// Occurrences that are told, the latest.
const OCCURRENCES: usize = 8;
/// Places that are looked at for them: others may have the same hash.
const LOOKS: usize = 4 * OCCURRENCES;
/// Hashes, as bits: fewer of them, longer chains. A table of the most takes 256 KiB.
const LEAST_BITS: u32 = 10;
const MOST_BITS: u32 = 16;

#[derive(Debug, Default)]
pub struct Index {
    /// By hash: one more than where the latest context with it ends; 0: nowhere.
    heads: Vec<u32>,
    /// By the last token of a context: the same of the context before it.
    chain: Vec<u32>,
}

impl Index {
    /// Indexes what it has not seen of `text`, but its last token: nothing follows that.
    pub fn read(&mut self, text: &[u32]) {
        let known = text.len().saturating_sub(1);
        if known > 2 * self.heads.len() && self.heads.len() < 1 << MOST_BITS {
            let bits = known.ilog2().saturating_add(1).clamp(LEAST_BITS, MOST_BITS);
            self.heads = vec![0; 1 << bits];
            self.chain.clear();
        }
        for last in self.chain.len()..known {
            let before = match text[..=last].last_chunk::<CONTEXT>() {
                Some(context) => {
                    let head = self.slot(context);
                    std::mem::replace(&mut self.heads[head], last as u32 + 1)
                }
                None => 0,
            };
            self.chain.push(before);
        }
    }

    /// The places after `context`, the latest first.
    pub fn places(&self, text: &[u32], context: &[u32; CONTEXT]) -> Vec<usize> {
        if self.heads.is_empty() {
            return Vec::new();
        }
        let after = |place: u32| (place > 0).then_some(place);
        let chain = std::iter::successors(after(self.heads[self.slot(context)]), |place| {
            after(self.chain[*place as usize - 1])
        });
        let same = |place: &usize| text[..*place].ends_with(context);
        chain.take(LOOKS).map(|place| place as usize).filter(same).take(OCCURRENCES).collect()
    }

    /// Fibonacci hashing: Knuth, The Art of Computer Programming, volume 3, section 6.4.
    fn slot(&self, context: &[u32; CONTEXT]) -> usize {
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
        /// Read in parts, as a sequence grows, and beside what a plain search finds.
        #[test]
        fn the_latest_places_are_found(text in prop::collection::vec(0u32..6, 0..400), parts in prop::collection::vec(0usize..400, 0..5)) {
            let mut index = Index::default();
            parts.iter().for_each(|end| index.read(&text[..(*end).min(text.len())]));
            index.read(&text);
            for context in text.windows(CONTEXT).filter_map(|w| w.first_chunk::<CONTEXT>()) {
                let all: Vec<usize> =
                    (CONTEXT..text.len()).rev().filter(|place| text[..*place].ends_with(context)).take(OCCURRENCES).collect();
                prop_assert_eq!(index.places(&text, context), all);
            }
        }
    }

    #[test]
    fn it_takes_a_few_bytes_a_token() {
        let text: Vec<u32> = (0..262_144u32).map(|i| i.wrapping_mul(2_654_435_761) >> 12).collect();
        let mut index = Index::default();
        index.read(&text);
        assert!(4 * (index.heads.capacity() + index.chain.capacity()) <= 8 * text.len() + (4 << MOST_BITS));
        // The latest of many with the same hash are still found.
        let end = text.len() - 1;
        assert_eq!(index.places(&text, text[..end].last_chunk().unwrap()), [end]);
    }
}
