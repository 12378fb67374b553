//! `get_project_status`.

use cfq_proto::client::Client;
use cfq_proto::http::{NodeView, TaskQuery, TaskSort};
use cfq_proto::node::{ModelState, Residency};
use cfq_proto::task::TaskState;

use super::access::Access;
use super::arguments::OptionalSession;
use super::error::ToolError;
use super::listing::listed;
use super::replies::{ListedTask, NodeModels, ProjectStatus};

const MAX_ACTIVE: u32 = 20;
const MAX_ENDED: u32 = 5;

/// `get_project_status`.
pub async fn get(access: &Access, arguments: OptionalSession) -> Result<ProjectStatus, ToolError> {
    let client = access.client()?;
    let status = client.status().await?;
    let nodes = client.nodes().await?;
    let agents = client.agents().await?.agents;
    let (active, ended) = match arguments.session_id {
        Some(session) => (vec![listed(&client.task(session.0).await?.summary)], Vec::new()),
        None => (tasks(&client, false, MAX_ACTIVE).await?, tasks(&client, true, MAX_ENDED).await?),
    };
    Ok(ProjectStatus {
        version: status.version,
        not_ready: status.not_ready,
        tasks_by_state: status.tasks,
        agents,
        nodes: nodes.iter().map(node_models).collect(),
        active,
        ended,
    })
}

async fn tasks(client: &Client, ended: bool, limit: u32) -> Result<Vec<ListedTask>, ToolError> {
    let states = TaskState::ALL.into_iter().filter(|state| state.is_terminal() == ended).collect();
    let query = TaskQuery { states, sort: TaskSort::Newest, limit, ..TaskQuery::default() };
    Ok(client.list_tasks(&query).await?.tasks.iter().map(listed).collect())
}

fn usable(model: &&ModelState) -> bool {
    !matches!(model.residency, Residency::Unusable { .. })
}

fn node_models(node: &NodeView) -> NodeModels {
    NodeModels {
        node: node.id.to_string(),
        alive: node.alive,
        models: node.ledger.models.iter().filter(usable).map(|model| model.model.to_string()).collect(),
    }
}
