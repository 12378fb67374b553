//! Cron expressions with the five standard fields: minute, hour, day of the month, month, day of the week (crontab(5)).
//!
//! As in crontab, if both day fields are restricted (do not begin with `*`), a day matches if one of them does.
//!
//! **Changes of the clock.** An expression whose hour field contains all hours follows elapsed time: in an hour that
//! occurs twice it fires twice, and in an hour that is skipped it does not fire. Any other expression means times of day:
//! one that occurs twice fires at its first occurrence, and one that is skipped fires as much later as the clock is moved
//! forward. So a daily expression fires once on each day.

mod field;

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::{AmbiguousOffset, TimeZone};

use field::Field;

/// Number of days in which a matching day is searched. The longest distance between two matching days is that of two
/// February 29 on the same day of the week: 40 years around 1900 or 2100.
const MAX_SEARCHED_DAYS: usize = 41 * 366;

/// A cron expression that matches at least one day.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CronExpression {
    text: String,
    minutes: Field,
    hours: Field,
    days_of_month: Field,
    months: Field,
    /// Days of the week; 0 is Sunday.
    days_of_week: Field,
}

/// Text that is not a cron expression.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CronError {
    /// Not five fields.
    #[error(
        "{text:?} has {found} fields instead of 5: minute, hour, day of the month, month and day of the week, as in \
         \"30 6 * * 1-5\" (6:30 from Monday to Friday)"
    )]
    FieldCount {
        /// The expression.
        text: String,
        /// Number of its fields.
        found: usize,
    },
    /// A field that cannot be read.
    #[error("{text:?} is not valid in the field {field}: use {expected}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Text of the field.
        text: String,
        /// Description of the accepted forms.
        expected: String,
    },
    /// No date matches, as for February 30.
    #[error("{text:?} never fires: no month has such a day")]
    NeverFires {
        /// The expression.
        text: String,
    },
}

impl FromStr for CronExpression {
    type Err = CronError;
    fn from_str(text: &str) -> Result<Self, CronError> {
        let text = text.trim();
        let expanded = match text.to_ascii_lowercase().as_str() {
            "@hourly" => "0 * * * *",
            "@daily" | "@midnight" => "0 0 * * *",
            "@weekly" => "0 0 * * 0",
            "@monthly" => "0 0 1 * *",
            "@yearly" | "@annually" => "0 0 1 1 *",
            _ => text,
        };
        let fields: Vec<&str> = expanded.split_whitespace().collect();
        let [minutes, hours, days_of_month, months, days_of_week] = fields[..] else {
            return Err(CronError::FieldCount { text: text.to_owned(), found: fields.len() });
        };
        let parsed = Self {
            text: text.to_owned(),
            minutes: Field::parse(&field::MINUTE, minutes)?,
            hours: Field::parse(&field::HOUR, hours)?,
            days_of_month: Field::parse(&field::DAY_OF_MONTH, days_of_month)?,
            months: Field::parse(&field::MONTH, months)?,
            days_of_week: Field::parse(&field::DAY_OF_WEEK, days_of_week)?.with_sunday_as_zero(),
        };
        if parsed.next_after(Timestamp::UNIX_EPOCH, &TimeZone::UTC).is_none() {
            return Err(CronError::NeverFires { text: text.to_owned() });
        }
        Ok(parsed)
    }
}

impl fmt::Display for CronExpression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl CronExpression {
    /// The first instant after `after` at which the expression fires in `time_zone`. `None` if there is none before the
    /// end of the calendar.
    pub fn next_after(&self, after: Timestamp, time_zone: &TimeZone) -> Option<Timestamp> {
        let today = time_zone.to_datetime(after).date();
        // A time of the day before may have been moved to after midnight.
        let mut date = today.yesterday().unwrap_or(today);
        for _ in 0..MAX_SEARCHED_DAYS {
            if self.matches_date(date) {
                let next = self.instants(date, time_zone).into_iter().filter(|instant| *instant > after).min();
                if next.is_some() {
                    return next;
                }
            }
            date = date.tomorrow().ok()?;
        }
        None
    }

    fn matches_date(&self, date: Date) -> bool {
        if !self.months.contains(date.month()) {
            return false;
        }
        let of_month = self.days_of_month.contains(date.day());
        let of_week = self.days_of_week.contains(date.weekday().to_sunday_zero_offset());
        if self.days_of_month.is_restricted() && self.days_of_week.is_restricted() {
            of_month || of_week
        } else {
            of_month && of_week
        }
    }

    /// The instants of a matching day, in no order.
    fn instants(&self, date: Date, time_zone: &TimeZone) -> Vec<Timestamp> {
        let follows_elapsed_time = self.hours.is_full();
        let mut instants = Vec::new();
        for hour in self.hours.values() {
            for minute in self.minutes.values() {
                let local = time_zone.to_ambiguous_timestamp(date.at(hour, minute, 0, 0));
                match local.offset() {
                    AmbiguousOffset::Gap { .. } if follows_elapsed_time => {}
                    AmbiguousOffset::Fold { .. } if follows_elapsed_time => {
                        instants.extend(local.earlier());
                        instants.extend(local.later());
                    }
                    // In a gap, the time is moved forward; of two occurrences, the first one is used.
                    AmbiguousOffset::Unambiguous { .. }
                    | AmbiguousOffset::Gap { .. }
                    | AmbiguousOffset::Fold { .. } => {
                        instants.extend(local.compatible());
                    }
                }
            }
        }
        instants
    }
}

#[cfg(test)]
mod tests;
