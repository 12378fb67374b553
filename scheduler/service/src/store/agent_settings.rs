//! What users set for the agents while cfq runs. A model applies to tasks that do not name one: to each grant, to calls
//! that wait, and to the next attempt of calls that run. A running attempt finishes with its model. Instructions apply to
//! each grant of a task that has none of its own.

use std::collections::BTreeMap;

use cfq_proto::ids::JobId;
use cfq_proto::model::ModelId;
use cfq_proto::task::{Agent, TaskSpec};
use sqlx::PgConnection;

use super::columns::{parse, pg_text};
use super::error::Doing;
use super::hints::{Hint, LeaderHint};
use super::{Store, StoreError, roll_back};

/// Maximum number of hints to the leader after one change. It finds the other jobs when it reads all live jobs again.
const MAX_HINTS: usize = 1000;

/// What users set for one agent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AgentOverride {
    /// Its model, instead of that of the configuration.
    pub model: Option<ModelId>,
    /// Instructions for its tasks.
    pub instructions: Option<String>,
}

/// What users set for each agent.
pub type AgentOverrides = BTreeMap<Agent, AgentOverride>;

/// Result of a change of an agent's model.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentModelChange {
    /// Calls that waited for a node, and wait for the new model now.
    pub moved_calls: usize,
    /// Calls that run on the model from before.
    pub running_calls: usize,
    pub hints: Vec<Hint>,
}

