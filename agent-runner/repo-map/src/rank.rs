//! Importance of files and symbols: personalized PageRank over the files, in which a file refers to the files that
//! define the names that it uses. [Brin and Page, 1998](http://infolab.stanford.edu/~backrub/google.html); a symbol has
//! the part of its file's rank that comes from uses of its name.

use std::collections::{BTreeSet, HashMap};

use super::grammar::{Family, Grammar};
use super::symbols::{FileSymbols, Reach, Symbol};

/// Probability that a random walk follows a reference, instead of starting again at any file.
const DAMPING: f64 = 0.85;
/// Probability that a walk starts again at a file in focus, if there are any.
const FOCUS_RESTART_PROBABILITY: f64 = 0.9;
/// The iteration ends if the ranks change by less than this in total.
const TOLERANCE: f64 = 1e-9;
const MAX_ITERATIONS: usize = 100;
/// A name that more files define does not tell which of them is meant.
pub(super) const MAX_DEFINING_FILES: usize = 16;
/// Maximum number of references between files; those of the files after it are not followed.
const MAX_EDGES: usize = 20_000_000;

/// Ranks of one repository; those of all files add up to 1.
#[derive(Debug)]
pub(super) struct Ranks {
    /// By file.
    pub files: Vec<f64>,
    /// By file and symbol.
    pub symbols: Vec<Vec<f64>>,
}

/// A use of a name that another file defines.
struct Edge {
    to: usize,
    name: usize,
    weight: f64,
}

/// Ranks the files. `in_focus` has one value for each file. The result depends only on the arguments: all sums have a
/// fixed order.
pub(super) fn rank(files: &[(&str, &FileSymbols)], in_focus: &[bool]) -> Ranks {
    let names = Names::of(files);
    let mut remaining_edges = MAX_EDGES;
    let edges: Vec<References> = files
        .iter()
        .enumerate()
        .map(|(from, file)| {
            let references = if remaining_edges > 0 { names.references(from, *file) } else { References::default() };
            remaining_edges = remaining_edges.saturating_sub(references.edges.len());
            references
        })
        .collect();
    let restarts = restarts(in_focus);
    let mut ranks = restarts.clone();
    for _ in 0..MAX_ITERATIONS {
        let next = step(&ranks, &edges, &restarts);
        let change: f64 = ranks.iter().zip(&next).map(|(before, after)| (before - after).abs()).sum();
        ranks = next;
        if change < TOLERANCE {
            break;
        }
    }
    let mut by_name: HashMap<(usize, usize), f64> = HashMap::new();
    for (from, References { edges, total }) in edges.iter().enumerate() {
        for edge in edges {
            *by_name.entry((edge.to, edge.name)).or_default() += DAMPING * ranks[from] * edge.weight / total;
        }
    }
    let symbols = files.iter().enumerate().map(|(file, (path, symbols))| {
        let rank_of = |symbol: &Symbol| {
            let name = defined_name(symbol).and_then(|name| names.ids.get(&(family(path), name)));
            name.and_then(|name| by_name.get(&(file, *name))).copied().unwrap_or(0.0)
        };
        symbols.symbols.iter().map(rank_of).collect()
    });
    let symbols = symbols.collect();
    Ranks { files: ranks, symbols }
}

/// Probability of each file as the one at which a walk starts again.
fn restarts(in_focus: &[bool]) -> Vec<f64> {
    let focused = in_focus.iter().filter(|is_in_focus| **is_in_focus).count();
    let any = if focused == 0 { 1.0 } else { 1.0 - FOCUS_RESTART_PROBABILITY };
    let probability = |is_in_focus: &bool| {
        let of_focus = if *is_in_focus { FOCUS_RESTART_PROBABILITY / focused as f64 } else { 0.0 };
        any / in_focus.len() as f64 + of_focus
    };
    in_focus.iter().map(probability).collect()
}

