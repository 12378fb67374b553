//! Checks of the configured model servers.

use std::collections::BTreeMap;

use cfq_deploy::doctor::{Check, CheckStatus};
use cfq_inference_node::proxy::{Endpoint, EndpointError, Probe, Protocol, RemoteModel, probe};
use cfq_link::secret::SecretError;
use cfq_proto::model::ModelId;

use crate::config::Config;

/// Similarity from which a name is suggested in place of another one, from 0 to 1.
const MIN_SIMILARITY: f64 = 0.8;
/// Maximum number of suggested names.
const MAX_SUGGESTIONS: usize = 3;

/// Asks all servers at the same time.
pub async fn check(config: &Config) -> Vec<Check> {
    let models = config.models();
    let checks = config.endpoints.iter().flat_map(|(name, endpoint)| {
        let wanted = models_behind(name, &models);
        wanted.into_iter().map(move |(protocol, models)| check_endpoint(name, endpoint, protocol, models))
    });
    futures::future::join_all(checks).await
}

async fn check_endpoint(name: &str, endpoint: &Endpoint, protocol: Protocol, wanted: Vec<String>) -> Check {
    let probed = probe(name, endpoint, protocol).await;
    let (status, what, next_step) = describe(name, probed, protocol, &wanted);
    Check { name: "endpoint".to_owned(), status, what: format!("{name}: {what}"), next_step }
}

/// Names on the server of the configured models behind it, by protocol. A server without configured models is asked in
/// the OpenAI protocol.
fn models_behind(endpoint: &str, models: &[ModelId]) -> BTreeMap<Protocol, Vec<String>> {
    let mut behind: BTreeMap<Protocol, Vec<String>> = BTreeMap::new();
    for model in models.iter().filter(|model| model.endpoint().is_some_and(|name| name == endpoint)) {
        if let Some(RemoteModel { protocol, name }) = RemoteModel::of(model) {
            behind.entry(protocol).or_default().push(name);
        }
    }
    if behind.is_empty() {
        behind.insert(Protocol::OpenAi, Vec::new());
    }
    behind
}

fn describe(
    name: &str,
    probed: Result<Probe, EndpointError>,
    protocol: Protocol,
    wanted: &[String],
) -> (CheckStatus, String, Option<String>) {
    let table = format!("[endpoints.{name}] in cfq.toml");
    match probed {
        Ok(Probe::Answers { models }) => match wanted.iter().find(|model| !is_listed(model, &models, protocol)) {
            None if models.is_empty() => (CheckStatus::Ok, "answers, but lists no models".to_owned(), None),
            None => (CheckStatus::Ok, format!("answers, models: {}", models.len()), None),
            Some(missing) => {
                let what = format!("answers, but does not list {missing}");
                let step = match protocol {
                    Protocol::OpenAi => suggestion(missing, &models),
                    Protocol::Ollama => format!("fetch it: cfq models pull ollama:{name}/{missing}"),
                };
                (CheckStatus::Warn, what, Some(step))
            }
        },
        Ok(Probe::NoList(status)) => {
            let what = format!("answers the request for its models with status {status}");
            let step = match protocol {
                Protocol::OpenAi => {
                    format!("check that `url` under {table} ends with the version, as in http://HOST:8080/v1")
                }
                Protocol::Ollama => format!("check that `url` under {table} is Ollama's, as in http://HOST:11434"),
            };
            (CheckStatus::Warn, what, Some(step))
        }
        Ok(Probe::Unusable(reason)) => {
            let model = wanted.first().map_or("MODEL", String::as_str);
            // The reasons for Ollama's protocol end with the next step.
            let step = (protocol == Protocol::OpenAi).then(|| {
                format!("in cfq.toml, replace openai:{name}/{model} by ollama:{name}/{model}; the url may stay")
            });
            (CheckStatus::Warn, reason, step)
        }
        Ok(Probe::RefusesKey(status)) => {
            let what = format!("refuses the API key (status {status})");
            (CheckStatus::Fail, what, Some(format!("correct `key` under {table}")))
        }
        Ok(Probe::Down(reason)) => {
            (CheckStatus::Warn, reason, Some(format!("start that server, or correct `url` under {table}")))
        }
        // `cfq up` may run in another environment.
        Err(EndpointError::Key { source: SecretError::Unset { name }, .. }) => {
            let what = format!("its key is in the environment variable {name}, which is not set here");
            (CheckStatus::Warn, what, Some("set it where `cfq up` is started".to_owned()))
        }
        Err(error) => {
            (CheckStatus::Fail, format!("{:#}", anyhow::Error::from(error)), Some(format!("correct {table}")))
        }
    }
}

