//! `generate_test_suite`: a task in which Beta's model writes tests for the result of another task.

use cfq_agent_runner::checks::is_test_path;
use cfq_proto::ids::TaskKey;
use cfq_proto::model::ModelId;
use cfq_proto::task::{Agent, AgentBinding, AgentBindings, CoverageTarget, TaskSpec};
use schemars::JsonSchema;
use serde::Deserialize;

use super::access::Access;
use super::error::ToolError;
use super::replies::Accepted;
use super::review::ArtifactKey;
use super::submission::submit_prepared;

/// Maximum number of files that are shown to the agents.
const MAX_FILES: usize = 100;

/// Framework of the tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
// Names of products need no description, and one would make the schema a `oneOf`.
#[allow(missing_docs)]
pub enum TestFramework {
    Pytest,
    Jest,
    GoTesting,
    RustTest,
    Gtest,
    Junit5,
    Jasmine,
    Pgtap,
    Tsqlt,
}

/// How tests are written with a framework.
struct Convention {
    name: &'static str,
    language: &'static str,
    /// Where the tests are, and what a test is, as a requirement.
    rule: &'static str,
}

impl TestFramework {
    fn convention(self) -> Convention {
        let (name, language, rule) = match self {
            Self::Pytest => (
                "pytest",
                "python",
                "Put the tests in files tests/test_NAME.py, or where the project has its tests, as functions test_... with \
                 plain assert statements; use fixtures and pytest.mark.parametrize where cases repeat.",
            ),
            Self::Jest => (
                "Jest",
                "javascript",
                "Put the tests in files NAME.test.js (NAME.test.ts for TypeScript) next to the code, with describe, test and \
                 expect.",
            ),
            Self::GoTesting => (
                "Go's package testing",
                "go",
                "Put the tests in files NAME_test.go in the folder and the package of the code, as functions TestXxx(t \
                 *testing.T); use tables of cases with t.Run where cases repeat.",
            ),
            Self::RustTest => (
                "Rust's built-in tests",
                "rust",
                "Put the tests in files tests/NAME.rs, as functions with #[test] that use the public items of the crate.",
            ),
            Self::Gtest => (
                "GoogleTest",
                "cpp",
                "Put the tests in files NAME_test.cc where the project has its tests, with TEST or TEST_F, EXPECT_... and \
                 ASSERT_..., without a main function.",
            ),
            Self::Junit5 => (
                "JUnit 5",
                "java",
                "Put the tests in files NAMETest.java below src/test/java, in the package of the code, as methods with @Test \
                 from org.junit.jupiter.api; use @ParameterizedTest where cases repeat.",
            ),
            Self::Jasmine => {
                ("Jasmine", "javascript", "Put the tests in files spec/NAME.spec.js, with describe, it and expect.")
            }
            Self::Pgtap => (
                "pgTAP",
                "sql",
                "Put the tests in files tests/NAME.sql. Each begins with BEGIN and SELECT plan(N), where N is the number of its \
                 tests, and ends with SELECT * FROM finish() and ROLLBACK.",
            ),
            Self::Tsqlt => (
                "tSQLt",
                "sql",
                "Put the tests in files tests/NAME.sql. Each creates its test class with tSQLt.NewTestClass and its tests as \
                 procedures whose names begin with test, which use tSQLt.FakeTable and tSQLt.AssertEquals.",
            ),
        };
        Convention { name, language, rule }
    }
}

/// Arguments of `generate_test_suite`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GenerateTestSuite {
    /// Session id of a merged or accepted task, or the `artifact_id` of one of its artifacts. The tests are for the
    /// delivered result.
    #[schemars(with = "String")]
    pub artifact_id: ArtifactKey,
    /// Framework of the tests.
    pub framework: TestFramework,
    /// Lines of the code that the tests must execute, in percent, 1 to 100. It is measured if a check of the repository
    /// names a coverage report; otherwise the reviewer judges it by reading.
    #[serde(default)]
    #[schemars(range(min = 1, max = 100))]
    pub coverage_target: Option<f64>,
    /// Any text that is unique for this call. A repeated call with the same key returns the same session.
    #[serde(default)]
    pub idempotency_key: Option<String>,
}

