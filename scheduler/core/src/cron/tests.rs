use proptest::prelude::*;

use super::*;

fn cron(text: &str) -> CronExpression {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

fn zone(name: &str) -> TimeZone {
    TimeZone::get(name).unwrap()
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

/// The first `count` instants after `after`, as local times with their offset.
fn local(text: &str, zone_name: &str, after: &str, count: usize) -> Vec<String> {
    let (expression, zone) = (cron(text), zone(zone_name));
    let mut instants = Vec::new();
    let mut last = at(after);
    for _ in 0..count {
        last = expression.next_after(last, &zone).unwrap();
        instants.push(format!("{} {}", zone.to_datetime(last), zone.to_offset(last)));
    }
    instants
}

#[test]
fn fields_have_the_meaning_of_crontab() {
    let next = |text| cron(text).next_after(at("2026-11-23T12:00:00Z"), &TimeZone::UTC).unwrap().to_string();
    for (text, expected) in [
        ("* * * * *", "2026-11-23T12:01:00Z"),
        ("0 12 * * *", "2026-11-24T12:00:00Z"),
        ("30 6 * * 1-5", "2026-11-24T06:30:00Z"),
        ("*/20 13,14 * * *", "2026-11-23T13:00:00Z"),
        ("10-50/20 * * * *", "2026-11-23T12:10:00Z"),
        ("0 0 29 2 *", "2028-02-29T00:00:00Z"),
        ("0 0 * jan Sun", "2027-01-03T00:00:00Z"),
        ("0 0 * * 7", "2026-11-29T00:00:00Z"),
        // The 1st of a month, or a Friday.
        ("0 0 1 * 5", "2026-11-27T00:00:00Z"),
        // A day field that begins with a star only restricts the other one.
        ("0 0 1 * */7", "2027-08-01T00:00:00Z"),
        ("@weekly", "2026-11-29T00:00:00Z"),
        ("@yearly", "2027-01-01T00:00:00Z"),
    ] {
        assert_eq!(next(text), expected, "{text}");
    }
}

#[test]
fn invalid_expressions_are_refused_with_the_accepted_form() {
    for (text, words) in [
        ("", "has 0 fields"),
        ("* * * *", "has 4 fields"),
        ("0 0 * * * *", "has 6 fields"),
        ("60 * * * *", "\"60\" is not valid in the field minute: use *, a number from 0 to 59"),
        ("* 24 * * *", "in the field hour"),
        ("* * 0 * *", "day of the month"),
        ("* * * 13 *", "month"),
        ("* * * * 8", "day of the week"),
        ("5/15 * * * *", "a step such as */2"),
        ("*/0 * * * *", "minute"),
        ("+1 * * * *", "minute"),
        ("5-1 * * * *", "minute"),
        ("1,,2 * * * *", "minute"),
        ("0 0 30 2 *", "never fires"),
        ("@reboot", "has 1 fields"),
    ] {
        let error = text.parse::<CronExpression>().unwrap_err().to_string();
        assert!(error.contains(words), "{text:?}: {error}");
    }
}

/// In Berlin, 2:00 to 3:00 is skipped on 2026-03-29 and occurs twice on 2026-10-25.
#[test]
fn time_of_day_fires_once_when_the_clock_changes() {
    let berlin = |text, after| local(text, "Europe/Berlin", after, 2);
    assert_eq!(
        berlin("30 2 * * *", "2026-03-28T12:00:00Z"),
        ["2026-03-29T03:30:00 +02", "2026-03-30T02:30:00 +02"],
        "the skipped time is moved forward"
    );
    assert_eq!(
        berlin("30 2 * * *", "2026-10-24T12:00:00Z"),
        ["2026-10-25T02:30:00 +02", "2026-10-26T02:30:00 +01"],
        "only the first occurrence fires"
    );
    // Lord Howe Island moves its clock by half an hour: 2:15 is moved behind 2:40.
    assert_eq!(
        local("15,40 2 * * *", "Australia/Lord_Howe", "2026-10-03T00:00:00Z", 3),
        ["2026-10-04T02:40:00 +11", "2026-10-04T02:45:00 +11", "2026-10-05T02:15:00 +11"]
    );
}

#[test]
fn expression_for_all_hours_follows_elapsed_time() {
    let hours = local("0 * * * *", "Europe/Berlin", "2026-03-28T23:30:00Z", 3);
    assert_eq!(hours, ["2026-03-29T01:00:00 +01", "2026-03-29T03:00:00 +02", "2026-03-29T04:00:00 +02"]);
    let hours = local("0 * * * *", "Europe/Berlin", "2026-10-24T23:30:00Z", 3);
    assert_eq!(hours, ["2026-10-25T02:00:00 +02", "2026-10-25T02:00:00 +01", "2026-10-25T03:00:00 +01"]);
}

#[test]
fn day_that_a_zone_skipped_does_not_stop_the_search() {
    // Samoa had no 2011-12-30.
    let days = local("0 12 * * *", "Pacific/Apia", "2011-12-29T00:00:00Z", 3);
    assert_eq!(days, ["2011-12-29T12:00:00 -10", "2011-12-31T12:00:00 +14", "2012-01-01T12:00:00 +14"]);
}

fn any_field(first: i8, last: i8) -> impl Strategy<Value = String> {
    let number = first..=last;
    prop_oneof![
        3 => Just("*".to_owned()),
        2 => number.clone().prop_map(|n| n.to_string()),
        1 => (number.clone(), number.clone()).prop_map(|(a, b)| format!("{}-{}", a.min(b), a.max(b))),
        1 => (2u8..20).prop_map(|step| format!("*/{step}")),
        1 => (number.clone(), number).prop_map(|(a, b)| format!("{a},{b}")),
    ]
}

/// Whether the minute that begins at `instant` matches, by jiff's local time.
fn matches(expression: &CronExpression, instant: Timestamp, zone: &TimeZone) -> bool {
    let local = zone.to_datetime(instant);
    local.second() == 0
        && expression.minutes.contains(local.minute())
        && expression.hours.contains(local.hour())
        && expression.matches_date(local.date())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Compares with a walk over every minute of four days, most of which contain a change of the clock.
    #[test]
    fn next_instant_is_that_of_a_search_minute_by_minute(
        fields in (any_field(0, 59), any_field(0, 23), any_field(1, 31), any_field(0, 7)),
        zone_name in proptest::sample::select(vec!["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]),
        day in proptest::sample::select(vec!["2026-03-27", "2026-10-23", "2026-03-06", "2026-10-30", "2026-04-03", "2026-10-02", "2026-07-01"]),
        minutes in 0i64..1440,
    ) {
        const SEARCHED_MINUTES: i64 = 4 * 24 * 60;
        let (minute, hour, of_month, of_week) = fields;
        let expression = cron(&format!("{minute} {hour} {of_month} * {of_week}"));
        let zone = zone(zone_name);
        let after = at(&format!("{day}T00:00:00Z")).checked_add(jiff::SignedDuration::from_mins(minutes)).unwrap();
        let later = |minutes| after.checked_add(jiff::SignedDuration::from_mins(minutes)).unwrap();
        let found = expression.next_after(after, &zone).unwrap();
        prop_assert!(found > after);
        let mut expected = (1..=SEARCHED_MINUTES).map(later).filter(|instant| matches(&expression, *instant, &zone));
        if expression.hours.is_full() {
            match expected.next() {
                Some(first) => prop_assert_eq!(found, first),
                None => prop_assert!(found > later(SEARCHED_MINUTES)),
            }
        } else {
            let local = zone.to_ambiguous_timestamp(zone.to_datetime(found));
            let is_second_occurrence = local.later().unwrap() == found && local.earlier().unwrap() != found;
            prop_assert!(!is_second_occurrence, "{} fires at a second occurrence", found);
            // A time that a jump skipped is found at an instant that does not match; no match is left out before it,
            // except the second occurrences of times.
            let is_first = |instant: &Timestamp| zone.to_ambiguous_timestamp(zone.to_datetime(*instant)).earlier().unwrap() == *instant;
            match expected.find(is_first) {
                Some(first) => prop_assert!(found <= first),
                None => prop_assert!(found > later(SEARCHED_MINUTES) || !matches(&expression, found, &zone)),
            }
        }
    }
}
