//! Requests about the settings of the agents.

use reqwest::Method;

use super::{Client, ClientError};
use crate::http::{AgentList, AgentPatch, AgentPatchReply};
use crate::task::Agent;

impl Client {
    /// The settings of the agents.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn agents(&self) -> Result<AgentList, ClientError> {
        self.get("/agents").await
    }

    /// Changes settings of an agent.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn change_agent(&self, agent: Agent, patch: &AgentPatch) -> Result<AgentPatchReply, ClientError> {
        self.send(self.request(Method::PATCH, &format!("/agents/{agent}")).json(patch)).await
    }
}
