//! Requests to load or unload a model, from a user or, for a job, from the scheduler. The reply is sent before the load
//! or unload finishes. The reply contains the version of a ledger that already lists the model as being loaded or
//! unloaded; a later ledger shows the result.

use std::sync::Arc;

use cfq_proto::messages::ModelReply;
use cfq_proto::model::ModelId;
use tokio::sync::mpsc::error::TrySendError;

use super::{LoaderCommand, ModelRegistry, ModelStatus, RegistryState};
use crate::node::unusable::UnusableReason;

fn refused(reason: String) -> ModelReply {
    ModelReply::Refused { reason }
}

impl ModelRegistry {
    /// Requests that a model is loaded. `is_installed` is called for a model that the node does not serve yet; its
    /// error is the reason why the model cannot be served.
    pub fn load(&self, model: &ModelId, is_installed: impl FnOnce() -> Result<(), UnusableReason>) -> ModelReply {
        if let Some(claim) = self.state().load_blocked_by(model) {
            return refused(format!("this machine yields to {claim}; retry after that program has ended"));
        }
        if self.status(model).is_none() {
            if let Some(status) = self.proxies.status(model) {
                return self.add_proxied(model, status);
            }
            // Called without the lock, because it reads the disk.
            if let Err(reason) = is_installed() {
                return refused(reason.to_string());
            }
        }
        let reply = self.state().request_load(model);
        self.notify();
        reply
    }

    /// Serves a model that is not in the configuration.
    fn add_proxied(&self, model: &ModelId, status: ModelStatus) -> ModelReply {
        if let ModelStatus::Unusable(reason) = status {
            return refused(reason.to_string());
        }
        self.state().statuses.entry(model.clone()).or_insert(status);
        self.notify();
        ModelReply::Loaded
    }

    /// Requests that a model is unloaded once no sequence runs on it.
    pub fn unload(&self, model: &ModelId) -> ModelReply {
        let reply = self.state().request_unload(model, self.configured.contains(model));
        self.notify();
        reply
    }
}

impl RegistryState {
    fn request_load(&mut self, model: &ModelId) -> ModelReply {
        let before = self.statuses.get(model).cloned();
        match &before {
            Some(ModelStatus::Resident(_)) => return ModelReply::Loaded,
            Some(ModelStatus::Loading) => return ModelReply::Loading { ledger_version: self.refresh_ledger().version },
            Some(ModelStatus::Unusable(reason)) if !model.is_file() => return refused(reason.to_string()),
            Some(ModelStatus::OnDisk(_) | ModelStatus::Unusable(_)) | None => {
                self.statuses.insert(model.clone(), ModelStatus::Loading);
            }
            // The model is unloaded first and then loaded again.
            Some(ModelStatus::Unloading(_)) => {}
        }
        let reply = ModelReply::Loading { ledger_version: self.refresh_ledger().version };
        self.send(LoaderCommand::Load(model.clone())).map_or_else(
            |full| {
                match before {
                    Some(status) => self.statuses.insert(model.clone(), status),
                    None => self.statuses.remove(model),
                };
                full
            },
            |()| reply,
        )
    }

    fn request_unload(&mut self, model: &ModelId, is_configured: bool) -> ModelReply {
        match self.statuses.get(model).cloned() {
            None => refused(format!("{model} is not served by this node")),
            Some(_) if !model.is_file() => {
                refused(format!("{model} is behind a server or program, so this node has nothing to unload"))
            }
            Some(ModelStatus::Resident(engine)) => {
                // Published immediately, so that the next ledger shows it.
                self.statuses.insert(model.clone(), ModelStatus::Unloading(Arc::downgrade(&engine)));
                let running = engine.state().running;
                let reply = ModelReply::Unloading { running, ledger_version: self.refresh_ledger().version };
                self.send(LoaderCommand::Unload(model.clone())).map_or_else(
                    |full| {
                        self.statuses.insert(model.clone(), ModelStatus::Resident(engine));
                        full
                    },
                    |()| reply,
                )
            }
            Some(ModelStatus::Unloading(engine)) => {
                let running = engine.upgrade().map_or(0, |engine| engine.state().running);
                ModelReply::Unloading { running, ledger_version: self.refresh_ledger().version }
            }
            Some(ModelStatus::Loading) => refused(format!("{model} is being loaded; retry when it is loaded")),
            // A model that is neither configured nor usable is removed from the registry.
            Some(ModelStatus::Unusable(_)) if !is_configured => {
                self.statuses.remove(model);
                ModelReply::Unloaded
            }
            Some(ModelStatus::OnDisk(_) | ModelStatus::Unusable(_)) => ModelReply::Unloaded,
        }
    }

    /// Queues a command for the loader.
    ///
    /// # Errors
    /// If the queue is full or closed; the error is the reply to the request.
    pub(super) fn send(&self, command: LoaderCommand) -> Result<(), ModelReply> {
        let sent = match &self.commands {
            Some(commands) => commands.try_send(command),
            None => Err(TrySendError::Closed(command)),
        };
        sent.map_err(|error| match error {
            TrySendError::Full(_) => refused("too many loads and unloads wait on this node; retry later".to_owned()),
            TrySendError::Closed(_) => refused("this node is stopping and loads no more models".to_owned()),
        })
    }
}
