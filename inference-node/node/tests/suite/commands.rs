//! Tests of models behind programs. The program is a script that prints what Claude Code, Codex and Gemini CLI printed, or
//! that fails in one way.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cfq_engine::{AdmitError, Engine, GenerationEvent};
use cfq_inference_node::CommandConfig;
use cfq_inference_node::proxy::{CommandClient, ProxyEngine};
use cfq_proto::job::{ChatMessage, ChatRole, Completion, FinishReason, JobFailure, OutputFormat};
use cfq_proto::node::Residency;
use cfq_proto::timing::Timing;

use crate::proxy::{failure, run};
use crate::smollm::{finish, user_prompt};

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/agents/agent.sh")
}

fn engine(name: &str, config: &CommandConfig, case: &str) -> ProxyEngine {
    let client = CommandClient::new(name, config, None, Arc::default()).unwrap();
    ProxyEngine::of_command(format!("command:{name}/{case}").parse().unwrap(), Some(case.to_owned()), client)
}

/// A coding agent whose program is the script.
fn agent(name: &str, case: &str) -> ProxyEngine {
    engine(name, &CommandConfig { program: Some(script()), ..CommandConfig::default() }, case)
}

fn plain_config(args: &[&str]) -> CommandConfig {
    let args = args.iter().map(|arg| (*arg).to_owned()).collect();
    CommandConfig { program: Some(script()), args: Some(args), ..CommandConfig::default() }
}

/// Another program, which prints text.
fn plain(case: &str) -> ProxyEngine {
    engine("llm", &plain_config(&["{model}"]), case)
}

async fn completed(engine: &ProxyEngine) -> Completion {
    run(engine).await.unwrap()
}

#[tokio::test]
async fn events_of_each_agent_become_text_with_usage() {
    for name in ["claude", "codex", "gemini"] {
        let completion = completed(&agent(name, name)).await;
        assert_eq!(
            (completion.text.as_str(), completion.finish),
            ("{\"score\": 90, \"ok\": true}\n", FinishReason::Stop)
        );
        let usage = completion.usage;
        assert_eq!((usage.prompt_tokens, usage.output_tokens), (100, 12), "{name}");
    }
}

#[tokio::test]
async fn error_of_an_agent_decides_whether_a_retry_can_help() {
    for (name, case, words) in [
        ("claude", "claude-401", "claude: Failed to authenticate"),
        ("claude", "claude-login", "claude: Not logged in"),
        ("codex", "codex-401", "codex: unexpected status 401"),
        ("gemini", "gemini_key", "gemini: [API Error"),
        ("gemini", "login", "gemini: exit status: 41: Please set an Auth method"),
    ] {
        let failed = failure(run(&agent(name, case)).await);
        assert!(matches!(&failed, JobFailure::Rejected { reason } if reason.starts_with(words)), "{case}: {failed:?}");
    }
    for (name, case) in [("claude", "claude-429"), ("codex", "codex-429")] {
        let failed = failure(run(&agent(name, case)).await);
        assert!(matches!(&failed, JobFailure::Unavailable { reason } if reason.contains("429")), "{case}: {failed:?}");
    }
    for (name, case) in [("claude", "claude-400-long"), ("codex", "codex-long"), ("gemini", "gemini_long")] {
        let failed = failure(run(&agent(name, case)).await);
        assert!(matches!(failed, JobFailure::TooLong { need, have } if need > have), "{case}: {failed:?}");
    }
}

#[tokio::test]
async fn interrupted_reply_is_neither_cut_nor_repeated() {
    for (name, case) in [("claude", "claude_repeated"), ("gemini", "gemini_repeated")] {
        let failed = failure(run(&agent(name, case)).await);
        let words = "its reply was interrupted and repeated";
        assert!(matches!(&failed, JobFailure::Unavailable { reason } if reason.ends_with(words)), "{case}: {failed:?}");
    }
    assert_eq!(completed(&agent("codex", "codex_repeated")).await.text, "hello");
    // A long reply continues in a second message.
    assert_eq!(completed(&agent("claude", "claude_continued")).await.text, "one two three");
    for (case, words) in [("claude_command", "Unknown command"), ("claude_refusal", "refused: No")] {
        let failed = failure(run(&agent("claude", case)).await);
        assert!(failed.to_string().contains(words), "{case}: {failed:?}");
    }
}

