//! `cfq services fetch` and `cfq services ls`

use cfq_deploy::services::ServiceProgram;
use cfq_deploy::{Paths, ServiceSource, StackOptions, StatusOutput, stack};

use crate::args::ServicesCommand;
use crate::config::Config;
use crate::exit::Code;
use crate::output::{Line, Output, Tone};

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
    out.print_list("services", &[postgres, nats], lines)?;
    Ok(Code::Done)
}

pub(super) fn lines(programs: &[ServiceProgram]) -> Vec<Line> {
    programs.iter().map(|program| Line::new(line(program), Tone::Plain)).collect()
}

fn line(program: &ServiceProgram) -> String {
    let name = program.kind.to_string().to_lowercase();
    format!("{name} {}  {}  ({})", program.version, program.path.display(), program.origin)
}

#[cfg(test)]
mod tests {
    use cfq_deploy::services::{ServiceKind, ServiceOrigin, Version};

    use super::*;

    #[test]
    fn path_is_printed_in_its_own_case() {
        let program = ServiceProgram {
            kind: ServiceKind::Postgres,
            path: "/Applications/Postgres.app/Contents/Versions/18/bin".into(),
            version: Version::new(18, 6, 0),
            origin: ServiceOrigin::Found,
        };
        assert_eq!(line(&program), "postgres 18.6  /Applications/Postgres.app/Contents/Versions/18/bin  (found)");
    }
}
