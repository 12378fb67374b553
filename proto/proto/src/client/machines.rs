//! Requests about machines that join the cluster.

use reqwest::Method;
use uuid::Uuid;

use super::{Client, ClientError};
use crate::http::{
    JoinReply, JoinRequest, JoinTokenList, JoinTokenRemoval, JoinTokenReply, JoinTokenRequest, JoinTokenView,
    JoinTokensRemoved, MachineList, MachineView, NodeView,
};
use crate::ids::NodeId;

impl Client {
    /// Creates a token with which one machine can join.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn create_join_token(&self, request: &JoinTokenRequest) -> Result<JoinTokenReply, ClientError> {
        self.post("/join-tokens", request).await
    }

    /// Lists the join tokens that can still be used.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn join_tokens(&self) -> Result<Vec<JoinTokenView>, ClientError> {
        Ok(self.get::<JoinTokenList>("/join-tokens").await?.tokens)
    }

    /// Revokes join tokens; `None` revokes all.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn remove_join_tokens(&self, ids: Option<Vec<Uuid>>) -> Result<JoinTokensRemoved, ClientError> {
        self.post("/join-tokens/remove", &JoinTokenRemoval { ids }).await
    }

    /// Lists the machines that joined, with those whose access was revoked.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn machines(&self) -> Result<Vec<MachineView>, ClientError> {
        Ok(self.get::<MachineList>("/machines").await?.machines)
    }

    /// Revokes the access of a machine.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn revoke_machine(&self, name: &NodeId) -> Result<MachineView, ClientError> {
        self.send(self.request(Method::POST, &format!("/machines/{name}/revoke"))).await
    }

    /// Cordons a node, so that it gets no new work, or ends this.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn cordon_node(&self, name: &NodeId, cordon: bool) -> Result<NodeView, ClientError> {
        let action = if cordon { "cordon" } else { "uncordon" };
        self.send(self.request(Method::POST, &format!("/nodes/{name}/{action}"))).await
    }

    /// Joins the cluster. Sends no API token: the join token is in the request.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn join(http: reqwest::Client, url: &str, request: &JoinRequest) -> Result<JoinReply, ClientError> {
        let client = Self::new(http, url, "");
        let request = client.request(Method::POST, "/join").json(request);
        let response = request.send().await.map_err(|source| client.unreachable(source))?;
        client.receive(response).await
    }
}
