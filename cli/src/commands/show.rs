//! `cfq show TASK`

use cfq_proto::client::Client;
use cfq_proto::http::{EscalationView, IterationView, TaskDetail};
use cfq_proto::ids::TaskKey;
use cfq_proto::job::JobState;
use cfq_proto::looping::{ActionKind, Decision};

use crate::exit::Code;
use crate::output::{self, Output};

pub async fn run(client: &Client, out: Output, task: TaskKey) -> anyhow::Result<Code> {
    let detail = client.task(task).await?;
    out.data(&detail, render)?;
    Ok(Code::Done)
}

pub fn render(detail: &TaskDetail) -> String {
    let mut text = String::new();
    let mut say = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    let s = &detail.summary;
    say(format!("{}  {}  ({})", s.number, s.state, s.id));
    say(format!("  {}", output::plain(&s.title)));
    say(format!("  repository  {}", detail.spec.repo));
    if let Some(base) = &detail.spec.base {
        say(format!("  base        {base}"));
    }
    say(format!(
        "  loop        {}, iteration {} of at most {}, best {} of {:.0}, {} of work",
        s.loop_state,
        s.iteration,
        s.max_iterations,
        s.best_score.map_or_else(|| "-".to_owned(), |b| format!("{b:.0}")),
        s.threshold,
        output::duration(detail.active_ms),
    ));
    if !detail.reason.is_empty() {
        say(format!("  because     {}", output::plain(&detail.reason)));
    }
    if let Some(branch) = &detail.delivered_branch {
        say(format!("  delivered   branch {branch} ({})", detail.delivered_commit.as_deref().unwrap_or("?")));
    }
    if let Some(pr) = detail.pr {
        say(format!("  pull request {pr}"));
    }
    for iteration in &detail.iterations {
        iteration_lines(iteration, detail.best_iteration, &mut say);
    }
    for job in &detail.jobs {
        let mut line = format!("  {:5} {} {} attempt {}", job.role, job.model, job.state, job.attempt);
        if let Some(node) = &job.node {
            line += &format!(" on {node}");
        }
        if let Some(usage) = &job.usage {
            line += &format!(
                ", {} + {} tokens in {}, first after {}",
                usage.prompt_tokens,
                usage.output_tokens,
                output::duration(usage.total_ms),
                output::duration(usage.first_token_ms)
            );
        }
        if job.state == JobState::Queued && !job.placement.is_empty() {
            line += &format!(", {}", output::plain(&job.placement));
        }
        if job.losses > 0 || job.failures > 0 {
            line += &format!(", {} lost, {} failed", job.losses, job.failures);
        }
        if let Some(failure) = &job.failure {
            line += &format!(": {failure}");
        }
        say(line);
    }
    if let Some(escalation) = &detail.escalation {
        escalation_lines(escalation, s.number.to_string(), &mut say);
    }
    text.trim_end().to_owned()
}

fn iteration_lines(it: &IterationView, best: Option<u32>, say: &mut impl FnMut(String)) {
    let mark = if best == Some(it.iteration) { " (best)" } else { "" };
    say(format!("  iteration {}{mark}: {} by {}", it.iteration, it.paths.join(", "), it.model));
    for finding in &it.findings {
        say(format!("    check   {}:{} {}", finding.path, finding.line, output::plain(&finding.message)));
    }
    if let Some(review) = &it.review {
        let by = it.reviewer_model.as_deref().unwrap_or("?");
        say(format!(
            "    review  {:.0}/100 by {by}, {}",
            review.quality_score,
            output::count(review.defects.len(), "defect")
        ));
        for defect in &review.defects {
            say(format!(
                "      {:8} {}: {}",
                defect.severity.as_str(),
                output::plain(&defect.location),
                output::plain(&defect.description)
            ));
        }
        for change in review.required_changes.iter().filter(|change| !change.trim().is_empty()) {
            say(format!("      required {}", output::plain(change)));
        }
    }
    if let Some(decided) = &it.decided {
        let word = match &decided.decision {
            Decision::Converged => "converged".to_owned(),
            Decision::Revise => "revise".to_owned(),
            Decision::Escalate { reason, .. } => format!("escalate ({reason})"),
            Decision::Fail { reason } => format!("fail ({reason})"),
        };
        say(format!("    decided {word}: {}", decided.why));
    }
}

fn escalation_lines(escalation: &EscalationView, task: String, say: &mut impl FnMut(String)) {
    say(format!("  needs you: {}", escalation.why));
    say(format!("  {}", escalation.recommendation));
    for action in &escalation.available_actions {
        let with = match action {
            ActionKind::SwitchLlm => " --model MODEL",
            ActionKind::RetryWithConstraints => " --constraint \"...\"",
            ActionKind::AcceptBestEffort | ActionKind::Abort | ActionKind::Fail => "",
        };
        say(format!("    cfq resolve {task} --action {}{with}", action.as_str()));
    }
}
