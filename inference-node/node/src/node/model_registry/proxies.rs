//! The models behind servers and programs: their engines, and the clients whose health has to be watched.

use std::collections::{BTreeMap, BTreeSet};
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
use crate::proxy::{
    CommandClient, CommandConfig, CommandError, Endpoint, EndpointClient, Probe, ProxyEngine, RemoteModel, probe,
};

/// Maximum number of names in a message.
const MAX_LISTED: usize = 10;

/// Why a model cannot be used now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotUsable {
    pub reason: String,
    /// Whether its server is down, and may be up later.
    pub is_down: bool,
}

/// The clients of all configured servers and programs.
pub struct Proxies {
    servers: BTreeMap<String, Result<Arc<EndpointClient>, UnusableReason>>,
    commands: BTreeMap<String, Result<Arc<CommandClient>, UnusableReason>>,
    endpoints: BTreeMap<String, Endpoint>,
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
        let used = config.models.iter().filter_map(ModelId::command);
        let names: BTreeSet<String> = used.chain(config.commands.keys().cloned()).collect();
        let program = |name: &String| {
            let settings = config.commands.get(name).cloned().or_else(|| CommandConfig::of_coding_agent(name));
            let settings = settings.ok_or_else(|| CommandError::Unknown { name: name.clone() });
            let program = settings.and_then(|settings| {
                CommandClient::new(name, &settings, config.command_dir.as_deref(), changes.clone())
            });
            program.map_err(|error| {
                let detail = error.to_string();
                tracing::error!(command = name, reason = detail, "command cannot be used");
                UnusableReason::ProxyInvalid { detail }
            })
        };
        let commands = names.into_iter().map(|name| (name.clone(), program(&name))).collect();
        Self { servers, commands, endpoints: config.endpoints.clone() }
    }

    /// Asks the server of a model that is not in the configuration whether it can be used.
    ///
    /// # Errors
    /// Why it cannot be used now.
    pub async fn check(&self, model: &ModelId) -> Result<(), NotUsable> {
        let Some((name, remote)) = model.endpoint().zip(RemoteModel::of(model)) else { return Ok(()) };
        let Some(endpoint) = self.endpoints.get(&name) else { return Ok(()) };
        let never = |reason: String| NotUsable { reason, is_down: false };
        let probed = probe(&name, endpoint, remote.protocol).await.map_err(|error| never(with_causes(&error)))?;
        match probed {
            Probe::Answers { models } if !models.is_empty() && !remote.is_among(&models) => {
                Err(never(format!("endpoint {name} does not list {}; it lists {}", remote.name, listed(&models))))
            }
            Probe::Answers { .. } | Probe::NoList(_) => Ok(()),
            Probe::RefusesKey(status) => Err(never(format!("endpoint {name} refuses the API key (status {status})"))),
            Probe::Unusable(reason) => Err(never(format!("endpoint {name}: {reason}"))),
            Probe::Down(reason) => Err(NotUsable { reason: format!("endpoint {name}: {reason}"), is_down: true }),
        }
    }

    /// Asks the server about a model that was just added, instead of at the next check.
    pub async fn ask_about(&self, model: &ModelId) {
        if let Some(Ok(server)) = model.endpoint().and_then(|name| self.servers.get(&name)) {
            server.check().await;
        }
    }

    /// Status of a model before its server was asked; `None` if the model is files.
    pub fn status(&self, model: &ModelId) -> Option<ModelStatus> {
        let engine = match model.source() {
            ModelSource::Path(_) | ModelSource::Hub { .. } | ModelSource::Pypi { .. } => return None,
            ModelSource::OpenAi { .. } | ModelSource::Ollama { .. } => {
                let (endpoint, remote) = model.endpoint().zip(RemoteModel::of(model))?;
                match self.servers.get(&endpoint) {
                    Some(Ok(server)) => {
                        server.add(&remote);
                        Ok(ProxyEngine::of_server(model.clone(), remote, server.clone()))
                    }
                    Some(Err(reason)) => Err(reason.clone()),
                    None => Err(UnusableReason::EndpointNotConfigured { endpoint }),
                }
            }
            ModelSource::Command { command, model: remote } => match self.commands.get(&command) {
                None => {
                    Err(UnusableReason::ProxyInvalid { detail: CommandError::Unknown { name: command }.to_string() })
                }
                Some(Ok(program)) => match program.check_model(remote.as_deref()) {
                    Ok(()) => Ok(ProxyEngine::of_command(model.clone(), remote, program.clone())),
                    Err(error) => Err(UnusableReason::ProxyInvalid { detail: error.to_string() }),
                },
                Some(Err(reason)) => Err(reason.clone()),
            },
        };
        Some(match engine {
            Ok(engine) => ModelStatus::Resident(Arc::new(engine)),
            Err(reason) => ModelStatus::Unusable(reason),
        })
    }

    /// Endless tasks that watch the health of the servers and programs.
    pub fn watch(&self, timing: &Timing) -> Vec<BoxFuture<'static, ()>> {
        let servers = self.servers.values().filter_map(|server| server.as_ref().ok());
        let programs = self.commands.values().filter_map(|program| program.as_ref().ok());
        let servers = servers.map(|server| server.clone().watch(timing.clone()).boxed());
        servers.chain(programs.map(|program| program.clone().watch(timing.clone()).boxed())).collect()
    }
}

/// The first of these names, for a message.
fn listed(names: &[String]) -> String {
    let more = if names.len() > MAX_LISTED { ", ..." } else { "" };
    format!("{}{more}", names.iter().take(MAX_LISTED).map(String::as_str).collect::<Vec<_>>().join(", "))
}
