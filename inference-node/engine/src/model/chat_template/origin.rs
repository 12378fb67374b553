//! Finds out which characters of a rendered prompt come from the messages.
//!
//! A template is a program: it may trim, cut, join or drop the contents, so their place in its output is not known. The
//! template is therefore rendered a second time, with a stand-in for every character of the contents that occurs in a
//! name of a control token. If both outputs are equal after the stand-ins are restored, the stand-ins show which
//! characters come from the contents. White space has no stand-in, because templates trim it; nor have texts that the
//! template itself contains, like `</think>`, because it may search for them.
//!
//! If the outputs differ, the template depends on other parts of the contents. Then only complete names of control
//! tokens get a stand-in.

use cfq_proto::job::ChatMessage;

use crate::model::chat_template::{ChatTemplate, TemplateError};
use crate::model::control_names::ControlNames;
use crate::model::prompt_text::PromptText;
use crate::model::stand_ins::StandIns;
use crate::model::time_limit::TimeLimit;

/// Length of a text of the template that is searched in contents, in bytes.
const SEARCHED_TEXT_BYTES: std::ops::RangeInclusive<usize> = 2..=64;
/// Maximum number of such texts.
const MAX_SEARCHED_TEXTS: usize = 64;

/// Renders the messages.
pub(super) fn render(
    template: &ChatTemplate,
    messages: &[ChatMessage],
    limit: &TimeLimit,
) -> Result<PromptText, TemplateError> {
    let names = &*template.control_names;
    let contents: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
    limit.check()?;
    let plain = template.render_text(messages, &contents)?;
    if !contents.iter().any(|content| content.contains(|c| names.chars().contains(&c))) {
        return Ok(PromptText::of_template(plain));
    }
    let texts = contents.iter().copied().chain([template.source.as_str(), &plain]);
    let stand_ins = StandIns::new(names.chars().iter().copied(), texts).ok_or(TemplateError::NoFreeCharacters)?;

    limit.check()?;
    let searched = searched_texts(&template.source, names);
    let hidden: Vec<String> =
        contents.iter().map(|content| hide_chars(content, &searched, names, &stand_ins)).collect();
    if let Ok(text) = template.render_text(messages, &hidden) {
        let restored = text.chars().map(|c| stand_ins.restore(c));
        if restored.eq(plain.chars()) {
            return Ok(restore(&text, &stand_ins));
        }
    }
    limit.check()?;
    let hidden: Vec<String> = contents.iter().map(|content| hide_names(content, names, &stand_ins)).collect();
    Ok(restore(&template.render_text(messages, &hidden)?, &stand_ins))
}

fn restore(text: &str, stand_ins: &StandIns) -> PromptText {
    PromptText::of_chars(text.chars().map(|c| {
        let original = stand_ins.restore(c);
        (original, original != c)
    }))
}

/// Replaces all characters that have a stand-in, except within the `searched` texts.
fn hide_chars(content: &str, searched: &[&str], names: &ControlNames, stand_ins: &StandIns) -> String {
    let mut starts = names.find(content).map(|name| name.start).peekable();
    let mut kept: Vec<_> =
        searched.iter().flat_map(|text| content.match_indices(text)).map(|(at, text)| at..at + text.len()).collect();
    kept.sort_unstable_by_key(|range| range.start);
    let mut kept = kept.into_iter().peekable();
    let mut kept_until = 0;
    let hide = |(at, c)| {
        while let Some(range) = kept.next_if(|range| range.start <= at) {
            kept_until = range.end.max(kept_until);
        }
        let is_name = next_starts_at(&mut starts, at);
        if at < kept_until && !is_name { c } else { stand_ins.hide(c) }
    };
    content.char_indices().map(hide).collect()
}

/// Replaces the first character of every complete name.
fn hide_names(content: &str, names: &ControlNames, stand_ins: &StandIns) -> String {
    let mut starts = names.find(content).map(|name| name.start).peekable();
    let hide = |(at, c)| if next_starts_at(&mut starts, at) { stand_ins.hide(c) } else { c };
    content.char_indices().map(hide).collect()
}

/// Whether the next of the ascending positions `starts` is `at`. Skips it, and its repetitions.
fn next_starts_at(starts: &mut std::iter::Peekable<impl Iterator<Item = usize>>, at: usize) -> bool {
    let is_start = starts.peek() == Some(&at);
    while starts.next_if_eq(&at).is_some() {}
    is_start
}

/// The texts in quotes in a template's source, without those that are a part of a control token's name or contain one.
/// What stands between two texts in quotes may be among them.
fn searched_texts<'a>(source: &'a str, names: &ControlNames) -> Vec<&'a str> {
    let quotes = source.match_indices(['\'', '"']);
    let texts = quotes.filter_map(|(at, quote)| source[at + 1..].split_once(quote).map(|(text, _)| text));
    let mut texts: Vec<&str> = texts
        .filter(|text| SEARCHED_TEXT_BYTES.contains(&text.len()))
        .filter(|text| text.contains(|c: char| names.chars().contains(&c)) && !names.overlaps(text))
        .collect();
    texts.sort_unstable();
    texts.dedup();
    // Tags first: plain words are rarely searched for.
    texts.sort_by_key(|text| !text.starts_with(['<', '[']));
    texts.truncate(MAX_SEARCHED_TEXTS);
    texts
}
