//! `cfq explain TASK|JOB`

use cfq_proto::client::Client;
use cfq_proto::http::{
    AttemptView, CostTerms, Explanation, JobExplanation, JobPlan, NodePlan, TaskExplanation, TaskWait,
};
use cfq_proto::ids::TaskKey;
use cfq_proto::job::JobState;

use crate::exit::Code;
use crate::output::{self, Line, Output, Tone, View};

pub async fn run(client: &Client, out: Output, key: TaskKey) -> anyhow::Result<Code> {
    let explanation = client.explain(key).await?;
    out.print_lines(&explanation, render)?;
    if !explanation.warning.is_empty() {
        out.status(&explanation.warning);
    }
    Ok(Code::Done)
}

pub(super) fn render(explanation: &Explanation) -> Vec<Line> {
    let mut view = View::default();
    task_lines(&explanation.task, &mut view);
    for job in &explanation.jobs {
        job_lines(job, &mut view);
    }
    view.lines
}

fn task_lines(task: &TaskExplanation, view: &mut View) {
    view.push_toned(Tone::Heading, format!("{}  {}  {}", task.number, task.state, task.priority));
    match &task.waits_for {
        Some(TaskWait::RunnerSlot { before, slots, free, runners, running_tasks_limit }) => {
            view.push(match (before, running_tasks_limit) {
                (_, Some(limit)) => {
                    format!(
                        "  waits until another task of its token gives its slot back; {}, which is the token's limit",
                        running(*limit)
                    )
                }
                (0, None) => "  waits for a runner slot; it gets the next one".to_owned(),
                (before, None) => format!("  waits for a runner slot; {} before it", are(*before, "ready task")),
            });
            view.push(format!("  {free} of {slots} slots are free on {}", count(*runners, "live runner")));
        }
        Some(TaskWait::Job { job }) => view.push(format!("  waits until job {job} is placed; it holds no runner slot")),
        Some(TaskWait::Human { .. }) => {
            view.push(format!("  waits for a human: `cfq show {}` lists the possible answers", task.number));
        }
        Some(TaskWait::Predecessor) => view.push("  waits for other tasks"),
        Some(TaskWait::Time) => view.push("  waits for its time"),
        Some(TaskWait::Resume) => view.push(format!("  is paused: `cfq resume {}` continues it", task.number)),
        None => {}
    }
    if let Some(by) = task.preempted_by {
        view.push(format!("  is preempted by {by} after its current step"));
    }
    if !task.reason.is_empty() {
        view.push(format!("  reason    {}", task.reason));
    }
}

fn job_lines(job: &JobExplanation, view: &mut View) {
    let node = job.node.as_ref().map(|node| format!(" on {node}")).unwrap_or_default();
    view.push_toned(
        Tone::Heading,
        format!("job {}  {}  {}  {}, attempt {}{node}", job.id, job.role, job.model, job.state, job.attempt),
    );
    match job.state {
        JobState::Queued if job.placement.is_empty() => view.push("  waits for free capacity on a node"),
        JobState::Queued => view.push(format!("  {}", job.placement)),
        JobState::Placed
        | JobState::Running
        | JobState::Done
        | JobState::Failed
        | JobState::Dead
        | JobState::Cancelled => view.push(format!("  placed    {}", job.placement)),
    }
    if let Some(failure) = &job.failure {
        view.push(format!("  failure   {failure}"));
    }
    if let Some(plan) = &job.plan {
        plan_lines(job, plan, view);
    }
    for attempt in &job.attempts {
        view.push(attempt_line(attempt));
    }
}

