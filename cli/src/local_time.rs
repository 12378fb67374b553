//! Points in time as users type and read them: with an offset, with the name of a time zone, in the system's zone, or as
//! a time from now.

use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Span, Timestamp, ZonedDateTime};

const EXPECTED: &str = "use 2026-12-01T06:30:00Z, \"2026-12-01 06:30\" for local time, \"2026-12-01 06:30 Europe/Berlin\", or \"in 2h 30m\"";

/// Parses a point in time. A local time that does not exist or occurs twice, because the clock changes, is refused.
pub fn parse(text: &str) -> Result<Timestamp, String> {
    parse_at(text, Timestamp::now())
}

fn parse_at(text: &str, now: Timestamp) -> Result<Timestamp, String> {
    let text = text.trim();
    if let Some(span) = text.strip_prefix("in ") {
        return after(now, span).ok_or_else(|| format!("{text:?} is not a time: {EXPECTED}"));
    }
    if let Ok(timestamp) = text.parse::<Timestamp>() {
        return Ok(timestamp);
    }
    if let Ok(zoned) = text.parse::<ZonedDateTime>() {
        return Ok(zoned.timestamp());
    }
    let (local, zone) = match text.rsplit_once(char::is_whitespace) {
        Some((local, zone)) if !zone.starts_with(|first: char| first.is_ascii_digit()) => (local.trim(), Some(zone)),
        _ => (text, None),
    };
    let local: DateTime = local.parse().map_err(|_| format!("{text:?} is not a time: {EXPECTED}"))?;
    let zone = match zone {
        Some(name) => zone_named(name)?,
        None => system_zone()?,
    };
    zone.to_ambiguous_timestamp(local).unambiguous().map_err(|_| {
        format!(
            "{text:?} is not one point in time, because the clock changes then: add the offset from UTC, as in \
             2026-12-01T06:30:00+01:00"
        )
    })
}

/// Parses a time that has passed: a point in time as for [`parse`], or how long ago it was, such as `2h` or `3 days`.
pub fn parse_past(text: &str) -> Result<Timestamp, String> {
    parse_past_at(text, Timestamp::now())
}

fn parse_past_at(text: &str, now: Timestamp) -> Result<Timestamp, String> {
    let ago = text.trim();
    let ago = ago.strip_suffix("ago").unwrap_or(ago);
    if let Some(at) = before(now, ago) {
        return Ok(at);
    }
    parse_at(text, now).map_err(|_| {
        format!(
            "{text:?} is not a time: use 30m, 2h or 7d (ago), 2026-12-01T06:30:00Z, or \"2026-12-01 06:30\" for local \
             time"
        )
    })
}

/// Parses a duration such as `90s`, `10m` or `2h 30m`.
pub fn parse_duration(text: &str) -> Result<std::time::Duration, String> {
    let duration = text.trim().parse::<SignedDuration>().ok();
    let duration = duration.and_then(|duration| std::time::Duration::try_from(duration).ok());
    duration.ok_or_else(|| format!("{text:?} is not a duration: use 90s, 10m or \"2h 30m\""))
}

/// Parses how long a token is valid: a duration, or days such as `2d`; at most ten years.
pub fn parse_ttl(text: &str) -> Result<std::time::Duration, String> {
    const TEN_YEARS: u64 = 3650 * 24 * 3600;
    let days = text.trim().strip_suffix('d').and_then(|days| days.parse::<u64>().ok());
    let ttl = match days {
        Some(days) => std::time::Duration::from_secs(days.saturating_mul(24 * 3600)),
        None => parse_duration(text).map_err(|_| format!("{text:?} is not a duration: use 30m, 2h or 2d"))?,
    };
    match ttl.as_secs() {
        1..=TEN_YEARS => Ok(ttl),
        _ => Err(format!("{text:?} is not between 1s and 3650d")),
    }
}

/// The time this span, such as `2h 30m` or `3 days`, after `now`. Days are those of the system's zone.
fn after(now: Timestamp, span: &str) -> Option<Timestamp> {
    local(now).checked_add(parse_span(span)?).ok().map(|at| at.timestamp())
}

/// The time this span before `now`.
fn before(now: Timestamp, span: &str) -> Option<Timestamp> {
    local(now).checked_sub(parse_span(span)?).ok().map(|at| at.timestamp())
}

fn parse_span(span: &str) -> Option<Span> {
    span.trim().parse::<Span>().ok().filter(|span| !span.is_negative())
}

fn local(now: Timestamp) -> ZonedDateTime {
    now.to_zoned_datetime(TimeZone::try_system().unwrap_or(TimeZone::UTC))
}

