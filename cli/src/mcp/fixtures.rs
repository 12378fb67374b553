//! What the official conformance suite calls (github.com/modelcontextprotocol/conformance): its tools, prompts and
//! resources beside cfq's own, behind the same HTTP routes. Names, texts and shapes are those that the suite's scenarios
//! describe. Only in builds with the feature `mcp-fixtures`, which `just mcp-conformance` makes.
//!
//! Two things differ from the routes of other builds: revisions before 2026-07-28 have sessions, because in them a tool
//! can ask its client only in a session, and the server declares logging and subscriptions.

#![expect(deprecated, reason = "sampling, roots and logging are deprecated, but the suite requires them")]

mod content;
mod input_required;
mod tools;

use std::sync::Arc;

use rmcp::ServerHandler;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CancelTaskParams, CompleteRequestParams, CompleteResult, CompletionInfo,
    ErrorData, GetPromptRequestParams, GetPromptResponse, GetTaskParams, GetTaskResult, ListPromptsResult,
    ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, PaginatedRequestParams,
    ReadResourceRequestParams, ReadResourceResponse, Reference, RequestStateCodec, ServerConfig, SetLevelRequestParams,
    SubscribeRequestParams, SubscriptionFilter, Tool, UnsubscribeRequestParams, UpdateTaskParams,
};
use rmcp::service::{RequestContext, RoleServer};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};

use super::bridge::Bridge;

/// The server of one MCP client: the bridge with the suite's fixtures.
#[derive(Debug, Clone)]
pub struct FixtureServer {
    bridge: Bridge,
    /// Seals the state that a client carries between two calls.
    codec: Arc<RequestStateCodec>,
}

/// The HTTP service of the fixtures and of what `bridge` creates.
pub fn service(
    bridge: impl Fn() -> Result<Bridge, std::io::Error> + Send + Sync + 'static,
    config: StreamableHttpServerConfig,
) -> StreamableHttpService<FixtureServer, LocalSessionManager> {
    // The key is new in each process, so older states are refused.
    let key: Vec<u8> = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()].iter().flat_map(|id| *id.as_bytes()).collect();
    let codec = Arc::new(RequestStateCodec::new(key));
    let fixtures = move || Ok(FixtureServer { bridge: bridge()?, codec: codec.clone() });
    StreamableHttpService::new(
        fixtures,
        Arc::new(LocalSessionManager::default()),
        config.with_legacy_session_mode(true),
    )
}

impl ServerHandler for FixtureServer {
    fn get_info(&self) -> ServerConfig {
        let mut config = self.bridge.get_info();
        config.capabilities.logging = Some(Default::default());
        if let Some(resources) = &mut config.capabilities.resources {
            resources.subscribe = Some(true);
        }
        config
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let mut list = self.bridge.list_tools(request, context).await?;
        list.tools.extend(tools::definitions());
        Ok(list)
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        tools::definitions().find(|tool| tool.name == name).or_else(|| self.bridge.get_tool(name))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        match tools::find(&request.name) {
            Some(tool) => tool.call(request, &self.codec, &context).await,
            None => self.bridge.call_tool(request, context).await,
        }
    }

    async fn get_task(
        &self,
        request: GetTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        self.bridge.get_task(request, context).await
    }

    async fn update_task(
        &self,
        request: UpdateTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.bridge.update_task(request, context).await
    }

    async fn cancel_task(
        &self,
        request: CancelTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.bridge.cancel_task(request, context).await
    }

    async fn list_prompts(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let mut list = self.bridge.list_prompts(request, context).await?;
        list.prompts.extend(content::prompts());
        Ok(list)
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        match content::prompt(&request, &context, &self.codec)? {
            Some(prompt) => Ok(prompt),
            None => self.bridge.get_prompt(request, context).await,
        }
    }

    async fn list_resource_templates(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let mut list = self.bridge.list_resource_templates(request, context).await?;
        list.resource_templates.push(content::template());
        Ok(list)
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let mut list = self.bridge.list_resources(request, context).await?;
        if list.next_cursor.is_none() {
            list.resources.extend(content::resources());
        }
        Ok(list)
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        match content::resource(&request.uri) {
            Some(content) => Ok(content.into()),
            None => self.bridge.read_resource(request, context).await,
        }
    }

    async fn complete(
        &self,
        request: CompleteRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        match &request.r#ref {
            Reference::Prompt(prompt) if content::prompts().any(|fixture| fixture.name == prompt.name) => {
                Ok(CompleteResult::new(CompletionInfo::default()))
            }
            _ => self.bridge.complete(request, context).await,
        }
    }

    async fn set_level(
        &self,
        _request: SetLevelRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Ok(())
    }

    /// All that are declared. The fixtures never change, so a subscription is only acknowledged.
    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        Some(requested.clone())
    }

    async fn subscribe(
        &self,
        _request: SubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Ok(())
    }

    async fn unsubscribe(
        &self,
        _request: UnsubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Ok(())
    }
}
