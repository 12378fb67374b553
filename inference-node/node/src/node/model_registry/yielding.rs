//! Which models yield to other programs, see [`crate::node::gpu_yield`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use cfq_proto::model::ModelId;

use super::{LoaderCommand, ModelRegistry, ModelStatus, RegistryState};

/// The claim of another program on a GPU. Its text is, for example, `game on cuda:0`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuClaim {
    /// Name of the program.
    pub program: String,
    /// Id of the GPU, such as `cuda:0`.
    pub gpu: String,
}

impl fmt::Display for GpuClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.program, self.gpu)
    }
}

/// Claims of other programs, by the id of the GPU.
pub type GpuClaims = BTreeMap<String, GpuClaim>;

impl ModelRegistry {
    /// Replaces the claims. Returns a description of the programs if the claims changed.
    pub fn set_gpu_claims(&self, claims: GpuClaims) -> Option<String> {
        let programs = claims.values().map(GpuClaim::to_string).collect::<Vec<_>>().join(", ");
        let changed = {
            let mut state = self.state();
            let changed = state.gpu_claims != claims;
            state.gpu_claims = claims;
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
        !self.state().gpu_claims.is_empty()
    }

    /// The claim because of which the model takes no jobs now; `None` if the model does not yield.
    pub fn yields_to(&self, model: &ModelId) -> Option<GpuClaim> {
        let state = self.state();
        state.statuses.get(model)?.yields_to(model, &state.gpu_claims)
    }

    /// Resident models on GPUs that other programs claim.
    pub fn models_on_claimed_gpus(&self) -> Vec<ModelId> {
        let state = self.state();
        let is_on_claimed = |(model, status): &(&ModelId, &ModelStatus)| {
            matches!(status, ModelStatus::Resident(_))
                && status.gpus(model).iter().any(|gpu| state.gpu_claims.contains_key(gpu))
        };
        state.statuses.iter().filter(is_on_claimed).map(|(model, _)| model.clone()).collect()
    }

    /// Requests the reload of `models`, which were unloaded for another program. They are loaded together, so that they
    /// share the memory as at the node's start. A model that is still being unloaded is not included; it is loaded when
    /// a job needs it. If the loader's queue is full, every model stays on disk until a job needs it.
    pub fn reclaim(&self, models: &BTreeSet<ModelId>) {
        {
            let mut state = self.state();
            let on_disk = |model: &&ModelId| matches!(state.statuses.get(*model), Some(ModelStatus::OnDisk(_)));
            let on_disk: Vec<ModelId> = models.iter().filter(on_disk).cloned().collect();
            if on_disk.is_empty() {
                return;
            }
            // Sent first, so that the models do not remain in the status `Loading` without a load. The loader reads
            // their status only after the state is unlocked.
            if state.send(LoaderCommand::LoadPending).is_err() {
                tracing::warn!("models are not loaded again after the GPU yield: the loader's queue is full or closed");
                return;
            }
            state.statuses.extend(on_disk.into_iter().map(|model| (model, ModelStatus::Loading)));
        }
        self.notify();
    }
}

impl RegistryState {
    /// The claim because of which `model` must not be loaded now; `None` if the model may be loaded, or is loaded
    /// already.
    pub(super) fn load_blocked_by(&self, model: &ModelId) -> Option<GpuClaim> {
        match self.statuses.get(model) {
            Some(ModelStatus::Resident(_)) => None,
            Some(_) | None => self.gpu_claims.values().next().filter(|_| model.is_file()).cloned(),
        }
    }
}

impl ModelStatus {
    /// Ids of the GPUs that the model is loaded on.
    fn gpus(&self, model: &ModelId) -> Vec<String> {
        let engine = match self {
            Self::Resident(engine) => Some(engine.clone()),
            Self::Unloading(engine) => engine.upgrade(),
            Self::OnDisk(_) | Self::Loading | Self::Unusable(_) => None,
        };
        let device = engine.filter(|_| model.is_file()).map(|engine| engine.state().device).unwrap_or_default();
        device.split(',').filter(|id| !id.is_empty() && *id != "cpu").map(str::to_owned).collect()
    }