fn step(ranks: &[f64], edges: &[References], restarts: &[f64]) -> Vec<f64> {
    let mut next = vec![0.0; ranks.len()];
    // Rank of the files without references; a walk that reaches one starts again.
    let mut dangling = 0.0;
    for (rank, References { edges, total }) in ranks.iter().zip(edges) {
        if edges.is_empty() {
            dangling += rank;
        }
        for edge in edges {
            next[edge.to] += DAMPING * rank * edge.weight / total;
        }
    }
    for (next, restart) in next.iter_mut().zip(restarts) {
        *next += (1.0 - DAMPING + DAMPING * dangling) * restart;
    }
    next
}

/// What one file refers to.
#[derive(Default)]
struct References {
    edges: Vec<Edge>,
    /// Sum of the weights.
    total: f64,
}

/// The defined names, each of one family of languages, and the files that define it.
struct Names<'f> {
    ids: HashMap<(Option<Family>, &'f str), usize>,
    defined_in: Vec<BTreeSet<usize>>,
    /// Number of files that use each name.
    used_in: Vec<usize>,
    /// Whether all definitions of the name are members of types.
    is_member: Vec<bool>,
}

impl<'f> Names<'f> {
    fn of(files: &[(&str, &'f FileSymbols)]) -> Self {
        let mut names =
            Self { ids: HashMap::new(), defined_in: Vec::new(), used_in: Vec::new(), is_member: Vec::new() };
        for (file, (path, symbols)) in files.iter().enumerate() {
            for (symbol, name) in symbols.symbols.iter().filter_map(|symbol| Some((symbol, defined_name(symbol)?))) {
                let id = *names.ids.entry((family(path), name)).or_insert(names.defined_in.len());
                if id == names.defined_in.len() {
                    names.defined_in.push(BTreeSet::new());
                    names.is_member.push(true);
                }
                names.is_member[id] &= symbol.reach == Reach::Member;
                names.defined_in[id].insert(file);
            }
        }
        names.used_in = vec![0; names.defined_in.len()];
        for (path, symbols) in files {
            for (name, _) in &symbols.references {
                if let Some(id) = names.ids.get(&(family(path), &**name)) {
                    names.used_in[*id] += 1;
                }
            }
        }
        names
    }

    /// The uses of names that other files define. The weight of a use grows with the square root of its count, so that
    /// one file that repeats a name does not decide, and is shared by the files that define it. A name of one word, or
    /// of a member, is one of many things, most of them in libraries, so all files that use it share the weight of one.
    fn references(&self, from: usize, (path, file): (&str, &FileSymbols)) -> References {
        let family = family(path);
        let mut edges = Vec::new();
        for (name, uses) in &file.references {
            let is_one_word = is_one_word(name);
            let Some(&name) = self.ids.get(&(family, &**name)) else { continue };
            let defined_in = &self.defined_in[name];
            if defined_in.len() > MAX_DEFINING_FILES {
                continue;
            }
            let shared_by = if is_one_word || self.is_member[name] {
                self.used_in[name] * defined_in.len()
            } else {
                defined_in.len()
            };
            let weight = f64::from(*uses).sqrt() / shared_by as f64;
            edges.extend(defined_in.iter().filter(|to| **to != from).map(|to| Edge { to: *to, name, weight }));
        }
        let total = edges.iter().map(|edge| edge.weight).sum();
        References { edges, total }
    }
}

/// The name by which other files use a symbol. A method of one word, such as `error` or `clone`, is one of many, most of
/// them in libraries, so its uses tell nothing.
fn defined_name(symbol: &Symbol) -> Option<&str> {
    symbol.name.as_deref().filter(|name| match symbol.reach {
        Reach::File => false,
        Reach::Member => !is_one_word(name),
        Reach::Repository => true,
    })
}

/// Whether a name is one word in lower case. `merge_queue`, `MergeQueue` and `Queue` are more likely to mean the same
/// thing wherever they are used.
fn is_one_word(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_lowercase())
}

fn family(path: &str) -> Option<Family> {
    Grammar::of_path(path).map(Grammar::family)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(defines: &[&str], uses: &[(&str, u32)]) -> FileSymbols {
        let symbol = |name: &&str| Symbol {
            name: Some((*name).into()),
            reach: Reach::Repository,
            line: 1,
            text: (*name).into(),
            parent: None,
        };
        FileSymbols {
            symbols: defines.iter().map(symbol).collect(),
            references: uses.iter().map(|(name, uses)| ((*name).into(), *uses)).collect(),
        }
    }

    fn ranks(files: &[FileSymbols], in_focus: &[bool]) -> Ranks {
        let files: Vec<(&str, &FileSymbols)> = files.iter().map(|file| ("a.py", file)).collect();
        rank(&files, in_focus)
    }

    #[test]
    fn file_that_others_use_is_ranked_above_them() {
        let files = [
            file(&["helper", "unused"], &[]),
            file(&["first"], &[("helper", 3)]),
            file(&["second"], &[("helper", 1), ("first", 1)]),
        ];
        let ranks = ranks(&files, &[false; 3]);
        assert!(ranks.files[0] > ranks.files[1] && ranks.files[1] > ranks.files[2], "{ranks:?}");
        assert!(ranks.symbols[0][0] > ranks.symbols[1][0], "{ranks:?}");
        assert_eq!(ranks.symbols[0][1], 0.0, "no file uses it");
    }

    #[test]
    fn focus_raises_a_file_and_what_it_uses() {
        let files = [
            file(&["helper"], &[]),
            file(&["other"], &[]),
            file(&["first"], &[("helper", 1)]),
            file(&[], &[("other", 1)]),
        ];
        let plain = ranks(&files, &[false; 4]);
        assert!((plain.files[0] - plain.files[1]).abs() < 1e-9, "{plain:?}");
        let focused = ranks(&files, &[false, false, true, false]);
        assert!(focused.files[0] > 5.0 * focused.files[1], "{focused:?}");
    }

    #[test]
    fn common_word_counts_less_than_a_name() {
        let user = file(&[], &[("error", 4), ("ErrorKind", 1)]);
        let files = [file(&["error"], &[]), file(&["ErrorKind"], &[]), user.clone(), user.clone(), user];
        let ranks = ranks(&files, &[false; 5]);
        assert!(ranks.files[1] > ranks.files[0], "{ranks:?}");
    }

    #[test]
    fn name_means_a_definition_in_the_same_language() {
        let files = [file(&["Queue"], &[]), file(&["Queue"], &[]), file(&[], &[("Queue", 1)])];
        let files = [("a.rs", &files[0]), ("b.py", &files[1]), ("c.py", &files[2])];
        let ranks = rank(&files, &[false; 3]);
        assert!(ranks.files[1] > ranks.files[0], "{ranks:?}");
    }

    #[test]
    fn name_defined_in_many_files_has_no_weight() {
        let mut files = vec![file(&["new"], &[]); MAX_DEFINING_FILES + 1];
        files.push(file(&[], &[("new", 9)]));
        let ranks = ranks(&files, &vec![false; files.len()]);
        let mean = 1.0 / files.len() as f64;
        assert!(ranks.files.iter().all(|rank| (rank - mean).abs() < 1e-9), "{ranks:?}");
    }

    proptest! {
        /// Files that define and use names of a small alphabet.
        #[test]
        fn ranks_add_up_to_one_and_depend_only_on_the_files(
            shape in prop::collection::vec(
                (prop::collection::vec(0..6_usize, 0..4), prop::collection::vec((0..6_usize, 1..9_u32), 0..5), any::<bool>()),
                1..12,
            ),
        ) {
            const NAMES: [&str; 6] = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"];
            let files: Vec<FileSymbols> = shape
                .iter()
                .map(|(defines, uses, _)| {
                    let defines: Vec<&str> = defines.iter().map(|name| NAMES[*name]).collect();
                    let uses: Vec<(&str, u32)> = uses.iter().map(|(name, uses)| (NAMES[*name], *uses)).collect();
                    file(&defines, &uses)
                })
                .collect();
            let in_focus: Vec<bool> = shape.iter().map(|(.., focus)| *focus).collect();
            let first = ranks(&files, &in_focus);
            let total: f64 = first.files.iter().sum();
            prop_assert!((total - 1.0).abs() < 1e-6, "{total}");
            prop_assert_eq!(&ranks(&files, &in_focus).files, &first.files);
        }
    }
}
