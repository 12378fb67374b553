//! Finds tasks by state and priority. The index on (state, priority, -number) is read once for each combination of both
//! that is wanted, at most `limit` entries each, so the cost does not grow with the number of tasks. Lists of labelled
//! tasks and of a repository's tasks are read in other ways (`labels.rs`, `list_by_repository.rs`).

use cfq_proto::http::{ListPosition, TaskSort};
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::label::Label;
use cfq_proto::task::{Priority, TaskState};

use super::error::Doing;
use super::{Store, StoreError};

/// Number of submissions whose numbers may be in another order than their ids.
const CONCURRENT_SUBMISSIONS: i64 = 200;

/// Which tasks are listed; an empty list of states or priorities means all.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TaskFilter {
    pub states: Vec<TaskState>,
    pub priorities: Vec<Priority>,
    /// Labels that each listed task has.
    pub labels: Vec<Label>,
    /// Repository of each listed task; `None`: all repositories.
    pub repo: Option<String>,
    /// Time in seconds since 1970 before which no listed task was submitted.
    pub since: Option<i64>,
}

/// A task of a list.
pub(super) struct FoundTask {
    pub id: uuid::Uuid,
    pub number: i64,
}

impl FoundTask {
    pub fn ids(self) -> (TaskId, TaskNumber) {
        (TaskId(self.id), TaskNumber(self.number))
    }
}

/// Ranges of the index to read: one for each state and priority. `numbers` are the exclusive bounds.
struct Ranges {
    states: Vec<&'static str>,
    priorities: Vec<i16>,
    numbers: Vec<i64>,
}

impl Ranges {
    fn of(filter: &TaskFilter, sort: TaskSort, after: Option<ListPosition>) -> Self {
        const PRIORITIES: [Priority; 4] = [Priority::P0, Priority::P1, Priority::P2, Priority::P3];
        let states = if filter.states.is_empty() { &TaskState::ALL[..] } else { &filter.states };
        let priorities = if filter.priorities.is_empty() { &PRIORITIES[..] } else { &filter.priorities };
        let mut ranges = Self { states: Vec::new(), priorities: Vec::new(), numbers: Vec::new() };
        for priority in PRIORITIES.into_iter().filter(|priority| priorities.contains(priority)) {
            let number = match (sort, after) {
                (TaskSort::Newest, after) => after.map_or(i64::MAX, |after| after.number.0),
                (TaskSort::Oldest, after) => after.map_or(0, |after| after.number.0),
                (TaskSort::Priority, Some(after)) if priority < after.priority => continue,
                (TaskSort::Priority, Some(after)) if priority == after.priority => after.number.0,
                (TaskSort::Priority, Some(_) | None) => 0,
            };
            for state in TaskState::ALL.into_iter().filter(|state| states.contains(state)) {
                ranges.states.push(state.as_str());
                ranges.priorities.push(priority.as_i16());
                ranges.numbers.push(number);
            }
        }
        ranges
    }
}

