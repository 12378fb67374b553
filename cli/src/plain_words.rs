//! Errors of parsers in the words of users. The libraries name types of Rust and their own functions.

use cfq_proto::plain_types::plain_types;

/// Words of the libraries, and what they mean.
const WORDS: [(&str, &str); 13] = [
    ("invalid digit found in string", "not a whole number"),
    ("cannot parse integer from empty string", "not a whole number"),
    ("number too large to fit in target type", "the number is too large"),
    ("number too small to fit in target type", "the number is too small"),
    ("invalid float literal", "not a number"),
    ("cannot parse float from empty string", "not a number"),
    ("stream did not contain valid UTF-8", "it is not UTF-8 text"),
    ("provided string was not `true` or `false`", "neither true nor false"),
    ("expected a sequence", "expected a list"),
    ("expected a string", "expected a text"),
    ("expected a boolean", "expected true or false"),
    ("invalid type: ", ""),
    ("unknown variant", "unknown value"),
];
/// Minimum similarity of a name that is suggested.
const MIN_SIMILARITY: f64 = 0.85;

/// The message with plain words, and with the nearest name if a field is unknown.
pub fn plain(message: &str) -> String {
    let mut text = message.to_owned();
    for (words, meaning) in WORDS {
        text = text.replace(words, meaning);
    }
    if !text.contains("expected a mapping") {
        text = text.replace("expected a map", "expected a mapping");
    }
    with_nearest_name(&plain_ranges(&plain_types(&text)))
}

/// `0 is not in 1..=1000` as `0 is not a number from 1 to 1000`.
fn plain_ranges(text: &str) -> String {
    text.lines().map(plain_range).collect::<Vec<_>>().join("\n")
}

fn plain_range(line: &str) -> String {
    let parsed = line.split_once(" is not in ").and_then(|(before, range)| {
        let (first, last) = range.split_once("..=")?;
        let is_number = |text: &str| text.parse::<i128>().is_ok();
        (is_number(first) && is_number(last)).then(|| match last.parse::<u64>() {
            Ok(last) if last < u64::from(u32::MAX) => format!("{before} is not a number from {first} to {last}"),
            _ => format!("{before} is not a number of at least {first}"),
        })
    });
    parsed.unwrap_or_else(|| line.to_owned())
}

/// Adds the nearest of the known names to a message such as ``unknown field `a`, expected one of `b`, `c` ``.
fn with_nearest_name(text: &str) -> String {
    for kind in ["unknown field", "unknown value"] {
        let Some(at) = text.find(&format!("{kind} `")) else { continue };
        let names: Vec<&str> = text[at..].split('`').skip(1).step_by(2).collect();
        let Some((unknown, known)) = names.split_first() else { continue };
        if let Some(nearest) = nearest(unknown, known.iter().copied()) {
            let named = format!("{kind} `{unknown}`");
            return text.replacen(&named, &format!("{named} (did you mean `{nearest}`?)"), 1);
        }
    }
    text.to_owned()
}

/// The most similar of the names, if one is similar enough to be meant.
pub fn nearest<'n>(name: &str, known: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let similarity = |known: &&str| strsim::jaro(known, name);
    let nearest = known.into_iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
    nearest.filter(|known| similarity(known) >= MIN_SIMILARITY)
}

/// The words ` (did you mean NAME?)` if a known name is similar, else nothing.
pub fn did_you_mean<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(name, known).map(|nearest| format!(" (did you mean {nearest}?)")).unwrap_or_default()
}

/// Commands of other programs, and what does the same in cfq.
const OTHER_NAMES: [(&str, &str); 16] = [
    ("add", "submit"),
    ("create", "submit"),
    ("delete", "cancel"),
    ("describe", "show"),
    ("follow", "watch"),
    ("get", "ls"),
    ("inspect", "show"),
    ("kill", "cancel"),
    ("list", "ls"),
    ("log", "logs"),
    ("remove", "cancel"),
    ("rm", "cancel"),
    ("run", "submit"),
    ("start", "up"),
    ("stop", "down"),
    ("view", "show"),
];

