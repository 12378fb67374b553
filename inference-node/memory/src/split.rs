//! Which layers of a model go to which card, where cards are unequal.
//!
//! A token passes all layers one after the other, so a pass takes the sum of the cards' times: each layer belongs on the
//! fastest card that still has room, and a slower card is used only for what is left. Therefore cards are filled in the
//! order of their speed. Fewer cards are better than more, since every boundary costs a copy, unless the pool for keys and
//! values would be too small with fewer.
//!
//! What must hold, and is tested below: no card gets more than it has; the ranges are contiguous, in order, and cover every
//! layer once; among the splits of these cards, the pool is the largest.

use std::ops::{Range, RangeInclusive};

use crate::bytes::Bytes;
use crate::fit::MOST_CORRECTION;

/// A card's room and speed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CardRoom {
    /// Bytes that may be taken.
    pub free: u64,
    /// Of its memory, in any unit that is the same for all.
    pub speed: f64,
    /// Thousandths that earlier loads took more there than the weights come to; [`MOST_CORRECTION`] at the most.
    pub correction: u64,
}

impl CardRoom {
    /// What so many bytes of weights took more.
    fn more(&self, weights: u64) -> u64 {
        let more = u128::from(weights) * u128::from(self.correction.min(MOST_CORRECTION)) / 1000;
        u64::try_from(more).unwrap_or(u64::MAX)
    }
}

/// What is to be laid out, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Weights of each layer.
    pub layers: Vec<u64>,
    /// The embedding, on the card of the first layer.
    pub first: u64,
    /// The output matrix and the scores, on the card of the last layer.
    pub last: u64,
    /// Scratch and reserve, on every card that is used.
    pub each: u64,
    /// Keys and values of one token in one layer.
    pub kv_per_token: u64,
}

/// One card's part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CardShare {
    /// Index of the card as it was given.
    pub card: usize,
    pub layers: Range<usize>,
    /// Bytes of the weights on it.
    pub weights: u64,
    /// By how much earlier loads took more than those.
    pub correction: u64,
    /// Bytes it takes, the pool included.
    pub bytes: u64,
}

/// A layout of all layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// In the order of the layers; cards without a layer are not in it.
    pub shares: Vec<CardShare>,
    /// Tokens of the pool.
    pub kv_tokens: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "needs {} for its layers, {} at both ends, {} on every card and {} for keys and values of {tokens} tokens; the cards have {}",
    Bytes(*layers), Bytes(*ends), Bytes(*each), Bytes(*kv), list(have)
)]
pub struct NoSplit {
    pub layers: u64,
    pub ends: u64,
    pub each: u64,
    pub kv: u64,
    pub tokens: u64,
    /// Free bytes of each card.
    pub have: Vec<u64>,
}

fn list(have: &[u64]) -> String {
    let words: Vec<String> = have.iter().map(|free| Bytes(*free).to_string()).collect();
    if words.is_empty() { "nothing".to_owned() } else { words.join(" and ") }
}

/// Lays the stack out with the largest pool within `tokens`: on the fastest card that alone gives at least `enough`, else on
/// the fewest of the fastest that do together; if none do, on those that give most.
pub fn split(stack: &Stack, cards: &[CardRoom], tokens: RangeInclusive<u64>, enough: u64) -> Result<Split, NoSplit> {
    let mut order: Vec<usize> = (0..cards.len()).collect();
    order.sort_by(|a, b| {
        let (a, b) = (&cards[*a], &cards[*b]);
        b.speed.total_cmp(&a.speed).then(b.free.cmp(&a.free))
    });
    let alone = order.iter().map(std::slice::from_ref);
    let together = (2..=order.len()).map(|count| &order[..count]);
    let mut best: Option<Split> = None;
    for cards_of in alone.chain(together) {
        let Some(found) = largest(stack, cards, cards_of, &tokens) else { continue };
        let tokens = found.kv_tokens;
        if best.as_ref().is_none_or(|best| tokens > best.kv_tokens) {
            best = Some(found);
        }
        if tokens >= enough {
            break;
        }
    }
    best.ok_or_else(|| {
        let sum = |values: &[u64]| values.iter().fold(0u64, |all, bytes| all.saturating_add(*bytes));
        let per_token = stack.kv_per_token.saturating_mul(stack.layers.len() as u64);
        NoSplit {
            layers: sum(&stack.layers),
            ends: stack.first.saturating_add(stack.last),
            each: stack.each,
            kv: per_token.saturating_mul(*tokens.start()),
            tokens: *tokens.start(),
            have: cards.iter().map(|card| card.free).collect(),
        }
    })
}

