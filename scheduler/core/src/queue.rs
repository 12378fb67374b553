//! The queued jobs by model and request class, each class in the order of the jobs' keys.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use cfq_proto::ids::JobId;
use cfq_proto::model::ModelId;

use crate::job::Job;
use crate::priority::{OrderKey, order_key};
use crate::request_class::RequestClass;

/// The queued jobs.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Queue {
    models: BTreeMap<ModelId, BTreeMap<RequestClass, ClassQueue>>,
    /// Number of queued jobs that may be poison.
    isolated: usize,
}

/// The queued jobs of one request class. It is never empty.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct ClassQueue {
    jobs: BTreeSet<OrderKey>,
    /// What the last comparison with the nodes found.
    pub blocked: Option<Blocked>,
}

/// The first job of a class did not fit on any node. It still does not fit on nodes that have not changed since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocked {
    pub head: JobId,
    /// Version of the [`Rooms`](crate::rooms::Rooms) that it was compared with.
    pub version: u64,
}

impl ClassQueue {
    pub fn first(&self) -> Option<OrderKey> {
        self.jobs.first().copied()
    }

    pub fn next_after(&self, key: OrderKey) -> Option<OrderKey> {
        self.jobs.range((Bound::Excluded(key), Bound::Unbounded)).next().copied()
    }
}

impl Queue {
    /// Adds a job, or stores that its row has changed.
    pub fn insert(&mut self, job: &Job) {
        let class = RequestClass::of(job);
        let is_isolated = class.is_isolated();
        let queue = self.models.entry(job.model.clone()).or_default().entry(class).or_default();
        self.isolated += usize::from(queue.jobs.insert(order_key(job)) && is_isolated);
        queue.blocked.take_if(|blocked| blocked.head == job.id);
    }

    /// Removes a job; the row must be the one that was inserted.
    pub fn remove(&mut self, job: &Job) {
        let Some(classes) = self.models.get_mut(&job.model) else { return };
        let class = RequestClass::of(job);
        let Some(queue) = classes.get_mut(&class) else { return };
        self.isolated -= usize::from(queue.jobs.remove(&order_key(job)) && class.is_isolated());
        if queue.jobs.is_empty() {
            classes.remove(&class);
            if classes.is_empty() {
                self.models.remove(&job.model);
            }
        }
    }

    /// Whether a job that may be poison is queued.
    pub fn has_isolated(&self) -> bool {
        self.isolated > 0
    }

    pub fn contains_model(&self, model: &ModelId) -> bool {
        self.models.contains_key(model)
    }

    /// The models of the queued jobs.
    pub fn models(&self) -> impl Iterator<Item = &ModelId> {
        self.models.keys()
    }

    /// The classes of a model's queued jobs.
    pub fn classes(&self, model: &ModelId) -> impl Iterator<Item = (&RequestClass, &ClassQueue)> {
        self.models.get(model).into_iter().flatten()
    }

    pub fn set_blocked(&mut self, model: &ModelId, class: &RequestClass, blocked: Option<Blocked>) {
        if let Some(queue) = self.models.get_mut(model).and_then(|classes| classes.get_mut(class)) {
            queue.blocked = blocked;
        }
    }

    /// Forgets what the comparisons of all classes with the nodes found.
    pub fn forget_blocked(&mut self) {
        self.models.values_mut().flat_map(BTreeMap::values_mut).for_each(|queue| queue.blocked = None);
    }

    /// The queued jobs of a model in their order.
    pub fn in_order(&self, model: &ModelId) -> impl Iterator<Item = OrderKey> + '_ {
        let classes = self.models.get(model).into_iter().flat_map(BTreeMap::values);
        let mut heads: BTreeMap<OrderKey, &ClassQueue> =
            classes.filter_map(|queue| Some((queue.first()?, queue))).collect();
        std::iter::from_fn(move || {
            let (key, queue) = heads.pop_first()?;
            heads.extend(queue.next_after(key).map(|next| (next, queue)));
            Some(key)
        })
    }

    /// Number of queued jobs of the job's model that come before it, and of all of them.
    pub fn position(&self, job: &Job) -> (usize, usize) {
        let own = order_key(job);
        let classes = || self.models.get(&job.model).into_iter().flat_map(BTreeMap::values);
        (classes().map(|queue| queue.jobs.range(..own).count()).sum(), classes().map(|queue| queue.jobs.len()).sum())
    }

    /// The queued jobs of a model by class, from the one after `cursor`.
    pub fn jobs_after<'a>(
        &'a self,
        model: &ModelId,
        cursor: Option<&(RequestClass, OrderKey)>,
    ) -> impl Iterator<Item = (&'a RequestClass, OrderKey)> {
        let from = cursor.map_or(Bound::Unbounded, |(class, _)| Bound::Included(class));
        let after = cursor.map(|(class, key)| (class.clone(), *key));
        let classes =
            self.models.get(model).into_iter().flat_map(move |classes| {
                classes.range::<RequestClass, _>((from, Bound::Unbounded)).collect::<Vec<_>>()
            });
        classes.flat_map(move |(class, queue)| {
            let start = match &after {
                Some((of, key)) if of == class => Bound::Excluded(*key),
                _ => Bound::Unbounded,
            };
            queue.jobs.range((start, Bound::Unbounded)).map(move |key| (class, *key))
        })
    }
}
