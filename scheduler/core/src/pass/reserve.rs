//! Reservation of nodes for jobs that wait for room.

use cfq_proto::model::ModelId;

use super::{Pass, Reserved};
use crate::candidates::{Candidates, is_open};
use crate::job::Job;
use crate::node::Node;
use crate::occupancy::NodeOccupancy;
use crate::reservation::Reservation;
use crate::room_timeline::Planned;
use crate::start_estimate::{reserve_node, start_estimate};

impl Pass<'_> {
    /// Reserves the whole node with the fewest jobs for a job that may be poison.
    pub(super) fn reserve_whole_node(&mut self, job: &Job) {
        let open = Candidates::of(self.state, job, self.now_ms).open;
        if let Some((node, _)) = open.iter().min_by_key(|(node, _)| self.occupancy(&node.id).jobs) {
            let occupancy = NodeOccupancy { exclusive: true, ..self.occupancy(&node.id) };
            self.set_occupancy(&node.id, occupancy);
        }
    }

    /// Reserves a node for the job if it is the first of its model that fits nowhere.
    pub(super) fn reserve(&mut self, job: &Job) {
        if self.reservations.contains_key(&job.model) {
            return;
        }
        let state = self.state;
        let before = state.reservations.get(&job.model);
        let own = before.filter(|reservation| reservation.job == job.id);
        if let Some(kept) = own.and_then(|reservation| self.kept(job, reservation)) {
            self.reservations.insert(job.model.clone(), kept);
            return;
        }
        let reservation = (self.rooms.count(&job.model) > 0)
            .then(|| reserve_node(state, job, self.now_ms, |node| self.planned_on(node, &job.model)))
            .flatten();
        if let Some(released) = before.filter(|_| own.is_some() || reservation.is_some()) {
            self.rooms.touch(&released.node, &job.model);
        }
        if let Some(reservation) = reservation {
            let until_ms = reservation.start_ms;
            self.reservations.insert(job.model.clone(), Reserved { reservation, until_ms });
        }
    }

    /// Whether a node that accepts the job now has enough room for it once other jobs have ended.
    pub(super) fn can_ever_start(&self, job: &Job) -> bool {
        let mut nodes = self.state.live_nodes_with(&job.model, self.now_ms);
        nodes.any(|(node, model)| {
            let planned = || self.planned_on(node, &job.model);
            is_open(self.state, job, &(node, model), self.now_ms)
                && start_estimate(self.state, job, (node, model), self.now_ms, planned()).is_some()
        })
    }

    /// The reservation of an earlier pass, if the node can still run the job.
    fn kept(&self, job: &Job, reservation: &Reservation) -> Option<Reserved> {
        let node = self.state.nodes.get(&reservation.node).filter(|node| node.boot == reservation.boot)?;
        let candidate = (&**node, node.model(&job.model)?);
        if !is_open(self.state, job, &candidate, self.now_ms) {
            return None;
        }
        let planned = self.planned_on(node, &job.model);
        let start = start_estimate(self.state, job, candidate, self.now_ms, planned)?;
        let until_ms = reservation.start_ms.min(start.at_ms);
        Some(Reserved { reservation: reservation.clone(), until_ms })
    }

    pub(super) fn planned_on(&self, node: &Node, model: &ModelId) -> Vec<Planned> {
        self.planned.get(&(node.id.clone(), model.clone())).cloned().unwrap_or_default()
    }
}
