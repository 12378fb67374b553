//! `cfq demo`: the main job once, for real, on a sample repository of its own; then everything stops and the data stays.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_deploy::{Paths, Talk};
use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskKey;
use cfq_proto::node::{Device, DeviceKind};
use cfq_proto::task::{AgentBinding, AgentBindings, TaskSpec, TaskState};

use crate::args::DemoArgs;
use crate::commands::{models, pull, watch};
use crate::config::{self, Config};
use crate::exit::{self, Code};
use crate::machine::{self, Machine};
use crate::output::{self, Output};
use crate::repo;

/// Tokens; the example function needs thirty, its review two hundred.
const LONGEST_REPLY: u32 = 320;

const TASK: &str = "Write a Python function is_even(n) that returns True if n is even and False otherwise.";

pub async fn run(out: Output, paths: &Paths, mut config: Config, args: DemoArgs) -> anyhow::Result<Code> {
    let start = Instant::now();
    // Beside the user's own data, so that a running cfq and its tasks are left alone.
    let paths = Paths { data: paths.data.join("demo"), ..paths.clone() };
    if let Some(model) = &args.model {
        config.agents.alpha.model = Some(model.clone());
        config.agents.beta.model = Some(model.clone());
    }
    let bind = free_address()?;
    let engines = config::engines(&config.engines, &args.engines);
    let talk = if out.json || args.quiet { Talk::Silent } else { Talk::Stderr };
    if !args.quiet {
        out.talk("cfq demo: one small task through the whole system, on this machine alone");
    }
    machine::check_holder(&paths)?;
    models::require(out, &config, &paths).await?;
    let machine = Machine::start(&paths, &config, engines, bind, talk).await?;
    if !args.quiet {
        out.talk(&format!("everything runs after {:.1} s", start.elapsed().as_secs_f64()));
    }
    let interrupted = cfq_link::stop::signalled();
    let worked = tokio::select! {
        worked = work(&machine.client, out, &paths, &config, &args) => worked,
        () = interrupted => Err(exit::Coded {
            code: Code::Interrupted,
            message: "interrupted; the task is kept and goes on with the next `cfq demo`".to_owned(),
        }
        .into()),
    };
    machine.stop().await?;
    let detail = worked?;
    if !out.json {
        output::line(&epilogue(&detail, &paths, &config));
        output::line(&format!("took {:.0} s", start.elapsed().as_secs_f64()));
    } else {
        output::line(&serde_json::to_string(&detail)?);
    }
    Ok(exit::of_state(detail.summary.state))
}

async fn work(
    client: &Client,
    out: Output,
    paths: &Paths,
    config: &Config,
    args: &DemoArgs,
) -> anyhow::Result<TaskDetail> {
    let sample = sample_repository(&paths.data)?;
    let facts = repo::start(&sample, None).context("the sample repository is damaged")?;
    let bound = config.agents();
    // A small model that does not find its end is stopped soon: the run should take about a minute.
    let seeded = |binding: &AgentBinding| AgentBinding {
        seed: Some(args.seed),
        max_tokens: binding.max_tokens.or(Some(LONGEST_REPLY)),
        ..binding.clone()
    };
    let spec = TaskSpec {
        description: TASK.to_owned(),
        language: "python".to_owned(),
        context_files: Vec::new(),
        constraints: Vec::new(),
        examples: Vec::new(),
        repo: facts.root.to_string_lossy().into_owned(),
        base: Some(facts.base),
        agents: AgentBindings { alpha: seeded(&bound.alpha), beta: seeded(&bound.beta) },
        threshold: None,
        max_iterations: Some(3),
        timeout_minutes: Some(5.0),
        priority: cfq_proto::task::Priority::default(),
        deadline: None,
    };
    let reply = client.submit(&spec, None).await?;
    let task = TaskKey::Id(reply.id);
    if !args.quiet {
        out.talk(&format!("{} submitted: {TASK}", reply.number));
    }
    let view = if args.quiet { Output { json: false } } else { out };
    if args.quiet {
        rest(client, task).await?;
    } else {
        watch::follow(client, view, task, 0, true).await?;
    }
    let mut detail = client.task(task).await?;
    // What the loop was not content with is still worth looking at.
    if detail.delivered_branch.is_none() && detail.best_iteration.is_some() {
        let repo = PathBuf::from(&detail.spec.repo);
        let delivery = pull::bring(client, &detail, &repo, detail.best_iteration).await?;
        detail.delivered_branch = Some(delivery.branch);
        detail.delivered_commit = Some(delivery.commit);
    }
    Ok(detail)
}

async fn rest(client: &Client, task: TaskKey) -> anyhow::Result<()> {
    while !client.task(task).await?.summary.state.is_resting() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// A git repository with one commit; a new one each time, so that each demo is one user's first task.
fn sample_repository(data: &Path) -> anyhow::Result<PathBuf> {
    let dir = (1..)
        .map(|n| data.join(format!("sample-{n}")))
        .find(|dir| !dir.exists())
        .unwrap_or_else(|| data.join("sample"));
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let repo = git2::Repository::init(&dir)?;
    std::fs::write(dir.join("README.md"), "# sample\n\nA repository for `cfq demo` to work on.\n")?;
    let mut index = repo.index()?;
    index.add_path(Path::new("README.md"))?;
    index.write()?;
    let tree = repo.find_tree(index.write_tree()?)?;
    let author = git2::Signature::now("cfq demo", "demo@localhost")?;
    repo.commit(Some("HEAD"), &author, &author, "Start the sample", &tree, &[])?;
    Ok(dir)
}

fn epilogue(detail: &TaskDetail, paths: &Paths, config: &Config) -> String {
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
        lines.push(switching(&cfq_inference_node::gpu::inventory().devices));
    }
    lines.join("\n")
}

/// How to go on with a model worth its name: the largest coding model that the best card found could hold.
fn switching(devices: &[Device]) -> String {
    let card = devices.iter().filter(|d| d.kind == DeviceKind::Cuda).max_by_key(|d| d.memory_total);
    let (fits, why) = match card {
        None => ("a 7B coder model on a machine with a card", "no card was found here".to_owned()),
        Some(card) => {
            let gib = card.memory_total >> 30;
            let fits = match gib {
                0..=5 => "qwen2.5-coder:3b",
                6..=11 => "qwen2.5-coder:7b",
                12..=19 => "qwen2.5-coder:14b",
                _ => "qwen2.5-coder:32b",
            };
            (fits, format!("{} with {gib} GiB", card.name))
        }
    };
    format!(
        "To use a code model ({why}: {fits}), serve it with any OpenAI-compatible server and bind it in cfq.toml:\n  \
         [endpoints.box]\n  url = \"http://127.0.0.1:11434/v1\"\n  [agents.alpha]\n  model = \"openai:box/{}\"",
        if card.is_some() { fits } else { "qwen2.5-coder:7b" }
    )
}

fn free_address() -> anyhow::Result<std::net::SocketAddr> {
    std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).context("no free port on 127.0.0.1")
}
