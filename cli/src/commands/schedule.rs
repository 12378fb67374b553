//! `cfq schedule`

use cfq_proto::client::Client;
use cfq_proto::http::{ScheduleRequest, ScheduleView};
use cfq_proto::ids::TaskId;
use jiff::tz::TimeZone;

use crate::args::{ScheduleAddArgs, ScheduleCommand};
use crate::commands::submit;
use crate::exit::{self, Code};
use crate::local_time;
use crate::output::{self, Line, Output, Tone};

pub async fn run(client: &Client, out: Output, command: ScheduleCommand) -> anyhow::Result<Code> {
    match command {
        ScheduleCommand::Add(args) => {
            let added = client.add_schedule(&request(&args)?).await?;
            out.print(&added, |schedule| format!("schedule {} added, {}", schedule.name, next(schedule)))?;
        }
        ScheduleCommand::Ls => {
            let list = client.schedules().await?;
            out.print_lines(&list, |list| render(&list.schedules, output::terminal_columns()))?;
        }
        ScheduleCommand::Rm { name } => {
            let removed = client.remove_schedule(&name).await?;
            out.print(&removed, |schedule| format!("schedule {} removed; its tasks stay", schedule.name))?;
        }
        ScheduleCommand::Run { name } => {
            let reply = client.run_schedule(&name, &TaskId::fresh().to_string()).await?;
            out.print(&reply, submit::accepted)?;
            submit::print_warnings(out, &reply);
            out.status(&format!("follow it: cfq watch {}", reply.number));
        }
        ScheduleCommand::Pause { name } => {
            let paused = client.pause_schedule(&name, true).await?;
            out.print(&paused, |schedule| format!("schedule {} paused", schedule.name))?;
        }
        ScheduleCommand::Resume { name } => {
            let resumed = client.pause_schedule(&name, false).await?;
            out.print(&resumed, |schedule| format!("schedule {} continues, {}", schedule.name, next(schedule)))?;
        }
    }
    Ok(Code::Done)
}

fn request(args: &ScheduleAddArgs) -> anyhow::Result<ScheduleRequest> {
    let time_zone = match &args.zone {
        Some(name) => name.clone(),
        None => TimeZone::try_system().ok().and_then(|zone| zone.iana_name().map(str::to_owned)).ok_or_else(|| {
            exit::usage("the time zone of this machine is unknown: name one, as in --zone Europe/Berlin")
        })?,
    };
    local_time::zone_named(&time_zone).map_err(|error| exit::usage(format!("--zone: {error}")))?;
    let task = submit::scheduled_spec(&args.task)?;
    Ok(ScheduleRequest { name: args.name.clone(), cron: args.cron.clone(), time_zone, task })
}

fn next(schedule: &ScheduleView) -> String {
    match schedule.next_at {
        Some(at) => format!("next task at {}", local_time::describe(at)),
        None => "paused".to_owned(),
    }
}

fn render(schedules: &[ScheduleView], terminal: Option<usize>) -> Vec<Line> {
    if schedules.is_empty() {
        return output::plain_lines("no schedules; add one with `cfq schedule add NAME --cron \"0 6 * * *\" \"...\"`");
    }
    let rows: Vec<Vec<String>> = schedules.iter().map(row).collect();
    let columns = [("NAME", 0), ("CRON", 2), ("ZONE", 4), ("NEXT", 1), ("LAST TASK", 3), ("TITLE", 0)];
    let tone = |schedule: &ScheduleView| if schedule.next_at.is_some() { Tone::Plain } else { Tone::Faint };
    output::list_lines(&columns, &rows, schedules.iter().map(tone), terminal)
}

fn row(schedule: &ScheduleView) -> Vec<String> {
    vec![
        schedule.name.clone(),
        output::sanitize(&schedule.cron),
        schedule.time_zone.clone(),
        schedule.next_at.map_or_else(|| "paused".to_owned(), local_time::describe),
        schedule.last_task.map_or_else(|| "-".to_owned(), |task| task.to_string()),
        output::one_line(&schedule.title),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_fits_the_terminal() {
        let schedule: ScheduleView = serde_json::from_value(serde_json::json!({
            "name": "nightly", "cron": "30 2 * * 1-5", "time_zone": "Europe/Berlin", "title": "Fix the warnings of the linter",
            "next_at": null, "last_at": null, "last_task": 42,
            "task": { "description": "Fix the warnings of the linter", "repo": "/home/a/shop" },
        }))
        .unwrap();
        let text = output::at_widths(|terminal| render(std::slice::from_ref(&schedule), terminal));
        insta::assert_snapshot!("view_schedule_ls", text);
    }
}
