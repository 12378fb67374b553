//! `cfq schema NAME`: the JSON schema of what a command prints with `--json`.

use cfq_deploy::doctor::Check;
use cfq_deploy::services::ServiceProgram;
use cfq_engine::check::CheckReport;
use cfq_inference_node::models::InstalledModel;
use cfq_proto::event::Event;
use cfq_proto::http::{
    AgentList, AgentPatchReply, ApiTokenReply, BatchReply, BulkResult, ClusterStatus, DeadLetterDetail, DeadLetterList,
    DefectReply, EscalationView, Explanation, GcReply, JobList, JoinTokensRemoved, MachineView, NodeList, NodeView,
    PrList, PrView, RequeueReply, ScheduleList, ScheduleRemoved, ScheduleView, StateReply, SubmitReply, TaskDetail,
    TaskList, TaskSummary,
};
use cfq_proto::loop_step::Artifact;
use cfq_proto::task::TaskSpec;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema};
use serde::Serialize;

use crate::archive::Archived;
use crate::args::SchemaArgs;
use crate::commands::backup;
use crate::commands::checks::view::{
    ChecksFileView, ComparedView, DeclaredView, NotRunView, PreparationView, PreparedView, SingleRunView,
};
use crate::commands::diff::{ChangedFiles, Difference};
use crate::commands::down::Down;
use crate::commands::join::{JoinStatus, Joined};
use crate::commands::machines::Machines;
use crate::commands::man::Written;
use crate::commands::map::PrintedMap;
use crate::commands::models::fit::FitReport;
use crate::commands::models::load::LoadResult;
use crate::commands::models::{self, Suggestion};
use crate::commands::pull;
use crate::commands::service::{self, RemovedUnit, UnitStatus, UnitText};
use crate::commands::submit::dry_run::DryRun;
use crate::commands::token::{JoinCommand, Rotated, TokenPath, TokenRow};
use crate::commands::up::Up;
use crate::commands::watch::TokensLine;
use crate::exit::{self, Code, ErrorOutput};
use crate::json_times;
use crate::mcp;
use crate::output::{Line, Output, Tone};
use crate::plain_words;

/// Name of an output, what prints it, and its schema.
type NamedSchema = (&'static str, &'static str, fn() -> Schema);

