//! Labels of tasks. A list of labelled tasks reads the entries of one of its labels, the rarest, so its cost does not
//! grow with the number of tasks that lack this label. The newest and the oldest tasks of a label are found at once; a
//! list by priority, and one of states that few tasks of the label have, read all tasks of the label.

use cfq_proto::http::{ListPosition, TaskSort};
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::label::Label;
use cfq_proto::task::Priority;
use sqlx::PgConnection;

use super::error::Doing;
use super::list::{FoundTask, TaskFilter};
use super::{Store, StoreError};

/// Number of tasks of a label up to which labels are compared.
const MAX_COMPARED_TASKS: i64 = 1_000;

/// Selects labelled tasks: `$1` the label that is read, `$2` all labels, `$3` states, `$4` priorities, `$5` the number
/// after which the list begins, `$6` its length, `$7` the first number, `$8` the repository.
macro_rules! labelled_tasks {
    ($range_and_order:literal, $($argument:expr),*) => {
        sqlx::query_as!(
            FoundTask,
            r#"select t.id, t.number from task_labels l join tasks t on t.id = l.task
               where l.label = $1
                 and (select count(*) from task_labels o where o.task = l.task and o.label = any($2))
                     = cardinality($2::text[])
                 and (cardinality($3::text[]) = 0 or t.state = any($3))
                 and (cardinality($4::smallint[]) = 0 or t.priority = any($4))
                 and l.number >= $7 and ($8::text is null or t.spec ->> 'repo' = $8) and "# + $range_and_order,
            $($argument),*
        )
    };
}

impl Store {
    /// The first `limit` tasks after `after`, in this order, that match the filter, which has labels, and whose
    /// number is at least `first`.
    pub(super) async fn find_labelled_tasks(
        &self,
        filter: &TaskFilter,
        first: i64,
        sort: TaskSort,
        after: Option<ListPosition>,
        limit: i64,
    ) -> Result<Vec<(TaskId, TaskNumber)>, StoreError> {
        let mut labels: Vec<&str> = filter.labels.iter().map(Label::as_str).collect();
        labels.sort_unstable();
        labels.dedup();
        let read = self.rarest_label(&labels).await?;
        let states: Vec<&str> = filter.states.iter().map(|state| state.as_str()).collect();
        let priorities: Vec<i16> = filter.priorities.iter().map(|priority| priority.as_i16()).collect();
        let number = after.map(|after| after.number.0);
        let repo = filter.repo.as_deref();
        let found = match sort {
            TaskSort::Newest => {
                labelled_tasks!(
                    "l.number < $5 order by l.number desc limit $6",
                    read,
                    &labels as &[&str],
                    &states as &[&str],
                    &priorities,
                    number.unwrap_or(i64::MAX),
                    limit,
                    first,
                    repo
                )
                .fetch_all(&self.pool)
                .await
            }
            TaskSort::Oldest => {
                labelled_tasks!(
                    "l.number > $5 order by l.number limit $6",
                    read,
                    &labels as &[&str],
                    &states as &[&str],
                    &priorities,
                    number.unwrap_or(0),
                    limit,
                    first,
                    repo
                )
                .fetch_all(&self.pool)
                .await
            }
            TaskSort::Priority => {
                labelled_tasks!(
                    "(t.priority, l.number) > ($9::smallint, $5::bigint) order by t.priority, l.number limit $6",
                    read,
                    &labels as &[&str],
                    &states as &[&str],
                    &priorities,
                    number.unwrap_or(0),
                    limit,
                    first,
                    repo,
                    after.map_or(Priority::P0, |after| after.priority).as_i16()
                )
                .fetch_all(&self.pool)
                .await
            }
        };
        let found = found.doing("listing labelled tasks")?;
        Ok(found.into_iter().map(FoundTask::ids).collect())
    }

    /// The label that the fewest tasks have.
    pub(super) async fn rarest_label(&self, labels: &[&str]) -> Result<String, StoreError> {
        if let [label] = labels {
            return Ok((*label).to_owned());
        }
        // The order makes Postgres read the index, not the table, which could have few tasks of the label.
        let rarest = sqlx::query_scalar!(
            r#"select label as "label!" from unnest($1::text[]) as wanted (label)
               cross join lateral (select count(*) as tasks from (
                   select from task_labels where task_labels.label = wanted.label order by number limit $2)
                   as first) as counted
               order by counted.tasks, label limit 1"#,
            labels as &[&str],
            MAX_COMPARED_TASKS
        )
        .fetch_optional(&self.pool)
        .await
        .doing("comparing labels")?;
        Ok(rarest.unwrap_or_default())
    }
}

/// Inserts the labels of a new task.
pub(super) async fn insert_labels(
    connection: &mut PgConnection,
    task: TaskId,
    number: TaskNumber,
    labels: &[Label],
) -> Result<(), StoreError> {
    if labels.is_empty() {
        return Ok(());
    }
    let labels: Vec<&str> = labels.iter().map(Label::as_str).collect();
    sqlx::query!(
        r#"insert into task_labels (task, number, label)
           select distinct $1::uuid, $2::bigint, label from unnest($3::text[]) as label"#,
        task.0,
        number.0,
        &labels as &[&str]
    )
    .execute(connection)
    .await
    .doing("writing the labels of a task")?;
    Ok(())
}
