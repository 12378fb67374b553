//! Tests of the edits as a whole: from the text of a reply to changed files.

#[cfg(test)]
mod files;
#[cfg(test)]
mod git_apply;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod replies;
#[cfg(test)]
mod table;
