//! Which models yield to other programs, see [`crate::node::gpu_yield`].

use std::collections::{BTreeMap, BTreeSet};

use cfq_proto::model::ModelId;

use super::{LoaderCommand, ModelRegistry, ModelStatus, Table, is_file};

/// GPUs that other programs claim: maps the id of each GPU to a description of the program, for example `game on
/// cuda:0`.
pub type GpuClaims = BTreeMap<String, String>;

impl ModelRegistry {
    /// Replaces the claims. Returns a description of the programs if the claims changed.
    pub fn set_gpu_claims(&self, claims: GpuClaims) -> Option<String> {
        let programs = claims.values().map(String::as_str).collect::<Vec<_>>().join(", ");
        let changed = {
            let mut table = self.table();
            let changed = table.gpu_claims != claims;
            table.gpu_claims = claims;
            changed
        };
        if !changed {
            return None;
        }
        self.notify();
        Some(programs)
    }

    /// True while any GPU is claimed by another program.
    pub fn is_yielding(&self) -> bool {
        !self.table().gpu_claims.is_empty()
    }

    /// The program to which the model yields, so that it takes no jobs now; `None` if it does not yield.
    pub fn yields_to(&self, model: &ModelId) -> Option<String> {
        let table = self.table();
        table.statuses.get(model)?.yields_to(model, &table.gpu_claims)
    }

    /// Ready models on GPUs that other programs claim.
    pub fn models_on_claimed_gpus(&self) -> Vec<ModelId> {
        let table = self.table();
        let is_on_claimed = |(model, status): &(&ModelId, &ModelStatus)| {
            matches!(status, ModelStatus::Ready(_))
                && status.gpus(model).iter().any(|gpu| table.gpu_claims.contains_key(gpu))
        };
        table.statuses.iter().filter(is_on_claimed).map(|(model, _)| model.clone()).collect()
    }

    /// Requests that models unloaded for another program are loaded again, sharing the memory as at start. A model that
    /// is still being unloaded is not included; it is loaded when a job needs it.
    pub fn reclaim(&self, models: &BTreeSet<ModelId>) {
        {
            let mut table = self.table();
            let on_disk = |model: &&ModelId| matches!(table.statuses.get(*model), Some(ModelStatus::OnDisk(_)));
            let on_disk: Vec<ModelId> = models.iter().filter(on_disk).cloned().collect();
            if on_disk.is_empty() {
                return;
            }
            table.statuses.extend(on_disk.into_iter().map(|model| (model, ModelStatus::Loading)));
            if table.send(LoaderCommand::LoadPending).is_err() {
                tracing::debug!("models are not loaded again: the node stops or has many to load already");
            }
        }
        self.notify();
    }
}

impl Table {
    /// The program because of which `model` must not be loaded now; `None` if it may, or is already loaded.
    pub(super) fn load_blocked_by(&self, model: &ModelId) -> Option<String> {
        match self.statuses.get(model) {
            Some(ModelStatus::Ready(_)) => None,
            Some(_) | None => self.gpu_claims.values().next().filter(|_| is_file(model)).cloned(),
        }
    }
}

impl ModelStatus {
    /// Ids of the GPUs that the model is loaded on.
    fn gpus(&self, model: &ModelId) -> Vec<String> {
        let engine = match self {
            Self::Ready(engine) => Some(engine.clone()),
            Self::Unloading(engine) => engine.upgrade(),
            Self::OnDisk(_) | Self::Loading | Self::Unusable(_) => None,
        };
        let device = engine.filter(|_| is_file(model)).map(|engine| engine.state().device).unwrap_or_default();
        device.split(',').filter(|id| !id.is_empty() && *id != "cpu").map(str::to_owned).collect()
    }

    /// The program that the model yields to. A model on GPUs that no program claims continues to serve, and an unusable
    /// model reports its own reason.
    pub(super) fn yields_to(&self, model: &ModelId, claims: &GpuClaims) -> Option<String> {
        if !is_file(model) || matches!(self, Self::Unusable(_)) {
            return None;
        }
        let gpus = self.gpus(model);
        match gpus.is_empty() {
            true => claims.values().next().cloned(),
            false => gpus.iter().find_map(|gpu| claims.get(gpu).cloned()),
        }
    }
}

