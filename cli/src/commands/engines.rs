//! `cfq engines fetch` and `cfq engines ls`

use cfq_deploy::engines::Engine;
use cfq_deploy::{Options, Paths, Preference, Talk, stack};

use crate::args::EnginesCommand;
use crate::config::Config;
use crate::exit::Code;
use crate::output::Output;

pub async fn run(out: Output, paths: &Paths, config: &Config, command: EnginesCommand) -> anyhow::Result<Code> {
    let mut engines = config.engines.clone().overridden_by_environment()?;
    if matches!(command, EnginesCommand::Fetch) {
        engines.source = Preference::Fetched;
        engines.postgres_bin = None;
        engines.nats_bin = None;
    }
    let talk = if out.json { Talk::Silent } else { Talk::Stderr };
    let (postgres, nats) = stack::find(paths, &Options { engines, talk, ..Options::default() }).await?;
    out.data(&vec![postgres, nats], |engines| engines.iter().map(line).collect::<Vec<_>>().join("\n"))?;
    Ok(Code::Done)
}

fn line(engine: &Engine) -> String {
    format!("{} {}  {}  ({:?})", engine.kind, engine.version, engine.path.display(), engine.origin).to_lowercase()
}
