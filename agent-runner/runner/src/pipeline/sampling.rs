//! Sampling parameters of a role: deterministic for a task, with a different seed for each iteration and each repeated
//! call.

use cfq_proto::ids::TaskId;
use cfq_proto::job::Sampling;
use cfq_proto::task::{Agent, AgentBinding};

/// Difference between the seeds of two repeated calls. It is larger than any number of iterations, so that iterations
/// and repeated calls of a role never share a seed.
const SEED_STEP_PER_CALL: u64 = 7_919;

/// Maximum reply length in tokens: as configured for the agent, else the default of its role.
pub fn max_tokens(agent: Agent, binding: &AgentBinding) -> u32 {
    binding.max_tokens.unwrap_or(match agent {
        Agent::Alpha => 2048,
        Agent::Beta => 1024,
    })
}

/// Returns the sampling parameters of one call. `n` counts the calls of the role for the same step, from 0.
pub fn sampling(
    agent: Agent,
    binding: &AgentBinding,
    task: TaskId,
    iteration: u32,
    n: i16,
    reply_tokens: u32,
) -> Sampling {
    let base = binding.seed.unwrap_or_else(|| u64::from(task.0.as_fields().0));
    let n = u64::from(n.unsigned_abs());
    // A creator with some randomness finds another solution in the next iteration; a critic should be consistent.
    let default = match agent {
        Agent::Alpha => 0.2,
        Agent::Beta => 0.0,
    };
    let temperature = binding.temperature.unwrap_or(default);
    Sampling {
        // With greedy sampling, a repeated call would return the same unreadable reply.
        temperature: if n > 0 { temperature.max(0.5) } else { temperature },
        // Some servers take seeds as signed 32-bit integers.
        seed: base.wrapping_add(u64::from(iteration)).wrapping_add(n * SEED_STEP_PER_CALL) & 0x7fff_ffff,
        max_tokens: reply_tokens,
        deterministic: binding.deterministic.unwrap_or(false),
        ..Sampling::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_is_stable_per_call_and_differs_between_calls() {
        let task = TaskId::fresh();
        let binding = AgentBinding { seed: Some(7), ..AgentBinding::default() };
        let at = |iteration, n| sampling(Agent::Alpha, &binding, task, iteration, n, 10).seed;
        assert_eq!(at(1, 0), at(1, 0));
        assert_ne!(at(1, 0), at(2, 0));
        assert_ne!(at(1, 0), at(1, 1));
        assert_eq!(at(1, 0), 8);
    }

    #[test]
    fn repeated_call_is_not_greedy() {
        let binding = AgentBinding { temperature: Some(0.0), ..AgentBinding::default() };
        let at = |n| sampling(Agent::Beta, &binding, TaskId::fresh(), 1, n, 10).temperature;
        assert_eq!(at(0), 0.0);
        assert!(at(1) > 0.0);
    }
}
