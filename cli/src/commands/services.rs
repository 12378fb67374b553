//! `cfq services fetch` and `cfq services ls`

use cfq_deploy::services::ServiceProgram;
use cfq_deploy::{Paths, ServiceSource, StackOptions, StatusOutput, stack};

use crate::args::ServicesCommand;
use crate::config::Config;
use crate::exit::Code;
use crate::output::Output;

pub async fn run(out: Output, paths: &Paths, config: &Config, command: ServicesCommand) -> anyhow::Result<Code> {
    let mut services = config.services.clone().overridden_by_environment()?;
    if matches!(command, ServicesCommand::Fetch) {
        services.source = ServiceSource::Fetched;
        services.postgres_bin = None;
        services.nats_bin = None;
    }
    let status = if out.json { StatusOutput::Silent } else { StatusOutput::Stderr };
    let options = StackOptions { services, status, ..StackOptions::default() };
    let (postgres, nats) = stack::find_programs(paths, &options).await?;
    out.print(&vec![postgres, nats], |programs| programs.iter().map(line).collect::<Vec<_>>().join("\n"))?;
    Ok(Code::Done)
}

fn line(program: &ServiceProgram) -> String {
    format!("{} {}  {}  ({:?})", program.kind, program.version, program.path.display(), program.origin).to_lowercase()
}
