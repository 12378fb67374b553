//! What a critic says, and the findings the engine's own checks make. The schema that constrains a critic's decoding,
//! the HTTP API's and the parser's are this one type.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Severities as dual-agent clients see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    Critical,
    Major,
    Minor,
    Info,
}

impl Severity {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Major => "major",
            Self::Minor => "minor",
            Self::Info => "info",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
// Decoding makes no other fields; reading passes over what an endpoint that does not constrain adds.
#[schemars(extend("additionalProperties" = false))]
pub struct Defect {
    pub severity: Severity,
    /// For example `correctness`, `security`, `style`.
    #[schemars(length(max = 40))]
    pub category: String,
    /// `path:line`, or `N/A` for something that is missing.
    #[schemars(length(max = 120))]
    pub location: String,
    #[schemars(length(max = 400))]
    pub description: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 400))]
    pub suggested_fix: Option<String>,
}

/// One critic's report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = false))]
pub struct ReviewFeedback {
    /// 0 to 100.
    #[schemars(range(min = 0, max = 100))]
    pub quality_score: f64,
    #[schemars(length(max = 8))]
    pub defects: Vec<Defect>,
    #[schemars(length(max = 6), inner(length(max = 240)))]
    pub suggestions: Vec<String>,
    /// What must change before it can pass.
    #[schemars(length(max = 6), inner(length(max = 240)))]
    pub required_changes: Vec<String>,
}

impl ReviewFeedback {
    /// An open critical finding prevents passing, whatever the score.
    pub fn has_critical(&self) -> bool {
        self.defects.iter().any(|d| d.severity == Severity::Critical)
    }
}

/// What kind of check made a [`Finding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CheckKind {
    /// The creator's reply could not be turned into files.
    Reply,
    /// A file does not parse in its language.
    Syntax,
    /// The change adds something destructive.
    Dangerous,
}

/// One finding of the engine's own checks; always blocking.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    pub check: CheckKind,
    /// Relative path, empty where there is none.
    pub path: String,
    /// From 1; 0 where there is none.
    pub line: u32,
    pub message: String,
}

/// Why an artifact is kept but never run, merged or accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Quarantine {
    /// Goes back to the creator as blocking findings.
    Unparsable,
    /// Goes back to the creator as blocking findings.
    Syntax,
    /// Escalates.
    Dangerous,
}
