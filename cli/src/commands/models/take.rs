//! What `cfq up` serves, made ready where somebody looks: the model chosen for a card, then whatever else is missing.
//!
//! A choice that comes to nothing (no network, no room, a hub that refuses, Ctrl-C) costs this start the better model and
//! nothing else: the small one serves, what was fetched stays, and the next start chooses again and goes on from there.

use std::future::Future;
use std::time::Duration;

use cfq_deploy::Paths;
use cfq_inference_node::engine::candle::Choice;
use cfq_inference_node::models::{Hub, HubConfig, Patience, Presence, Pull, Store};
use cfq_link::stop::{self, Signals, Stopper, Told};
use cfq_proto::model::ModelId;

use super::choice;
use super::{ensure, fetch};
use crate::config::Config;
use crate::output::Output;

/// Tries in a row that bring nothing. Fewer than for what somebody asked for: a machine that is never online waits for them
/// at each start.
const TRIES: u32 = 3;
/// For a fetch that is told to stop. One that waits for another process's does not hear it.
const STOPPING: Duration = Duration::from_secs(2);

/// The configuration with what agents that nobody bound get; `None`: told to stop. `decided`: by the process that started
/// this one in the background, which has fetched too.
pub async fn settle(
    out: Output,
    paths: &Paths,
    config: Config,
    decided: Option<ModelId>,
    told: &mut Signals,
) -> Option<Config> {
    if decided.is_some() {
        return Some(Config { unbound: decided, ..config });
    }
    let choice = choice::of_this_machine(&config);
    let config = match &choice {
        Choice::Curated { entry, .. } => match entry.id() {
            Some(model) => take(out, paths, config, &choice, &model, told).await?,
            None => config,
        },
        Choice::Nothing | Choice::Idle { .. } => {
            choice::words(&choice, true).iter().for_each(|words| out.talk(words));
            config
        }
    };
    tokio::select! {
        () = ensure(out, &config, paths) => Some(config),
        _ = told.next() => None,
    }
}

/// `None`: told to stop.
async fn take(
    out: Output,
    paths: &Paths,
    config: Config,
    choice: &Choice,
    model: &ModelId,
    told: &mut Signals,
) -> Option<Config> {
    let chosen = Config { unbound: Some(model.clone()), ..config.clone() };
    let store = chosen.store(paths);
    let here = matches!(store.presence(model), Ok(Presence::Here));
    choice::words(choice, here).iter().for_each(|words| out.talk(words));
    if here {
        return Some(chosen);
    }
    let (stopper, stop) = stop::pair();
    let patience = Patience { tries: config.hub.patience.tries.min(TRIES), ..config.hub.patience };
    let hub = Hub::from_environment(&HubConfig { patience, ..config.hub.clone() }).until(stop);
    // What people fetched does not go for what nobody asked for: where the quota is full this one is not taken.
    let kept = store.list().unwrap_or_default().into_iter().map(|installed| installed.model);
    let store = Store { hub, bound: store.bound.iter().cloned().chain(kept).collect(), ..store };
    let small = "the small model serves this time, and the next `cfq up` tries again";
    match unless_told(fetch(out, &store, model.clone(), Pull::default()), &stopper, told.next()).await {
        Fetched::Whole => Some(chosen),
        Fetched::Failed(error) => {
            out.talk(&format!("{error:#}\n{small}"));
            Some(config)
        }
        Fetched::Left => {
            out.talk(&format!("left there, and what came is kept: {small}"));
            Some(config)
        }
        Fetched::Ended => None,
    }
}

#[derive(Debug)]
enum Fetched {
    Whole,
    Failed(anyhow::Error),
    /// By Ctrl-C: go on without it.
    Left,
    /// By SIGTERM: go on with nothing.
    Ended,
}

async fn unless_told(
    fetch: impl Future<Output = anyhow::Result<()>>,
    stopper: &Stopper,
    told: impl Future<Output = Told>,
) -> Fetched {
    let settled = |done: anyhow::Result<()>| done.map_or_else(Fetched::Failed, |()| Fetched::Whole);
    tokio::pin!(fetch);
    let told = tokio::select! {
        biased;
        done = &mut fetch => return settled(done),
        told = told => told,
    };
    stopper.stop();
    let ended = tokio::time::timeout(STOPPING, fetch).await;
    match (told, ended) {
        (Told::Interrupt, Ok(Ok(()))) => Fetched::Whole,
        (Told::Interrupt, Ok(Err(_)) | Err(_)) => Fetched::Left,
        (Told::Terminate, _) => Fetched::Ended,
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn what_ends_a_fetch_decides_what_becomes_of_the_start() {
        let failed = async || Err(anyhow::anyhow!("no room"));
        let (stopper, stop) = stop::pair();
        let ended = unless_told(ready(Ok(())), &stopper, pending()).await;
        assert!(matches!(ended, Fetched::Whole), "{ended:?}");
        let ended = unless_told(failed(), &stopper, pending()).await;
        assert!(matches!(&ended, Fetched::Failed(error) if error.to_string() == "no room"), "{ended:?}");
        assert!(!stop.is_raised());
        assert!(matches!(told(Told::Interrupt, failed().await).await, Fetched::Left));
        assert!(matches!(told(Told::Interrupt, Ok(())).await, Fetched::Whole), "it came to its end in that moment");
        assert!(matches!(told(Told::Terminate, Ok(())).await, Fetched::Ended));
    }

    /// Of a fetch that hears it and ends so.
    async fn told(how: Told, done: anyhow::Result<()>) -> Fetched {
        let (stopper, mut stop) = stop::pair();
        let fetch = async move {
            stop.raised().await;
            done
        };
        unless_told(fetch, &stopper, ready(how)).await
    }

    #[tokio::test]
    async fn a_fetch_that_does_not_hear_is_not_waited_for() {
        let (stopper, _stop) = stop::pair();
        let ended = unless_told(pending(), &stopper, ready(Told::Interrupt)).await;
        assert!(matches!(ended, Fetched::Left), "{ended:?}");
    }
}
