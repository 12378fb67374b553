//! Types of a loop declaration, the file that configures a loop. Scores in loop declarations are out of 10.

use serde::Deserialize;
use serde_saphyr::Spanned;

/// A loop declaration: the content of a `transformer.yaml`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Declaration {
    /// Name, type and version.
    pub transformer: TransformerInfo,
    /// Agents that take part.
    pub resources: Resources,
    /// Order of the agents and number of iterations.
    pub methodology: Methodology,
    /// Score thresholds.
    pub quality: Quality,
    /// Limits beyond the iteration cap.
    #[serde(default)]
    pub guards: Guards,
}

/// Name, type and version of a loop.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TransformerInfo {
    /// Name of the loop; not empty.
    pub name: Spanned<String>,
    /// Type of the loop, in the field `type`; only `quality` is defined.
    #[serde(rename = "type")]
    pub kind: Spanned<String>,
    /// Version of the declaration.
    pub version: String,
    /// Description for people.
    #[serde(default)]
    pub description: String,
}

/// Agents of a loop.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Resources {
    /// Agents that produce artifacts; exactly one so far.
    pub creators: Spanned<Vec<AgentDeclaration>>,
    /// Agents that review artifacts; exactly one so far.
    pub critics: Spanned<Vec<AgentDeclaration>>,
}

/// One agent of a loop.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct AgentDeclaration {
    /// Identifier, unique in the declaration.
    pub id: Spanned<String>,
    /// Name of the prompt template.
    pub prompt: Spanned<String>,
}

/// Order of the agents and number of iterations.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Methodology {
    /// Order of the agents.
    pub mode: Mode,
    /// Order in which several critics review.
    pub critic_execution: CriticExecution,
    /// Whether a review may end as soon as the rest of it cannot change the decision. An early end saves time, but a
    /// human who later reads the review sees only a part of it.
    #[serde(default)]
    pub early_stop: bool,
    /// Iteration cap.
    pub iteration: IterationLimits,
}

/// Order of the agents. The other modes of the format are refused, because they are not implemented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The creator, then the critic, in turn.
    SequentialChain,
}

/// Order in which several critics review.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CriticExecution {
    /// The critics review one after the other.
    Serial,
}

/// Iteration cap of a loop.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct IterationLimits {
    /// Maximum number of iterations in one window (since the loop started or a human last answered); at least 1.
    pub max_cycles: Spanned<u32>,
}

/// Score thresholds of a loop.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Quality {
    /// Scores that decide how the loop continues.
    pub thresholds: Thresholds,
}

/// Scores that decide how the loop continues.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Thresholds {
    /// Minimum score at which an iteration converges, 0 to 10.
    pub pass: Spanned<f64>,
}

/// Limits beyond the iteration cap. An absent time limit means no limit.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Guards {
    /// Maximum working time of one window (since the loop started or a human last answered), in minutes.
    #[serde(default)]
    pub timeout_minutes: Option<Spanned<f64>>,
    /// Time after which an endpoint that stays down fails the task, in minutes.
    #[serde(default)]
    pub retry_ceiling_minutes: Option<Spanned<f64>>,
    /// Definition of stagnation; if it is absent, the defaults of `cfq-convergence` apply.
    #[serde(default)]
    pub stagnation: Option<Stagnation>,
}

/// Definition of stagnation.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Stagnation {
    /// Smallest increase of the best score that counts as an improvement, 0 to 10.
    pub min_gain: Spanned<f64>,
    /// Number of consecutive iterations without improvement that count as stagnation; at least 1.
    pub cycles: Spanned<u32>,
}
