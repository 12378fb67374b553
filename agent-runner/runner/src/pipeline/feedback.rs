//! Feedback on an iteration, as the creator's prompt shows it.

use cfq_convergence::Iteration;

/// Returns the findings of the checks, then those of the review: the defects (critical ones first), the required
/// changes, and the suggestions.
pub(super) fn feedback(iteration: &Iteration) -> String {
    let mut lines = Vec::new();
    for finding in &iteration.findings {
        lines.push(format!("- {finding}"));
    }
    let known_failures = iteration.known_failures();
    if !known_failures.is_empty() {
        lines.push("\nTests that fail, and failed before the change too:".to_owned());
        lines.extend(known_failures.iter().map(|name| format!("- {name}")));
        lines.push(String::new());
    }
    if let Some(review) = &iteration.review {
        lines.push(format!("Review score: {:.0} of 100.", review.quality_score));
        let mut defects: Vec<_> = review.defects.iter().collect();
        defects.sort_by_key(|d| d.severity);
        for defect in defects {
            let fix = defect.suggested_fix.as_deref().map_or(String::new(), |fix| format!(" Fix: {fix}"));
            lines.push(format!("- {} ({}): {}{fix}", defect.severity.as_str(), defect.location, defect.description));
        }
        for (title, items) in [("Required changes", &review.required_changes), ("Suggestions", &review.suggestions)] {
            if !items.is_empty() {
                lines.push(format!("\n{title}:"));
                lines.extend(items.iter().map(|item| format!("- {item}")));
            }
        }
    }
    lines.join("\n")
}
