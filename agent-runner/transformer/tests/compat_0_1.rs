//! Tests that a loop declaration written for cfq 0.1 loads with the same values.
#![allow(clippy::unwrap_used)]

use cfq_transformer::{AgentDeclaration, CriticExecution, Mode, parse};

#[test]
fn declaration_of_0_1_keeps_its_values() {
    let declaration = parse("transformer.yaml", include_str!("fixtures/transformer-0.1.yaml")).unwrap();
    assert_eq!(declaration.transformer.name.value, "dual-agent");
    let ids = |agents: &[AgentDeclaration]| agents.iter().map(|a| a.id.value.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&declaration.resources.creators.value), ["alpha"]);
    assert_eq!(ids(&declaration.resources.critics.value), ["beta"]);
    assert_eq!(declaration.methodology.mode, Mode::SequentialChain);
    assert_eq!(declaration.methodology.critic_execution, CriticExecution::Serial);
    assert_eq!(declaration.methodology.iteration.max_cycles.value, 5);
    assert_eq!(declaration.quality.thresholds.pass.value, 8.5);
    assert_eq!(declaration.guards.timeout_minutes.unwrap().value, 30.0);
    assert_eq!(declaration.guards.retry_ceiling_minutes.unwrap().value, 10.0);
    let stagnation = declaration.guards.stagnation.unwrap();
    assert_eq!((stagnation.min_gain.value, stagnation.cycles.value), (0.2, 2));
}
