//! `cfq map`

use std::time::Duration;

use cfq_agent_runner::workstream::{RepoMapReply, StartPoint};
use cfq_deploy::Paths;
use cfq_repo_map::{MapRequest, RepoMap};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::MapArgs;
use crate::exit::Code;
use crate::output::{self, Output};
use crate::repo_map;

/// Time after which the progress is printed, and what is parsed is kept.
const PARSE_WITHIN: Duration = Duration::from_secs(10);

/// The map with `--json`.
#[derive(Serialize, JsonSchema)]
pub struct PrintedMap<'m> {
    repo: String,
    commit: &'m str,
    files: usize,
    definitions: usize,
    tests_left_out: usize,
    part: usize,
    parts: usize,
    estimated_tokens: usize,
    map: &'m str,
}

pub async fn run(paths: &Paths, out: Output, args: MapArgs) -> anyhow::Result<Code> {
    let cache = paths.cache.clone();
    tokio::task::spawn_blocking(move || make(&cache, out, &args)).await?
}

fn make(cache: &std::path::Path, out: Output, args: &MapArgs) -> anyhow::Result<Code> {
    let request = MapRequest {
        depth: args.depth.map(|depth| depth as usize),
        include_tests: args.tests,
        max_tokens: args.tokens as usize,
        part: args.part as usize,
        focus: args.focus.clone(),
        mentioned_names: Vec::new(),
    };
    let base = args.base.as_deref();
    let mut parsed_before = 0;
    let (start, map) = loop {
        let (stop, _cancel) = repo_map::stop_after(PARSE_WITHIN);
        match repo_map::make(("--repo DIR", &args.repo), base, request.clone(), cache, PARSE_WITHIN, &stop)? {
            RepoMapReply::Map { start, map } => break (start, map),
            RepoMapReply::Unfinished { parsed, files } if parsed > parsed_before => {
                out.status(&format!("read {parsed} of {files} source files"));
                parsed_before = parsed;
            }
            RepoMapReply::Unfinished { parsed, files } => {
                anyhow::bail!(
                    "no progress after {parsed} of {files} source files: something else removes or replaces the cache; \
                     run the command again when it has ended"
                );
            }
            RepoMapReply::Refused { reason } => anyhow::bail!(reason),
        }
    };
    print(out, &start, &map)?;
    if let Some(note) = note(&map) {
        out.status(&note);
    }
    Ok(Code::Done)
}

/// What the map does not show; `None` if it shows everything.
fn note(map: &RepoMap) -> Option<String> {
    let mut notes = Vec::new();
    if map.parts > 1 {
        let next =
            if map.part < map.parts { format!(", the next one: --part {}", map.part + 1) } else { String::new() };
        notes.push(format!("part {} of {}{next}", map.part, map.parts));
    }
    if map.tests_left_out > 0 {
        notes.push(format!("{} left out: --tests", output::count(map.tests_left_out, "test file")));
    }
    if map.files == 0 {
        notes.push("the commit has no files to show".to_owned());
    }
    (!notes.is_empty()).then(|| format!("({})", notes.join("; ")))
}

fn print(out: Output, start: &StartPoint, map: &RepoMap) -> anyhow::Result<()> {
    if !out.json {
        // Its control characters are visible already.
        output::print_raw(&map.text);
        return Ok(());
    }
    let printed = PrintedMap {
        repo: start.root.to_string_lossy().into_owned(),
        commit: &start.base,
        files: map.files,
        definitions: map.symbols,
        tests_left_out: map.tests_left_out,
        part: map.part,
        parts: map.parts,
        estimated_tokens: map.tokens,
        map: &map.text,
    };
    out.print(&printed, |printed| printed.map.to_owned())
}