    /// The claim that the model yields to; `None` if there is no claim, or if the model is loaded on unclaimed GPUs, is
    /// behind a server or program, or is unusable (and reports that reason).
    pub(super) fn yields_to(&self, model: &ModelId, claims: &GpuClaims) -> Option<GpuClaim> {
        if !model.is_file() || matches!(self, Self::Unusable(_)) {
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

    use cfq_engine::{AdmitError, Admitted, Engine};
    use cfq_proto::messages::ModelReply;
    use cfq_proto::node::{ModelState, Residency};
    use futures::future::BoxFuture;
    use tokio::sync::mpsc::Receiver;

    use super::super::model_state;
    use super::*;
    use crate::config::Config;
    use crate::node::model_registry::MAX_QUEUED_COMMANDS;
    use crate::node::unusable::UnusableReason;

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
        ) -> BoxFuture<'_, Result<Admitted, AdmitError>> {
            Box::pin(async { Err(AdmitError::NotNow { need: None, have: 0 }) })
        }
    }

    /// Creates a registry with one resident model on each of the given devices.
    pub fn registry_on<const N: usize>(
        devices: [&'static str; N],
    ) -> (Arc<ModelRegistry>, Receiver<LoaderCommand>, [ModelId; N]) {
        let models = devices.map(|device| format!("path:/{device}").parse::<ModelId>().unwrap());
        let config: Config = serde_json::from_value(serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": "/m", "models": &models[..],
        }))
        .unwrap();
        let (registry, commands) = ModelRegistry::new(&config, Arc::default());
        for (model, device) in models.iter().zip(devices) {
            registry.set_status(model, ModelStatus::Resident(Arc::new(EngineOn(device, model.clone()))));
        }
        (registry, commands, models)
    }

    pub fn claim(program: &str, gpu: &str) -> GpuClaim {
        GpuClaim { program: program.to_owned(), gpu: gpu.to_owned() }
    }

    #[test]
    fn model_stays_on_disk_if_the_queue_is_full_when_it_is_reclaimed() {
        let (registry, mut commands, [model]) = registry_on(["cuda:0"]);
        registry.set_status(&model, ModelStatus::OnDisk(model_state(&model, Residency::Available)));
        let others: Vec<ModelId> =
            (0..MAX_QUEUED_COMMANDS).map(|index| format!("path:/other{index}").parse().unwrap()).collect();
        for other in &others {
            assert!(matches!(registry.load(other, || Ok(())), ModelReply::Loading { .. }));
        }
        registry.reclaim(&[model.clone()].into());
        assert!(matches!(registry.status(&model), Some(ModelStatus::OnDisk(_))));
        commands.try_recv().unwrap();
        registry.reclaim(&[model.clone()].into());
        assert!(registry.pending_loads().contains(&model));
    }

    #[test]
    fn only_models_on_claimed_gpus_or_without_gpu_yield() {
        let (registry, _commands, [cpu, first, second, split, disk, broken]) =
            registry_on(["cpu", "cuda:0", "cuda:1", "cuda:0,cuda:1", "disk", "broken"]);
        let endpoint: ModelId = "openai:box/m".parse().unwrap();
        let on_endpoint: Arc<dyn Engine> = Arc::new(EngineOn("proxy", endpoint.clone()));
        registry.set_status(&endpoint, ModelStatus::Resident(on_endpoint));
        registry.set_status(&disk, ModelStatus::OnDisk(model_state(&disk, Residency::Available)));
        let reason = UnusableReason::Unreadable { model: broken.clone(), detail: "no such file".to_owned() };
        registry.set_status(&broken, ModelStatus::Unusable(reason));
        let before = registry.ledger();
        assert!(before.yields.is_empty() && !registry.is_yielding() && registry.models_on_claimed_gpus().is_empty());
        let game = GpuClaims::from([("cuda:0".to_owned(), claim("game", "cuda:0"))]);
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
