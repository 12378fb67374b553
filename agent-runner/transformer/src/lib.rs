//! Parses and validates loop declarations; this crate does not run loops. A loop declaration is a `transformer.yaml`,
//! the file that configures a loop; built-in declarations have the same format and are compiled in. The runner derives
//! the limits of a loop from its declaration; the rules of the loop are in `cfq-convergence`.
//!
//! Only the fields that the dual-agent loop needs are supported, each under the same path as in the full
//! `transformer.yaml` format.

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
