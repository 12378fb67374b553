//! Which card is `cuda:N`.
//!
//! NVML numbers cards by their place on the bus; CUDA, unless told otherwise, puts the fastest first and leaves out what
//! CUDA_VISIBLE_DEVICES does not name. People read NVML's numbers (`cfq doctor`, `cfq nodes`, nvidia-smi), so `cuda:N` means
//! those, and CUDA's are looked up by the cards' UUIDs, which both tell.
//!
//! Where one has no match (a slice of a card, which has a UUID of its own; no NVML) all keep CUDA's numbers: a mixture could
//! give two cards the same one.

/// A card as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbered {
    /// CUDA's.
    pub ordinal: usize,
    /// The N of `cuda:N`.
    pub index: usize,
    /// By which NVML knows it, where it does.
    pub uuid: Option<String>,
}

/// All cards in the order of their numbers: `seen` are the UUIDs in CUDA's order, `told` are NVML's numbers and UUIDs. The
/// second is false where they could not be matched.
pub fn numbered(seen: &[Option<[u8; 16]>], told: &[(usize, String)]) -> (Vec<Numbered>, bool) {
    let known = |(ordinal, uuid): (usize, &Option<[u8; 16]>)| {
        let uuid = written(&(*uuid)?);
        let (index, uuid) = told.iter().find(|(_, own)| own.eq_ignore_ascii_case(&uuid))?.clone();
        Some(Numbered { ordinal, index, uuid: Some(uuid) })
    };
    let matched: Option<Vec<Numbered>> = seen.iter().enumerate().map(known).collect();
    match matched {
        Some(mut all) => {
            all.sort_by_key(|card| card.index);
            // Slices of one card are one to a driver that tells them its UUID.
            let distinct = all.windows(2).all(|two| two[0].index != two[1].index);
            if distinct { (all, true) } else { (by_ordinal(seen.len()), false) }
        }
        None => (by_ordinal(seen.len()), false),
    }
}

fn by_ordinal(count: usize) -> Vec<Numbered> {
    (0..count).map(|ordinal| Numbered { ordinal, index: ordinal, uuid: None }).collect()
}

/// As NVML writes one of a whole card.
fn written(uuid: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let parts = [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]];
    format!("GPU-{}", parts.map(hex).join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: [u8; 16] = [1; 16];
    const FAST: [u8; 16] = [0xAB, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0xFF];

    fn told() -> Vec<(usize, String)> {
        let fast = "GPU-ab000102-0304-0506-0708-090a0b0c0dff".to_owned();
        vec![(0, "GPU-01010101-0101-0101-0101-010101010101".to_owned()), (1, fast)]
    }

    fn pairs(seen: &[Option<[u8; 16]>], told: &[(usize, String)]) -> (Vec<(usize, usize, bool)>, bool) {
        let (all, matched) = numbered(seen, told);
        (all.into_iter().map(|card| (card.index, card.ordinal, card.uuid.is_some())).collect(), matched)
    }

    #[test]
    fn a_card_has_the_number_that_people_read() {
        assert_eq!(pairs(&[Some(FAST), Some(SLOW)], &told()), (vec![(0, 1, true), (1, 0, true)], true));
        assert_eq!(pairs(&[Some(SLOW), Some(FAST)], &told()), (vec![(0, 0, true), (1, 1, true)], true));
        // CUDA_VISIBLE_DEVICES names the second only.
        assert_eq!(pairs(&[Some(FAST)], &told()), (vec![(1, 0, true)], true));
        assert_eq!(pairs(&[], &told()), (vec![], true));
    }

    #[test]
    fn without_a_match_for_each_all_keep_cudas_numbers() {
        let ordinals = (vec![(0, 0, false), (1, 1, false)], false);
        assert_eq!(pairs(&[Some(FAST), Some([9; 16])], &told()), ordinals);
        assert_eq!(pairs(&[Some(FAST), None], &told()), ordinals);
        assert_eq!(pairs(&[Some(FAST), Some(FAST)], &told()), ordinals);
        assert_eq!(pairs(&[Some(FAST), Some(SLOW)], &[]), ordinals);
    }
}
