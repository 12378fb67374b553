//! Tests of the prefill hints for the critic's prompt, which are sent while the creator generates.

use cfq_proto::messages::PrefillHint;
use cfq_proto::task::{Agent, TaskState};

use super::fixture::{add, fixture, score};
use super::port::Reply;
use crate::driver::PrefillPredictor;
use crate::workstream::Mirror;
use crate::workstream::testing::UserRepo;

fn prompt_of(hint: &PrefillHint) -> &str {
    &hint.messages.last().unwrap().content
}

#[tokio::test]
async fn critic_prompt_starts_with_every_hint() {
    let mut fixture = fixture();
    fixture.spec.context_files = vec!["README.md".into()];
    fixture.spec.agents.beta.model = Some("path:/beta.gguf".parse().unwrap());
    let code = "```python\ndef sub(a, b):\n    return a - b\n```\n";
    let more = Reply::Text(format!("Both.\n\nadd.py\n```python\nadd = sum\n```\n\nsub.py\n{code}"));
    fixture.script(vec![add(1), more.clone()], vec![score(30), score(90)]);
    fixture.drive().await.unwrap();
    let records = fixture.port.0.lock().unwrap();
    let asked: Vec<_> = records.prompts.iter().filter(|(role, _)| *role == Agent::Beta).map(|(_, p)| p).collect();
    let predictors: &[PrefillPredictor] = &records.predictors;
    assert_eq!((asked.len(), predictors.len()), (2, 2), "only creators are followed");
    for ((asked, predictor), reply) in asked.iter().zip(predictors).zip([add(1), more]) {
        let Reply::Text(reply) = reply else { unreachable!() };
        let hints: Vec<PrefillHint> = (0..=reply.len()).map(|end| predictor(&reply[..end]).unwrap()).collect();
        for hint in &hints {
            assert_eq!((hint.role, hint.max_tokens), (Agent::Beta, asked.sampling.max_tokens));
            assert_eq!(hint.messages[0], asked.messages[0]);
            assert!(
                asked.messages[1].content.starts_with(prompt_of(hint)),
                "{} of {}",
                prompt_of(hint),
                asked.messages[1].content
            );
        }
        assert!(prompt_of(&hints[0]).contains("# sample"), "the context is known before anything is generated");
        let last = reply.trim_end().trim_end_matches('`');
        assert!(
            prompt_of(&hints[reply.len()]).ends_with(&last[last.len() - 15..]),
            "all files are known after the last line"
        );
    }
}

#[tokio::test]
async fn all_prompts_of_a_task_and_their_hints_show_the_same_map() {
    let mut fixture = fixture();
    let user = UserRepo::new(&[("sums.py", "def total(): pass\n"), ("README.md", "# sample\n")]);
    (fixture.spec.repo, fixture.spec.base) = (user.path().to_str().unwrap().to_owned(), Some(user.base.clone()));
    fixture.user = user;
    fixture.spec.agents.beta.model = Some("path:/beta.gguf".parse().unwrap());
    fixture.script(vec![add(1), add(2)], vec![score(30), score(90)]);
    fixture.drive().await.unwrap();
    let records = fixture.port.0.lock().unwrap();
    let hints: Vec<PrefillHint> = records.predictors.iter().map(|predictor| predictor("").unwrap()).collect();
    let prompts = records.prompts.iter().map(|(_, prompt)| &prompt.messages);
    let prompts: Vec<_> = prompts.chain(hints.iter().map(|hint| &hint.messages)).collect();
    assert_eq!(prompts.len(), 6);
    let start = "# Task\n\nWrite a Python function add(a, b) in add.py that returns the sum.\n\nLanguage: python\n\n# Map of the \
                 repository before the change\n";
    for messages in prompts {
        let text = &messages[1].content;
        let map = "\n\n```\nREADME.md\nsums.py\n  1: def total(): pass\n```\n";
        assert!(text.starts_with(start) && text.contains(map), "{text}");
    }
}

#[tokio::test]
async fn task_is_completed_without_a_map_if_none_can_be_made() {
    let fixture = fixture();
    fixture.script(vec![add(1)], vec![score(90)]);
    let mirror = Mirror::open(fixture.data.path(), &fixture.user.path()).unwrap();
    std::fs::write(mirror.path().join("symbols"), "not a folder").unwrap();
    fixture.drive().await.unwrap();
    assert_eq!(fixture.task_state(), TaskState::Merged);
    let records = fixture.port.0.lock().unwrap();
    assert!(records.prompts.iter().all(|(_, prompt)| !prompt.messages[1].content.contains("# Map")));
}

#[tokio::test]
async fn critic_behind_an_endpoint_gets_no_hints() {
    let fixture = fixture();
    fixture.script(vec![add(1)], vec![score(90)]);
    fixture.drive().await.unwrap();
    assert!(fixture.port.0.lock().unwrap().predictors.is_empty());
}
