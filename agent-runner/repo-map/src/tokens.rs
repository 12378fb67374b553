//! Estimate of a text's length in tokens.

/// Returns about how many tokens a text has, rather too many than too few: without the model's tokenizer, the exact
/// number is unknown. Tokenizers of language models split texts into parts of words, single digits or short groups of
/// them, and punctuation, and keep bytes of rare characters apart. The estimate of a text is at most the sum of the
/// estimates of its lines.
pub fn estimated_tokens(text: &str) -> usize {
    let mut tokens = 0;
    let (mut letters, mut spaces) = (0_usize, 0_usize);
    let mut previous = '\n';
    for character in text.chars() {
        // `camelCase` and `snake_case` are several words.
        let continues_word =
            character.is_ascii_lowercase() || (character.is_ascii_uppercase() && !previous.is_ascii_lowercase());
        if !continues_word {
            tokens += tokens_of_word(letters);
            letters = 0;
        }
        if character.is_ascii_alphabetic() {
            letters += 1;
        } else if character == ' ' {
            spaces = if previous == ' ' { spaces + 1 } else { 0 };
            tokens += usize::from(spaces.is_multiple_of(SPACES_PER_TOKEN));
        } else {
            tokens += character.len_utf8();
        }
        previous = character;
    }
    tokens + tokens_of_word(letters)
}

/// Letters of a part of a word, on average, if the word is not one that models know as a whole.
const LETTERS_PER_TOKEN: usize = 4;

/// Spaces that are one token, at the beginning of a line.
const SPACES_PER_TOKEN: usize = 16;

fn tokens_of_word(letters: usize) -> usize {
    letters.div_ceil(LETTERS_PER_TOKEN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_punctuation_and_other_scripts_are_counted() {
        assert_eq!(estimated_tokens(""), 0);
        assert_eq!(estimated_tokens("word"), 1);
        assert_eq!(estimated_tokens("snake_case"), 4);
        assert_eq!(estimated_tokens("camelCase"), 3);
        assert_eq!(estimated_tokens("2026"), 4);
        assert_eq!(estimated_tokens("        x"), 2, "a run of spaces");
        assert_eq!(estimated_tokens("ä"), 2);
        assert_eq!(estimated_tokens("a\nb"), 3);
    }

    proptest! {
        #[test]
        fn text_has_at_most_the_tokens_of_its_lines(lines in prop::collection::vec("[ -~äß]{0,30}", 0..6)) {
            let whole: String = lines.iter().map(|line| format!("{line}\n")).collect();
            let sum: usize = lines.iter().map(|line| estimated_tokens(&format!("{line}\n"))).sum();
            prop_assert!(estimated_tokens(&whole) <= sum);
        }
    }
}
