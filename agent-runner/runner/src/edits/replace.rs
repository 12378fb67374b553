//! Search/replace hunks: `<<<<<<< SEARCH`, `=======`, `>>>>>>> REPLACE`. The searched lines must be in the file exactly
//! once; only spaces at line ends are forgiven, because models drop them and they rarely matter.

use super::ReplyProblem;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hunk {
    pub search: Vec<String>,
    pub replace: Vec<String>,
}

pub(super) fn is_start(line: &str) -> bool {
    let line = line.trim();
    line.starts_with("<<<<<") && line.trim_start_matches('<').trim().eq_ignore_ascii_case("search")
}

fn is_middle(line: &str) -> bool {
    let line = line.trim_end();
    line.len() >= 5 && line.bytes().all(|b| b == b'=')
}

fn is_end(line: &str) -> bool {
    let line = line.trim();
    line.starts_with(">>>>>") && line.trim_start_matches('>').trim().eq_ignore_ascii_case("replace")
}

/// The hunks of a block's lines. Lines between hunks are passed over.
pub(super) fn hunks(path: &str, lines: &[&str]) -> Result<Vec<Hunk>, ReplyProblem> {
    let incomplete = || ReplyProblem::Incomplete { path: path.to_owned() };
    let mut hunks = Vec::new();
    let mut lines = lines.iter();
    while let Some(line) = lines.next() {
        if !is_start(line) {
            continue;
        }
        let mut hunk = Hunk { search: Vec::new(), replace: Vec::new() };
        loop {
            let line = lines.next().ok_or_else(incomplete)?;
            if is_middle(line) {
                break;
            }
            hunk.search.push((*line).to_owned());
        }
        loop {
            let line = lines.next().ok_or_else(incomplete)?;
            if is_end(line) {
                break;
            }
            hunk.replace.push((*line).to_owned());
        }
        hunks.push(hunk);
    }
    Ok(hunks)
}

/// The text after one hunk. An empty search makes a new file, or adds to the end of one.
pub(super) fn replace(path: &str, text: &str, hunk: &Hunk) -> Result<String, ReplyProblem> {
    let mut lines: Vec<&str> = text.lines().collect();
    let replacement: Vec<&str> = hunk.replace.iter().map(String::as_str).collect();
    let at = if hunk.search.iter().all(|l| l.trim().is_empty()) {
        lines.len()..lines.len()
    } else {
        let n = hunk.search.len();
        let matches = |same: fn(&str, &str) -> bool| -> Vec<usize> {
            let fits = |w: &[&str]| w.iter().zip(&hunk.search).all(|(a, b)| same(a, b));
            lines.windows(n).enumerate().filter(|(_, w)| fits(w)).map(|(i, _)| i).collect()
        };
        let mut found = matches(|a, b| a == b);
        if found.is_empty() {
            found = matches(|a, b| a.trim_end() == b.trim_end());
        }
        let line = hunk.search.iter().find(|l| !l.trim().is_empty()).map(|l| l.trim().to_owned()).unwrap_or_default();
        match found.as_slice() {
            [] => return Err(ReplyProblem::NotFound { path: path.to_owned(), line }),
            [one] => *one..*one + n,
            many => return Err(ReplyProblem::Ambiguous { path: path.to_owned(), line, times: many.len() }),
        }
    };
    lines.splice(at, replacement);
    let mut new = lines.join("\n");
    if !new.is_empty() {
        new.push('\n');
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: [&str; 7] = ["<<<<<<< SEARCH", "b", "=======", "x", "y", ">>>>>>> REPLACE", "said"];

    #[test]
    fn a_hunk_is_found_and_replaced_once() {
        let hunks = hunks("f", &BLOCK).unwrap();
        assert_eq!(hunks.len(), 1);
        assert_eq!(replace("f", "a\nb  \nc\n", &hunks[0]).unwrap(), "a\nx\ny\nc\n");
        assert!(matches!(replace("f", "a\n", &hunks[0]), Err(ReplyProblem::NotFound { .. })));
        assert!(matches!(replace("f", "b\nb\n", &hunks[0]), Err(ReplyProblem::Ambiguous { times: 2, .. })));
    }

    #[test]
    fn an_empty_search_appends_and_a_cut_hunk_is_said() {
        let hunk = Hunk { search: vec![], replace: vec!["z".into()] };
        assert_eq!(replace("f", "a\n", &hunk).unwrap(), "a\nz\n");
        assert_eq!(replace("f", "", &hunk).unwrap(), "z\n");
        assert!(matches!(hunks("f", &BLOCK[..4]), Err(ReplyProblem::Incomplete { .. })));
    }
}
