//! Reviews of critics and findings of cfq's own checks. [`ReviewFeedback`] has three uses: its JSON schema constrains a
//! critic's decoding, critics' replies are parsed into it, and the HTTP API returns it.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::IdError;

/// Severity of a defect, with the names of dual-agent clients. An open critical defect prevents convergence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
// schemars writes documented variants as `oneOf` with descriptions instead of a plain `enum`; this schema goes to
// models.
#[allow(missing_docs)]
pub enum Severity {
    Critical,
    Major,
    Minor,
    Info,
}

impl Severity {
    /// All severities, the worst first.
    pub const ALL: [Self; 4] = [Self::Critical, Self::Major, Self::Minor, Self::Info];

    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Major => "major",
            Self::Minor => "minor",
            Self::Info => "info",
        }
    }
}

impl FromStr for Severity {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::ALL.into_iter().find(|severity| severity.as_str() == text).ok_or(IdError {
            kind: "severity",
            text: text.to_owned(),
            expected: "critical, major, minor or info",
        })
    }
}

/// One defect that a critic found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
// Constrained decoding generates no other fields; parsing ignores those that an unconstrained endpoint adds.
#[schemars(extend("additionalProperties" = false))]
pub struct Defect {
    /// How severe it is.
    pub severity: Severity,
    /// For example `correctness`, `security`, `style`.
    #[schemars(length(max = 40))]
    pub category: String,
    /// `path:line`, or `N/A` for something that is missing.
    #[schemars(length(max = 120))]
    pub location: String,
    /// What is wrong.
    #[schemars(length(max = 400))]
    pub description: String,
    /// How to fix it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 400))]
    pub suggested_fix: Option<String>,
}

/// A critic's review of one artifact.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = false))]
pub struct ReviewFeedback {
    /// 0 to 100.
    #[schemars(range(min = 0, max = 100))]
    pub quality_score: f64,
    /// Defects of the artifact.
    #[schemars(length(max = 8))]
    pub defects: Vec<Defect>,
    /// Optional improvements.
    #[schemars(length(max = 6), inner(length(max = 240)))]
    pub suggestions: Vec<String>,
    /// Changes that are required to pass.
    #[schemars(length(max = 6), inner(length(max = 240)))]
    pub required_changes: Vec<String>,
}

impl ReviewFeedback {
    /// Merges another review of the same change into this one: the defects, suggestions and required changes of both
    /// without repetitions, the worst defects first, and the lower score.
    #[must_use]
    pub fn merged_with(mut self, other: Self) -> Self {
        self.quality_score = self.quality_score.min(other.quality_score);
        let is_known = |known: &[Defect], new: &Defect| {
            known.iter().any(|d| d.location == new.location && d.description == new.description)
        };
        for defect in other.defects {
            if !is_known(&self.defects, &defect) {
                self.defects.push(defect);
            }
        }
        self.defects.sort_by_key(|defect| defect.severity);
        for (texts, new) in
            [(&mut self.suggestions, other.suggestions), (&mut self.required_changes, other.required_changes)]
        {
            for text in new {
                if !texts.contains(&text) {
                    texts.push(text);
                }
            }
        }
        self
    }

    /// True if a defect is critical, which prevents convergence at any score.
    pub fn has_critical(&self) -> bool {
        self.defects.iter().any(|d| d.severity == Severity::Critical)
    }
}

/// Kind of check that made a [`Finding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CheckKind {
    /// The creator's reply could not be parsed into files.
    Reply,
    /// A file does not parse in its language.
    Syntax,
    /// The change adds something destructive.
    Dangerous,
    /// A check that the project declares in `.cfq/checks.toml` fails, for example its tests.
    Project,
}

/// One finding of cfq's own checks or of the project's. An artifact of the loop that has findings is quarantined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// Kind of check.
    pub check: CheckKind,
    /// Path relative to the repository's root; empty if there is none.
    pub path: String,
    /// Line number from 1; 0 if there is none.
    pub line: u32,
    /// What is wrong.
    pub message: String,
}

