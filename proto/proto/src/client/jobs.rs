//! Requests about jobs and the cluster: the list of jobs, why one waits, and the state of the cluster.

use reqwest::{Method, RequestBuilder};

use super::{Client, ClientError};
use crate::http::{ClusterStatus, Explanation, JobFilter, JobList};
use crate::ids::TaskKey;

impl Client {
    /// Lists jobs, newest first.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn jobs(&self, filter: &JobFilter) -> Result<JobList, ClientError> {
        let mut query = vec![("limit", filter.limit.to_string())];
        query.extend(filter.task.map(|task| ("task", task.to_string())));
        if !filter.states.is_empty() {
            let states: Vec<&str> = filter.states.iter().map(|state| state.as_str()).collect();
            query.push(("state", states.join(",")));
        }
        query.extend(filter.node.as_ref().map(|node| ("node", node.to_string())));
        query.extend(filter.model.as_ref().map(|model| ("model", model.to_string())));
        query.extend(filter.after.map(|job| ("after", job.to_string())));
        let mut request = self.request(Method::GET, "/jobs").build().map_err(|source| self.unreachable(source))?;
        request.url_mut().query_pairs_mut().extend_pairs(query);
        self.read(RequestBuilder::from_parts(self.http.clone(), request)).await
    }

    /// Explains why a task or a job waits, or where it runs. `key` is a task's number, or the id of a task or job.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn explain(&self, key: TaskKey) -> Result<Explanation, ClientError> {
        self.get(&format!("/explain/{key}")).await
    }

    /// Returns the state of the cluster.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn status(&self) -> Result<ClusterStatus, ClientError> {
        self.get("/status").await
    }
}