impl Store {
    /// The first `limit` tasks after `after`, in this order.
    pub async fn find_tasks(
        &self,
        filter: &TaskFilter,
        sort: TaskSort,
        after: Option<ListPosition>,
        limit: i64,
    ) -> Result<Vec<(TaskId, TaskNumber)>, StoreError> {
        let first = match filter.since {
            Some(since) => self.first_number_since(since).await?,
            None => i64::from(1),
        };
        if !filter.labels.is_empty() {
            return self.find_labelled_tasks(filter, first, sort, after, limit).await;
        }
        // Few tasks are in a state that is not terminal, so those of a repository are found among them.
        let is_open = !filter.states.is_empty() && filter.states.iter().all(|state| !state.is_terminal());
        if let Some(repo) = filter.repo.as_ref().filter(|_| !is_open) {
            return self.find_tasks_of_repository(repo, filter, first, sort, after, limit).await;
        }
        let ranges = Ranges::of(filter, sort, after);
        let found = match sort {
            TaskSort::Newest => sqlx::query!(
                r#"select found.id as "id!", found.number as "number!"
                   from unnest($1::text[], $2::smallint[], $3::bigint[]) as range (state, priority, number),
                        lateral (select id, number from tasks
                                 where tasks.state = range.state and tasks.priority = range.priority
                                   and -tasks.number > -range.number and -tasks.number <= -$5::bigint
                                   and ($6::text is null or tasks.spec ->> 'repo' = $6)
                                 order by -tasks.number limit $4) as found
                   order by found.number desc limit $4"#,
                &ranges.states as &[&str],
                &ranges.priorities,
                &ranges.numbers,
                limit,
                first,
                filter.repo
            )
            .fetch_all(&self.pool)
            .await
            .doing("listing tasks")?
            .into_iter()
            .map(|r| (TaskId(r.id), TaskNumber(r.number)))
            .collect(),
            TaskSort::Oldest | TaskSort::Priority => sqlx::query!(
                r#"select found.id as "id!", found.number as "number!"
                   from unnest($1::text[], $2::smallint[], $3::bigint[]) as range (state, priority, number),
                        lateral (select id, number from tasks
                                 where tasks.state = range.state and tasks.priority = range.priority
                                   and -tasks.number < -range.number and -tasks.number <= -$6::bigint
                                   and ($7::text is null or tasks.spec ->> 'repo' = $7)
                                 order by -tasks.number desc limit $4) as found
                   order by case when $5 then range.priority else 0 end, found.number limit $4"#,
                &ranges.states as &[&str],
                &ranges.priorities,
                &ranges.numbers,
                limit,
                sort == TaskSort::Priority,
                first,
                filter.repo
            )
            .fetch_all(&self.pool)
            .await
            .doing("listing tasks")?
            .into_iter()
            .map(|r| (TaskId(r.id), TaskNumber(r.number)))
            .collect(),
        };
        Ok(found)
    }

    /// The smallest number of the tasks that were submitted at this time or later; `i64::MAX` if there is none. The ids of
    /// tasks begin with the time of their submission. Tasks that are submitted at the same time may get their numbers in
    /// another order, so the smallest number of several ids is taken.
    async fn first_number_since(&self, since: i64) -> Result<i64, StoreError> {
        let number = sqlx::query_scalar!(
            "select min(number) from (select number from tasks where id >= $1 and number > 0 order by id limit $2) as first",
            first_id_at(since),
            CONCURRENT_SUBMISSIONS
        )
        .fetch_one(&self.pool)
        .await
        .doing("finding the first task since a time")?;
        Ok(number.unwrap_or(i64::MAX))
    }

    /// Number of the task that was created last; 0 if there is none.
    pub async fn last_task_number(&self) -> Result<TaskNumber, StoreError> {
        let number = sqlx::query_scalar!(r#"select coalesce(max(number), 0) as "number!" from tasks where number > 0"#)
            .fetch_one(&self.pool)
            .await
            .doing("finding the last task")?;
        Ok(TaskNumber(number))
    }
}

/// The smallest id of version 7 with this time in seconds since 1970; RFC 9562, section 5.7.
fn first_id_at(seconds: i64) -> uuid::Uuid {
    let ms = u64::try_from(seconds).unwrap_or(0).saturating_mul(1_000);
    uuid::Builder::from_unix_timestamp_millis(ms, &[0; 10]).into_uuid()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_id_of_a_time_is_before_all_ids_of_this_time() {
        let (before, id) = (first_id_at(1_700_000_000), TaskId::fresh().0);
        let now = id.get_timestamp().unwrap().to_unix().0 as i64;
        assert!(before < id && first_id_at(now) <= id && id < first_id_at(now + 1), "{id}");
        assert!(first_id_at(-5) <= before);
    }

    #[test]
    fn ranges_before_the_position_are_skipped() {
        let filter = TaskFilter { states: vec![TaskState::Ready, TaskState::Paused], ..TaskFilter::default() };
        let all = Ranges::of(&filter, TaskSort::Newest, None);
        assert_eq!((all.states.len(), all.numbers[0]), (8, i64::MAX));
        let after = ListPosition { priority: Priority::P1, number: TaskNumber(7) };
        let rest = Ranges::of(&filter, TaskSort::Priority, Some(after));
        assert_eq!(rest.priorities, [1, 1, 2, 2, 3, 3]);
        assert_eq!(rest.numbers, [7, 7, 0, 0, 0, 0]);
        assert_eq!(Ranges::of(&filter, TaskSort::Oldest, Some(after)).numbers, [7; 8]);
    }
}
