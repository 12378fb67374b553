//! `cfq models pull ollama:ENDPOINT/MODEL`: the server fetches the model.

use cfq_deploy::StatusOutput;
use cfq_inference_node::proxy::{self, PullError, PullStep};
use cfq_proto::model::ModelId;
use schemars::JsonSchema;
use serde::Serialize;

use crate::config::Config;
use crate::exit::{self, Code};
use crate::output::{self, Output};

#[derive(Serialize, JsonSchema)]
pub struct Pulled<'a> {
    model: &'a ModelId,
    url: &'a str,
}

/// Refuses flags that only apply to models on this machine.
pub fn check_flags(flags: [(&str, bool); 3]) -> anyhow::Result<()> {
    match flags.iter().find(|(_, is_set)| *is_set) {
        Some((flag, _)) => Err(exit::usage(format!(
            "{flag} cannot be used with a model of an Ollama server, which stores it: leave the flag out"
        ))),
        None => Ok(()),
    }
}

/// Makes the endpoint's server fetch the model of this name, with visible progress.
pub async fn pull(
    out: Output,
    config: &Config,
    model: &ModelId,
    (endpoint, name): (&str, &str),
) -> anyhow::Result<Code> {
    let Some(server) = config.endpoints.get(endpoint) else {
        return Err(exit::usage(format!(
            "endpoint {endpoint} is not configured: add [endpoints.{endpoint}] with url = \"http://127.0.0.1:11434\" to \
             cfq.toml"
        )));
    };
    let status = if out.json { StatusOutput::Silent } else { StatusOutput::Stderr };
    let bar = status.progress_bar("  model", 0);
    let mut last = String::new();
    let pulled = proxy::pull(endpoint, server, name, |step| match step {
        PullStep::Transferred { done, total } => {
            bar.set_length(total);
            bar.set_position(done);
        }
        PullStep::Status(text) if text != last => {
            bar.suspend(|| status.print(&output::sanitize(&text)));
            last = text;
        }
        PullStep::Status(_) => {}
    })
    .await;
    bar.finish_and_clear();
    pulled.map_err(|error| match error {
        PullError::Endpoint(error) => exit::usage(format!("{:#}", anyhow::Error::from(error))),
        PullError::Unusable(_) | PullError::Refused { .. } => exit::usage(error.to_string()),
        PullError::Unreachable { .. } | PullError::Invalid { .. } => error.into(),
    })?;
    out.print(&Pulled { model, url: &server.url }, |p| format!("{} is on {}", p.model, p.url))?;
    Ok(Code::Done)
}
