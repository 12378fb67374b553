//! The final output of the demo: where the result is, what to do with it, and how to use a larger model.

use cfq_deploy::Paths;
use cfq_inference_node::models::{default_model::DefaultModel, fitting_models, nominal_capacity};
use cfq_proto::http::TaskDetail;
use cfq_proto::node::{Device, DeviceKind};
use cfq_proto::task::TaskState;

use crate::commands::models::default_model;
use crate::config::{self, Config};

pub fn render(detail: &TaskDetail, paths: &Paths, config: &Config) -> String {
    let repo = &detail.spec.repo;
    let task = detail.summary.number;
    let cfq = std::env::current_exe().map_or_else(|_| "cfq".to_owned(), |path| path.display().to_string());
    let cfq = format!("{cfq} --data {}", paths.data.display());
    let escalated = detail.summary.state == TaskState::Escalated;
    let mut lines = vec![String::new()];
    if escalated {
        lines.push(format!("the task needs a human: {}", detail.reason));
    } else if !matches!(detail.summary.state, TaskState::Merged | TaskState::Accepted) {
        lines.push(format!("the task is {}: {}", detail.summary.state, detail.reason));
    }
    if let Some(branch) = &detail.delivered_branch {
        let what = if escalated { "the best result" } else { "the result" };
        lines.push(format!("{what} is branch {branch} in {repo}"));
        lines.push(format!("  view it:      git -C {repo} diff HEAD...{branch}"));
        lines.push(format!("  merge it:     git -C {repo} merge {branch}"));
    }
    lines.push(format!("  task details: {cfq} up -d --bind 127.0.0.1:0 && {cfq} show {task}"));
    if escalated {
        lines.push(format!(
            "  retry it:     {cfq} resolve {task} --action retry_with_constraints --constraint \"...\" --watch"
        ));
    }
    lines.push(format!("  stop cfq:     {cfq} down"));
    if let Some(artifact) = detail.iterations.iter().find(|i| Some(i.iteration) == detail.best_iteration) {
        lines.push(format!("files (best of {} iterations): {}", detail.iterations.len(), artifact.paths.join(", ")));
    }
    lines.push(String::new());
    if config.models().iter().any(|m| m.as_str() == config::SMALL_MODEL) {
        lines.push(
            "The demo's model has 135 million parameters: it shows that the system works; its scores are meaningless."
                .to_owned(),
        );
        lines.push(match default_model::choose(config) {
            DefaultModel::Curated { entry, gpus } => {
                format!("`cfq up` automatically uses {} on {}.", entry.name, default_model::describe_gpus(&gpus))
            }
            DefaultModel::NoCandidate | DefaultModel::UnusedGpu { .. } => {
                suggest_larger_model(&cfq_inference_node::gpu::inventory().devices, config)
            }
        });
    }
    lines.join("\n")
}

/// Text on how to use a larger model: names the largest curated coding model that fits the largest GPU found.
fn suggest_larger_model(devices: &[Device], config: &Config) -> String {
    let gpu = devices.iter().filter(|d| d.kind == DeviceKind::Cuda).max_by_key(|d| d.memory_total);
    let entry = gpu.and_then(|gpu| fitting_models(&[nominal_capacity(gpu)], config.node.max_sequences).next());
    let found = match gpu {
        None => "no GPU was found".to_owned(),
        Some(gpu) => format!("{} with {} GiB", gpu.name, gpu.memory_total >> 30),
    };
    let choice = match entry {
        Some(entry) => format!("{found}: {} fits; licence: {}", entry.name, entry.licence),
        None => format!("{found}; `cfq models suggest` lists models"),
    };
    let model = entry.map_or("hf:ORG/REPO:FILE.gguf", |entry| entry.model);
    format!(
        "To use a larger coding model ({choice}), fetch it and configure it in cfq.toml:\n  \
         cfq models pull {model}\n  [agents.alpha]\n  model = \"{model}\"\n\
         or, if this build does not run models on GPUs, run one in Ollama or another model server and configure that:\n  \
         [endpoints.box]\n  url = \"http://127.0.0.1:11434\"\n  [agents.alpha]\n  model = \"ollama:box/qwen2.5-coder:7b\""
    )
}
