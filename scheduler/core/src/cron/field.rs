//! One field of a cron expression: a list of values, ranges and steps.

use super::CronError;

/// Values that a field may have.
#[derive(Debug)]
pub(super) struct FieldKind {
    name: &'static str,
    first: i8,
    last: i8,
    /// Names of the values from `first` on.
    names: &'static [&'static str],
}

pub(super) const MINUTE: FieldKind = FieldKind { name: "minute", first: 0, last: 59, names: &[] };
pub(super) const HOUR: FieldKind = FieldKind { name: "hour", first: 0, last: 23, names: &[] };
pub(super) const DAY_OF_MONTH: FieldKind = FieldKind { name: "day of the month", first: 1, last: 31, names: &[] };
pub(super) const MONTH: FieldKind = FieldKind {
    name: "month",
    first: 1,
    last: 12,
    names: &["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
};
/// 0 and 7 are Sunday.
pub(super) const DAY_OF_WEEK: FieldKind =
    FieldKind { name: "day of the week", first: 0, last: 7, names: &["sun", "mon", "tue", "wed", "thu", "fri", "sat"] };

impl FieldKind {
    fn parse_value(&self, text: &str) -> Option<i8> {
        let lower = text.to_ascii_lowercase();
        if let Some(place) = self.names.iter().position(|name| *name == lower) {
            return i8::try_from(place).ok().map(|place| place + self.first);
        }
        // `parse` also accepts a sign.
        let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        text.parse::<i8>().ok().filter(|value| is_number && (self.first..=self.last).contains(value))
    }
}

/// The set of values that a field matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Field {
    /// Bit n is set if the field matches n.
    values: u64,
    all: u64,
    begins_with_star: bool,
}

impl Field {
    pub fn parse(kind: &FieldKind, text: &str) -> Result<Self, CronError> {
        let error = || CronError::Field {
            field: kind.name,
            text: text.to_owned(),
            expected: format!(
                "*, a number from {} to {}, a range such as {}-{}, a step such as */2, or a list of these",
                kind.first,
                kind.last,
                kind.first + 1,
                kind.first + 3
            ),
        };
        let mut values = 0;
        for part in text.split(',') {
            let (range, step) = match part.split_once('/') {
                None => (part, 1),
                Some((range, step)) => {
                    let step = step.parse::<u8>().ok().filter(|n| *n > 0 && step.bytes().all(|b| b.is_ascii_digit()));
                    (range, step.ok_or_else(error)?)
                }
            };
            let (from, to) = match range.split_once('-') {
                None if range == "*" => (kind.first, kind.last),
                None => {
                    let value = kind.parse_value(range).ok_or_else(error)?;
                    // A step needs a range: `5/15` has no agreed meaning.
                    if part.contains('/') {
                        return Err(error());
                    }
                    (value, value)
                }
                Some((from, to)) => {
                    (kind.parse_value(from).ok_or_else(error)?, kind.parse_value(to).ok_or_else(error)?)
                }
            };
            if from > to {
                return Err(error());
            }
            for value in (from..=to).step_by(usize::from(step)) {
                values |= bit(value);
            }
        }
        let all = (kind.first..=kind.last).map(bit).sum();
        Ok(Self { values, all, begins_with_star: text.starts_with('*') })
    }

    /// Replaces 7 by 0.
    pub fn with_sunday_as_zero(self) -> Self {
        let merge = |values: u64| if values & bit(7) == 0 { values } else { (values & !bit(7)) | bit(0) };
        Self { values: merge(self.values), all: merge(self.all), ..self }
    }

    pub fn contains(self, value: i8) -> bool {
        self.values & bit(value) != 0
    }

    /// Whether the field contains all values.
    pub fn is_full(self) -> bool {
        self.values == self.all
    }

    /// Whether crontab regards the field as restricted: it does not begin with `*`.
    pub fn is_restricted(self) -> bool {
        !self.begins_with_star
    }

    /// The values of the set, ascending.
    pub fn values(self) -> impl Iterator<Item = i8> {
        (0..60).filter(move |value| self.contains(*value))
    }
}

fn bit(value: i8) -> u64 {
    1 << value
}
