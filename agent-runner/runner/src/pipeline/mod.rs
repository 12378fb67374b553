//! What is asked of the models and what is made of their answers. Pure: a prompt is a function of the task, the files and
//! the history, so a step that is repeated after a crash asks for exactly the job it asked for before.

mod budget;
mod context;
mod early;
mod limits;
mod prompt;
mod review;
mod sampling;

pub use budget::Budget;
pub use context::{ContextFile, context_files};
pub use early::enough;
pub use limits::limits;
pub use prompt::{PromptError, creator, critic, critic_ahead, previous};
pub(crate) use prompt::{is_basis, review_format};
pub use review::{UnreadableReview, ended_review, parse_review, salvage_review};
pub use sampling::{max_tokens, sampling};
