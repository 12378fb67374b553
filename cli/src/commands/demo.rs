//! `cfq demo`: one real task on a new sample repository. Afterwards everything is stopped, and the data is kept.

mod epilogue;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_deploy::{Paths, StatusOutput};
use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskKey;
use cfq_proto::task::{AgentBinding, AgentBindings, TaskSpec};

use crate::args::DemoArgs;
use crate::commands::{models, pull, watch};
use crate::config::{self, Config};
use crate::exit::{self, Code};
use crate::local_server::{self, ApiAddress, LocalServer};
use crate::output::{self, Output};
use crate::repo;

/// Token limit of a reply: the example function needs about 30, its review about 200.
const MAX_REPLY_TOKENS: u32 = 320;

const TASK: &str = "Write a Python function is_even(n) that returns True if n is even and False otherwise.";

pub async fn run(out: Output, paths: &Paths, mut config: Config, args: DemoArgs) -> anyhow::Result<Code> {
    let start = Instant::now();
    // A separate data folder, so that a running cfq and its tasks are not affected.
    let paths = Paths { data: paths.data.join("demo"), ..paths.clone() };
    if let Some(model) = &args.model {
        config.agents.alpha.model = Some(model.clone());
        config.agents.beta.model = Some(model.clone());
    }
    let address = ApiAddress::new(free_address()?, false, &config)?;
    let services = config::service_options(&config.services, &args.services)?;
    let status = if out.json || args.quiet { StatusOutput::Silent } else { StatusOutput::Stderr };
    if !args.quiet {
        out.status("cfq demo: running one small task through the whole system on this machine");
    }
    local_server::check_data_folder_is_free(&paths)?;
    models::fetch_required(out, &config, &paths).await?;
    let machine = LocalServer::start(&paths, &config, services, address, status).await?;
    if !args.quiet {
        out.status(&format!("ready after {:.1} s", start.elapsed().as_secs_f64()));
    }
    let interrupted = cfq_link::stop::signalled();
    let finished = tokio::select! {
        finished = run_task(&machine.client, out, &paths, &config, &args) => finished,
        () = interrupted => Err(exit::CodedError {
            code: Code::Interrupted,
            message: "interrupted; the next `cfq demo` resumes the task".to_owned(),
        }
        .into()),
    };
    machine.stop().await?;
    let detail = finished?;
    if !out.json {
        output::print_line(&output::sanitize(&epilogue::render(&detail, &paths, &config)));
        output::print_line(&format!("finished in {:.0} s", start.elapsed().as_secs_f64()));
    } else {
        output::print_line(&output::json(&detail)?);
    }
    Ok(exit::of_state(detail.summary.state))
}

/// Runs the demo's task to completion, or follows the unfinished task of an interrupted demo.
async fn run_task(
    client: &Client,
    out: Output,
    paths: &Paths,
    config: &Config,
    args: &DemoArgs,
) -> anyhow::Result<TaskDetail> {
    let (number, task) = match find_unfinished(client, args).await? {
        Some(found) => {
            if !args.quiet {
                out.status(&format!("resuming {} of an interrupted demo: {TASK}", found.summary.number));
            }
            (found.summary.number, found.summary.id)
        }
        None => {
            let reply = client.submit(&spec(paths, config, args)?, None).await?;
            if !args.quiet {
                out.status(&format!("{} submitted: {TASK}", reply.number));
            }
            (reply.number, reply.id)
        }
    };
    if args.quiet {
        wait_until_settled(client, TaskKey::Id(task)).await?;
    } else {
        watch::follow(client, out, TaskKey::Number(number), 0, watch::WatchOptions::default()).await?;
    }
    let mut detail = client.task(TaskKey::Id(task)).await?;
    // A result that did not converge may still be useful: deliver its branch too.
    if detail.delivered_branch.is_none() && detail.best_iteration.is_some() {
        let repo = PathBuf::from(&detail.spec.repo);
        let delivered = pull::create_branch(client, &detail, &repo, detail.best_iteration).await?;
        detail.delivered_branch = Some(delivered.branch);
        detail.delivered_commit = Some(delivered.commit);
    }
    Ok(detail)
}

/// Returns the unfinished task of an interrupted demo with the seed of `args`, and with its model if `args` names one.
/// That task continues in any case, and a second task would only compete with it.
async fn find_unfinished(client: &Client, args: &DemoArgs) -> anyhow::Result<Option<TaskDetail>> {
    for summary in client.tasks(None, 20).await?.tasks.iter().filter(|task| !task.state.is_settled()) {
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
    let sample = create_sample_repository(&paths.data)?;
    let start = repo::resolve(&sample, None, &[]).context("the sample repository is damaged")?;
    let bound = config.agents();
    // Limits a small model that does not stop by itself: the demo should take about a minute.
    let seeded = |binding: &AgentBinding| AgentBinding {
        seed: Some(args.seed),
        max_tokens: binding.max_tokens.or(Some(MAX_REPLY_TOKENS)),
        ..binding.clone()
    };
    Ok(TaskSpec {
        language: "python".to_owned(),
        base: Some(start.base),
        agents: AgentBindings { alpha: seeded(&bound.alpha), beta: seeded(&bound.beta) },
        max_iterations: Some(3),
        timeout_minutes: Some(5.0),
        ..TaskSpec::new(TASK, start.root.to_string_lossy())
    })
}

async fn wait_until_settled(client: &Client, task: TaskKey) -> anyhow::Result<()> {
    while !client.task(task).await?.summary.state.is_settled() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// Creates a git repository with one commit. Each demo gets a new repository, so that its task is the first one there.
fn create_sample_repository(data: &Path) -> anyhow::Result<PathBuf> {
    let dir = (1..)
        .map(|n| data.join(format!("sample-{n}")))
        .find(|dir| !dir.exists())
        .unwrap_or_else(|| data.join("sample"));
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
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
