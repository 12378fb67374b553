//! Reasons why a step of a task's loop is rejected.

use cfq_convergence::IllegalTransition;
use cfq_proto::ids::ArtifactId;
use cfq_proto::pr::PrState;
use cfq_proto::task::TaskState;

/// Why a step cannot be written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StepRejection {
    /// The loop's state does not allow the step.
    #[error(transparent)]
    Transition(#[from] IllegalTransition),
    /// A task in the state `from` cannot enter the state `to`, to which the step leads.
    #[error("the task is {from}, it cannot become {to}")]
    TaskState { from: TaskState, to: TaskState },
    /// A pull request in the state `from` cannot enter the state `to`, to which the step leads.
    #[error("pull request {pr} is {from}, it cannot become {to}")]
    PrState { pr: i64, from: PrState, to: PrState },
    #[error("the task has no pull request")]
    NoPr,
    #[error("the task has a pull request already")]
    PrExists,
    #[error("there is no iteration {iteration}")]
    NoIteration { iteration: u32 },
    #[error("there is no iteration {iteration}, or it has this review already")]
    NoIterationOrReviewExists { iteration: u32 },
    #[error("iteration {iteration} exists already")]
    IterationExists { iteration: u32 },
    #[error("the last merge intent of the task is {intended}")]
    NotTheIntendedMerge { intended: String },
    /// The main branch is not at the old commit of the merge intent.
    #[error("the main branch of {repository} has moved since the merge was planned")]
    MainMoved { repository: String },
    /// The merge intent names a repository other than that of the task.
    #[error("the task belongs to the repository {expected}, not to {named}")]
    OtherRepository { named: String, expected: String },
    #[error("artifact {id} exists already")]
    ArtifactExists { id: ArtifactId },
}
