//! The MCP bridge: tools through which the AI of an editor delegates tasks to cfq, follows them, answers their
//! questions and gets their results. It speaks the Model Context Protocol (modelcontextprotocol.io) and uses only the
//! HTTP API of the scheduler. It keeps no state: every call names its session, so nothing is lost when it ends.

mod access;
mod answer;
mod arguments;
mod artifact;
mod bridge;
mod completion;
mod defects;
mod endpoint;
mod error;
#[cfg(feature = "mcp-fixtures")]
mod fixtures;
mod handoff;
mod http;
pub mod install;
mod listing;
mod map;
mod policies;
mod progress;
mod prompts;
mod questions;
mod repeat;
mod replies;
mod resources;
mod review;
mod revise;
mod schema;
mod status;
mod submission;
mod tasks;
mod test_suite;
mod tool;

use anyhow::Context;
use cfq_deploy::Paths;
use rmcp::ServiceExt;

pub use http::http_routes;
pub use install::{McpClient, install};

/// Answers an MCP client on stdin and stdout until the client closes stdin.
pub async fn serve_stdio(paths: &Paths) -> anyhow::Result<()> {
    let bridge = bridge::Bridge::new(access::AccessSource::Fixed(access::Access::local(paths)));
    let service = match bridge.serve(rmcp::transport::stdio()).await {
        Ok(service) => service,
        // A client that only checked whether the program starts is no failure.
        Err(rmcp::service::ServerInitializeError::ConnectionClosed(_)) => return Ok(()),
        Err(error) => return Err(error).context("the MCP client did not begin a session"),
    };
    service.waiting().await.context("the MCP session ended unexpectedly")?;
    Ok(())
}
