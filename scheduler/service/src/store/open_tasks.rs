//! Number of tasks that have not ended, for the limit on submissions.

use cfq_proto::ids::ApiTokenId;

use super::error::Doing;
use super::{Store, StoreError};

impl Store {
    /// Counts the tasks whose state is not terminal.
    pub async fn count_open_tasks(&self) -> Result<i64, StoreError> {
        self.count_open_tasks_of(None).await
    }

    /// Counts those of them that were submitted with this token; `None`: with any.
    pub async fn count_open_tasks_of(&self, token: Option<ApiTokenId>) -> Result<i64, StoreError> {
        sqlx::query_scalar!(
            r#"select count(*) as "count!" from tasks
               where state in ('queued', 'blocked', 'ready', 'running', 'waiting_on_human', 'paused', 'escalated')
                 and ($1::uuid is null or api_token = $1)"#,
            token.map(|token| token.0)
        )
        .fetch_one(&self.pool)
        .await
        .doing("counting open tasks")
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::task::TaskState;

    use crate::testing::TestEnv;

    #[tokio::test]
    async fn tasks_in_every_state_but_the_terminal_ones_are_counted() {
        let env = TestEnv::new().await;
        env.submit().await;
        for state in TaskState::ALL {
            env.store.raw(&format!("update tasks set state = '{state}'")).await;
            let open = i64::from(!state.is_terminal());
            assert_eq!(env.store.count_open_tasks().await.unwrap(), open, "{state}");
        }
    }
}
