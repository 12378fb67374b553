//! Private-use characters that replace ordinary characters of a text for a while.
//!
//! A stand-in occurs in none of the given texts, so restoring it always gives the character that it replaced.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

/// The private-use planes of Unicode. Their characters have no case, no normal form and are not white space.
const PRIVATE_USE: [std::ops::RangeInclusive<char>; 2] = ['\u{F0000}'..='\u{FFFFD}', '\u{100000}'..='\u{10FFFD}'];

/// One stand-in for each of a set of characters.
#[derive(Debug, Default)]
pub struct StandIns {
    stand_ins: HashMap<char, char>,
    originals: HashMap<char, char>,
}

impl StandIns {
    /// Chooses stand-ins for `chars` that occur in none of `texts`. `None` if the texts leave too few of them.
    pub fn new<'a>(chars: impl IntoIterator<Item = char>, texts: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let used: HashSet<char> = texts.into_iter().flat_map(str::chars).filter(|c| *c >= '\u{F0000}').collect();
        let mut free = PRIVATE_USE.into_iter().flatten().filter(|c| !used.contains(c));
        let mut chosen = Self::default();
        for c in chars {
            if let Entry::Vacant(entry) = chosen.stand_ins.entry(c) {
                let stand_in = *entry.insert(free.next()?);
                chosen.originals.insert(stand_in, c);
            }
        }
        Some(chosen)
    }

    /// The stand-in of `c`; `c` itself if it has none.
    pub fn hide(&self, c: char) -> char {
        self.stand_ins.get(&c).copied().unwrap_or(c)
    }

    /// The character for which `c` stands; `c` itself if it is not a stand-in.
    pub fn restore(&self, c: char) -> char {
        if c < '\u{F0000}' { c } else { self.originals.get(&c).copied().unwrap_or(c) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stand_ins_do_not_occur_in_the_texts() {
        let text = "\u{F0000}<\u{F0001}";
        let stand_ins = StandIns::new(['<', '>', '<'], [text]).unwrap();
        let hidden: String = text.chars().map(|c| stand_ins.hide(c)).collect();
        assert_eq!(hidden, "\u{F0000}\u{F0002}\u{F0001}");
        assert_eq!(hidden.chars().map(|c| stand_ins.restore(c)).collect::<String>(), text);
        let all: String = PRIVATE_USE.into_iter().flatten().collect();
        assert!(StandIns::new(['<'], [all.as_str()]).is_none());
    }
}
