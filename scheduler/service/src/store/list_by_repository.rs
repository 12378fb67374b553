//! Lists of the tasks of one repository. They read the entries of the repository in the index on (hash of the path,
//! -number), so their cost does not grow with the tasks of other repositories. A list by priority, and one of terminal
//! states that few of its tasks have, read all tasks of the repository.

use cfq_proto::http::{ListPosition, TaskSort};
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::task::Priority;

use super::error::Doing;
use super::list::{FoundTask, TaskFilter};
use super::{Store, StoreError};

/// Selects the tasks of a repository: `$1` its path, `$2` states, `$3` priorities, `$4` the number after which the list
/// begins, `$5` its length, `$6` the first number.
macro_rules! tasks_of_repository {
    ($range_and_order:literal, $($argument:expr),*) => {
        sqlx::query_as!(
            FoundTask,
            r#"select id, number from tasks
               where md5(spec ->> 'repo') = md5($1::text) and spec ->> 'repo' = $1::text and state <> 'call'
                 and (cardinality($2::text[]) = 0 or state = any($2))
                 and (cardinality($3::smallint[]) = 0 or priority = any($3))
                 and -number <= -$6::bigint and "# + $range_and_order,
            $($argument),*
        )
    };
}

impl Store {
    /// The first `limit` tasks of the repository after `after`, in this order, that match the states and priorities of
    /// the filter and whose number is at least `first`.
    pub(super) async fn find_tasks_of_repository(
        &self,
        repo: &str,
        filter: &TaskFilter,
        first: i64,
        sort: TaskSort,
        after: Option<ListPosition>,
        limit: i64,
    ) -> Result<Vec<(TaskId, TaskNumber)>, StoreError> {
        let states: Vec<&str> = filter.states.iter().map(|state| state.as_str()).collect();
        let priorities: Vec<i16> = filter.priorities.iter().map(|priority| priority.as_i16()).collect();
        let number = after.map(|after| after.number.0);
        let found = match sort {
            TaskSort::Newest => {
                tasks_of_repository!(
                    "-number > -$4::bigint order by -number limit $5",
                    repo,
                    &states as &[&str],
                    &priorities,
                    number.unwrap_or(i64::MAX),
                    limit,
                    first
                )
                .fetch_all(&self.pool)
                .await
            }
            TaskSort::Oldest => {
                tasks_of_repository!(
                    "-number < -$4::bigint order by -number desc limit $5",
                    repo,
                    &states as &[&str],
                    &priorities,
                    number.unwrap_or(0),
                    limit,
                    first
                )
                .fetch_all(&self.pool)
                .await
            }
            TaskSort::Priority => {
                tasks_of_repository!(
                    "(priority, number) > ($7::smallint, $4::bigint) order by priority, number limit $5",
                    repo,
                    &states as &[&str],
                    &priorities,
                    number.unwrap_or(0),
                    limit,
                    first,
                    after.map_or(Priority::P0, |after| after.priority).as_i16()
                )
                .fetch_all(&self.pool)
                .await
            }
        };
        let found = found.doing("listing the tasks of a repository")?;
        Ok(found.into_iter().map(FoundTask::ids).collect())
    }
}
