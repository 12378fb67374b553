//! The text of lists and dictionaries, within the template's fuel.
//!
//! A list can contain another list several times, so its text can be exponentially larger than the list. minijinja
//! charges fuel for the text only after it has created all of it. Here the text is measured before it is created, and
//! the measurement stops when the fuel does not suffice.
//!
//! Operators cannot be replaced: `~` with a nested list, and a comparison of two of them, are not limited here, but only
//! if the template is rendered in a process with limits.

use std::fmt::{self, Write};

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, escape_formatter, filters};

/// Number of bytes that cost one unit of fuel. Characters of JSON can take six times as many bytes as those of text.
const BYTES_PER_FUEL: u64 = 8;

/// Counts bytes up to a limit.
struct Counter {
    left: u64,
}

impl Write for Counter {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.left = self.left.checked_sub(text.len() as u64).ok_or(fmt::Error)?;
        Ok(())
    }
}

/// Replaces everything that creates the text of a list or dictionary: output, and the filters for text.
pub(super) fn limit(environment: &mut Environment<'_>) {
    environment.set_formatter(|output: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value| {
        charge(state, value)?;
        escape_formatter(output, state, value)
    });
    environment.add_filter("string", |state: &mut State<'_, '_>, value: &Value| {
        charge(state, value)?;
        filters::string(state, value)
    });
    environment.add_filter(
        "tojson",
        |state: &mut State<'_, '_>, value: &Value, indent: Option<Value>, options: Kwargs| {
            charge(state, value)?;
            filters::tojson(value, indent, options)
        },
    );
    environment.add_filter(
        "join",
        |state: &mut State<'_, '_>, value: &Value, separator: Option<&str>, attribute: Option<&str>| {
            let bytes = separator.map_or(0, str::len);
            for item in value.try_iter()? {
                let item = match attribute {
                    Some(name) => item.get_attr(name)?,
                    None => item,
                };
                charge(state, &item)?;
                let bytes = bytes.saturating_add(item.as_str().map_or(0, str::len)) as u64;
                state.consume_fuel(1 + bytes / BYTES_PER_FUEL)?;
            }
            let mut text = String::new();
            for (at, item) in value.try_iter()?.enumerate() {
                let item = match attribute {
                    Some(name) => item.get_attr(name)?,
                    None => item,
                };
                if at > 0 {
                    text.push_str(separator.unwrap_or_default());
                }
                match item.as_str() {
                    Some(item) => text.push_str(item),
                    None => text.push_str(&item.to_string()),
                }
            }
            Ok::<_, Error>(text)
        },
    );
    environment.remove_filter("pprint");
}

/// Charges the text of a list or dictionary.
fn charge(state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::Plain) {
        return Ok(());
    }
    let fuel = state.fuel_levels().map_or(u64::MAX, |(_, remaining)| remaining);
    let limit = fuel.saturating_mul(BYTES_PER_FUEL);
    let mut counter = Counter { left: limit };
    if write!(counter, "{value}").is_err() {
        // Uses up the fuel.
        state.consume_fuel(u64::MAX)?;
        return Err(Error::from(ErrorKind::OutOfFuel));
    }
    state.consume_fuel((limit - counter.left) / BYTES_PER_FUEL)
}
