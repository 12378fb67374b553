//! `run_critic_review`: Beta reviews an artifact again, apart from the loop that made it.

use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::ArtifactChain;
use cfq_proto::ids::{ArtifactId, TaskKey};
use cfq_proto::model::ModelId;
use cfq_proto::task::ReviewDepth;
use schemars::JsonSchema;
use serde::Deserialize;

use super::access::Access;
use super::error::ToolError;
use super::replies::Accepted;
use super::submission::submit_prepared;
use crate::commands::review::of_chain;

/// Id of an artifact or of a task.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub struct ArtifactKey(TaskKey);

impl TryFrom<String> for ArtifactKey {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let error = || {
            format!(
                "{text:?} is not an artifact: use the artifact_id of get_artifact, a session_id, or a number as in t42"
            )
        };
        text.parse().map(Self).map_err(|_| error())
    }
}

impl ArtifactKey {
    /// The artifact, or the best one of the task.
    pub async fn find(self, client: &Client) -> Result<ArtifactChain, ToolError> {
        match (client.artifacts(self.0, None).await, self.0) {
            (Err(of_task @ ClientError::Refused { status: 404, .. }), TaskKey::Id(id)) => {
                // Not the id of a task, or of one without artifacts.
                match client.artifact(ArtifactId(id.0)).await {
                    Err(ClientError::Refused { status: 404, .. }) => Err(of_task.into()),
                    found => Ok(found?),
                }
            }
            (found, _) => Ok(found?),
        }
    }
}

/// Arguments of `run_critic_review`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunCriticReview {
    /// `artifact_id` of `get_artifact`, or the session id of a task, whose best artifact is reviewed.
    #[schemars(with = "String")]
    pub artifact_id: ArtifactKey,
    /// `quick`: one call that looks only for defects that must be fixed. `standard`: one call, as in the loop.
    /// `comprehensive`: the checks of the project, then one call each about correctness, security, and tests with
    /// maintainability. Default: standard.
    #[serde(default)]
    pub review_depth: ReviewDepth,
    /// Model of the critic. Default: that of the server's configuration.
    #[serde(default)]
    pub model: Option<ModelId>,
    /// Any text that is unique for this review. A repeated call with the same key returns the same session. Name an
    /// `artifact_id` with it: the best artifact of a session may change.
    #[serde(default)]
    pub idempotency_key: Option<String>,
}

/// `run_critic_review`.
pub async fn run(access: &Access, arguments: RunCriticReview) -> Result<Accepted, ToolError> {
    let RunCriticReview { artifact_id, review_depth, model, idempotency_key } = arguments;
    let client = access.client()?;
    let chain = artifact_id.find(&client).await?;
    let detail = client.task(TaskKey::Number(chain.number)).await?;
    let mut spec = of_chain(&detail.spec, chain)?;
    spec.agents.beta.model = model;
    if let Some(review) = &mut spec.review {
        review.depth = review_depth;
    }
    submit_prepared(&client, spec, idempotency_key).await
}
