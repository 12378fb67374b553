//! The models behind servers and programs: their engines, and the clients whose health has to be watched.

use std::collections::BTreeMap;
use std::sync::Arc;

use cfq_engine::StateChanged;
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::timing::Timing;
use futures::FutureExt;
use futures::future::BoxFuture;

use super::ModelStatus;
use crate::config::Config;
use crate::node::error::with_causes;
use crate::node::unusable::UnusableReason;
use crate::proxy::{CommandClient, CommandConfig, CommandError, EndpointClient, ProxyEngine, RemoteModel};

/// The clients of all configured servers and programs.
pub struct Proxies {
    servers: BTreeMap<String, Result<Arc<EndpointClient>, UnusableReason>>,
    programs: BTreeMap<String, Result<(Arc<CommandClient>, CommandConfig), UnusableReason>>,
}

impl Proxies {
    /// The clients of this configuration. `changes` is notified when the state of a model changes.
    pub fn new(config: &Config, changes: &Arc<StateChanged>) -> Self {
        let server = |name: &str| {
            let endpoint = config.endpoints.get(name)?;
            let behind = config.models.iter().filter(|model| model.endpoint().as_deref() == Some(name));
            let models = behind.filter_map(RemoteModel::of);
            let server = EndpointClient::new(name, endpoint, models, &config.timing, changes.clone());
            Some(server.map_err(|error| {
                let detail = with_causes(&error);
                tracing::error!(endpoint = name, reason = detail, "endpoint cannot be used");
                UnusableReason::ProxyInvalid { detail }
            }))
        };
        let servers = config.endpoints.keys().filter_map(|name| Some((name.clone(), server(name)?))).collect();
        let program = |name: &String| {
            let settings = config.commands.get(name).cloned().or_else(|| CommandConfig::of_known_agent(name));
            let settings = settings.ok_or_else(|| CommandError::Unknown { name: name.clone() });
            let program =
                settings.and_then(|settings| Ok((CommandClient::new(name, &settings, changes.clone())?, settings)));
            program.map_err(|error| {
                let detail = error.to_string();
                tracing::error!(command = name, reason = detail, "command cannot be used");
                UnusableReason::ProxyInvalid { detail }
            })
        };
        let commands: std::collections::BTreeSet<String> = config.models.iter().filter_map(ModelId::command).collect();
        let programs = commands
            .into_iter()
            .map(|name| {
                let program = program(&name);
                (name, program)
            })
            .collect();
        Self { servers, programs }
    }

    /// Status of a model at the start; `None` if the model is files.
    pub fn status(&self, model: &ModelId) -> Option<ModelStatus> {
        let engine = match model.source() {
            ModelSource::Path(_) | ModelSource::Hub { .. } | ModelSource::Pypi { .. } => return None,
            ModelSource::OpenAi { .. } | ModelSource::Ollama { .. } => {
                let (endpoint, remote) = model.endpoint().zip(RemoteModel::of(model))?;
                match self.servers.get(&endpoint) {
                    Some(Ok(server)) => Ok(ProxyEngine::of_server(model.clone(), remote, server.clone())),
                    Some(Err(reason)) => Err(reason.clone()),
                    None => Err(UnusableReason::EndpointNotConfigured { endpoint }),
                }
            }
            ModelSource::Command { command, model: remote } => match self.programs.get(&command)? {
                Ok((program, settings)) => match settings.check_model(&command, remote.as_deref()) {
                    Ok(()) => Ok(ProxyEngine::of_program(model.clone(), remote, program.clone())),
                    Err(error) => Err(UnusableReason::ProxyInvalid { detail: error.to_string() }),
                },
                Err(reason) => Err(reason.clone()),
            },
        };
        Some(match engine {
            Ok(engine) => ModelStatus::Resident(Arc::new(engine)),
            Err(reason) => ModelStatus::Unusable(reason),
        })
    }

    /// Endless tasks that watch the health of the servers and programs.
    pub fn watch(self, timing: &Timing) -> Vec<BoxFuture<'static, ()>> {
        let servers = self.servers.into_values().filter_map(Result::ok);
        let programs = self.programs.into_values().filter_map(Result::ok);
        let servers = servers.map(|server| server.watch(timing.clone()).boxed());
        servers.chain(programs.map(|(program, _)| program.watch(timing.clone()).boxed())).collect()
    }
}
