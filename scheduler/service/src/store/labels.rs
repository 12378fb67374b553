//! Labels of tasks. A list of labelled tasks reads the entries of its first label, so its cost does not grow with the
//! number of tasks that lack this label.

use cfq_proto::http::{ListPosition, TaskSort};
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::label::Label;
use cfq_proto::task::Priority;
use sqlx::PgConnection;

use super::error::Doing;
use super::list::TaskFilter;
use super::{Store, StoreError};

impl Store {
    /// The first `limit` tasks after `after`, in this order, that have the label `first` and match the filter.
    pub(super) async fn find_labelled_tasks(
        &self,
        first: &Label,
        filter: &TaskFilter,
        sort: TaskSort,
        after: Option<ListPosition>,
        limit: i64,
    ) -> Result<Vec<(TaskId, TaskNumber)>, StoreError> {
        let mut labels: Vec<&str> = filter.labels.iter().map(Label::as_str).collect();
        labels.sort_unstable();
        labels.dedup();
        let states: Vec<&str> = filter.states.iter().map(|state| state.as_str()).collect();
        let priorities: Vec<i16> = filter.priorities.iter().map(|priority| priority.as_i16()).collect();
        let found: Vec<(uuid::Uuid, i64)> = match sort {
            TaskSort::Newest => sqlx::query!(
                r#"select t.id, t.number from task_labels l join tasks t on t.id = l.task
                   where l.label = $1 and l.number < $5
                     and (select count(*) from task_labels o where o.task = l.task and o.label = any($2))
                         = cardinality($2::text[])
                     and (cardinality($3::text[]) = 0 or t.state = any($3))
                     and (cardinality($4::smallint[]) = 0 or t.priority = any($4))
                   order by l.number desc limit $6"#,
                first.as_str(),
                &labels as &[&str],
                &states as &[&str],
                &priorities,
                after.map_or(i64::MAX, |after| after.number.0),
                limit
            )
            .fetch_all(&self.pool)
            .await
            .doing("listing labelled tasks")?
            .into_iter()
            .map(|row| (row.id, row.number))
            .collect(),
            TaskSort::Oldest | TaskSort::Priority => sqlx::query!(
                r#"select t.id, t.number from task_labels l join tasks t on t.id = l.task
                   where l.label = $1
                     and case when $7 then (t.priority, l.number) > ($8::smallint, $5::bigint) else l.number > $5 end
                     and (select count(*) from task_labels o where o.task = l.task and o.label = any($2))
                         = cardinality($2::text[])
                     and (cardinality($3::text[]) = 0 or t.state = any($3))
                     and (cardinality($4::smallint[]) = 0 or t.priority = any($4))
                   order by case when $7 then t.priority else 0 end, l.number limit $6"#,
                first.as_str(),
                &labels as &[&str],
                &states as &[&str],
                &priorities,
                after.map_or(0, |after| after.number.0),
                limit,
                sort == TaskSort::Priority,
                after.map_or(Priority::P0, |after| after.priority).as_i16()
            )
            .fetch_all(&self.pool)
            .await
            .doing("listing labelled tasks")?
            .into_iter()
            .map(|row| (row.id, row.number))
            .collect(),
        };
        Ok(found.into_iter().map(|(id, number)| (TaskId(id), TaskNumber(number))).collect())
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
        "insert into task_labels (task, number, label) select distinct $1::uuid, $2::bigint, l from unnest($3::text[]) as l",
        task.0,
        number.0,
        &labels as &[&str]
    )
    .execute(connection)
    .await
    .doing("writing the labels of a task")?;
    Ok(())
}
