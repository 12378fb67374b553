//! `cfq show TASK`

use cfq_proto::client::Client;
use cfq_proto::http::{EscalationView, IterationView, TaskDetail};
use cfq_proto::job::JobState;
use cfq_proto::loop_step::{ActionKind, Decision};
use cfq_proto::task::{ReviewDepth, TaskState};

use crate::args::ShowArgs;
use crate::commands::ls::last_iteration;
use crate::exit::Code;
use crate::local_time;
use crate::output::{self, Output};

pub async fn run(client: &Client, out: Output, args: ShowArgs) -> anyhow::Result<Code> {
    let several = args.tasks.len() > 1;
    for (n, task) in args.tasks.into_iter().enumerate() {
        let detail = client.task(task).await?;
        let separator = if several && n > 0 { "\n" } else { "" };
        out.print(&detail, |detail| separator.to_owned() + &render(detail, args.verbose))?;
    }
    Ok(Code::Done)
}

pub fn render(detail: &TaskDetail, is_verbose: bool) -> String {
    let mut text = String::new();
    // A line break in a text of a model or user must not begin a line that looks like cfq's own.
    let mut push = |line: String| {
        text.push_str(&output::indent_rest(&line));
        text.push('\n');
    };
    let s = &detail.summary;
    push(format!("{}  {}  ({})", s.number, s.state, s.id));
    push(format!("  {}", output::sanitize(&s.title)));
    push(format!("  repository  {}", output::sanitize(&detail.spec.repo)));
    if let Some(base) = &detail.spec.base {
        push(format!("  base        {base}"));
    }
    match &detail.spec.review {
        Some(review) => push(format!(
            "  review      {} of {}, working time {}",
            review.depth,
            output::sanitize(&review.head),
            output::duration(detail.active_ms)
        )),
        None => push(format!(
            "  loop        {}, iteration {} of at most {}, best score {}, threshold {:.0}, working time {}",
            s.loop_state,
            s.iteration,
            last_iteration(s),
            s.best_score.map_or_else(|| "-".to_owned(), |b| format!("{b:.0}")),
            s.threshold,
            output::duration(detail.active_ms),
        )),
    }
    push(format!("  priority    {}", s.priority));
    if !s.labels.is_empty() {
        push(format!("  labels      {}", output::list(&s.labels)));
    }
    if !detail.reason.is_empty() {
        push(format!("  reason      {}", output::sanitize(&detail.reason)));
    }
    if let Some(now) = &detail.activity {
        push(format!("  now         {}, for {}", output::sanitize(&now.text), output::duration(now.elapsed_ms)));
    }
    if let Some(retried) = s.retry_of {
        push(format!("  retry of    {retried}"));
    }
    if let Some(run_at) = detail.spec.run_at {
        push(format!("  run at      {}", local_time::describe(run_at)));
    }
    for (label, tasks) in [("after", &detail.predecessors), ("blocks", &detail.dependents)] {
        if !tasks.is_empty() {
            let tasks: Vec<String> = tasks.iter().map(|task| format!("{} ({})", task.number, task.state)).collect();
            push(format!("  {label:11} {}", tasks.join(", ")));
        }
    }
    if s.is_bottleneck {
        push(format!("  bottleneck  three or more tasks wait for it, so its priority was raised to {}", s.priority));
    }
    if let Some(branch) = &detail.delivered_branch {
        push(format!("  delivered   branch {branch} ({})", detail.delivered_commit.as_deref().unwrap_or("?")));
    }
    if let Some(pr) = detail.pr {
        push(format!("  pr          {pr}"));
    }
    if !detail.merge_checks.is_empty() {
        push(format!("  merge checks {}", output::check_runs(&detail.merge_checks)));
    }
    if let Some(curve) = score_curve(&detail.iterations) {
        push(format!("  scores      {curve}"));
    }
    for iteration in &detail.iterations {
        push_iteration_lines(iteration, detail.best_iteration, &mut push);
    }
    for reported in &detail.reported_defects {
        let defect = &reported.defect;
        push(format!(
            "  defect reported: {} {}{}",
            defect.severity.as_str(),
            if defect.location.is_empty() {
                String::new()
            } else {
                format!("{}: ", output::sanitize(&defect.location))
            },
            output::sanitize(&defect.description)
        ));
        if let Some(fix) = &defect.suggested_fix {
            push(format!("               fix: {}", output::sanitize(fix)));
        }
    }
    for job in &detail.jobs {
        let mut line = format!("  {:5} {} {} attempt {}", job.role, job.model, job.state, job.attempt);
        if let Some(node) = &job.node {
            line += &format!(" on {node}");
        }
        if let Some(usage) = job.usage.as_ref().filter(|_| !is_verbose) {
            line += &format!(" in {}", output::duration(usage.total_ms));
        }
        if let Some(usage) = job.usage.as_ref().filter(|_| is_verbose) {
            line += &format!(
                ", {} prompt tokens and {} output tokens in {}, first token after {}",
                usage.prompt_tokens,
                usage.output_tokens,
                output::duration(usage.total_ms),
                output::duration(usage.first_token_ms)
            );
        }
        if (job.state == JobState::Queued || is_verbose) && !job.placement.is_empty() {
            line += &format!(", {}", output::sanitize(&job.placement));
        }
        let unaccepted = if job.unaccepted > 0 { format!("{} not accepted, ", job.unaccepted) } else { String::new() };
        if job.losses > 0 || job.unaccepted > 0 || job.failures > 0 {
            line += &format!(", attempts: {} lost, {unaccepted}{} failed", job.losses, job.failures);
        }
        if let Some(failure) = &job.failure {
            line += &format!(": {failure}");
        }
        if job.state == JobState::Dead {
            line += &format!("; `cfq dead show {}` shows its attempts", s.number);
        }
        push(line);
    }
    if let Some(escalation) = &detail.escalation {
        let mut escalation = escalation.clone();
        // The line `reason` has the rest.
        if let Some((first, _)) = escalation.explanation.split_once('\n') {
            escalation.explanation = format!("{first} ...");
        }
        push_escalation_lines(&escalation, s.number.to_string(), true, &mut push);
    }
    text.trim_end().to_owned()
}

