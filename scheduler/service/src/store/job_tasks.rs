//! The tasks of recent jobs. The task of a job never changes, and most jobs are looked up several times within seconds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cfq_proto::ids::{JobId, TaskId};

/// Number of jobs at which all are forgotten; about 3 MiB.
const MAX_JOBS: usize = 65_536;

/// Clones share the entries.
#[derive(Debug, Clone, Default)]
pub struct JobTasks(Arc<Mutex<HashMap<JobId, TaskId>>>);

impl JobTasks {
    pub fn get(&self, job: JobId) -> Option<TaskId> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&job).copied()
    }

    pub fn add(&self, job: JobId, task: TaskId) {
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if tasks.len() >= MAX_JOBS {
            tasks.clear();
        }
        tasks.insert(job, task);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_entries_is_limited() {
        let tasks = JobTasks::default();
        let (first, task) = (JobId::fresh(), TaskId::fresh());
        tasks.add(first, task);
        assert_eq!(tasks.clone().get(first), Some(task));
        for _ in 0..MAX_JOBS {
            tasks.add(JobId::fresh(), task);
        }
        assert_eq!(tasks.get(first), None);
        assert!(tasks.0.lock().unwrap().len() <= MAX_JOBS);
    }
}
