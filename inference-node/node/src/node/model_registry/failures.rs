//! Failures of the engines and of the loader, after which the process has to restart.

use std::collections::BTreeMap;

use cfq_engine::EngineFailure;
use cfq_proto::model::ModelId;

use super::{ModelRegistry, ModelStatus};
use crate::node::error::{LoaderFailure, ModelFault};

impl ModelRegistry {
    /// Records why the loader thread exited. The thread cannot be restarted, since it owned the engines.
    pub fn set_loader_failure(&self, failure: LoaderFailure) {
        self.state().loader_failure = Some(failure);
        self.notify();
    }

    /// Why the loader thread exited, if it did.
    pub fn loader_failure(&self) -> Option<LoaderFailure> {
        self.state().loader_failure.clone()
    }

    /// Records a failure outside the engine of `model`. The node exits because of it, since the process may be out of
    /// memory.
    pub fn set_fault(&self, model: &ModelId, fault: ModelFault) {
        self.state().fault = Some((model.clone(), fault));
        self.notify();
    }

    /// A model that cannot be served until the process restarts, and the fault; `None` if there is none.
    pub fn broken_engine(&self) -> Option<(ModelId, ModelFault)> {
        let state = self.state();
        if let Some(fault) = state.fault.clone() {
            return Some(fault);
        }
        let failed = |(model, status): (&ModelId, &ModelStatus)| {
            Some((model.clone(), ModelFault::Engine(status.engine()?.failure()?)))
        };
        state.statuses.iter().find_map(failed)
    }

    /// The failure of the engine of `model`; `None` if it works or the model is not loaded.
    pub fn engine_failure(&self, model: &ModelId) -> Option<EngineFailure> {
        self.state().statuses.get(model)?.engine()?.failure()
    }

    /// The work that each engine without a failure has begun and not ended, see [`Engine::unfinished_work`].
    pub fn unfinished_work(&self) -> BTreeMap<ModelId, u64> {
        let state = self.state();
        let unfinished = |(model, status): (&ModelId, &ModelStatus)| {
            let engine = status.engine().filter(|engine| engine.failure().is_none())?;
            Some((model.clone(), engine.unfinished_work()?))
        };
        state.statuses.iter().filter_map(unfinished).collect()
    }

    /// Records a failure of the engine of `model` that the engine cannot notice itself.
    pub fn set_engine_failure(&self, model: &ModelId, failure: EngineFailure) {
        let engine = self.state().statuses.get(model).and_then(ModelStatus::engine);
        if let Some(engine) = engine {
            engine.set_failure(failure);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cfq_engine::{AdmitError, Admitted, Engine};
    use cfq_proto::node::{ModelState, Residency};
    use futures::future::BoxFuture;

    use super::*;
    use crate::config::Config;
    use crate::node::model_registry::model_state;

    struct Broken;

    impl Engine for Broken {
        fn state(&self) -> ModelState {
            model_state(&"openai:box/m".parse().unwrap(), Residency::Loading)
        }

        fn failure(&self) -> Option<EngineFailure> {
            Some(EngineFailure::Panic { message: "index out of bounds".to_owned() })
        }

        fn admit_resumed(
            &self,
            _: cfq_proto::job::Prompt,
            _: cfq_proto::job::GeneratedTokens,
        ) -> BoxFuture<'_, Result<Admitted, AdmitError>> {
            Box::pin(async { Err(AdmitError::NotNow { need: None, have: 0 }) })
        }
    }

    #[test]
    fn broken_engine_is_reported_and_unusable_model_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let config: Config = serde_json::from_value(serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": folder.path(),
            "models": ["ollama:den/q", "openai:box/m"],
        }))
        .unwrap();
        let (registry, _commands) = ModelRegistry::new(&config, Arc::default());
        assert_eq!(registry.broken_engine(), None);
        let model: ModelId = "openai:box/m".parse().unwrap();
        registry.set_status(&model, ModelStatus::Resident(Arc::new(Broken)));
        let failure = EngineFailure::Panic { message: "index out of bounds".to_owned() };
        assert_eq!(registry.broken_engine(), Some((model, ModelFault::Engine(failure))));
    }
}
