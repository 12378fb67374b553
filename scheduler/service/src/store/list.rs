//! Finds tasks by state and priority. The index on (state, priority, -number) is read once for each combination of both
//! that is wanted, at most `limit` entries each, so the cost does not grow with the number of tasks. Lists of labelled
//! tasks are read in another way (`labels.rs`).

use cfq_proto::http::{ListPosition, TaskSort};
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::label::Label;
use cfq_proto::task::{Priority, TaskState};

use super::error::Doing;
use super::{Store, StoreError};

/// Which tasks are listed; an empty list of states or priorities means all.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TaskFilter {
    pub states: Vec<TaskState>,
    pub priorities: Vec<Priority>,
    /// Labels that each listed task has.
    pub labels: Vec<Label>,
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
        if !filter.labels.is_empty() {
            return self.find_labelled_tasks(filter, sort, after, limit).await;
        }
        let ranges = Ranges::of(filter, sort, after);
        let found = match sort {
            TaskSort::Newest => sqlx::query!(
                r#"select found.id as "id!", found.number as "number!"
                   from unnest($1::text[], $2::smallint[], $3::bigint[]) as range (state, priority, number),
                        lateral (select id, number from tasks
                                 where tasks.state = range.state and tasks.priority = range.priority
                                   and -tasks.number > -range.number
                                 order by -tasks.number limit $4) as found
                   order by found.number desc limit $4"#,
                &ranges.states as &[&str],
                &ranges.priorities,
                &ranges.numbers,
                limit
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
                                   and -tasks.number < -range.number
                                 order by -tasks.number desc limit $4) as found
                   order by case when $5 then range.priority else 0 end, found.number limit $4"#,
                &ranges.states as &[&str],
                &ranges.priorities,
                &ranges.numbers,
                limit,
                sort == TaskSort::Priority
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

    /// Number of the task that was created last; 0 if there is none.
    pub async fn last_task_number(&self) -> Result<TaskNumber, StoreError> {
        let number = sqlx::query_scalar!(r#"select coalesce(max(number), 0) as "number!" from tasks where number > 0"#)
            .fetch_one(&self.pool)
            .await
            .doing("finding the last task")?;
        Ok(TaskNumber(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