/// `generate_test_suite`.
pub async fn generate(access: &Access, arguments: GenerateTestSuite) -> Result<Accepted, ToolError> {
    let GenerateTestSuite { artifact_id, framework, coverage_target, idempotency_key } = arguments;
    if coverage_target.is_some_and(|target| !(1.0..=100.0).contains(&target)) {
        return Err(ToolError::argument("coverage_target", "must be from 1 to 100"));
    }
    let client = access.client()?;
    let chain = artifact_id.find(&client).await?;
    let detail = client.task(TaskKey::Number(chain.number)).await?;
    let (number, state) = (detail.summary.number, detail.summary.state);
    let Some(commit) = detail.delivered_commit else {
        return Err(ToolError(format!(
            "{number} is {state} and has no delivered result: tests are written for the result of a task that is merged or \
             accepted. Call get_progress_summary for {number}"
        )));
    };
    // The tests are for the delivered result, whichever artifact of the task was named.
    let delivered = client.artifacts(TaskKey::Number(number), None).await?;
    let files = delivered.artifacts.last().map(|artifact| artifact.files.as_slice()).unwrap_or_default();
    let paths = files.iter().filter(|file| file.content.is_some()).map(|file| file.path.clone());
    let paths = paths.take(MAX_FILES).collect();
    // The model that Beta has now: the one of the task may have been replaced.
    let agents = client.agents().await?.agents;
    let model = agents.into_iter().find(|agent| agent.agent == Agent::Beta).and_then(|beta| beta.model);
    let spec = task(&detail.spec, model, (framework, coverage_target), paths, commit);
    let mut accepted = submit_prepared(&client, spec, idempotency_key).await?;
    if coverage_target.is_some() {
        let warning = "the coverage is measured only if a check in .cfq/checks.toml names a `coverage` report; otherwise \
                       the reviewer judges it by reading";
        accepted.warnings.push(warning.to_owned());
    }
    Ok(accepted)
}

/// The task of writing tests for the files at `paths` of a commit, which the task `of` made.
fn task(
    of: &TaskSpec,
    model: Option<ModelId>,
    (framework, coverage_target): (TestFramework, Option<f64>),
    paths: Vec<String>,
    commit: String,
) -> TaskSpec {
    let Convention { name, language, rule } = framework.convention();
    let constraints = vec![
        rule.to_owned(),
        "Create or change only files of tests. Do not change the code that is tested; if it is wrong, mark the test that \
         shows it as an expected failure in the way of the framework, and name the defect in the test's name."
            .to_owned(),
        "Test typical input, boundary values and errors. Each test must fail if the behaviour that it is about is wrong."
            .to_owned(),
    ];
    // The tests of the result are not what has to be covered.
    let files: Vec<String> = paths.iter().filter(|path| !is_test_path(path)).cloned().collect();
    // The target is from 1 to 100.
    let coverage = coverage_target
        .filter(|_| !files.is_empty())
        .map(|target| CoverageTarget { percent: target.ceil() as u8, files });
    let description = format!(
        "Write tests with {name} for {}.\n\nWhat this code should do:\n\n{}",
        paths.join(", "),
        of.description.trim()
    );
    // Beta's model writes the tests.
    let creator = AgentBinding { model, ..AgentBinding::default() };
    TaskSpec {
        language: language.to_owned(),
        context_files: paths,
        constraints,
        coverage,
        base: Some(commit),
        agents: AgentBindings { alpha: creator, beta: AgentBinding::default() },
        priority: of.priority,
        labels: of.labels.clone(),
        ..TaskSpec::new(description, of.repo.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_names_the_framework_its_convention_and_the_coverage_target() {
        let of: TaskSpec = serde_json::from_value(serde_json::json!({
            "description": "Add two numbers.", "repo": "/r", "language": "python",
        }))
        .unwrap();
        let critic: ModelId = "openai:box/critic".parse().unwrap();
        let names = ["pytest", "jest", "go_testing", "rust_test", "gtest", "junit5", "jasmine", "pgtap", "tsqlt"];
        let mut rules = std::collections::BTreeSet::new();
        for name in names {
            let framework: TestFramework = serde_json::from_value(name.into()).unwrap();
            let spec = task(
                &of,
                Some(critic.clone()),
                (framework, Some(79.5)),
                vec!["add.x".into(), "tests/add_test.x".into()],
                "c".repeat(40),
            );
            let name = framework.convention().name;
            assert!(
                spec.description.starts_with(&format!("Write tests with {name} for add.x, tests/add_test.x.")),
                "{}",
                spec.description
            );
            assert!(spec.description.contains("Add two numbers."));
            let target = spec.coverage.as_ref().unwrap();
            assert_eq!((target.percent, target.files.as_slice()), (80, &["add.x".to_owned()][..]));
            assert_eq!(spec.agents.alpha.model.as_ref(), Some(&critic), "Beta's model writes the tests");
            assert_eq!((spec.base.as_deref(), spec.context_files.len()), (Some(&*"c".repeat(40)), 2));
            rules.insert(spec.constraints[0].clone());
        }
        assert_eq!(rules.len(), names.len());
    }
}
