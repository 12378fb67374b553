//! Parsing and validation of loop declarations.

use std::collections::BTreeSet;

use serde_saphyr::Spanned;

use crate::declaration::Declaration;
use crate::error::DeclarationError;

const DUAL_AGENT: &str = include_str!("dual-agent.yaml");

/// Returns the built-in declaration of the loop with one creator (Alpha) and one critic (Beta).
///
/// # Errors
/// [`DeclarationError`] if the compiled-in file is invalid; a test checks that it is valid.
pub fn dual_agent() -> Result<Declaration, DeclarationError> {
    parse("dual-agent.yaml", DUAL_AGENT)
}

/// Parses and validates the text of a loop declaration. `file` is its name in error messages.
///
/// # Errors
/// [`DeclarationError::Malformed`] if `text` is not YAML or does not have the fields of a loop declaration,
/// [`DeclarationError::InvalidValue`] if a value is out of range or not supported.
pub fn parse(file: &str, text: &str) -> Result<Declaration, DeclarationError> {
    let declaration: Declaration =
        serde_saphyr::from_str(text).map_err(|error| DeclarationError::malformed(file, &error))?;
    validate(file, &declaration)?;
    Ok(declaration)
}

fn validate(file: &str, declaration: &Declaration) -> Result<(), DeclarationError> {
    let Declaration { transformer, resources, methodology, quality, guards } = declaration;
    let refuse = |at, field, message: &str| Err(DeclarationError::invalid_value(file, at, field, message));

    if transformer.name.value.trim().is_empty() {
        return refuse(transformer.name.referenced, "transformer.name", "must not be empty");
    }
    if transformer.kind.value != "quality" {
        return refuse(transformer.kind.referenced, "transformer.type", "only `quality` is defined");
    }
    if resources.creators.value.len() != 1 {
        return refuse(resources.creators.referenced, "resources.creators", "exactly one creator is supported so far");
    }
    if resources.critics.value.len() != 1 {
        return refuse(resources.critics.referenced, "resources.critics", "exactly one critic is supported so far");
    }
    let mut ids = BTreeSet::new();
    for agent in resources.creators.value.iter().chain(&resources.critics.value) {
        if !ids.insert(agent.id.value.as_str()) {
            let message = format!("{:?} is used twice", agent.id.value);
            return Err(DeclarationError::invalid_value(file, agent.id.referenced, "id", message));
        }
    }
    if methodology.iteration.max_cycles.value == 0 {
        let at = methodology.iteration.max_cycles.referenced;
        return refuse(at, "methodology.iteration.max-cycles", "must be at least 1");
    }
    let pass = &quality.thresholds.pass;
    if !(0.0..=10.0).contains(&pass.value) {
        return refuse(pass.referenced, "quality.thresholds.pass", "must be between 0 and 10");
    }
    let minutes = [
        ("guards.timeout-minutes", &guards.timeout_minutes),
        ("guards.retry-ceiling-minutes", &guards.retry_ceiling_minutes),
    ];
    for (field, minutes) in minutes {
        if let Some(Spanned { value, referenced, .. }) = minutes
            && !(value.is_finite() && *value > 0.0)
        {
            return refuse(*referenced, field, "must be a positive number of minutes");
        }
    }
    if let Some(stagnation) = &guards.stagnation {
        if !(0.0..=10.0).contains(&stagnation.min_gain.value) {
            return refuse(stagnation.min_gain.referenced, "guards.stagnation.min-gain", "must be between 0 and 10");
        }
        if stagnation.cycles.value == 0 {
            return refuse(stagnation.cycles.referenced, "guards.stagnation.cycles", "must be at least 1");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_loop_has_the_documented_values() {
        let declaration = dual_agent().unwrap();
        assert_eq!(declaration.quality.thresholds.pass.value, 8.5);
        assert_eq!(declaration.methodology.iteration.max_cycles.value, 5);
        assert_eq!(declaration.guards.timeout_minutes.unwrap().value, 30.0);
        assert_eq!(declaration.guards.retry_ceiling_minutes.unwrap().value, 10.0);
        let stagnation = declaration.guards.stagnation.unwrap();
        assert_eq!((stagnation.min_gain.value, stagnation.cycles.value), (0.2, 2));
        assert!(!declaration.methodology.early_stop);
        let allowed = DUAL_AGENT.replacen("mode: sequential-chain", "mode: sequential-chain\n  early-stop: true", 1);
        assert!(parse("x.yaml", &allowed).unwrap().methodology.early_stop);
    }

    fn refused(from: &str, to: &str) -> String {
        assert!(DUAL_AGENT.contains(from), "{from}");
        parse("x/transformer.yaml", &DUAL_AGENT.replacen(from, to, 1)).unwrap_err().to_string()
    }

    #[test]
    fn error_names_file_line_and_field() {
        let line = |from: &str| 1 + DUAL_AGENT.lines().position(|l| l.contains(from)).unwrap();
        for (from, to, names) in [
            ("max-cycles: 5", "max-cycle: 5", "max-cycle"),
            ("max-cycles: 5", "max-cycles: 0", "at least 1"),
            ("max-cycles: 5", "max-cycles: many", "u32"),
            ("pass: 8.5", "pass: 85", "between 0 and 10"),
            ("type: quality", "type: other", "quality"),
            ("mode: sequential-chain", "mode: adaptive", "adaptive"),
            ("mode: sequential-chain", "early-stop: perhaps", "bool"),
            ("id: beta", "id: alpha", "used twice"),
            ("timeout-minutes: 30", "timeout-minutes: -1", "positive"),
        ] {
            let message = refused(from, to);
            let place = format!("x/transformer.yaml:{}:", line(from));
            assert!(message.starts_with(&place) && message.contains(names), "{to}: {message}");
        }
    }

    #[test]
    fn missing_section_is_named() {
        let message = parse("t.yaml", "transformer:\n  name: x\n").unwrap_err().to_string();
        assert!(message.contains("type"), "{message}");
    }
}
