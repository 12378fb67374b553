//! `cfq show TASK`

use cfq_proto::client::Client;
use cfq_proto::http::{EscalationView, IterationView, TaskDetail};
use cfq_proto::job::JobState;
use cfq_proto::loop_step::{ActionKind, Decision};
use cfq_proto::review::Severity;
use cfq_proto::task::{ReviewDepth, TaskState};

use crate::args::ShowArgs;
use crate::commands::ls::{last_iteration, tone};
use crate::exit::Code;
use crate::local_time;
use crate::output::{self, Line, Output, Tone, View};

pub async fn run(client: &Client, out: Output, args: ShowArgs) -> anyhow::Result<Code> {
    let several = args.tasks.len() > 1;
    for (n, task) in args.tasks.into_iter().enumerate() {
        let detail = client.task(task).await?;
        let is_further = several && n > 0;
        out.print_lines(&detail, |detail| [output::blank_line(is_further), render(detail, args.verbose)].concat())?;
    }
    Ok(Code::Done)
}

pub(super) fn render(detail: &TaskDetail, is_verbose: bool) -> Vec<Line> {
    let mut view = View::default();
    let s = &detail.summary;
    view.push_toned(tone(s.state).or_heading(), format!("{}  {}  ({})", s.number, s.state, s.id));
    view.push(format!("  {}", output::sanitize(&s.title)));
    view.push(format!("  repository  {}", output::sanitize(&detail.spec.repo)));
    if let Some(base) = &detail.spec.base {
        view.push(format!("  base        {}", short(base)));
    }
    match &detail.spec.review {
        Some(review) => view.push(format!(
            "  review      {} of {}, working time {}",
            review.depth,
            output::sanitize(&review.head),
            output::duration(detail.active_ms)
        )),
        None => view.push(format!(
            "  loop        {}, iteration {} of at most {}, best score {}, threshold {:.0}, working time {}",
            s.loop_state,
            s.iteration,
            last_iteration(s),
            s.best_score.map_or_else(|| "-".to_owned(), |b| format!("{b:.0}")),
            s.threshold,
            output::duration(detail.active_ms),
        )),
    }
    view.push(format!("  priority    {}", s.priority));
    if !s.labels.is_empty() {
        view.push(format!("  labels      {}", output::list(&s.labels)));
    }
    // The question repeats the reason.
    let is_repeated = |escalation: &EscalationView| escalation.explanation == detail.reason;
    if !detail.reason.is_empty() && !detail.escalation.as_ref().is_some_and(is_repeated) {
        view.push(format!("  reason      {}", output::sanitize(&detail.reason)));
    }
    if let Some(now) = &detail.activity {
        view.push(format!("  now         {}, for {}", output::sanitize(&now.text), output::duration(now.elapsed_ms)));
    }
    if let Some(retried) = s.retry_of {
        view.push(format!("  retry of    {retried}"));
    }
    if let Some(run_at) = detail.spec.run_at {
        view.push(format!("  run at      {}", local_time::describe(run_at)));
    }
    for (label, tasks) in [("after", &detail.predecessors), ("blocks", &detail.dependents)] {
        if !tasks.is_empty() {
            let tasks: Vec<String> = tasks.iter().map(|task| format!("{} ({})", task.number, task.state)).collect();
            view.push(format!("  {label:11} {}", tasks.join(", ")));
        }
    }
    if s.is_bottleneck {
        view.push(format!(
            "  bottleneck  three or more tasks wait for it, so its priority was raised to {}",
            s.priority
        ));
    }
    if let Some(branch) = &detail.delivered_branch {
        view.push(format!(
            "  delivered   branch {branch} ({})",
            short(detail.delivered_commit.as_deref().unwrap_or("?"))
        ));
    }
    if let Some(pr) = detail.pr {
        view.push(format!("  pr          {pr}"));
    }
    if !detail.merge_checks.is_empty() {
        view.push(format!("  checks      of the merge: {}", output::check_runs(&detail.merge_checks)));
    }
    if let Some(curve) = score_curve(&detail.iterations) {
        view.push(format!("  scores      {curve}"));
    }
    for iteration in &detail.iterations {
        push_iteration_lines(iteration, detail.best_iteration, &mut view);
    }
    for reported in &detail.reported_defects {
        let defect = &reported.defect;
        view.push(format!(
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
            view.push(format!("               fix: {}", output::sanitize(fix)));
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
        let is_repeated = |failure: &str| job.state == JobState::Queued && job.placement.contains(failure);
        if let Some(failure) = job.failure.as_ref().map(ToString::to_string).filter(|text| !is_repeated(text)) {
            line += &format!(": {failure}");
        }
        if job.state == JobState::Dead {
            line += &format!("; `cfq dead show {}` shows its attempts", s.number);
        }
        view.push(line);
    }
    if let Some(escalation) = &detail.escalation {
        let mut escalation = escalation.clone();
        // The line `reason` has the rest.
        if let Some((first, _)) = escalation.explanation.split_once('\n') {
            escalation.explanation = format!("{first} ...");
        }
        push_escalation_lines(&escalation, s.number.to_string(), true, &mut view);
    }
    view.lines
}

/// The id of a commit in the length that is enough to name it.
pub fn short(commit: &str) -> &str {
    commit.get(..12).unwrap_or(commit)
}

/// The scores of the reviews with a bar for each, if there are several: `60 ▅  95 █`.
fn score_curve(iterations: &[IterationView]) -> Option<String> {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let scores: Vec<f64> = iterations.iter().filter_map(|it| Some(it.review.as_ref()?.quality_score)).collect();
    let bar = |score: f64| BARS[((score.clamp(0.0, 100.0) / 100.0 * 7.0).round() as usize).min(7)];
    let scored: Vec<String> = scores.iter().map(|score| format!("{score:.0} {}", bar(*score))).collect();
    (scored.len() > 1).then(|| scored.join("  "))
}

fn push_iteration_lines(it: &IterationView, best: Option<u32>, view: &mut View) {
    let mark = if best == Some(it.iteration) { " (best)" } else { "" };
    let paths: Vec<String> = it.paths.iter().map(|path| output::sanitize(path)).collect();
    view.push(format!("  iteration {}{mark}: {} by {}", it.iteration, paths.join(", "), it.model));
    push_findings(it, view);
    if let Some(decided) = &it.decided {
        let word = match &decided.decision {
            Decision::Converged => "converged".to_owned(),
            Decision::ReviewComplete => "reviewed".to_owned(),
            Decision::Revise => "revise".to_owned(),
            Decision::Escalate { reason, .. } => format!("escalate ({reason})"),
            Decision::Fail { .. } => "fail".to_owned(),
        };
        view.push(format!("    decided {word}: {}", decided.explanation));
    }
}

/// The review of a change, for a task that only reviews one.
pub fn review(detail: &TaskDetail) -> Vec<Line> {
    let mut view = View::default();
    match detail.iterations.last() {
        Some(iteration) => {
            let paths: Vec<String> = iteration.paths.iter().map(|path| output::sanitize(path)).collect();
            view.push(format!("{}  {}  {}", detail.summary.number, detail.summary.state, paths.join(", ")));
            if let Some(review) = &detail.spec.review {
                let base = detail.spec.base.as_deref().unwrap_or_default();
                view.push(format!("    change  {}..{}, {} review", short(base), short(&review.head), review.depth));
                if review.depth == ReviewDepth::Comprehensive && iteration.ran.is_empty() {
                    view.push("    checks  no check of the project ran");
                }
            }
            push_findings(iteration, &mut view);
        }
        None => view.push(format!("{}  {}", detail.summary.number, detail.summary.state)),
    }
    if detail.summary.state != TaskState::Reviewed && !detail.reason.is_empty() {
        view.push(format!("    {}", output::sanitize(&detail.reason)));
    }
    view.lines
}

/// What checks and critic found in an iteration.
fn push_findings(it: &IterationView, view: &mut View) {
    if it.unchecked {
        view.push("    not checked");
    }
    if !it.ran.is_empty() {
        view.push(format!("    checks  {}", output::check_runs(&it.ran)));
    }
    for finding in &it.findings {
        let text = finding.to_string();
        let lines: Vec<_> = text.lines().map(output::sanitize).collect();
        view.push(format!("    check   {}", lines.join("\n            ")));
    }
    if let Some(review) = &it.review {
        let by = it.reviewer_model.as_deref().unwrap_or("?");
        view.push(format!(
            "    review  {:.0}/100 by {by}, {}",
            review.quality_score,
            output::count(review.defects.len(), "defect")
        ));
        for defect in &review.defects {
            let tone = if defect.severity == Severity::Critical { Tone::Bad } else { Tone::Plain };
            view.push_toned(
                tone,
                format!(
                    "      {:8} {}: {}",
                    defect.severity.as_str(),
                    output::sanitize(&defect.location),
                    output::sanitize(&defect.description)
                ),
            );
            if let Some(fix) = defect.suggested_fix.as_ref().filter(|fix| !fix.trim().is_empty()) {
                view.push(format!("               fix: {}", output::sanitize(fix)));
            }
        }
        for suggestion in review.suggestions.iter().filter(|suggestion| !suggestion.trim().is_empty()) {
            view.push(format!("      suggested {}", output::sanitize(suggestion)));
        }
        for change in review.required_changes.iter().filter(|change| !change.trim().is_empty()) {
            view.push(format!("      required {}", output::sanitize(change)));
        }
    }
}

/// Adds the question of a task and the commands that answer it.
pub fn push_escalation_lines(escalation: &EscalationView, task: String, with_commands: bool, view: &mut View) {
    view.push_toned(Tone::NeedsUser, format!("  needs a human: {}", escalation.explanation));
    view.push(format!("  {}", escalation.recommendation));
    for action in escalation.available_actions.iter().filter(|_| with_commands) {
        let with = match action {
            ActionKind::SwitchLlm => " --model MODEL",
            ActionKind::RetryWithConstraints => " --constraint \"...\"",
            ActionKind::AcceptBestEffort | ActionKind::Abort | ActionKind::Fail => "",
        };
        view.push(format!("    cfq resolve {task} --action {}{with}", action.as_str()));
    }
}
