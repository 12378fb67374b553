//! `cfq logs --process NAME`: the log files of this machine's processes.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use jiff::Timestamp;

use super::Selection;
use crate::exit::{Code, usage};
use crate::output;

/// Processes with a log.
pub const PROCESSES: [&str; 7] = ["scheduler", "node", "runner", "postgres", "nats", "up", "join"];
/// Interval at which a followed file is read.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub async fn process(data: &Path, name: &str, selection: Selection) -> anyhow::Result<Code> {
    if !PROCESSES.contains(&name) {
        return Err(usage(format!("unknown process {name:?}; valid names: {}", PROCESSES.join(", "))));
    }
    let path = data.join("log").join(format!("{name}.log"));
    if !path.exists() {
        return Err(usage(format!(
            "{} does not exist: has `cfq up`, or for `join` and `node` `cfq join`, run with this data folder?",
            path.display()
        )));
    }
    let cannot_read = || format!("cannot read {}", path.display());
    let bytes = std::fs::read(&path).with_context(cannot_read)?;
    let mut read = bytes.len() as u64;
    // A followed line is printed when it is complete.
    let complete = if selection.follow {
        bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1)
    } else {
        bytes.len()
    };
    let text = String::from_utf8_lossy(&bytes[..complete]);
    let lines: Vec<&str> = selected(&text, selection.since);
    let first = selection.tail.map_or(0, |tail| lines.len().saturating_sub(tail));
    if lines.len() > first {
        output::print_line(output::sanitize(&lines[first..].join("\n")).trim_end());
    }
    if !selection.follow {
        return Ok(Code::Done);
    }
    let mut rest = bytes[complete..].to_vec();
    let mut signalled = std::pin::pin!(cfq_link::stop::signalled());
    loop {
        tokio::select! {
            () = &mut signalled => return Ok(Code::Interrupted),
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
        // The file is missing while it is replaced.
        let Ok(mut file) = std::fs::File::open(&path) else { continue };
        let length = file.metadata().with_context(cannot_read)?.len();
        if length < read {
            read = 0;
            rest.clear();
        }
        file.seek(SeekFrom::Start(read)).with_context(cannot_read)?;
        let before = rest.len();
        file.read_to_end(&mut rest).with_context(cannot_read)?;
        read += (rest.len() - before) as u64;
        if let Some(end) = rest.iter().rposition(|byte| *byte == b'\n') {
            output::print_line(&output::sanitize(&String::from_utf8_lossy(&rest[..end])));
            rest.drain(..=end);
        }
    }
}

/// The lines from the first one that was written at this time or later. A line without a time was written with the one
/// before it.
fn selected(text: &str, since: Option<Timestamp>) -> Vec<&str> {
    let lines = text.lines();
    match since {
        None => lines.collect(),
        Some(since) => lines.skip_while(|line| time_of(line).is_none_or(|at| at < since)).collect(),
    }
}

/// The time at the start of a line of cfq (`2026-12-01T06:30:00.123456Z`), Postgres (`2026-12-01 06:30:00.123 UTC`) or
/// NATS (`[123] 2026/12/01 06:30:00.123456`, in the local zone).
fn time_of(line: &str) -> Option<Timestamp> {
    let line = line.trim_start();
    let mut words = line.split_whitespace();
    let first = words.next()?;
    if let Ok(at) = first.parse::<Timestamp>() {
        return Some(at);
    }
    let (date, zone) = match first.starts_with('[') {
        true => (words.next()?.replace('/', "-"), None),
        false => (first.to_owned(), Some(jiff::tz::TimeZone::UTC)),
    };
    let local: jiff::civil::DateTime = format!("{date}T{}", words.next()?).parse().ok()?;
    let zone = zone.or_else(|| jiff::tz::TimeZone::try_system().ok())?;
    zone.to_timestamp(local).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_since_a_time_are_found_in_every_format() {
        let cfq = "2026-12-01T06:29:59.9Z  INFO a\n  more of a\n2026-12-01T06:30:00.1Z  INFO b\n  more of b\n";
        let postgres = "2026-12-01 06:29:59.9 UTC [7] LOG:  a\n2026-12-01 06:30:00.1 UTC [7] LOG:  b\n";
        let since = Some("2026-12-01T06:30:00Z".parse().unwrap());
        assert_eq!(selected(cfq, since), ["2026-12-01T06:30:00.1Z  INFO b", "  more of b"]);
        assert_eq!(selected(postgres, since), ["2026-12-01 06:30:00.1 UTC [7] LOG:  b"]);
        assert_eq!(selected(cfq, None).len(), 4);
        let zone = jiff::tz::TimeZone::try_system().unwrap_or(jiff::tz::TimeZone::UTC);
        let local = zone.to_datetime("2026-12-01T06:30:00Z".parse().unwrap()).strftime("%Y/%m/%d %H:%M:%S").to_string();
        let nats = format!("[12] {local}.500000 [INF] a\n");
        assert_eq!(time_of(&nats), Some("2026-12-01T06:30:00.5Z".parse().unwrap()));
        assert_eq!(time_of("no time"), None);
    }
}
