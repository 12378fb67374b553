//! `cfq map`

use std::io::IsTerminal;
use std::time::Duration;

use cfq_agent_runner::workstream::{RepoMapReply, StartPoint};
use cfq_deploy::Paths;
use cfq_repo_map::{MapRequest, RepoMap};
use serde::Serialize;

use crate::args::MapArgs;
use crate::exit::Code;
use crate::output::{self, Output};
use crate::repo_map;

/// Time after which the progress is printed, and what is parsed is kept.
const PARSE_WITHIN: Duration = Duration::from_secs(20);

/// The map with `--json`.
#[derive(Serialize)]
struct PrintedMap<'m> {
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
    };
    let base = args.base.as_deref();
    let (start, map) = loop {
        match repo_map::make(("--repo DIR", &args.repo), base, request.clone(), cache, PARSE_WITHIN)? {
            RepoMapReply::Map { start, map } => break (start, map),
            RepoMapReply::Unfinished { parsed, files } => out.status(&format!("read {parsed} of {files} source files")),
            RepoMapReply::Refused { reason } => anyhow::bail!(reason),
        }
    };
    print(out, &start, &map)?;
    if map.parts > 1 && std::io::stderr().is_terminal() {
        let next = match map.part < map.parts {
            true => format!("; the next one: --part {}", map.part + 1),
            false => String::new(),
        };
        out.status(&format!("\npart {} of {}{next}", map.part, map.parts));
    }
    Ok(Code::Done)
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
