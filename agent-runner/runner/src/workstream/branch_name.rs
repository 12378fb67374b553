//! Names of delivery branches.

use cfq_proto::ids::TaskNumber;

/// Maximum length of the slug in a branch name, in bytes. Short, because users type branch names.
const MAX_SLUG_BYTES: usize = 40;

/// Name of a task's delivery branch, such as `cfq/t42-add-a-parser`: the task number and the first words of the
/// description.
pub fn branch_name(number: TaskNumber, description: &str) -> String {
    let mut slug = String::new();
    for c in description.chars() {
        if c.is_ascii_alphanumeric() {
            slug.push(c.to_ascii_lowercase());
        } else if !slug.is_empty() && !slug.ends_with('-') {
            slug.push('-');
        }
        if slug.len() >= MAX_SLUG_BYTES {
            // Cut at the end of a word, if one ends in the last third.
            if let Some(end) = slug.rfind('-').filter(|end| *end > MAX_SLUG_BYTES * 2 / 3) {
                slug.truncate(end);
            }
            break;
        }
    }
    let slug = slug.trim_end_matches('-');
    if slug.is_empty() { format!("cfq/{number}") } else { format!("cfq/{number}-{slug}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branch_name_has_the_task_number_and_a_slug() {
        let name = |text| branch_name(TaskNumber(42), text);
        assert_eq!(name("Add a parser!"), "cfq/t42-add-a-parser");
        assert_eq!(name("…"), "cfq/t42");
        assert_eq!(name("../../etc: HEAD"), "cfq/t42-etc-head");
        let long = name("Write a function that returns the sum of the two largest numbers of a list");
        assert_eq!(long, "cfq/t42-write-a-function-that-returns-the-sum");
        for text in ["a.lock", "@{x", "a..b", "-x"] {
            assert!(git2::Reference::is_valid_name(&format!("refs/heads/{}", name(text))), "{text}");
        }
    }
}
