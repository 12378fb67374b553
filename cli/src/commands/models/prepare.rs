//! Preparation of the models that `cfq up` serves, with visible progress: the default model chosen for the GPUs, then
//! every other model that is missing.
//!
//! If the chosen model cannot be fetched (no network, no space, a hub error, Ctrl-C), this start uses the small model
//! ([`SMALL_MODEL`](crate::config::SMALL_MODEL)) instead. The partial download is kept, and the next start chooses
//! again and resumes it.

use std::future::Future;
use std::time::Duration;

use cfq_deploy::Paths;
use cfq_inference_node::models::default_model::DefaultModel;
use cfq_inference_node::models::{Hub, HubConfig, HubRetryPolicy, ModelStore, Presence, PullOptions};
use cfq_link::stop::{self, Signals, StopSignal, Stopper};
use cfq_proto::model::ModelId;

use super::default_model;
use super::{fetch, fetch_missing};
use crate::config::Config;
use crate::output::Output;

/// Maximum number of consecutive fetch attempts without progress, for the automatically chosen model. Lower than for
/// models named in the configuration, because an offline machine goes through all of these attempts at every start.
const MAX_FETCH_ATTEMPTS: u32 = 3;
/// Longest wait for a fetch to stop after a stop was requested. A fetch that waits for another process does not
/// react to the stop.
const FETCH_STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// Chooses the default model and fetches missing models. Returns the configuration with the default model, or `None` if
/// a signal ended the start. `chosen` is the default model that `cfq up -d` chose before it started this process in the
/// background; if it is set, all models are fetched already.
pub async fn prepare_models(
    out: Output,
    paths: &Paths,
    config: Config,
    chosen: Option<ModelId>,
    signals: &mut Signals,
) -> Option<Config> {
    if chosen.is_some() {
        return Some(Config { default_model: chosen, ..config });
    }
    let choice = default_model::choose(&config);
    let config = match &choice {
        DefaultModel::Curated { entry, .. } => match entry.id() {
            Some(model) => fetch_default(out, paths, config, &choice, &model, signals).await?,
            None => config,
        },
        DefaultModel::NoCandidate | DefaultModel::UnusedGpu { .. } => {
            default_model::message(&choice, true).iter().for_each(|text| out.status(text));
            config
        }
    };
    tokio::select! {
        () = fetch_missing(out, &config, paths) => Some(config),
        _ = signals.next() => None,
    }
}

/// Fetches the chosen model. Returns the configuration with that model; the unchanged configuration if the fetch failed
/// or Ctrl-C stopped it; `None` if SIGTERM ended the start.
async fn fetch_default(
    out: Output,
    paths: &Paths,
    config: Config,
    choice: &DefaultModel,
    model: &ModelId,
    signals: &mut Signals,
) -> Option<Config> {
    let chosen = Config { default_model: Some(model.clone()), ..config.clone() };
    let store = chosen.store(paths);
    let present = matches!(store.presence(model), Ok(Presence::Present));
    default_model::message(choice, present).iter().for_each(|text| out.status(text));
    if present {
        return Some(chosen);
    }
    let (stopper, stop) = stop::channel();
    let max_attempts = config.hub.retry.max_attempts.min(MAX_FETCH_ATTEMPTS);
    let retry = HubRetryPolicy { max_attempts, ..config.hub.retry };
    let hub = Hub::from_environment(&HubConfig { retry, ..config.hub.clone() }).with_stop(stop);
    // Models that the user fetched are never removed for a default model: if the quota is full, it is not fetched.
    let kept = store.list().unwrap_or_default().into_iter().map(|installed| installed.model);
    let store = ModelStore { hub, bound: store.bound.iter().cloned().chain(kept).collect(), ..store };
    let fallback = "cfq uses the small model for now; the next `cfq up` tries again";
    let fetch = fetch(out, &store, model.clone(), PullOptions::default());
    match fetch_until_signal(fetch, &stopper, signals.next()).await {
        FetchOutcome::Complete => Some(chosen),
        FetchOutcome::Failed(error) => {
            out.status(&format!("{error:#}\n{fallback}"));
            Some(config)
        }
        FetchOutcome::Interrupted => {
            out.status(&format!("fetch interrupted, and the partial download is kept; {fallback}"));
            Some(config)
        }
        FetchOutcome::Terminated => None,
    }
}

#[derive(Debug)]
enum FetchOutcome {
    Complete,
    Failed(anyhow::Error),
    /// Stopped by Ctrl-C: the start continues without the model.
    Interrupted,
    /// Stopped by SIGTERM: the start ends.
    Terminated,
}

/// Runs a fetch to completion, or stops it when a signal arrives.
async fn fetch_until_signal(
    fetch: impl Future<Output = anyhow::Result<()>>,
    stopper: &Stopper,
    signal: impl Future<Output = StopSignal>,
) -> FetchOutcome {
    let outcome = |result: anyhow::Result<()>| result.map_or_else(FetchOutcome::Failed, |()| FetchOutcome::Complete);
    tokio::pin!(fetch);
    let signal = tokio::select! {
        biased;
        result = &mut fetch => return outcome(result),
        signal = signal => signal,
    };
    stopper.stop();
    let stopped = tokio::time::timeout(FETCH_STOP_TIMEOUT, fetch).await;
    match (signal, stopped) {
        (StopSignal::Interrupt, Ok(Ok(()))) => FetchOutcome::Complete,
        (StopSignal::Interrupt, Ok(Err(_)) | Err(_)) => FetchOutcome::Interrupted,
        (StopSignal::Terminate, _) => FetchOutcome::Terminated,
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn outcome_of_a_fetch_decides_how_the_start_continues() {
        let failed = async || Err(anyhow::anyhow!("no space"));
        let (stopper, stop) = stop::channel();
        let ended = fetch_until_signal(ready(Ok(())), &stopper, pending()).await;
        assert!(matches!(ended, FetchOutcome::Complete), "{ended:?}");
        let ended = fetch_until_signal(failed(), &stopper, pending()).await;
        assert!(matches!(&ended, FetchOutcome::Failed(error) if error.to_string() == "no space"), "{ended:?}");
        assert!(!stop.is_raised());
        assert!(matches!(after_signal(StopSignal::Interrupt, failed().await).await, FetchOutcome::Interrupted));
        let ended = after_signal(StopSignal::Interrupt, Ok(())).await;
        assert!(matches!(ended, FetchOutcome::Complete), "the fetch completed at that moment");
        assert!(matches!(after_signal(StopSignal::Terminate, Ok(())).await, FetchOutcome::Terminated));
    }

    /// Returns the outcome if `signal` arrives during a fetch that then stops and returns `result`.
    async fn after_signal(signal: StopSignal, result: anyhow::Result<()>) -> FetchOutcome {
        let (stopper, mut stop) = stop::channel();
        let fetch = async move {
            stop.raised().await;
            result
        };
        fetch_until_signal(fetch, &stopper, ready(signal)).await
    }

    #[tokio::test]
    async fn unresponsive_fetch_is_not_awaited() {
        let (stopper, _stop) = stop::channel();
        let ended = fetch_until_signal(pending(), &stopper, ready(StopSignal::Interrupt)).await;
        assert!(matches!(ended, FetchOutcome::Interrupted), "{ended:?}");
    }
}
