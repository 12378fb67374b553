//! What is said of the critic's prompt while the creator writes.

use cfq_proto::messages::WarmUp;
use cfq_proto::task::Agent;

use super::bench::{add, bench, score};
use super::port::Reply;
use crate::driver::Foresee;

fn end(ahead: &WarmUp) -> &str {
    &ahead.messages.last().unwrap().content
}

#[tokio::test]
async fn the_critics_prompt_begins_with_what_was_foreseen_however_far_the_creator_was() {
    let mut bench = bench();
    bench.spec.context_files = vec!["README.md".into()];
    bench.spec.agents.beta.model = Some("path:/beta.gguf".parse().unwrap());
    let code = "```python\ndef sub(a, b):\n    return a - b\n```\n";
    let more = Reply::Text(format!("Both.\n\nadd.py\n```python\nadd = sum\n```\n\nsub.py\n{code}"));
    bench.script(vec![add(1), more.clone()], vec![score(30), score(90)]);
    bench.drive().await.unwrap();
    let records = bench.port.0.lock().unwrap();
    let asked: Vec<_> = records.prompts.iter().filter(|(role, _)| *role == Agent::Beta).map(|(_, p)| p).collect();
    let foresee: &[Foresee] = &records.foresee;
    assert_eq!((asked.len(), foresee.len()), (2, 2), "only creators are followed");
    for ((asked, foresee), reply) in asked.iter().zip(foresee).zip([add(1), more]) {
        let Reply::Text(reply) = reply else { unreachable!() };
        let known: Vec<WarmUp> = (0..=reply.len()).map(|end| foresee(&reply[..end]).unwrap()).collect();
        for ahead in &known {
            assert_eq!((ahead.role, ahead.max_tokens), (Agent::Beta, asked.sampling.max_tokens));
            assert_eq!(ahead.messages[0], asked.messages[0]);
            assert!(
                asked.messages[1].content.starts_with(end(ahead)),
                "{} of {}",
                end(ahead),
                asked.messages[1].content
            );
        }
        assert!(end(&known[0]).contains("# sample"), "the context is known before anything is written");
        let last = reply.trim_end().trim_end_matches('`');
        assert!(
            end(&known[reply.len()]).ends_with(&last[last.len() - 15..]),
            "and all of the files after the last line"
        );
    }
}

#[tokio::test]
async fn a_critic_behind_an_endpoint_is_asked_nothing_ahead() {
    let bench = bench();
    bench.script(vec![add(1)], vec![score(90)]);
    bench.drive().await.unwrap();
    assert!(bench.port.0.lock().unwrap().foresee.is_empty());
}