/// The command of cfq for a command of other programs.
fn own_name(command: &str) -> Option<&'static str> {
    OTHER_NAMES.iter().find(|(other, _)| *other == command).map(|(_, own)| *own)
}

/// The message of clap with plain words, and with the command whose help is meant.
pub fn usage_error(message: &str, command: &str) -> String {
    let unknown = message.split_once("unrecognized subcommand '").and_then(|(_, rest)| rest.split_once('\''));
    let message = match unknown.and_then(|(unknown, _)| own_name(unknown)).filter(|_| command == "cfq") {
        // The names that clap finds similar mean something else.
        Some(own) => {
            let first = message.lines().next().unwrap_or_default();
            format!("{first}\n\n  tip: use 'cfq {own}'\n\nFor more information, try '--help'.")
        }
        None => message.to_owned(),
    };
    let mut message = plain(&message).replace("try '--help'", &format!("try '{command} --help'"));
    let is_missing_task = message.contains("were not provided") && message.contains("<TASK>");
    let tip = match command {
        "cfq submit" if message.contains("unexpected argument '") && !message.contains("unexpected argument '-") => {
            Some("put the description in quotes: cfq submit \"...\"")
        }
        "cfq cancel" | "cfq pause" | "cfq resume" | "cfq retry" | "cfq prioritize" if is_missing_task => {
            Some("name tasks, or select them with --state, --label or --all")
        }
        "cfq wait" if is_missing_task => Some("name tasks, or select them with --label"),
        "cfq prioritize" if message.contains("is not a priority") => {
            Some("the priority comes first: cfq prioritize P1 t42")
        }
        _ => None,
    };
    if let Some(tip) = tip {
        let end = message.find("\n\nUsage:").or_else(|| message.find("\n\nFor more")).unwrap_or(message.len());
        message.insert_str(end, &format!("\n\n  tip: {tip}"));
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_rust_are_not_named() {
        for (message, expected) in [
            (
                "max_iterations: invalid type: string \"many\", expected u32",
                "max_iterations: string \"many\", expected a whole number from 0 to 4294967295",
            ),
            ("threshold: invalid type: map, expected f64", "threshold: map, expected a number"),
            ("tasks: expected a map", "tasks: expected a mapping"),
            (
                "error: invalid value '0': 0 is not in 1..=1000\n\nmore",
                "error: invalid value '0': 0 is not a number from 1 to 1000\n\nmore",
            ),
            ("-1 is not in 0..=18446744073709551615", "-1 is not a number of at least 0"),
            ("'x': invalid digit found in string", "'x': not a whole number"),
            (
                "unknown field `modle`, expected one of `model`, `seed`",
                "unknown field `modle` (did you mean `model`?), expected one of `model`, `seed`",
            ),
            ("unknown field `zzz`, expected `model`", "unknown field `zzz`, expected `model`"),
        ] {
            assert_eq!(plain(message), expected);
        }
        assert_eq!(usage_error("try '--help'.", "cfq ls"), "try 'cfq ls --help'.");
        let stop = usage_error("error: unrecognized subcommand 'stop'\n\n  tip: 'top' exists", "cfq");
        assert!(stop.contains("tip: use 'cfq down'") && !stop.contains("'top'"), "{stop}");
        let unquoted = usage_error("error: unexpected argument 'there' found\n\nUsage: cfq submit", "cfq submit");
        assert!(unquoted.contains("tip: put the description in quotes") && unquoted.ends_with("Usage: cfq submit"));
    }

    #[test]
    fn only_a_similar_name_is_suggested() {
        assert_eq!(nearest("lss", ["ls", "jobs"]), Some("ls"));
        assert_eq!(nearest("nope", ["nodes", "jobs"]), None);
    }
}