/// What the commands print, and what they read, in the order of the names.
const SCHEMAS: &[NamedSchema] = &[
    ("agent", "cfq agents set, cfq agents reset, cfq agents instruct", of::<AgentPatchReply>),
    ("agents", "cfq agents ls", of::<AgentList>),
    ("archive", "cfq archive", of::<Archived>),
    ("backup", "cfq backup", of::<backup::Written>),
    ("batch", "cfq submit -f FILE, with several tasks", of::<BatchReply>),
    ("cancel", "a line of cfq cancel, cfq pause, cfq resume, cfq retry, cfq prioritize", of::<BulkResult>),
    ("checks-file", "cfq checks init", of::<ChecksFileView>),
    ("checks-run", "a line of cfq checks run", of::<CheckLine<'_>>),
    ("checks-show", "a line of cfq checks show", of::<DeclaredLine<'_>>),
    ("dead", "cfq dead ls", of::<DeadLetterList>),
    ("dead-letter", "cfq dead show", of::<DeadLetterDetail>),
    ("defect", "cfq defect", of::<DefectReply>),
    ("diff", "cfq diff", of::<Artifact>),
    ("diff-from", "cfq diff --from", of::<Difference>),
    ("diff-stat", "cfq diff --stat, and cfq diff --name-only", of::<ChangedFiles>),
    ("doctor", "cfq doctor", || list_of::<Check>("checks")),
    ("down", "cfq down", of::<Down>),
    ("dry-run", "cfq submit --dry-run", of::<DryRun>),
    ("engine", "cfq engine check", of::<CheckReport>),
    ("error", "an error, on stderr", of::<ErrorOutput>),
    ("event", "a line of cfq watch and of cfq logs", of::<Event>),
    ("explain", "cfq explain", of::<Explanation>),
    ("gc", "cfq gc", of::<GcReply>),
    ("jobs", "cfq jobs", of::<JobList>),
    ("join", "cfq join", of::<Joined>),
    ("join-status", "cfq status on a machine that joined", of::<JoinStatus>),
    ("ls", "cfq ls", of::<TaskList>),
    ("machine", "cfq machines revoke", of::<MachineView>),
    ("machines", "cfq machines ls", of::<Machines>),
    ("man", "cfq man", of::<Written>),
    ("map", "cfq map", of::<PrintedMap<'_>>),
    ("mcp-install", "cfq mcp install", of::<mcp::install::Installed>),
    ("model", "cfq models show, cfq models pull, cfq models pin, cfq models unpin", of::<InstalledModel>),
    ("model-fit", "cfq models fit", of::<FitReport>),
    ("model-load", "cfq models load, cfq models unload", of::<LoadResult>),
    ("model-rm", "cfq models rm", of::<models::Removed>),
    ("models", "cfq models ls", || list_of::<InstalledModel>("models")),
    ("models-suggest", "cfq models suggest", || list_of::<Suggestion>("models")),
    ("node", "cfq machines cordon, cfq machines uncordon, cfq machines drain", of::<NodeView>),
    ("nodes", "cfq nodes", of::<NodeList>),
    ("pr", "cfq pr show", of::<PrView>),
    ("prs", "cfq pr ls", of::<PrList>),
    ("pull", "cfq pull", of::<pull::Pulled>),
    ("question", "cfq resolve without --action", of::<EscalationView>),
    ("requeue", "a line of cfq dead requeue", of::<RequeueReply>),
    ("restore", "cfq restore", of::<backup::Restored>),
    ("schedule", "cfq schedule add, cfq schedule pause, cfq schedule resume", of::<ScheduleView>),
    ("schedule-rm", "cfq schedule rm", of::<ScheduleRemoved>),
    ("schedules", "cfq schedule ls", of::<ScheduleList>),
    ("schemas", "cfq schema without a name", || list_of::<Named>("schemas")),
    ("service-install", "cfq service install", of::<service::Installed>),
    ("service-print", "cfq service install --print", of::<UnitText>),
    ("service-status", "cfq service status", of::<UnitStatus>),
    ("service-uninstall", "cfq service uninstall", of::<RemovedUnit>),
    ("services", "cfq services ls, cfq services fetch", || list_of::<ServiceProgram>("services")),
    ("show", "cfq show, cfq review, cfq demo", of::<TaskDetail>),
    ("state", "cfq resolve, cfq acknowledge", of::<StateReply>),
    ("status", "cfq status", of::<ClusterStatus>),
    ("submit", "cfq submit, cfq schedule run, and cfq review --no-wait", of::<SubmitReply>),
    ("task-file", "a task file, without `tasks`", of_input::<TaskSpec>),
    ("text", "a line of cfq watch with generated text", of::<TokensLine<'_>>),
    ("token", "cfq token create --role ROLE, and cfq token rotate NAME", of::<ApiTokenReply>),
    ("token-create", "cfq token create", of::<JoinCommand>),
    ("token-path", "cfq token path", of::<TokenPath>),
    ("token-rm", "cfq token rm", of::<JoinTokensRemoved>),
    ("token-rotate", "cfq token rotate without a name", of::<Rotated>),
    ("tokens", "cfq token ls", || list_of::<TokenRow>("tokens")),
    ("up", "cfq up", of::<Up>),
    ("wait", "a line of cfq wait", of::<TaskSummary>),
];

/// A line of `cfq checks run`; only its schema is used.
#[allow(dead_code)]
#[derive(JsonSchema)]
#[schemars(untagged)]
enum CheckLine<'a> {
    Prepared(PreparedView<'a>),
    Run(SingleRunView<'a>),
    Compared(ComparedView<'a>),
    NotRun(NotRunView<'a>),
}

/// A line of `cfq checks show`; only its schema is used.
#[allow(dead_code)]
#[derive(JsonSchema)]
#[schemars(untagged)]
enum DeclaredLine<'a> {
    Preparation(PreparationView<'a>),
    Check(DeclaredView<'a>),
}

#[derive(Serialize, JsonSchema)]
pub struct Named {
    pub name: &'static str,
    pub describes: &'static str,
}

/// The document of the HTTP API, which is no schema of an output.
const OPENAPI: Named = Named { name: "openapi", describes: "the HTTP API, as an OpenAPI document" };

pub fn run(out: Output, args: SchemaArgs) -> anyhow::Result<Code> {
    let Some(name) = args.name else {
        let names = names();
        out.print_list("schemas", &names, names_lines)?;
        return Ok(Code::Done);
    };
    let pretty = |schema: &serde_json::Value| serde_json::to_string_pretty(schema).unwrap_or_default();
    if name == OPENAPI.name {
        out.print(&cfq_scheduler::openapi_document(), pretty)?;
        return Ok(Code::Done);
    }
    let Some((_, _, schema)) = SCHEMAS.iter().find(|(known, ..)| *known == name) else {
        let known: Vec<&str> = names().iter().map(|known| known.name).collect();
        let hint = plain_words::did_you_mean(&name, known.iter().copied());
        return Err(exit::usage(format!("there is no schema {name:?}{hint}: choose one of {}", known.join(", "))));
    };
    let mut schema = schema().to_value();
    json_times::in_schema(&mut schema);
    out.print(&schema, pretty)?;
    Ok(Code::Done)
}

pub fn names() -> Vec<Named> {
    let mut names: Vec<Named> = SCHEMAS.iter().map(|(name, describes, _)| Named { name, describes }).collect();
    names.push(OPENAPI);
    names.sort_by_key(|named| named.name);
    names
}

fn names_lines(names: &[Named]) -> Vec<Line> {
    let width = names.iter().map(|named| named.name.len()).max().unwrap_or_default();
    let line = |named: &Named| Line::new(format!("{:width$}  {}", named.name, named.describes), Tone::Plain);
    names.iter().map(line).collect()
}

fn of<T: JsonSchema>() -> Schema {
    SchemaSettings::draft2020_12().for_serialize().into_generator().into_root_schema_for::<T>()
}

/// The schema of an object with an array of these under this key.
fn list_of<T: JsonSchema>(key: &str) -> Schema {
    let mut array = of::<Vec<T>>().to_value();
    let mut whole = serde_json::json!({ "type": "object", "required": [key] });
    for shared in ["$schema", "$defs"] {
        if let Some(value) = array.as_object_mut().and_then(|array| array.remove(shared)) {
            whole[shared] = value;
        }
    }
    whole["properties"] = serde_json::json!({ key: array });
    whole.try_into().unwrap_or_default()
}

fn of_input<T: JsonSchema>() -> Schema {
    SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;

    /// The fields of the outputs: a change must be a decision.
    #[test]
    fn fields_are_those_that_scripts_know() {
        let fields = |schema: Schema| {
            let schema = schema.to_value();
            let of_object = |value: &serde_json::Value| {
                let properties =
                    value["properties"].as_object().map(|fields| fields.keys().cloned().collect::<Vec<_>>());
                properties.unwrap_or_default().join(" ")
            };
            match schema["anyOf"].as_array() {
                None => of_object(&schema),
                Some(variants) => {
                    let definition = |variant: &serde_json::Value| {
                        let name = variant["$ref"].as_str().and_then(|path| path.rsplit('/').next());
                        name.map_or_else(|| of_object(variant), |name| of_object(&schema["$defs"][name]))
                    };
                    variants.iter().map(definition).collect::<Vec<_>>().join(" | ")
                }
            }
        };
        let text: Vec<String> =
            SCHEMAS.iter().map(|(name, _, schema)| format!("{name}: {}", fields(schema()))).collect();
        assert!(text.iter().all(|line| !line.ends_with(": ")), "{text:#?}");
        insta::assert_snapshot!("fields", text.join("\n"));
    }

    #[test]
    fn names_fit_the_terminal() {
        insta::assert_snapshot!("view_schema", crate::output::at_widths(|_| names_lines(&names())));
    }

    #[test]
    fn lists_have_one_array_and_are_sorted() {
        let names: Vec<&str> = SCHEMAS.iter().map(|(name, ..)| *name).collect();
        assert!(names.is_sorted(), "{names:?}");
        for name in
            ["ls", "jobs", "prs", "nodes", "machines", "models", "services", "doctor", "tokens", "schedules", "dead"]
        {
            let (.., schema) = SCHEMAS.iter().find(|(known, ..)| *known == name).unwrap();
            let value = schema().to_value();
            let arrays = value["properties"].as_object().unwrap().values().filter(|field| field["type"] == "array");
            assert_eq!(arrays.count(), 1, "{name}");
        }
    }

    /// Names of ids say of what they are the id: `task` and `job` are ids, `number` is that of a task, `pr` that of a pull
    /// request.
    #[test]
    fn ids_are_typed() {
        fn check(schema: &serde_json::Value, name: &str, violations: &mut Vec<String>) {
            for (field, value) in schema["properties"].as_object().into_iter().flatten() {
                let text = value.to_string();
                let wanted = match field.as_str() {
                    "task" => "TaskId",
                    "number" => "TaskNumber",
                    "job" => "JobId",
                    "pr" => "int64",
                    _ => continue,
                };
                // The file of an archive has the number as text.
                if !text.contains(wanted) && name != "archive/Manifest" {
                    violations.push(format!("{name}: {field} is {text}"));
                }
            }
        }
        let mut violations = Vec::new();
        for (name, _, schema) in SCHEMAS {
            let schema = schema().to_value();
            check(&schema, name, &mut violations);
            for (definition, schema) in schema["$defs"].as_object().into_iter().flatten() {
                check(schema, &format!("{name}/{definition}"), &mut violations);
            }
        }
        assert!(violations.is_empty(), "{}", violations.join("\n"));
    }

    /// Every command prints its results with `--json` as one of the schemas says, except those that print no results.
    #[test]
    fn every_command_has_a_schema() {
        fn commands(command: &clap::Command, path: &str, found: &mut Vec<String>) {
            let inner: Vec<_> = command.get_subcommands().filter(|inner| !inner.is_hide_set()).collect();
            if inner.is_empty() {
                found.push(path.to_owned());
            }
            for inner in inner {
                commands(inner, &format!("{path} {}", inner.get_name()), found);
            }
        }
        const WITHOUT: [(&str, &str); 2] =
            [("cfq top", "is drawn on a terminal"), ("cfq completions", "prints a script for a shell")];
        let mut all = Vec::new();
        commands(&<Cli as clap::CommandFactory>::command(), "cfq", &mut all);
        for command in &all {
            let names_it = |text: &str| {
                text.split(command.as_str()).skip(1).any(|rest| {
                    let next = rest.trim_start();
                    // Not a longer command, such as `cfq models` in `cfq models ls`.
                    next.is_empty()
                        || rest.starts_with(',')
                        || next.starts_with('-')
                        || ["and ", "with", "on ", "of "].iter().any(|word| next.starts_with(word))
                })
            };
            let has_schema = SCHEMAS.iter().any(|(_, describes, _)| names_it(describes));
            let is_without = WITHOUT.iter().any(|(name, _)| name == command);
            assert_ne!(has_schema, is_without, "{command}");
        }
    }
}
