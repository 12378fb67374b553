//! What a declaration says, as types. Scores are out of 10 here, as everywhere inside the engine's declarations.

use serde::Deserialize;
use serde_saphyr::Spanned;

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Declaration {
    pub transformer: Identity,
    pub resources: Resources,
    pub methodology: Methodology,
    pub quality: Quality,
    #[serde(default)]
    pub guards: Guards,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Identity {
    pub name: Spanned<String>,
    #[serde(rename = "type")]
    pub kind: Spanned<String>,
    pub version: String,
    #[serde(default)]
    pub description: String,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Resources {
    pub creators: Spanned<Vec<Agent>>,
    pub critics: Spanned<Vec<Agent>>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Agent {
    pub id: Spanned<String>,
    /// Name of the prompt template.
    pub prompt: Spanned<String>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Methodology {
    pub mode: Mode,
    pub critic_execution: CriticExecution,
    /// A critic's report may be ended where the rest of it cannot change the decision: faster, and a human who is asked then
    /// reads less.
    #[serde(default)]
    pub early_stop: bool,
    pub iteration: Iteration,
}

/// How agents follow each other. The other modes of the format are refused until the engine can run them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    SequentialChain,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CriticExecution {
    Serial,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Iteration {
    pub max_cycles: Spanned<u32>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Quality {
    pub thresholds: Thresholds,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Thresholds {
    /// Out of 10.
    pub pass: Spanned<f64>,
}

/// Limits beyond the iteration cap. An absent time limit is none.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Guards {
    #[serde(default)]
    pub timeout_minutes: Option<Spanned<f64>>,
    #[serde(default)]
    pub retry_ceiling_minutes: Option<Spanned<f64>>,
    #[serde(default)]
    pub stagnation: Option<Stagnation>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Stagnation {
    /// Out of 10.
    pub min_gain: Spanned<f64>,
    pub cycles: Spanned<u32>,
}
