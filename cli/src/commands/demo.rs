//! `cfq demo`: the main job once, for real, on a sample repository of its own; then everything stops and the data stays.

mod epilogue;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_deploy::{Paths, Talk};
use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskKey;
use cfq_proto::task::{AgentBinding, AgentBindings, TaskSpec};

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
        output::line(&output::plain(&epilogue::words(&detail, &paths, &config)));
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
    let (number, task) = match unfinished(client, args).await? {
        Some(found) => {
            if !args.quiet {
                out.talk(&format!("{} of a demo that was interrupted goes on: {TASK}", found.summary.number));
            }
            (found.summary.number, found.summary.id)
        }
        None => {
            let reply = client.submit(&spec(paths, config, args)?, None).await?;
            if !args.quiet {
                out.talk(&format!("{} submitted: {TASK}", reply.number));
            }
            (reply.number, reply.id)
        }
    };
    if args.quiet {
        rest(client, TaskKey::Id(task)).await?;
    } else {
        watch::follow(client, out, TaskKey::Number(number), 0, true).await?;
    }
    let mut detail = client.task(TaskKey::Id(task)).await?;
    // What the loop was not content with is still worth looking at.
    if detail.delivered_branch.is_none() && detail.best_iteration.is_some() {
        let repo = PathBuf::from(&detail.spec.repo);
        let delivery = pull::bring(client, &detail, &repo, detail.best_iteration).await?;
        detail.delivered_branch = Some(delivery.branch);
        detail.delivered_commit = Some(delivery.commit);
    }
    Ok(detail)
}

/// The task of an earlier demo, if that was broken off and asked for the same: it goes on anyhow, and two at once would
/// only hold each other up.
async fn unfinished(client: &Client, args: &DemoArgs) -> anyhow::Result<Option<TaskDetail>> {
    for summary in client.tasks(None, 20).await?.tasks.iter().filter(|task| !task.state.is_resting()) {
        let detail = client.task(TaskKey::Id(summary.id)).await?;
        let alpha = &detail.spec.agents.alpha;
        let same_model = args.model.is_none() || alpha.model == args.model;
        if detail.spec.description == TASK && alpha.seed == Some(args.seed) && same_model {
            return Ok(Some(detail));
        }
    }
    Ok(None)
}

fn spec(paths: &Paths, config: &Config, args: &DemoArgs) -> anyhow::Result<TaskSpec> {
    let sample = sample_repository(&paths.data)?;
    let facts = repo::start(&sample, None).context("the sample repository is damaged")?;
    let bound = config.agents();
    // A small model that does not find its end is stopped soon: the run should take about a minute.
    let seeded = |binding: &AgentBinding| AgentBinding {
        seed: Some(args.seed),
        max_tokens: binding.max_tokens.or(Some(LONGEST_REPLY)),
        ..binding.clone()
    };
    Ok(TaskSpec {
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
    })
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

fn free_address() -> anyhow::Result<std::net::SocketAddr> {
    std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).context("no free port on 127.0.0.1")
}
