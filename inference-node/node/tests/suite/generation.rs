//! Generation.

use crate::smollm::{answer, ask, engine};

#[tokio::test]
#[ignore = "prints rates and answers; run by hand with --ignored --nocapture"]
async fn rates() {
    let engine = engine();
    use cfq_inference_node::engine::Engine;
    println!("{}", engine.need());
    println!("{:?}", engine.state());
    for question in [
        "write a Python function that adds two numbers",
        "What is the capital of France, and name one famous building there?",
        "List three fruits.",
    ] {
        let mut prompt = ask(question);
        prompt.sampling.max_tokens = 160;
        let done = answer(&engine, prompt).await;
        let usage = done.usage;
        let decode = f64::from(usage.output_tokens - 1) * 1e3 / (usage.total_ms - usage.first_token_ms) as f64;
        println!("{question}\n{}\n{usage:?} decode {decode:.1}/s", done.text);
    }
    println!("{:?}", engine.state());
}
