//! Decides whether a planned merge is carried out: the project's checks must pass on it, unless its files were checked
//! before.

use cfq_proto::review::CheckRun;

use super::iterate::checks_time_limit;
use super::port::TaskPort;
use super::task_driver::{ActionError, TaskDriver};
use crate::checks::{CHECKS_FILE_PATH, CheckRunError, MAX_MERGE_RUNS, MergeToCheck, declared_checks};
use crate::workstream::{EarlierMerges, MergePlan, Mirror, Snapshot};

/// Maximum number of tries to check the merge of a result that a human has accepted as it is.
const MAX_ACCEPTED_TRIES: u32 = 3;
/// Maximum number of findings that the reason of a refused merge contains.
const MAX_FINDINGS: usize = 3;

/// Outcome of the checks of a planned merge.
pub(super) enum MergeCheck {
    /// The merge may be carried out. These checks ran on it.
    Passed(Vec<CheckRun>),
    /// The merge must not be carried out.
    Refused { reason: String },
}

impl<P: TaskPort> TaskDriver<P> {
    /// Runs the project's checks on a planned merge whose files were not checked before.
    ///
    /// # Errors
    /// If the checks cannot run on this machine now. What is wrong with the merge itself is no error.
    pub(super) async fn check_merge(&self, mirror: &Mirror, plan: &MergePlan) -> Result<MergeCheck, ActionError> {
        let Some(three_way) = &plan.three_way else { return Ok(MergeCheck::Passed(Vec::new())) };
        let (base, (iteration, result)) = (self.base()?.commit, self.result()?);
        let (of_commits, new, of_task) = (mirror.clone(), plan.new.clone(), base.clone());
        let declared = tokio::task::spawn_blocking(move || {
            let repository = of_commits.repository()?;
            let declared_at = |commit: &str| declared_checks(&Snapshot::of(&repository, commit)?);
            Ok::<_, CheckRunError>((declared_at(&new)?, declared_at(&of_task)?))
        });
        let (declared, of_base) = match declared.await? {
            Ok(declared) => declared,
            Err(error) => return self.refused(error, &three_way.earlier),
        };
        if declared.checks.is_empty() {
            return Ok(MergeCheck::Passed(Vec::new()));
        }
        let merge = MergeToCheck {
            merge: plan.new.clone(),
            main: three_way.main.clone(),
            result,
            merge_base: three_way.merge_base.clone(),
            passed: iteration.quarantine.is_none().then_some(iteration.ran),
            has_same_checks: declared == of_base,
            prepare_on: (declared.preparations == of_base.preparations).then_some(base),
        };
        let limit = checks_time_limit(&declared, MAX_MERGE_RUNS);
        let mut tries = 0;
        let checked = loop {
            let (declared, merge) = (declared.clone(), merge.clone());
            let checked = self.with_check_runner(mirror, limit, move |runner, name, mirror, cancelled| {
                runner.run_on_merge(name, &declared, &merge, mirror, cancelled)
            });
            tries += 1;
            match checked.await {
                // The result is delivered in any case then, but it is merged if that is possible.
                Err(ActionError::Checks(error))
                    if self.history.facts.accepted_as_is && error.is_transient() && tries < MAX_ACCEPTED_TRIES =>
                {
                    tracing::warn!(task = %self.number, error = error.with_causes(), "cannot check a merge, retrying");
                    self.port.record_progress();
                    tokio::time::sleep(self.backoff(tries)).await;
                }
                checked => break checked,
            }
        };
        let findings = match checked {
            Ok((ran, findings)) if findings.is_empty() => return Ok(MergeCheck::Passed(ran)),
            Ok((_, findings)) => findings,
            Err(ActionError::Checks(error)) => return self.refused(error, &three_way.earlier),
            Err(error) => return Err(error),
        };
        let mut texts: Vec<String> = findings.iter().take(MAX_FINDINGS).map(ToString::to_string).collect();
        if let Some(more) = findings.len().checked_sub(MAX_FINDINGS).filter(|more| *more > 0) {
            texts.push(format!("and {more} more findings"));
        }
        let reason = format!(
            "its merge with the results of earlier cfq tasks{} breaks the project's checks:\n{}",
            merged_before(&three_way.earlier),
            texts.join("\n")
        );
        Ok(MergeCheck::Refused { reason })
    }

    /// Refuses a merge that cannot be checked because of its content. Other errors are returned: the hand-off is then
    /// repeated or held, and the merge can still be carried out. If a human has accepted the result as it is, no error
    /// keeps it from being delivered.
    fn refused(&self, error: CheckRunError, earlier: &EarlierMerges) -> Result<MergeCheck, ActionError> {
        let accepted = self.history.facts.accepted_as_is;
        let problem = match error {
            CheckRunError::InvalidFile { reason } => format!("{CHECKS_FILE_PATH} of the merge is invalid: {reason}"),
            CheckRunError::MergeNotPrepared { .. } | CheckRunError::KeptFolderInCommit { .. } => error.with_causes(),
            error if accepted => error.with_causes(),
            error => return Err(error.into()),
        };
        let earlier = merged_before(earlier);
        let reason = format!("its merge with the results of earlier cfq tasks{earlier} cannot be checked: {problem}");
        Ok(MergeCheck::Refused { reason })
    }
}

/// The tasks that were merged before, in brackets.
fn merged_before(earlier: &EarlierMerges) -> String {
    match earlier.is_empty() {
        true => String::new(),
        false => format!(" (merged before: {earlier})"),
    }
}
