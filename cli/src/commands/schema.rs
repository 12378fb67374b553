//! `cfq schema NAME`: the JSON schema of what a command prints with `--json`.

use cfq_proto::event::Event;
use cfq_proto::http::{
    AgentList, BatchReply, BulkResult, ClusterStatus, DeadLetterDetail, DeadLetterList, EscalationView, Explanation,
    GcReply, JobList, JoinTokenList, NodeList, PrList, PrView, ScheduleList, StateReply, SubmitReply, TaskDetail,
    TaskList, TaskSummary,
};
use cfq_proto::loop_step::Artifact;
use cfq_proto::task::TaskSpec;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema};
use serde::Serialize;

use crate::args::SchemaArgs;
use crate::commands::machines::Machines;
use crate::exit::{self, Code, ErrorOutput};
use crate::json_times;
use crate::output::{Line, Output, Tone};
use crate::plain_words;

/// Name of an output, what prints it, and its schema.
type NamedSchema = (&'static str, &'static str, fn() -> Schema);

const OUTPUTS: [NamedSchema; 23] = [
    ("agents", "cfq agents ls", of::<AgentList>),
    ("batch", "cfq submit -f FILE, with several tasks", of::<BatchReply>),
    ("cancel", "a line of cfq cancel, pause, resume, retry and prioritize", of::<BulkResult>),
    ("dead", "cfq dead ls", of::<DeadLetterList>),
    ("dead-letter", "cfq dead show", of::<DeadLetterDetail>),
    ("diff", "cfq diff", of::<Artifact>),
    ("error", "an error, on stderr", of::<ErrorOutput>),
    ("event", "a line of cfq watch and cfq logs", of::<Event>),
    ("explain", "cfq explain", of::<Explanation>),
    ("gc", "cfq gc", of::<GcReply>),
    ("jobs", "cfq jobs", of::<JobList>),
    ("ls", "cfq ls", of::<TaskList>),
    ("machines", "cfq machines ls", of::<Machines>),
    ("nodes", "cfq nodes", of::<NodeList>),
    ("pr", "cfq pr show", of::<PrView>),
    ("prs", "cfq pr ls", of::<PrList>),
    ("question", "cfq resolve without --action", of::<EscalationView>),
    ("schedules", "cfq schedule ls", of::<ScheduleList>),
    ("show", "cfq show, and cfq review", of::<TaskDetail>),
    ("state", "cfq resolve, and cfq acknowledge", of::<StateReply>),
    ("status", "cfq status", of::<ClusterStatus>),
    ("submit", "cfq submit", of::<SubmitReply>),
    ("tokens", "cfq token ls", of::<JoinTokenList>),
];

/// Other schemas: a line of `cfq wait`, and what a task file contains.
const FURTHER: [NamedSchema; 2] = [
    ("task-file", "a task file, without `tasks`", of_input::<TaskSpec>),
    ("wait", "a line of cfq wait", of::<TaskSummary>),
];

#[derive(Serialize)]
struct Named {
    name: &'static str,
    describes: &'static str,
}

pub fn run(out: Output, args: SchemaArgs) -> anyhow::Result<Code> {
    let all = || OUTPUTS.into_iter().chain(FURTHER);
    let Some(name) = args.name else {
        let names = names();
        out.print_list("schemas", &names, |names| names_lines(names))?;
        return Ok(Code::Done);
    };
    let Some((_, _, schema)) = all().find(|(known, ..)| *known == name) else {
        let known: Vec<&str> = all().map(|(known, ..)| known).collect();
        let nearest = plain_words::nearest(&name, known.iter().copied());
        let hint = nearest.map(|known| format!(" (did you mean {known}?)")).unwrap_or_default();
        return Err(exit::usage(format!("there is no schema {name:?}{hint}: choose one of {}", known.join(", "))));
    };
    let mut schema = schema().to_value();
    json_times::in_schema(&mut schema);
    out.print(&schema, |schema| serde_json::to_string_pretty(schema).unwrap_or_default())?;
    Ok(Code::Done)
}

fn names() -> Vec<Named> {
    OUTPUTS.into_iter().chain(FURTHER).map(|(name, describes, _)| Named { name, describes }).collect()
}

fn names_lines(names: &[Named]) -> Vec<Line> {
    let line = |named: &Named| Line::new(format!("{:12}  {}", named.name, named.describes), Tone::Plain);
    names.iter().map(line).collect()
}

fn of<T: JsonSchema>() -> Schema {
    SchemaSettings::draft2020_12().for_serialize().into_generator().into_root_schema_for::<T>()
}

fn of_input<T: JsonSchema>() -> Schema {
    SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields of the outputs that scripts read most: a change must be a decision.
    #[test]
    fn fields_are_those_that_scripts_know() {
        let fields = |schema: Schema| {
            let schema = schema.to_value();
            let properties = schema["properties"].as_object().unwrap();
            properties.keys().cloned().collect::<Vec<_>>().join(" ")
        };
        let text: Vec<String> = OUTPUTS
            .into_iter()
            .chain(FURTHER)
            .map(|(name, _, schema)| format!("{name}: {}", fields(schema())))
            .collect();
        insta::assert_snapshot!("fields", text.join("\n"));
    }

    #[test]
    fn names_fit_the_terminal() {
        insta::assert_snapshot!("view_schema", crate::output::at_widths(|_| names_lines(&names())));
    }

    #[test]
    fn lists_have_one_array_and_are_sorted() {
        let names: Vec<&str> = OUTPUTS.iter().map(|(name, ..)| *name).collect();
        assert!(names.is_sorted(), "{names:?}");
        for (name, schema) in [("ls", of::<TaskList>()), ("jobs", of::<JobList>()), ("prs", of::<PrList>())] {
            let value = schema.to_value();
            let arrays = value["properties"].as_object().unwrap().values().filter(|field| field["type"] == "array");
            assert_eq!(arrays.count(), 1, "{name}");
        }
    }
}
