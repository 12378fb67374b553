//! Detects bidirectional control characters. They change the order in which a line is shown, so that a reviewer reads
//! other code than the one that runs ("Trojan Source", CVE-2021-42574).

use super::{Danger, DangerKind, Lines};

/// True for the characters that change the direction of the text after them.
fn is_bidi_control(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns one danger for each line with such a character.
pub(super) fn dangers(text: &str) -> Vec<Danger> {
    if !text.contains(is_bidi_control) {
        return Vec::new();
    }
    let lines = Lines::new(text);
    let rows = text.lines().enumerate().filter(|(_, line)| line.contains(is_bidi_control));
    rows.map(|(row, line)| Danger::new(DangerKind::BidiControl, &lines, row, line)).collect()
}