impl Store {
    /// What users set for the agents.
    pub async fn agent_overrides(&self) -> Result<AgentOverrides, StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        overrides(&mut connection).await
    }

    /// The specification as a runner would get it now.
    pub(super) async fn with_agent_settings(
        &self,
        spec: TaskSpec,
        agents_without_model: &[String],
    ) -> Result<TaskSpec, StoreError> {
        Ok(applied(spec, agents_without_model, self.agent_overrides().await?))
    }

    /// Sets the agent's instructions; `None` removes them. `by` names the author.
    pub async fn set_agent_instructions(
        &self,
        agent: Agent,
        instructions: Option<&str>,
        by: &str,
    ) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        // The lock on this row orders the change with grants, which hold it until they are committed.
        let changed = sqlx::query!(
            r#"update agent_settings set instructions = $2, changed_by = $3, changed_at = now()
               where agent = $1 and instructions is distinct from $2"#,
            agent.as_str(),
            instructions.map(pg_text),
            pg_text(by)
        )
        .execute(&mut *tx)
        .await
        .doing("changing an agent's instructions")?;
        if changed.rows_affected() == 0 {
            return roll_back(tx, ()).await;
        }
        sqlx::query!(
            r#"update tasks set agents_changed = true
               where id in (select id from tasks where state = 'running' and spec #>> array['agents', $1, 'instructions'] is null
                            order by number for update)"#,
            agent.as_str()
        )
        .execute(&mut *tx)
        .await
        .doing("changing the instructions of running tasks")?;
        tx.commit().await.doing("changing an agent's instructions")
    }

    /// Sets the agent's model; `None` returns to the one of the configuration. `by` names the author.
    pub async fn set_agent_model(
        &self,
        agent: Agent,
        model: Option<&ModelId>,
        by: &str,
    ) -> Result<AgentModelChange, StoreError> {
        let mut tx = self.begin().await?;
        let name = agent.as_str();
        // The lock on this row orders the change with grants, which hold it until they are committed.
        let before = sqlx::query_scalar!("select model from agent_settings where agent = $1 for update", name)
            .fetch_one(&mut *tx)
            .await
            .doing("changing an agent's model")?;
        sqlx::query!(
            "update agent_settings set model = $2, changed_by = $3, changed_at = now() where agent = $1",
            name,
            model.map(ModelId::as_str),
            pg_text(by)
        )
        .execute(&mut *tx)
        .await
        .doing("changing an agent's model")?;
        // Tasks are locked before their jobs, as everywhere. A task's specification has the model of the configuration.
        sqlx::query!(
            r#"update tasks set agents_changed = true
               where id in (select id from tasks where state = 'running' and $1 = any(agents_without_model)
                              and coalesce($2, spec #>> array['agents', $1, 'model'])
                                  is distinct from coalesce($3, spec #>> array['agents', $1, 'model'])
                            order by number for update)"#,
            name,
            before.as_deref(),
            model.map(ModelId::as_str)
        )
        .execute(&mut *tx)
        .await
        .doing("changing the models of running tasks")?;
        let live = sqlx::query!(
            r#"with live as (
                   select j.id, j.state, coalesce($3, t.spec #>> array['agents', $1, 'model']) as model
                   from jobs j join tasks t on t.id = j.task
                   where j.state in ('queued', 'placed', 'running', 'dead') and j.role = $1 and $1 = any(t.agents_without_model)
                     and coalesce(j.next_model, j.model) = coalesce($2, t.spec #>> array['agents', $1, 'model'])
                     and coalesce(j.next_model, j.model) is distinct from coalesce($3, t.spec #>> array['agents', $1, 'model'])
                   order by j.id for update of j
               )
               update jobs set next_model = live.model, updated_at = now() from live
               where jobs.id = live.id and live.model is not null
               returning jobs.id, live.state as "state!""#,
            name,
            before.as_deref(),
            model.map(ModelId::as_str)
        )
        .fetch_all(&mut *tx)
        .await
        .doing("changing the models of calls")?;
        let queued: Vec<uuid::Uuid> = live.iter().filter(|job| job.state == "queued").map(|job| job.id).collect();
        let running_calls = live.iter().filter(|job| matches!(job.state.as_str(), "placed" | "running")).count();
        adopt(&mut tx, &queued).await?;
        cfq_link::failpoint::hit("scheduler.agent_model.before_commit");
        tx.commit().await.doing("changing an agent's model")?;
        cfq_link::failpoint::hit("scheduler.agent_model.after_commit");
        let hints = queued.iter().take(MAX_HINTS).map(|job| Hint::Leader(LeaderHint::Job(JobId(*job)))).collect();
        Ok(AgentModelChange { moved_calls: queued.len(), running_calls, hints })
    }
}

/// Gives queued jobs the model that was set for them. What earlier attempts generated, and how they failed, belongs to
/// the model before. The number of the attempt is raised, so that plans for that model are stale.
pub(super) async fn adopt(connection: &mut PgConnection, jobs: &[uuid::Uuid]) -> Result<(), StoreError> {
    if jobs.is_empty() {
        return Ok(());
    }
    sqlx::query!(
        r#"update jobs j set model = next_model, next_model = null, attempt = j.attempt + 1, prefix = '[]', failures = 0,
                  first_failure_at = null, no_node_ms = 0, node_failures = '{}', refused_by = '{}', counted_tokens = null,
                  losses = 0, unaccepted = 0, failure = null, requeued_after = j.attempt + 1, updated_at = now(),
                  has_fallback = coalesce(t.spec #>> array['agents', j.role, 'fallback'] <> j.next_model, false),
                  placement = case t.state when 'paused' then placement else 'the model of the agent was changed' end
           from tasks t
           where j.id = any($1) and t.id = j.task and j.state = 'queued' and j.next_model is not null"#,
        jobs
    )
    .execute(connection)
    .await
    .doing("changing the models of calls")?;
    Ok(())
}

/// A row of the table of settings.
struct Row {
    agent: String,
    model: Option<String>,
    instructions: Option<String>,
}

impl Row {
    fn read(self) -> Result<(Agent, AgentOverride), StoreError> {
        let model = self.model.map(|model| parse("model", &model)).transpose()?;
        Ok((parse("agent", &self.agent)?, AgentOverride { model, instructions: self.instructions }))
    }
}

/// What users set, without a lock.
async fn overrides(connection: &mut PgConnection) -> Result<AgentOverrides, StoreError> {
    let rows = sqlx::query_as!(Row, "select agent, model, instructions from agent_settings")
        .fetch_all(connection)
        .await
        .doing("reading the settings of the agents")?;
    rows.into_iter().map(Row::read).collect()
}

fn applied(mut spec: TaskSpec, agents_without_model: &[String], set: AgentOverrides) -> TaskSpec {
    for (agent, AgentOverride { model, instructions }) in set {
        let binding = spec.agents.of_mut(agent);
        if model.is_some() && agents_without_model.iter().any(|name| name == agent.as_str()) {
            binding.model = model;
        }
        binding.instructions = binding.instructions.take().or(instructions);
    }
    spec
}

/// Agents whose names a column has.
pub(super) fn parse_agents(names: &[String]) -> Result<Vec<Agent>, StoreError> {
    names.iter().map(|name| parse("agent", name)).collect()
}

/// The specification of a task that is being granted: the agents in `agents_without_model` get the models that users set, and
/// agents without instructions those that users set. The transaction locks these settings: a change of them waits for it,
/// and finds the grant then.
pub(super) async fn apply_at_grant(
    connection: &mut PgConnection,
    spec: TaskSpec,
    agents_without_model: &[String],
) -> Result<TaskSpec, StoreError> {
    let rows = sqlx::query_as!(Row, "select agent, model, instructions from agent_settings order by agent for share")
        .fetch_all(connection)
        .await
        .doing("reading the settings of the agents")?;
    Ok(applied(spec, agents_without_model, rows.into_iter().map(Row::read).collect::<Result<_, _>>()?))
}

/// The specification of a task that was granted before, without a lock: a later change finds the task running.
pub(super) async fn apply(
    connection: &mut PgConnection,
    spec: TaskSpec,
    agents_without_model: &[String],
) -> Result<TaskSpec, StoreError> {
    Ok(applied(spec, agents_without_model, overrides(connection).await?))
}
