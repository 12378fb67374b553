//! Declarations of loops: parsed and validated, not run. A declaration is a `transformer.yaml`; the built-in ones are
//! files of the same format, compiled in. What is declared here the engine interprets; the rules are `cfq-convergence`'s.
//!
//! So far the fields that the dual-agent loop needs, in the places where the full format has them.

mod declaration;
mod error;
mod parse;

pub use declaration::{
    Agent, CriticExecution, Declaration, Guards, Identity, Iteration, Methodology, Mode, Quality, Resources,
    Stagnation, Thresholds,
};
pub use error::DeclarationError;
pub use parse::{dual_agent, parse};

#[cfg(test)]
mod properties;
