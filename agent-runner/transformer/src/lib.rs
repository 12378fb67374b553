//! Parses and validates declarations of loops; it does not run them. A declaration is a `transformer.yaml`; the
//! built-in ones have the same format and are compiled in. The runner derives the limits of a loop from its
//! declaration; the rules of the loop are in `cfq-convergence`.
//!
//! Only the fields that the dual-agent loop needs are supported, at the same places as in the full format.

#![warn(missing_docs)]

mod declaration;
mod error;
mod parse;

pub use declaration::{
    AgentDeclaration, CriticExecution, Declaration, Guards, IterationLimits, Methodology, Mode, Quality, Resources,
    Stagnation, Thresholds, TransformerInfo,
};
pub use error::DeclarationError;
pub use parse::{dual_agent, parse};

#[cfg(test)]
mod properties;
