//! How a role samples: deterministic for a task, different for each iteration and each repeated call.

use cfq_proto::ids::TaskId;
use cfq_proto::job::Sampling;
use cfq_proto::task::{Agent, AgentBinding};

/// Far enough apart that iterations and repeated calls of one role never share a seed.
const REPEAT: u64 = 7_919;

/// Longest reply unless the binding says otherwise, in tokens.
pub fn max_tokens(agent: Agent, binding: &AgentBinding) -> u32 {
    binding.max_tokens.unwrap_or(match agent {
        Agent::Alpha => 2048,
        Agent::Beta => 1024,
    })
}

/// `n` counts the calls of the role for the same step, from 0.
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
    // A creator that is a little free finds another way in the next iteration; a judge should judge alike.
    let usual = match agent {
        Agent::Alpha => 0.2,
        Agent::Beta => 0.0,
    };
    let temperature = binding.temperature.unwrap_or(usual);
    Sampling {
        // Greedily repeated, an unreadable reply would come again word for word.
        temperature: if n > 0 { temperature.max(0.5) } else { temperature },
        // Servers take seeds as signed integers, some of 32 bits.
        seed: base.wrapping_add(u64::from(iteration)).wrapping_add(n * REPEAT) & 0x7fff_ffff,
        max_tokens: reply_tokens,
        deterministic: binding.deterministic.unwrap_or(false),
        ..Sampling::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_call_has_the_same_seed_and_another_one_another() {
        let task = TaskId::fresh();
        let binding = AgentBinding { seed: Some(7), ..AgentBinding::default() };
        let at = |iteration, n| sampling(Agent::Alpha, &binding, task, iteration, n, 10).seed;
        assert_eq!(at(1, 0), at(1, 0));
        assert_ne!(at(1, 0), at(2, 0));
        assert_ne!(at(1, 0), at(1, 1));
        assert_eq!(at(1, 0), 8);
    }

    #[test]
    fn a_repeated_call_is_not_greedy() {
        let binding = AgentBinding { temperature: Some(0.0), ..AgentBinding::default() };
        let at = |n| sampling(Agent::Beta, &binding, TaskId::fresh(), 1, n, 10).temperature;
        assert_eq!(at(0), 0.0);
        assert!(at(1) > 0.0);
    }
}
