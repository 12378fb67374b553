//! The record of a load in progress, on disk. If a later process finds it, the earlier process ended during the load.

use cfq_memory::Bytes;
use cfq_proto::model::ModelId;
use cfq_proto::node::{Ledger, Residency};

use crate::models::{MeasuredLoad, ModelError, ModelStore};
use crate::node::error::with_causes;

/// Guard of a load in progress. Dropping it removes the record and stores the measurements.
pub(super) struct LoadRecord<'a> {
    store: &'a ModelStore,
    model: &'a ModelId,
    /// Memory that the load used, for each device on which it was measured.
    pub(super) took: Vec<(String, MeasuredLoad)>,
}

impl<'a> LoadRecord<'a> {
    pub(super) fn begin(store: &'a ModelStore, model: &'a ModelId) -> Self {
        log_failure(model, store.record_load_start(model));
        let record = Self { store, model, took: Vec::new() };
        cfq_link::failpoint::hit("node.loading");
        record
    }
}

/// Removes the records of the loads that a clean stop of this process ends.
pub(in crate::node) fn remove_records_of_loads(store: &ModelStore, ledger: &Ledger) {
    for model in ledger.models.iter().filter(|model| model.residency == Residency::Loading) {
        log_failure(&model.model, store.record_load_stop(&model.model));
    }
}

impl Drop for LoadRecord<'_> {
    fn drop(&mut self) {
        for (device, took) in &self.took {
            let (model, predicted, measured) = (self.model, Bytes(took.predicted), Bytes(took.measured));
            tracing::info!(%model, device, %predicted, %measured, "measured the memory of a load");
        }
        log_failure(self.model, self.store.record_load_end(self.model, &self.took));
    }
}

/// Logs a failure to write the record. The load continues, because the user may have no write permission for the model
/// folder.
fn log_failure(model: &ModelId, written: Result<(), ModelError>) {
    if let Err(error) = written {
        tracing::debug!(%model, reason = with_causes(&error), "load not recorded");
    }
}
