//! The methods of Python's strings, lists and dictionaries, within the template's fuel.
//!
//! minijinja-contrib implements the methods without a limit on their memory and time. minijinja charges fuel for the
//! result, but only after the method has created it. Methods whose result can be much larger than their arguments are
//! therefore charged, or refused, before they run.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat;

/// Number of bytes that cost one unit of fuel, as in minijinja.
const BYTES_PER_FUEL: usize = 64;
/// Maximum number of digits in a row in the format of `str.format`: a width or precision of up to 999 characters.
const MAX_FORMAT_DIGITS: usize = 3;

/// Calls the method `method` of `value`.
///
/// # Errors
/// If there is no such method, its arguments are invalid, or the fuel does not suffice.
pub fn call(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match (value.as_str(), method) {
        (Some(text), method) => {
            charge(state, text.len())?;
            match method {
                "replace" => charge_replace(state, text, args)?,
                "join" => charge_join(state, text, args)?,
                "format" => check_format(state, text, args)?,
                "strip" | "lstrip" | "rstrip" => {
                    // Each character of the text is compared with each of these.
                    let chars = args.first().and_then(Value::as_str).map_or(0, str::len);
                    charge(state, text.len().saturating_mul(chars))?;
                }
                "startswith" | "endswith" => charge_items(state, args)?,
                _ => {}
            }
        }
        // Comparing nested lists can take exponential time.
        (None, "count") if !args.iter().all(is_scalar) => {
            return Err(refused("list.count supports only strings and numbers"));
        }
        (None, "count") => charge_items(state, std::slice::from_ref(value))?,
        (None, _) => {}
    }
    pycompat::unknown_method_callback(state, value, method, args)
}

fn refused(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn charge(state: &State<'_, '_>, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / BYTES_PER_FUEL) as u64)
}

fn is_scalar(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Undefined | ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::String
    )
}

fn charge_replace(state: &State<'_, '_>, text: &str, args: &[Value]) -> Result<(), Error> {
    let (Some(old), Some(new)) = (args.first().and_then(Value::as_str), args.get(1).and_then(Value::as_str)) else {
        return Ok(());
    };
    charge(state, text.matches(old).count().saturating_mul(new.len()).saturating_add(text.len()))
}

fn charge_items(state: &State<'_, '_>, lists: &[Value]) -> Result<(), Error> {
    lists.iter().try_for_each(|list| state.consume_fuel(list.len().unwrap_or_default() as u64))
}

fn charge_join(state: &State<'_, '_>, separator: &str, args: &[Value]) -> Result<(), Error> {
    let Some(items) = args.first().filter(|items| items.as_str().is_none()) else { return Ok(()) };
    for item in items.try_iter()? {
        // The text of a nested list can be exponentially larger than the list.
        if !is_scalar(&item) {
            return Err(refused("str.join supports only strings and numbers"));
        }
        state.consume_fuel(1)?;
        charge(state, separator.len().saturating_add(item.as_str().map_or(0, str::len)))?;
    }
    Ok(())
}

fn check_format(state: &State<'_, '_>, format: &str, args: &[Value]) -> Result<(), Error> {
    if !args.iter().all(is_scalar) {
        return Err(refused("str.format supports only strings and numbers"));
    }
    let mut digits = 0;
    for c in format.chars() {
        digits = if c.is_ascii_digit() { digits + 1 } else { 0 };
        if digits > MAX_FORMAT_DIGITS {
            return Err(refused("str.format supports widths of up to three digits"));
        }
    }
    // Each field inserts one argument, padded to at most 999 characters of four bytes.
    let longest = args.iter().filter_map(Value::as_str).map(str::len).max().unwrap_or_default();
    charge(state, format.matches('{').count().saturating_mul(longest.saturating_add(4 * 999)))
}