#[tokio::test]
async fn program_reads_the_prompt_and_runs_in_an_empty_folder() {
    let mut prompt = user_prompt("hi");
    let system = ChatMessage { role: ChatRole::System, content: "Be brief.".to_owned() };
    prompt.messages.insert(0, system);
    let text = |engine: ProxyEngine, prompt| async move {
        finish(engine.admit(prompt).await.unwrap().start()).await.0.unwrap().text
    };
    let joined = text(plain("echo"), prompt.clone()).await;
    assert!(joined.starts_with("Be brief.\n\n") && joined.ends_with("\n\nhi"), "{joined}");
    let apart = engine("llm", &plain_config(&["{system_file}", "{model}"]), "system");
    let apart = text(apart, prompt.clone()).await;
    assert!(apart.starts_with("Be brief.") && apart.ends_with("|\nhi"), "{apart}");
    let place = text(plain("place"), prompt).await;
    let lines: Vec<&str> = place.lines().collect();
    let [folder, home] = lines[..] else { panic!("the folder is not empty: {place}") };
    assert!(folder.contains("/cfq-command-") && !Path::new(folder).exists(), "{folder}");
    assert!(home.ends_with(" 0"), "variables of cfq: {home}");
}

#[tokio::test]
async fn failing_program_is_named_with_its_last_error() {
    for (case, words) in [
        ("fails", "llm: exit status: 3: the disk is full"),
        ("silent", "llm: it wrote no reply"),
        ("nonsense", "llm: exit status: 64: there is no case nonsense"),
    ] {
        let failed = failure(run(&plain(case)).await);
        assert!(matches!(&failed, JobFailure::Unavailable { reason } if reason == words), "{failed:?}");
    }
    for case in ["endless", "endless_line"] {
        let failed = failure(run(&plain(case)).await);
        assert!(
            matches!(&failed, JobFailure::Engine { reason } if reason.contains("its text is longer")),
            "{failed:?}"
        );
    }
}

#[tokio::test]
async fn program_that_does_not_read_its_input_can_answer() {
    let long = user_prompt(&"x".repeat(1 << 20));
    let done = finish(plain("deaf").admit(long).await.unwrap().start()).await.0.unwrap();
    assert_eq!(done.text, "no input needed\n");
}

#[tokio::test]
async fn regular_expressions_are_refused() {
    let mut prompt = user_prompt("hi");
    prompt.format = OutputFormat::Regex { pattern: "a".to_owned() };
    let done = finish(plain("echo").admit(prompt).await.unwrap().start()).await.0;
    assert!(failure(done).to_string().contains("do not support output by regular expression"));
}

fn is_running(process: &str) -> bool {
    // A killed process that is not reaped yet is a zombie.
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next()).is_some_and(|state| state != 'Z')
}

async fn until_ended(process: &str) {
    let begun = Instant::now();
    while is_running(process) {
        assert!(begun.elapsed() < Duration::from_secs(20), "process {process} is running");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn cancelled_call_ends_the_program_and_what_it_started() {
    let engine = plain("hangs");
    let mut generation = engine.admit(user_prompt("hi")).await.unwrap().start();
    assert_eq!((engine.state().running, engine.state().max_sequences), (1, 1));
    assert!(matches!(engine.admit(user_prompt("hi")).await, Err(AdmitError::NotNow { .. })));
    let process = loop {
        match generation.next().await {
            GenerationEvent::Step { text, .. } if !text.is_empty() => break text.trim().to_owned(),
            GenerationEvent::Step { .. } => {}
            other => panic!("{other:?}"),
        }
    };
    assert!(is_running(&process));
    drop(generation);
    until_ended(&process).await;
    let begun = Instant::now();
    while engine.state().running > 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", engine.state());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn run_has_a_maximum_time() {
    let config = CommandConfig { timeout_seconds: Some(1), ..plain_config(&["{model}"]) };
    let engine = engine("llm", &config, "hangs");
    let mut generation = engine.admit(user_prompt("hi")).await.unwrap().start();
    let mut text = String::new();
    let outcome = loop {
        match generation.next().await {
            GenerationEvent::Step { text: more, .. } => text.push_str(&more),
            GenerationEvent::Done(outcome) => break outcome,
        }
    };
    assert_eq!(failure(outcome).to_string(), "llm did not end within 1 s");
    until_ended(text.trim()).await;
}

#[tokio::test]
async fn missing_program_is_named_and_used_once_it_is_installed() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("agent");
    let config = CommandConfig { program: Some(program.clone()), ..CommandConfig::default() };
    let client = CommandClient::new("claude", &config, None, Arc::default()).unwrap();
    let engine = ProxyEngine::of_command("command:claude".parse().unwrap(), None, client.clone());
    let Residency::Unusable { reason } = engine.state().residency else { panic!("{:?}", engine.state()) };
    assert!(
        reason.contains("npm install -g @anthropic-ai/claude-code") && reason.contains("[commands.claude]"),
        "{reason}"
    );
    assert!(matches!(failure(run(&engine).await), JobFailure::Unavailable { .. }));
    let timing: Timing = serde_json::from_value(serde_json::json!({ "heartbeat_ms": 20 })).unwrap();
    let watch = tokio::spawn(client.watch(timing));
    std::os::unix::fs::symlink(script(), &program).unwrap();
    let begun = Instant::now();
    while engine.state().residency != Residency::Resident {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", engine.state());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    watch.abort();
}
