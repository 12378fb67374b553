//! Prompts for the models and parsing of their replies. Pure: a prompt is a function of the task, the files, the
//! history, the repository map and the server policies. After a crash, a step is repeated with the same prompt, except
//! that the map may be missing and the server policies may have changed; then the scheduler keeps the prompt that was
//! requested first.

mod budget;
mod context;
mod early_stop;
mod feedback;
mod loop_limits;
mod policies;
mod prompt;
mod render;
mod repository_map;
mod review;
mod sampling;

pub use budget::Budget;
pub use context::{ContextFile, context_files, named_files, shown_paths};
pub use early_stop::early_stops;
pub use loop_limits::loop_limits;
pub use policies::DEFAULT_SECURITY_POLICY;
pub use prompt::{PromptSources, creator_prompt, critic_prompt, critic_prompt_prefix, previous_as_reply};
pub(crate) use prompt::{is_revision_base, review_format};
pub use render::PromptError;
pub use repository_map::{MAX_MAP_TIME, map_request};
pub use review::{UnreadableReview, early_stopped_review, incomplete_review, parse_review, salvage_review};
pub use sampling::{max_tokens, sampling};