/// A check that the project declares in `.cfq/checks.toml` and that ran to its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckRun {
    /// Name of the check.
    pub name: String,
    /// Whether it passed.
    pub passed: bool,
    /// Kind of the sandbox that it ran in.
    pub sandbox: String,
    /// Elapsed time of its runs on the result, in ms.
    pub ms: u64,
    /// Number of tests in its report; absent without a report, and in steps of earlier builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tests: Option<u32>,
    /// Covered lines in its coverage report; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<LineCoverage>,
    /// Tests that failed, and failed on the base commit too.
    #[serde(default, skip_serializing_if = "TestNames::is_empty")]
    pub known_failures: TestNames,
    /// Tests that failed in only one of two runs. The name of the check stands for its command.
    #[serde(default, skip_serializing_if = "TestNames::is_empty")]
    pub flaky: TestNames,
}

/// Lines of code that tests execute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LineCoverage {
    /// Number of the lines that were executed.
    pub covered: u64,
    /// Number of all lines in the report.
    pub total: u64,
}

impl fmt::Display for LineCoverage {
    /// Writes the percentage, rounded down, as in `79.9 % of 1000 lines`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { covered, total } = self;
        let tenths = u128::from(*covered) * 1000 / u128::from((*total).max(1));
        write!(f, "{}.{} % of {total} lines", tenths / 10, tenths % 10)
    }
}

/// Names of tests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TestNames {
    /// Number of the tests.
    pub count: u32,
    /// Names of the first 20 at most.
    pub names: Vec<String>,
}

impl TestNames {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The names, and an entry with the number of the others.
    pub fn entries(&self) -> Vec<String> {
        let more = (self.count as usize).saturating_sub(self.names.len());
        self.names.iter().cloned().chain((more > 0).then(|| format!("and {more} more"))).collect()
    }
}

impl fmt::Display for TestNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.entries().join(", "))
    }
}

impl fmt::Display for Finding {
    /// The place, if there is one, and the message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.path.is_empty(), self.line) {
            (true, _) => {}
            (false, 0) => write!(f, "{}: ", self.path)?,
            (false, line) => write!(f, "{}:{line}: ", self.path)?,
        }
        f.write_str(&self.message)
    }
}

/// Why an artifact is kept but not reviewed, and never merged without a human.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Quarantine {
    /// The reply could not be parsed into files; the creator gets the finding as feedback.
    Unparsable,
    /// A file has a syntax error; the creator gets the findings as feedback. Never run, merged or accepted, as an
    /// unparsable or dangerous one.
    Syntax,
    /// The change is dangerous; the task escalates.
    Dangerous,
    /// A check of the project fails; the creator gets the findings as feedback. A human may accept the artifact.
    FailedChecks,
}

impl Quarantine {
    /// Whether a human may accept the artifact although it is quarantined.
    pub const fn permits_acceptance(self) -> bool {
        match self {
            Self::FailedChecks => true,
            Self::Unparsable | Self::Syntax | Self::Dangerous => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_review_has_each_defect_once_the_worst_first_and_the_lower_score() {
        let defect = |severity, description: &str| Defect {
            severity,
            category: "correctness".into(),
            location: "a.py:1".into(),
            description: description.into(),
            suggested_fix: None,
        };
        let review = |quality_score, defects| ReviewFeedback {
            quality_score,
            defects,
            suggestions: vec!["rename it".into()],
            required_changes: vec![],
        };
        let first = review(90.0, vec![defect(Severity::Minor, "slow"), defect(Severity::Major, "wrong")]);
        let second = review(40.0, vec![defect(Severity::Major, "wrong"), defect(Severity::Critical, "unsafe")]);
        let merged = first.merged_with(second);
        let found: Vec<&str> = merged.defects.iter().map(|defect| defect.description.as_str()).collect();
        assert_eq!((merged.quality_score, found), (40.0, vec!["unsafe", "wrong", "slow"]));
        assert_eq!(merged.suggestions, ["rename it"]);
    }
}