#[cfg(test)]
pub(in crate::node) mod tests {
    use std::sync::Arc;

    use cfq_engine::{Admitted, Engine, Refused};
    use cfq_proto::messages::ModelReply;
    use cfq_proto::node::{ModelState, Residency};
    use futures::future::BoxFuture;
    use tokio::sync::mpsc::Receiver;

    use super::super::model_state;
    use super::*;
    use crate::config::Config;

    /// A fake engine on the given devices.
    struct EngineOn(&'static str, ModelId);

    impl Engine for EngineOn {
        fn state(&self) -> ModelState {
            ModelState { device: self.0.to_owned(), ..model_state(&self.1, Residency::Resident) }
        }

        fn admit_resumed(
            &self,
            _: cfq_proto::job::Prompt,
            _: cfq_proto::job::GeneratedTokens,
        ) -> BoxFuture<'_, Result<Admitted, Refused>> {
            Box::pin(async { Err(Refused::NotNow { need: None, have: 0 }) })
        }
    }

    /// Creates a registry with one ready model on each of the given devices.
    pub fn registry_on<const N: usize>(
        devices: [&'static str; N],
    ) -> (Arc<ModelRegistry>, Receiver<LoaderCommand>, [ModelId; N]) {
        let models = devices.map(|device| format!("path:/{device}").parse::<ModelId>().unwrap());
        let config: Config = serde_json::from_value(serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": "/m", "models": &models[..],
        }))
        .unwrap();
        let (registry, commands, _) = ModelRegistry::new(&config, Arc::default());
        for (model, device) in models.iter().zip(devices) {
            registry.set_status(model, ModelStatus::Ready(Arc::new(EngineOn(device, model.clone()))));
        }
        (registry, commands, models)
    }

    #[test]
    fn only_models_on_claimed_gpus_or_without_gpu_yield() {
        let (registry, _commands, [cpu, first, second, split, disk, broken]) =
            registry_on(["cpu", "cuda:0", "cuda:1", "cuda:0,cuda:1", "disk", "broken"]);
        let endpoint: ModelId = "openai:box/m".parse().unwrap();
        let on_endpoint: Arc<dyn Engine> = Arc::new(EngineOn("proxy", endpoint.clone()));
        registry.set_status(&endpoint, ModelStatus::Ready(on_endpoint));
        registry.set_status(&disk, ModelStatus::OnDisk(model_state(&disk, Residency::Available)));
        registry.set_status(&broken, ModelStatus::Unusable("no such file".to_owned()));
        let before = registry.ledger();
        assert!(before.yields.is_empty() && !registry.is_yielding() && registry.models_on_claimed_gpus().is_empty());
        let game = GpuClaims::from([("cuda:0".to_owned(), "game on cuda:0".to_owned())]);
        assert_eq!(registry.set_gpu_claims(game.clone()).as_deref(), Some("game on cuda:0"));
        assert_eq!(registry.set_gpu_claims(game), None, "unchanged");
        let ledger = registry.ledger();
        assert!(ledger.version > before.version);
        let yields: Vec<_> = ledger.yields.keys().cloned().collect();
        assert_eq!(yields, [cpu, first.clone(), split.clone(), disk.clone()]);
        assert_eq!(registry.models_on_claimed_gpus(), [first, split]);
        for model in [disk, "path:/unknown".parse().unwrap()] {
            let refused = registry.load(&model, || Ok(()));
            assert!(matches!(refused, ModelReply::Refused { reason } if reason.contains("game on cuda:0")));
        }
        // A model that is being unloaded from a GPU that is not claimed does not yield.
        let engine: Arc<dyn Engine> = Arc::new(EngineOn("cuda:1", second.clone()));
        registry.set_status(&second, ModelStatus::Unloading(Arc::downgrade(&engine)));
        assert_eq!(registry.yields_to(&second), None);
        registry.set_gpu_claims(GpuClaims::new());
        assert!(registry.ledger().yields.is_empty() && registry.ledger().version > ledger.version);
    }
}