/// The time zone with this IANA name.
pub fn zone_named(name: &str) -> Result<TimeZone, String> {
    TimeZone::get(name).map_err(|_| format!("{name:?} is not a time zone: use a name such as Europe/Berlin or UTC"))
}

fn system_zone() -> Result<TimeZone, String> {
    let unknown =
        |error| format!("the time zone of this machine is unknown ({error}): add one, as in \"... Europe/Berlin\"");
    TimeZone::try_system().map_err(unknown)
}

/// A time in seconds since 1970, in the system's zone, or in UTC if that is unknown.
pub fn describe(at_s: i64) -> String {
    let zone = TimeZone::try_system().unwrap_or(TimeZone::UTC);
    match Timestamp::from_second(at_s) {
        Ok(at) => format!("{} (UTC{})", zone.to_datetime(at).strftime("%Y-%m-%d %H:%M:%S"), zone.to_offset(at)),
        Err(_) => format!("{at_s} seconds since 1970"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn past_time_is_a_point_in_time_or_a_span_before_now() {
        let now: Timestamp = "2026-12-01T12:00:00Z".parse().unwrap();
        for (text, expected) in [
            ("2h", "2026-12-01T10:00:00Z"),
            ("2h 30m ago", "2026-12-01T09:30:00Z"),
            ("0s", "2026-12-01T12:00:00Z"),
            ("2026-11-30T08:00:00Z", "2026-11-30T08:00:00Z"),
        ] {
            assert_eq!(parse_past_at(text, now), Ok(expected.parse().unwrap()), "{text}");
        }
        for text in ["", "yesterday", "-2h", "7"] {
            assert!(parse_past_at(text, now).unwrap_err().contains("use 30m, 2h or 7d"), "{text}");
        }
    }

    #[test]
    fn ttl_is_between_a_second_and_a_week() {
        for (text, seconds) in [("1s", 1), ("30m", 1800), ("2d", 172_800), ("7d", 604_800)] {
            assert_eq!(parse_ttl(text).map(|ttl| ttl.as_secs()), Ok(seconds), "{text}");
        }
        for text in ["0s", "0d", "3651d", "30", "soon", "-1h"] {
            assert!(parse_ttl(text).is_err(), "{text}");
        }
    }

    #[test]
    fn time_has_an_offset_or_the_name_of_a_zone() {
        for text in [
            "2026-12-01T05:30:00Z",
            "2026-12-01T06:30:00+01:00",
            "2026-12-01T06:30[Europe/Berlin]",
            "2026-12-01 06:30 Europe/Berlin",
            "2026-12-01T06:30  Europe/Berlin",
            "2026-12-01 05:30 UTC",
        ] {
            assert_eq!(parse(text).map(Timestamp::as_second), Ok(1_796_103_000), "{text}");
        }
    }

    #[test]
    fn time_from_now_is_a_span() {
        let now = Timestamp::from_second(1_796_103_000).unwrap();
        for (text, seconds) in [("in 2h", 7_200), ("in 2h 30m", 9_000), ("in 90 minutes", 5_400), ("in  45s", 45)] {
            let at = parse_at(text, now).map(|at| at.as_second() - now.as_second());
            assert_eq!(at, Ok(seconds), "{text}");
        }
        for text in ["in", "in ", "in -2h", "in two hours", "in 2", "in 99999 years"] {
            let error = parse_at(text, now).unwrap_err();
            assert!(error.contains("is not a time: use"), "{text:?}: {error}");
        }
    }

    #[test]
    fn duration_has_a_unit() {
        for (text, seconds) in [("90s", 90), ("10m", 600), ("2h 30m", 9_000), ("0s", 0)] {
            assert_eq!(parse_duration(text).map(|duration| duration.as_secs()), Ok(seconds), "{text}");
        }
        for text in ["", "5", "-3s", "soon"] {
            assert!(parse_duration(text).unwrap_err().contains("use 90s, 10m"), "{text:?}");
        }
    }

    #[test]
    fn unusable_time_is_refused_with_the_accepted_form() {
        for (text, words) in [
            ("tomorrow", "is not a time: use"),
            ("", "is not a time: use"),
            ("2026-12-01 06:30 Europe/Berln", "\"Europe/Berln\" is not a time zone"),
            ("2026-03-29 02:30 Europe/Berlin", "the clock changes"),
            ("2026-10-25 02:30 Europe/Berlin", "the clock changes"),
            ("2026-13-01 02:30 UTC", "is not a time"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }
}
