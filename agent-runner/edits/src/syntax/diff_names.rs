//! Names of files in diffs.

/// Names of a file before and after, from its `---` and `+++` lines. A diff may have prefixes such as `a/` and `b/`, or
/// none, or name copies of the file, so several paths are possible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DiffNames {
    /// `None` for `/dev/null`.
    pub old: Option<String>,
    /// `None` for `/dev/null`.
    pub new: Option<String>,
}

impl DiffNames {
    /// The names in a `---` and a `+++` line, after the mark.
    pub(super) fn new(old: &str, new: &str) -> Self {
        Self { old: file_name(old), new: file_name(new) }
    }

    /// The paths that the names may mean, the most probable one first.
    pub(super) fn paths(&self) -> Vec<String> {
        let (old, new) = without_prefixes(self.old.clone(), self.new.clone());
        let mut paths: Vec<String> = Vec::new();
        let raw = [self.new.clone(), self.old.clone()];
        let below = |name: &Option<String>| name.as_ref()?.split_once('/').map(|(_, rest)| rest.to_owned());
        let below = [below(&self.new), below(&self.old)];
        for path in [new, old].into_iter().chain(raw).chain(below).flatten() {
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
        paths
    }
}

/// Name in a `---` or `+++` line; `None` for `/dev/null`. A tab separates the name from a time.
fn file_name(text: &str) -> Option<String> {
    let text = text.split('\t').next().unwrap_or_default().trim_end();
    // `a.c (original)`
    let text = match text.strip_suffix(')').and_then(|text| text.rsplit_once(" (")) {
        Some((name, _)) => name,
        None => text,
    };
    let name = unquoted(text);
    (name != "/dev/null").then_some(name)
}

/// Removes the prefixes `a/` and `b/`, or two others of one letter.
fn without_prefixes(old: Option<String>, new: Option<String>) -> (Option<String>, Option<String>) {
    let split = |name: &str| {
        let (prefix, rest) = name.split_once('/')?;
        let mut letters = prefix.chars();
        let letter = letters.next().filter(|c| c.is_ascii_lowercase() && letters.next().is_none())?;
        Some((letter, rest.to_owned()))
    };
    let old_split = old.as_deref().and_then(split);
    let new_split = new.as_deref().and_then(split);
    match (&old, &new, old_split, new_split) {
        (Some(_), Some(_), Some((a, old)), Some((b, new))) if (a, b) == ('a', 'b') || (a != b && old == new) => {
            (Some(old), Some(new))
        }
        (None, Some(_), _, Some(('b', new))) => (None, Some(new)),
        (Some(_), None, Some(('a', old)), _) => (Some(old), None),
        _ => (old, new),
    }
}

/// The path in `a/PATH b/PATH`, as in a `diff --git` line, if both are the same.
pub(super) fn same_path(paths: &str) -> Option<String> {
    let paths = paths.trim_end();
    let (old, new) = match paths.starts_with('"') {
        true => {
            let (old, new) = paths.split_once("\" ")?;
            (unquoted(&format!("{old}\"")), unquoted(new))
        }
        false => {
            let middle = paths.len() / 2;
            let (old, new) = (paths.get(..middle)?, paths.get(middle + 1..)?);
            (old.to_owned(), new.to_owned())
        }
    };
    let (old, new) = without_prefixes(Some(old), Some(new));
    if old == new { old } else { None }
}

/// Decodes a name that git put into quotation marks, with escapes as in C.
pub fn unquoted(text: &str) -> String {
    let Some(inner) = text.strip_prefix('"').and_then(|t| t.strip_suffix('"')) else { return text.to_owned() };
    let mut bytes = Vec::with_capacity(inner.len());
    let mut rest = inner.bytes().peekable();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        match rest.next() {
            Some(digit @ b'0'..=b'7') => {
                let mut value = u32::from(digit - b'0');
                for _ in 0..2 {
                    if let Some(digit) = rest.next_if(|b| (b'0'..=b'7').contains(b)) {
                        value = value * 8 + u32::from(digit - b'0');
                    }
                }
                bytes.push(u8::try_from(value).unwrap_or(b'?'));
            }
            Some(b'n') => bytes.push(b'\n'),
            Some(b't') => bytes.push(b'\t'),
            Some(other) => bytes.push(other),
            None => {}
        }
    }
    // A name that is not UTF-8 is no valid path.
    String::from_utf8(bytes).unwrap_or_else(|_| "\0".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_path_is_without_prefixes_and_quotes() {
        for (old, new, path) in [
            ("a/x.py", "b/x.py", "x.py"),
            ("x.py", "x.py", "x.py"),
            ("a/x.py", "a/x.py", "a/x.py"),
            ("i/x.py", "w/x.py", "x.py"),
            ("a/x.py\t2026-01-01", "b/x.py\t2026-01-02", "x.py"),
            ("\"a/\\303\\251\\\"x.py\"", "\"b/\\303\\251\\\"x.py\"", "é\"x.py"),
            ("x.py (original)", "x.py (modified)", "x.py"),
            ("x.py.orig", "x.py", "x.py"),
        ] {
            assert_eq!(DiffNames::new(old, new).paths()[0], path, "{old}");
        }
        assert_eq!(same_path("\"a/\\303\\251\" \"b/\\303\\251\"").as_deref(), Some("é"));
        assert_eq!(same_path("a/x y b/x y").as_deref(), Some("x y"));
        assert_eq!(same_path("a/x b/y"), None);
    }

    #[test]
    fn other_paths_are_those_with_a_prefix_or_without_one() {
        let paths = |old, new| DiffNames::new(old, new).paths();
        assert_eq!(paths("a/src/f.c", "b/f.c"), ["f.c", "src/f.c", "b/f.c", "a/src/f.c"]);
        assert_eq!(paths("a/f.c", "a/f.c"), ["a/f.c", "f.c"]);
        assert_eq!(paths("old/f.c", "new/f.c"), ["new/f.c", "old/f.c", "f.c"]);
        assert_eq!(paths("app.c", "app_new.c"), ["app_new.c", "app.c"]);
        assert_eq!(paths("/dev/null", "b/f.c"), ["f.c", "b/f.c"]);
    }
}