/// Whether the server lists the model, or does not list models at all, as some servers with the OpenAI protocol.
fn is_listed(model: &str, models: &[String], protocol: Protocol) -> bool {
    let remote = RemoteModel { protocol, name: model.to_owned() };
    protocol == Protocol::OpenAi && models.is_empty() || remote.is_among(models)
}

/// The next step for a model that the server does not list.
fn suggestion(missing: &str, models: &[String]) -> String {
    let mut similar: Vec<(f64, &str)> = models
        .iter()
        .map(|model| (strsim::jaro_winkler(missing, model), model.as_str()))
        .filter(|(similarity, _)| *similarity >= MIN_SIMILARITY)
        .collect();
    similar.sort_by(|a, b| b.0.total_cmp(&a.0));
    let names: Vec<&str> = similar.into_iter().take(MAX_SUGGESTIONS).map(|(_, name)| name).collect();
    match names.as_slice() {
        [] => "get that model on the server, or name one that it lists in [agents] of cfq.toml; some servers accept \
               other names too"
            .to_owned(),
        names => format!("did you mean {}? Some servers accept other names too", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_has_its_status_and_next_step() {
        let answers =
            |models: &[&str]| Ok(Probe::Answers { models: models.iter().map(|model| (*model).to_owned()).collect() });
        let unset = || EndpointError::Key {
            endpoint: "box".to_owned(),
            source: SecretError::Unset { name: "BOX_KEY".to_owned() },
        };
        let wanted = ["qwen2.5-coder:14b".to_owned()];
        for (probed, status, words) in [
            (answers(&["qwen2.5-coder:14b", "x"]), CheckStatus::Ok, ["answers, models: 2", ""]),
            (answers(&[]), CheckStatus::Ok, ["lists no models", ""]),
            (
                answers(&["qwen2.5-coder:7b", "llama3"]),
                CheckStatus::Warn,
                ["does not list qwen", "mean qwen2.5-coder:7b?"],
            ),
            (answers(&["qwen2.5-coder:14b:latest"]), CheckStatus::Ok, ["answers, models: 1", ""]),
            (Ok(Probe::NoList(404)), CheckStatus::Warn, ["status 404", "ends with the version"]),
            (Ok(Probe::Unusable("is Ollama".to_owned())), CheckStatus::Warn, ["is Ollama", "ollama:box/qwen2.5-coder"]),
            (answers(&["llama3"]), CheckStatus::Warn, ["does not list qwen", "get that model"]),
            (Ok(Probe::RefusesKey(401)), CheckStatus::Fail, ["status 401", "[endpoints.box]"]),
            (Ok(Probe::Down("cannot reach u".to_owned())), CheckStatus::Warn, ["cannot reach u", "start that server"]),
            (Err(unset()), CheckStatus::Warn, ["BOX_KEY", "where `cfq up` is started"]),
        ] {
            let (found, what, next_step) = describe("box", probed, Protocol::OpenAi, &wanted);
            let text = format!("{what} -> {}", next_step.unwrap_or_default());
            assert!(found == status && words.iter().all(|word| text.contains(word)), "{text}");
        }
        for models in [&["llama3:latest"][..], &[]] {
            let (status, _, next_step) = describe("box", answers(models), Protocol::Ollama, &wanted);
            let step = "fetch it: cfq models pull ollama:box/qwen2.5-coder:14b".to_owned();
            assert_eq!((status, next_step), (CheckStatus::Warn, Some(step)));
        }
    }
}