/// The layout with the largest pool over these cards in this order.
fn largest(stack: &Stack, cards: &[CardRoom], order: &[usize], tokens: &RangeInclusive<u64>) -> Option<Split> {
    let (mut low, mut high) = (*tokens.start(), (*tokens.end()).max(*tokens.start()));
    let mut best = Split { shares: fill(stack, cards, order, low)?, kv_tokens: low };
    // More tokens never make it easier, so halving finds the most that fit.
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        match fill(stack, cards, order, middle) {
            Some(shares) => {
                best = Split { shares, kv_tokens: middle };
                low = middle;
            }
            None => high = middle - 1,
        }
    }
    Some(best)
}

/// Each card takes as many of the layers that are left as it has room for.
fn fill(stack: &Stack, cards: &[CardRoom], order: &[usize], tokens: u64) -> Option<Vec<CardShare>> {
    let kv = stack.kv_per_token.checked_mul(tokens)?;
    let count = stack.layers.len();
    let mut shares = Vec::new();
    let mut next = 0;
    for card in order {
        let (at, room) = (*card, &cards[*card]);
        let mut share = CardShare { card: at, layers: next..next, weights: 0, correction: 0, bytes: stack.each };
        let mut pools = 0u64;
        while next < count {
            let mut weights = share.weights.checked_add(stack.layers[next])?;
            if next == 0 {
                weights = weights.checked_add(stack.first)?;
            }
            if next + 1 == count {
                weights = weights.checked_add(stack.last)?;
            }
            pools = pools.checked_add(kv)?;
            let correction = room.more(weights);
            let bytes = stack.each.checked_add(weights)?.checked_add(correction)?.checked_add(pools)?;
            if bytes > room.free {
                break;
            }
            next += 1;
            share = CardShare { layers: share.layers.start..next, weights, correction, bytes, ..share };
        }
        if !share.layers.is_empty() {
            shares.push(share);
        }
    }
    (next == count && count > 0).then_some(shares)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn stack(layers: usize, each_layer: u64) -> Stack {
        Stack { layers: vec![each_layer; layers], first: GIB / 4, last: GIB / 2, each: GIB / 2, kv_per_token: 4096 }
    }

    fn card(free: u64, speed: f64) -> CardRoom {
        CardRoom { free: free * GIB, speed, correction: 0 }
    }

    #[test]
    fn the_fast_card_is_filled_first_and_the_rest_goes_to_the_other() {
        let found = split(&stack(40, GIB * 3 / 4), &[card(12, 360.0), card(24, 936.0)], 2048..=2048, 2048).unwrap();
        assert_eq!(found.shares.iter().map(|s| s.card).collect::<Vec<_>>(), [1, 0]);
        assert_eq!((found.shares[0].layers.start, found.shares[1].layers.end), (0, 40));
        assert!(found.shares[0].layers.len() > found.shares[1].layers.len());
    }

    #[test]
    fn one_card_is_enough_where_the_pool_is() {
        let cards = [card(24, 900.0), card(24, 900.0)];
        assert_eq!(split(&stack(20, GIB / 2), &cards, 2048..=1 << 20, 8192).unwrap().shares.len(), 1);
        // A longer pool needs the other card too.
        let found = split(&stack(20, GIB / 2), &cards, 2048..=1 << 20, 1 << 18).unwrap();
        assert_eq!(found.shares.len(), 2);
        assert!(found.kv_tokens >= 1 << 18);
    }

    #[test]
    fn a_large_slow_card_is_better_than_two() {
        let found = split(&stack(20, GIB / 2), &[card(8, 900.0), card(24, 300.0)], 2048..=8192, 2048).unwrap();
        assert_eq!(found.shares.iter().map(|s| s.card).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn what_loads_took_more_moves_layers_to_the_next_card() {
        let cards = |correction| [CardRoom { correction, ..card(24, 900.0) }, card(24, 300.0)];
        let on_first = |correction| {
            let found = split(&stack(40, GIB * 3 / 4), &cards(correction), 2048..=2048, 2048).unwrap();
            (found.shares[0].clone(), found.shares[0].bytes - found.shares[0].weights - found.shares[0].correction)
        };
        let (plain, beside) = on_first(0);
        let (raised, _) = on_first(200);
        assert_eq!((plain.correction, beside > GIB / 2), (0, true));
        assert!(raised.layers.end < plain.layers.end, "{raised:?} {plain:?}");
        assert_eq!(raised.correction, raised.weights / 5);
        // Beyond a half something else took the memory.
        assert_eq!(on_first(5000), on_first(MOST_CORRECTION));
    }

    #[test]
    fn what_fits_nowhere_is_refused_with_the_sum() {
        let refused = split(&stack(40, GIB), &[card(12, 1.0), card(8, 1.0)], 2048..=4096, 2048).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "needs 40.0 GiB for its layers, 768.0 MiB at both ends, 512.0 MiB on every card and 320.0 MiB for keys and \
             values of 2048 tokens; the cards have 12.0 GiB and 8.0 GiB"
        );
        assert!(split(&stack(1, 1), &[], 1..=1, 1).unwrap_err().to_string().ends_with("the cards have nothing"));
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_no_card_gets_more_than_it_has(
            layers in proptest::collection::vec(1u64..1 << 30, 1..80),
            cards in proptest::collection::vec((0u64..48 << 30, 1u32..1000, 0u64..800), 0..5),
            first in 0u64..1 << 30, last in 0u64..1 << 30, each in 0u64..1 << 30,
            kv_per_token in 1u64..1 << 14, least in 1u64..8192, more in 0u64..1 << 18, enough in 0u64..1 << 18,
        ) {
            let stack = Stack { layers, first, last, each, kv_per_token };
            let room = |(free, speed, correction)| CardRoom { free, speed: f64::from(speed), correction };
            let cards: Vec<CardRoom> = cards.into_iter().map(room).collect();
            let tokens = least..=least + more;
            match split(&stack, &cards, tokens.clone(), enough) {
                Ok(found) => {
                    prop_assert!(tokens.contains(&found.kv_tokens));
                    let mut next = 0;
                    for share in &found.shares {
                        prop_assert_eq!(share.layers.start, next);
                        prop_assert!(!share.layers.is_empty());
                        next = share.layers.end;
                        let mut weights = stack.layers[share.layers.clone()].iter().sum::<u64>();
                        weights += if share.layers.start == 0 { first } else { 0 };
                        weights += if share.layers.end == stack.layers.len() { last } else { 0 };
                        let more = weights * cards[share.card].correction.min(MOST_CORRECTION) / 1000;
                        prop_assert_eq!((share.weights, share.correction), (weights, more));
                        let pool = kv_per_token * found.kv_tokens * share.layers.len() as u64;
                        prop_assert_eq!(share.bytes, each + pool + weights + more);
                        prop_assert!(share.bytes <= cards[share.card].free);
                    }
                    prop_assert_eq!(next, stack.layers.len());
                    let mut used: Vec<usize> = found.shares.iter().map(|s| s.card).collect();
                    used.sort_unstable();
                    used.dedup();
                    prop_assert_eq!(used.len(), found.shares.len(), "a card is used once");
                    // One more token does not fit in this order of cards, unless it is not wanted.
                    let order: Vec<usize> = found.shares.iter().map(|s| s.card).collect();
                    let larger = fill(&stack, &cards, &order, found.kv_tokens + 1);
                    prop_assert!(larger.is_none() || found.kv_tokens == least + more);
                }
                Err(_) => {
                    // No card holds it alone either.
                    for card in 0..cards.len() {
                        prop_assert!(fill(&stack, &cards, &[card], least).is_none());
                    }
                }
            }
        }
    }
}
