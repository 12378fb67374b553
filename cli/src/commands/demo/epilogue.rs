//! The demo's last words: where the result is, what to do with it, and how to go on with a model worth its name.

use cfq_deploy::Paths;
use cfq_inference_node::engine::candle::{Choice, curated_that_fit, lasting_room};
use cfq_proto::http::TaskDetail;
use cfq_proto::node::{Device, DeviceKind};
use cfq_proto::task::TaskState;

use crate::commands::models::choice;
use crate::config::{self, Config};

pub fn words(detail: &TaskDetail, paths: &Paths, config: &Config) -> String {
    let repo = &detail.spec.repo;
    let task = detail.summary.number;
    let cfq = std::env::current_exe().map_or_else(|_| "cfq".to_owned(), |path| path.display().to_string());
    let cfq = format!("{cfq} --data {}", paths.data.display());
    let escalated = detail.summary.state == TaskState::Escalated;
    let mut lines = vec![String::new()];
    if escalated {
        lines.push(format!("the loop stopped for a human: {}", detail.reason));
    } else if !matches!(detail.summary.state, TaskState::Merged | TaskState::Accepted) {
        lines.push(format!("the task is {}: {}", detail.summary.state, detail.reason));
    }
    if let Some(branch) = &detail.delivered_branch {
        let what = if escalated { "its best try" } else { "the result" };
        lines.push(format!("{what} is branch {branch} in {repo}"));
        lines.push(format!("  look at it:   git -C {repo} diff HEAD...{branch}"));
        lines.push(format!("  merge it:     git -C {repo} merge {branch}"));
    }
    lines.push(format!("  all of it:    {cfq} up -d --bind 127.0.0.1:0 && {cfq} show {task}"));
    if escalated {
        lines.push(format!(
            "  go on:        {cfq} resolve {task} --action retry_with_constraints --constraint \"...\" --watch"
        ));
    }
    lines.push(format!("  stop it:      {cfq} down"));
    if let Some(artifact) = detail.iterations.iter().find(|i| Some(i.iteration) == detail.best_iteration) {
        lines.push(format!("best of {} tries: {}", detail.iterations.len(), artifact.paths.join(", ")));
    }
    lines.push(String::new());
    if config.models().iter().any(|m| m.as_str() == config::SMALL_MODEL) {
        lines.push(
            "This was a 135-million-parameter model: it shows that the system works, its scores are no judgement."
                .to_owned(),
        );
        lines.push(match choice::of_this_machine(config) {
            Choice::Curated { entry, cards } => {
                format!("`cfq up` takes {} for {} by itself.", entry.name, choice::named(&cards))
            }
            Choice::Nothing | Choice::Idle { .. } => switching(&cfq_inference_node::gpu::inventory().devices, config),
        });
    }
    lines.join("\n")
}

/// How to go on with a model worth its name: the largest curated coding model that the best card found could hold.
fn switching(devices: &[Device], config: &Config) -> String {
    let card = devices.iter().filter(|d| d.kind == DeviceKind::Cuda).max_by_key(|d| d.memory_total);
    let entry = card.and_then(|card| curated_that_fit(&[lasting_room(card)], config.node.max_sequences).next());
    let why = match card {
        None => "no card was found here".to_owned(),
        Some(card) => format!("{} with {} GiB", card.name, card.memory_total >> 30),
    };
    let choice = match entry {
        Some(entry) => format!("{why}: {} fits; its licence: {}", entry.name, entry.licence),
        None => format!("{why}; `cfq models suggest` lists some"),
    };
    let model = entry.map_or("hf:ORG/REPO:FILE.gguf", |entry| entry.model);
    format!(
        "To use a code model ({choice}), fetch it and bind it in cfq.toml:\n  \
         cfq models pull {model}\n  [agents.alpha]\n  model = \"{model}\"\n\
         or, where this build does not compute on cards, serve one with any OpenAI-compatible server and bind that:\n  \
         [endpoints.box]\n  url = \"http://127.0.0.1:11434/v1\"\n  [agents.alpha]\n  model = \"openai:box/qwen2.5-coder:7b\""
    )
}