/// The scores of the reviews with a bar for each, if there are several: `60 ▅  95 █`.
fn score_curve(iterations: &[IterationView]) -> Option<String> {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let scores: Vec<f64> = iterations.iter().filter_map(|it| Some(it.review.as_ref()?.quality_score)).collect();
    let bar = |score: f64| BARS[((score.clamp(0.0, 100.0) / 100.0 * 7.0).round() as usize).min(7)];
    let scored: Vec<String> = scores.iter().map(|score| format!("{score:.0} {}", bar(*score))).collect();
    (scored.len() > 1).then(|| scored.join("  "))
}

fn push_iteration_lines(it: &IterationView, best: Option<u32>, push: &mut impl FnMut(String)) {
    let mark = if best == Some(it.iteration) { " (best)" } else { "" };
    let paths: Vec<String> = it.paths.iter().map(|path| output::sanitize(path)).collect();
    push(format!("  iteration {}{mark}: {} by {}", it.iteration, paths.join(", "), it.model));
    push_findings(it, push);
    if let Some(decided) = &it.decided {
        let word = match &decided.decision {
            Decision::Converged => "converged".to_owned(),
            Decision::ReviewComplete => "reviewed".to_owned(),
            Decision::Revise => "revise".to_owned(),
            Decision::Escalate { reason, .. } => format!("escalate ({reason})"),
            Decision::Fail { .. } => "fail".to_owned(),
        };
        push(format!("    decided {word}: {}", decided.explanation));
    }
}

/// The review of a change, for a task that only reviews one.
pub fn review(detail: &TaskDetail) -> String {
    let mut text = String::new();
    let mut push = |line: String| {
        text.push_str(&output::indent_rest(&line));
        text.push('\n');
    };
    match detail.iterations.last() {
        Some(iteration) => {
            let paths: Vec<String> = iteration.paths.iter().map(|path| output::sanitize(path)).collect();
            push(format!("{}  {}  {}", detail.summary.number, detail.summary.state, paths.join(", ")));
            if let Some(review) = &detail.spec.review {
                let base = detail.spec.base.as_deref().unwrap_or_default();
                let short = |id: &str| id.get(..12).unwrap_or(id).to_owned();
                push(format!("    change  {}..{}, {} review", short(base), short(&review.head), review.depth));
                if review.depth == ReviewDepth::Comprehensive && iteration.ran.is_empty() {
                    push("    checks  no check of the project ran".to_owned());
                }
            }
            push_findings(iteration, &mut push);
        }
        None => push(format!("{}  {}", detail.summary.number, detail.summary.state)),
    }
    if detail.summary.state != TaskState::Reviewed && !detail.reason.is_empty() {
        push(format!("    {}", output::sanitize(&detail.reason)));
    }
    text.trim_end().to_owned()
}

/// What checks and critic found in an iteration.
fn push_findings(it: &IterationView, push: &mut impl FnMut(String)) {
    if it.unchecked {
        push("    not checked".to_owned());
    }
    if !it.ran.is_empty() {
        push(format!("    checks  {}", output::check_runs(&it.ran)));
    }
    for finding in &it.findings {
        let text = finding.to_string();
        let lines: Vec<_> = text.lines().map(output::sanitize).collect();
        push(format!("    check   {}", lines.join("\n            ")));
    }
    if let Some(review) = &it.review {
        let by = it.reviewer_model.as_deref().unwrap_or("?");
        push(format!(
            "    review  {:.0}/100 by {by}, {}",
            review.quality_score,
            output::count(review.defects.len(), "defect")
        ));
        for defect in &review.defects {
            push(format!(
                "      {:8} {}: {}",
                defect.severity.as_str(),
                output::sanitize(&defect.location),
                output::sanitize(&defect.description)
            ));
            if let Some(fix) = defect.suggested_fix.as_ref().filter(|fix| !fix.trim().is_empty()) {
                push(format!("               fix: {}", output::sanitize(fix)));
            }
        }
        for suggestion in review.suggestions.iter().filter(|suggestion| !suggestion.trim().is_empty()) {
            push(format!("      suggested {}", output::sanitize(suggestion)));
        }
        for change in review.required_changes.iter().filter(|change| !change.trim().is_empty()) {
            push(format!("      required {}", output::sanitize(change)));
        }
    }
}

/// Adds the question of a task and the commands that answer it.
pub fn push_escalation_lines(
    escalation: &EscalationView,
    task: String,
    with_commands: bool,
    push: &mut impl FnMut(String),
) {
    push(format!("  needs a human: {}", escalation.explanation));
    push(format!("  {}", escalation.recommendation));
    for action in escalation.available_actions.iter().filter(|_| with_commands) {
        let with = match action {
            ActionKind::SwitchLlm => " --model MODEL",
            ActionKind::RetryWithConstraints => " --constraint \"...\"",
            ActionKind::AcceptBestEffort | ActionKind::Abort | ActionKind::Fail => "",
        };
        push(format!("    cfq resolve {task} --action {}{with}", action.as_str()));
    }
}
