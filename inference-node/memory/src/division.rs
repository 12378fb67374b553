//! How a node's memory is divided between models and the keys and values that wait beside them.

/// Parked KV takes this share of what there is, where nobody said how much.
const PARKED_SHARE: u64 = 8;
/// And no more than this: tens of thousands of tokens of a model that fits a home's cards.
const PARKED_MOST: u64 = 4 << 30;

/// Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Division {
    /// For all models together.
    pub models: u64,
    /// For parked KV.
    pub parked: u64,
}

/// Divides `memory`; `asked` is what parked KV should get, which comes first and is no more than there is.
pub fn divide(memory: u64, asked: Option<u64>) -> Division {
    let parked = asked.unwrap_or_else(|| (memory / PARKED_SHARE).min(PARKED_MOST)).min(memory);
    Division { models: memory - parked, parked }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_comes_first_and_nothing_is_counted_twice() {
        assert_eq!(divide(8 << 30, None), Division { models: 7 << 30, parked: 1 << 30 });
        assert_eq!(divide(1 << 40, None).parked, 4 << 30);
        assert_eq!(divide(1000, Some(0)), Division { models: 1000, parked: 0 });
        assert_eq!(divide(1000, Some(300)), Division { models: 700, parked: 300 });
        assert_eq!(divide(1000, Some(u64::MAX)), Division { models: 0, parked: 1000 });
    }
}