fn plan_lines(job: &JobExplanation, plan: &JobPlan, view: &mut View) {
    if let Some(position) = plan.position {
        let before = are(position.before, "job");
        view.push(format!("  position  {before} before it, of {} queued for the model", position.queued));
    }
    view.push(match &plan.estimate {
        Some(estimate) => {
            let end = output::duration(estimate.end_in_ms);
            let start = match (job.state, estimate.start_in_ms) {
                (JobState::Queued, 0) => format!("starts now on {}, ", estimate.node),
                (JobState::Queued, start) => {
                    format!("starts in about {} on {}, ", output::duration(start), estimate.node)
                }
                (_, _) => String::new(),
            };
            let doubt = if estimate.is_certain { "" } else { "; uncertain: a part of it is not known" };
            format!("  estimate  {start}ends in about {end} if it generates its maximum number of tokens{doubt}")
        }
        None => "  estimate  none: no node can run it now".to_owned(),
    });
    if let Some(reservation) = &plan.reservation {
        let whose = if reservation.job == job.id { "it".to_owned() } else { format!("job {}", reservation.job) };
        let (age, start) = (output::duration(reservation.age_ms), output::duration(reservation.start_in_ms));
        view.push(format!(
            "  reserved  {} for {whose}, since {age}, until room is free in about {start}",
            reservation.node
        ));
    }
    for node in &plan.nodes {
        view.push(node_line(node));
    }
    if plan.omitted_nodes > 0 {
        view.push(format!("  node      {} not listed", are(plan.omitted_nodes, "other node")));
    }
}

fn node_line(node: &NodePlan) -> String {
    let mut line = format!("  node      {}: {}", node.node, node.verdict);
    if let Some(start) = node.start_in_ms.filter(|start| *start > 0) {
        line += &format!(", room in about {}", output::duration(start));
    }
    if let Some(cost) = &node.cost {
        line += &format!("; {}", cost_text(cost));
    }
    line
}

/// The terms of the cost as a sum; terms that are zero are left out, except those of the job itself.
fn cost_text(cost: &CostTerms) -> String {
    let cached = if cost.cached_tokens > 0 { format!(" ({} cached)", cost.cached_tokens) } else { String::new() };
    let computed = cost.prompt_tokens.saturating_sub(cost.cached_tokens);
    let mut terms = vec![
        format!("prefill {computed} tokens{cached} {}", output::duration(cost.prefill_ms)),
        format!("decode {}", output::duration(cost.decode_ms)),
    ];
    let others = [
        ("earlier prefills", cost.earlier_prefills_ms),
        ("evictions", cost.eviction_ms),
        ("load of the model", cost.load_ms),
    ];
    terms.extend(others.iter().filter(|(_, ms)| *ms > 0).map(|(name, ms)| format!("{name} {}", output::duration(*ms))));
    format!(
        "cost {} = {}; needs {} of {} free tokens, {} free slots, {}",
        output::duration(cost.total_ms()),
        terms.join(" + "),
        cost.reserved_tokens,
        cost.free_tokens,
        cost.free_slots,
        count(cost.other_sequences.into(), "other sequence"),
    )
}

fn attempt_line(attempt: &AttemptView) -> String {
    let end = match (&attempt.outcome, attempt.ended_at, attempt.accepted_at) {
        (Some(outcome), Some(end), _) => {
            let from = attempt.accepted_at.unwrap_or(attempt.placed_at);
            format!("{outcome} after {}", output::duration(((end - from).max(0.0) * 1000.0) as u64))
        }
        (Some(outcome), None, _) => outcome.clone(),
        (None, _, Some(_)) => "running".to_owned(),
        (None, _, None) => "not accepted yet".to_owned(),
    };
    let detail = if attempt.detail.is_empty() { String::new() } else { format!(": {}", attempt.detail) };
    format!("  attempt   {} on {}, {end}{detail}", attempt.attempt, attempt.node)
}

fn count(n: u64, what: &str) -> String {
    output::count(usize::try_from(n).unwrap_or(usize::MAX), what)
}

/// Number of running tasks with its verb: `1 task runs`.
fn running(tasks: u32) -> String {
    format!("{} {}", count(u64::from(tasks), "task"), if tasks == 1 { "runs" } else { "run" })
}

/// A number with its noun and verb: `1 job is`, `2 jobs are`.
fn are(n: u64, what: &str) -> String {
    format!("{} {}", count(n, what), if n == 1 { "is" } else { "are" })
}
