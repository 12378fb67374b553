//! Requests about API tokens.

use reqwest::Method;

use super::{Client, ClientError};
use crate::http::{ApiTokenList, ApiTokenReply, ApiTokenRequest, ApiTokenRevoked, ApiTokenView};
use crate::ids::ApiTokenName;

impl Client {
    /// Creates an API token.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn create_token(&self, request: &ApiTokenRequest) -> Result<ApiTokenReply, ClientError> {
        self.post("/tokens", request).await
    }

    /// Replaces an API token by another one with the same name, role, limits and tasks.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn rotate_token(&self, name: &ApiTokenName) -> Result<ApiTokenReply, ClientError> {
        self.send(self.request(Method::POST, &format!("/tokens/{name}/rotate"))).await
    }

    /// Lists the valid API tokens.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn tokens(&self) -> Result<Vec<ApiTokenView>, ClientError> {
        Ok(self.get::<ApiTokenList>("/tokens").await?.tokens)
    }

    /// Revokes an API token.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn revoke_token(&self, name: &ApiTokenName) -> Result<ApiTokenRevoked, ClientError> {
        self.send(self.request(Method::DELETE, &format!("/tokens/{name}"))).await
    }
}
