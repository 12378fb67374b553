//! `POST /tasks/{key}/acknowledge`.

use axum::Json;
use axum::extract::{Extension, Path, State};
use cfq_proto::http::StateReply;
use cfq_proto::task::TaskState;

use super::Api;
use super::access::Access;
use super::error::ApiError;
use super::tasks::{find_own, unknown};
use crate::store::AcknowledgeOutcome;

pub async fn acknowledge(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(key): Path<String>,
) -> Result<Json<StateReply>, ApiError> {
    let task = find_own(&api, &access, &key).await?;
    match api.store.acknowledge(task).await? {
        AcknowledgeOutcome::Done { number, is_new } => {
            let note = if is_new { "" } else { "its failure was acknowledged before" };
            Ok(Json(StateReply { id: task, number, state: TaskState::Failed, note: note.to_owned() }))
        }
        AcknowledgeOutcome::Refused { number, state } => {
            Err(ApiError::conflict(format!("{number} is {state}: only the failure of a task can be acknowledged")))
        }
        AcknowledgeOutcome::Unknown => Err(unknown(&key)),
    }
}
