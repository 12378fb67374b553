//! One part of a map: the lines that fit into a number of tokens.

use std::collections::BTreeSet;

use super::layout::{Layout, Line};
use super::symbols::Symbol;
use super::tokens::estimated_tokens;

/// A part that is being made.
pub(super) struct Part<'l> {
    layout: &'l Layout<'l>,
    remaining_tokens: usize,
    folders: BTreeSet<usize>,
    files: BTreeSet<usize>,
    symbols: BTreeSet<(usize, usize)>,
}

impl<'l> Part<'l> {
    pub(super) fn new(layout: &'l Layout<'l>, max_tokens: usize) -> Self {
        let (folders, files, symbols) = Default::default();
        let at_the_top = estimated_tokens(&layout.more(None, layout.files.len()));
        Self { layout, remaining_tokens: max_tokens.saturating_sub(at_the_top), folders, files, symbols }
    }

    pub(super) fn files(&self) -> impl Iterator<Item = usize> {
        self.files.iter().copied()
    }

    fn has(&self, line: Line) -> bool {
        match line {
            Line::Folder(folder) => self.folders.contains(&folder),
            Line::File(file) => self.files.contains(&file),
            Line::Symbol(file, symbol) => self.symbols.contains(&(file, symbol)),
        }
    }

    /// Takes lines from the beginning of `order` until one does not fit, and returns the rest. A line that does not
    /// fit into an empty part is skipped.
    pub(super) fn fill<'o>(&mut self, order: &'o [Line]) -> &'o [Line] {
        for (index, line) in order.iter().enumerate() {
            let missing: Vec<Line> = std::iter::successors(Some(*line), |line| self.layout.enclosing(*line))
                .take_while(|line| !self.has(*line))
                .collect();
            let cost: usize = missing.iter().map(|line| self.cost(*line)).sum();
            if cost > self.remaining_tokens {
                if self.folders.is_empty() && self.files.is_empty() {
                    continue;
                }
                return &order[index..];
            }
            self.remaining_tokens -= cost;
            for line in missing {
                match line {
                    Line::Folder(folder) => self.folders.insert(folder),
                    Line::File(file) => self.files.insert(file),
                    Line::Symbol(file, symbol) => self.symbols.insert((file, symbol)),
                };
            }
        }
        &[]
    }

    /// Estimated tokens of a line. A folder may get a line for the files that are not shown.
    fn cost(&self, line: Line) -> usize {
        let more = match line {
            Line::Folder(folder) => estimated_tokens(&self.layout.more(Some(folder), self.layout.files.len())),
            Line::File(_) | Line::Symbol(..) => 0,
        };
        estimated_tokens(&self.layout.text(line)) + more
    }

    /// The text. `shown_files` are those that this part and earlier ones show.
    pub(super) fn text(&self, shown_files: &[bool]) -> String {
        let layout = self.layout;
        // By the folder that the part shows, from the top: files of the repository that no part has shown so far.
        let mut unseen = vec![0_usize; layout.folders.all.len() + 1];
        for (file, _) in layout.files.iter().enumerate().filter(|(file, _)| !shown_files[*file]) {
            let mut folder = layout.folders.of_file[file];
            while let Some(index) = folder.filter(|index| !self.folders.contains(index)) {
                folder = layout.folders.all[index].parent;
            }
            unseen[folder.map_or(0, |folder| folder + 1)] += 1;
        }
        let mut text = String::new();
        self.write(&unseen, &mut text);
        text
    }

    /// Writes the folders, without recursion: of each, first the folders in it, then its files, then the number of
    /// others.
    fn write(&self, unseen: &[usize], text: &mut String) {
        enum Todo {
            Folder(usize),
            Content(Option<usize>),
        }
        let layout = self.layout;
        let mut folders_in = vec![Vec::new(); layout.folders.all.len() + 1];
        for folder in self.folders.iter().rev() {
            folders_in[layout.folders.all[*folder].parent.map_or(0, |parent| parent + 1)].push(*folder);
        }
        let mut files_in = vec![Vec::new(); layout.folders.all.len() + 1];
        for file in &self.files {
            files_in[layout.folders.of_file[*file].map_or(0, |folder| folder + 1)].push(*file);
        }
        let mut open = vec![Todo::Content(None)];
        open.extend(folders_in[0].iter().map(|folder| Todo::Folder(*folder)));
        while let Some(todo) = open.pop() {
            match todo {
                Todo::Folder(folder) => {
                    text.push_str(&layout.text(Line::Folder(folder)));
                    open.push(Todo::Content(Some(folder)));
                    open.extend(folders_in[folder + 1].iter().map(|folder| Todo::Folder(*folder)));
                }
                Todo::Content(folder) => {
                    let slot = folder.map_or(0, |folder| folder + 1);
                    for file in &files_in[slot] {
                        text.push_str(&layout.text(Line::File(*file)));
                        let mut last = None;
                        for (_, symbol) in self.symbols.range((*file, 0)..=(*file, usize::MAX)) {
                            let Symbol { line, text: shown, .. } = &layout.files[*file].1.symbols[*symbol];
                            // A line that defines several names is shown once.
                            if last != Some((line, shown)) {
                                text.push_str(&layout.text(Line::Symbol(*file, *symbol)));
                            }
                            last = Some((line, shown));
                        }
                    }
                    if unseen[slot] > 0 {
                        text.push_str(&layout.more(folder, unseen[slot]));
                    }
                }
            }
        }
    }
}
