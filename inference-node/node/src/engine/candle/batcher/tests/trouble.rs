//! What becomes of sequences when a card fails under them: the cards' forward pass on candle's CPU device, with the driver's
//! errors put in at its edge.

use std::sync::Mutex;

use candle_core::{DType, Device, Error, Result};
use cfq_memory::Shape;
use cfq_proto::job::JobFailure;

use super::*;
use crate::engine::candle::ahead::Piece;
use crate::engine::candle::card::{CardModel, Stage};
use crate::engine::candle::model::Trouble;
use crate::engine::{Ahead, Warmed};

/// As cudarc words it.
const NO_MEMORY: &str = "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")";
const LOST: &str = "DriverError(CUDA_ERROR_ECC_UNCORRECTABLE, \"uncorrectable ECC error encountered\")";

/// A card that fails when it is told to: before the pass with such a number, counted from 1.
struct Failing {
    card: CardModel,
    plan: Mutex<(usize, Vec<(usize, &'static str)>)>,
    /// Rows of the passes that went well.
    rows: Arc<Mutex<Vec<usize>>>,
}

impl Network for Failing {
    type Memory = <CardModel as Network>::Memory;

    fn shape(&self) -> &Shape {
        self.card.shape()
    }

    fn original(&self) -> Option<u64> {
        self.card.original()
    }

    fn forward(&self, pool: &mut KvPool<Self::Memory>, parts: &[Rows<'_>], exact: bool) -> Result<Option<Tensor>> {
        let mut plan = self.plan.lock().unwrap();
        plan.0 += 1;
        let now = plan.0;
        if let Some((_, error)) = plan.1.iter().find(|(at, _)| *at == now) {
            return Err(Error::Cuda((*error).into()));
        }
        self.rows.lock().unwrap().push(parts.iter().map(|part| part.tokens.len()).sum());
        self.card.forward(pool, parts, exact)
    }

    fn trouble(&self, error: &Error) -> Trouble {
        self.card.trouble(error)
    }

    fn into_kept(self) -> Option<Model> {
        None
    }
}

fn rig(fails: &[(usize, &'static str)]) -> (Rig<Failing>, Arc<Mutex<Vec<usize>>>) {
    let rows = Arc::<Mutex<Vec<usize>>>::default();
    let rig = Rig::over("llama", |file| {
        let architecture = Architecture::read(file).unwrap();
        let stage = Stage { device: Device::Cpu, layers: 0..architecture.shape.layers as usize };
        let card = CardModel::load(file, architecture, vec![stage]).unwrap();
        let pool = card.pool(64, DType::F32).unwrap();
        (Failing { card, plan: Mutex::new((0, fails.to_vec())), rows: rows.clone() }, pool)
    });
    (rig, rows)
}

async fn ended(mut reader: Generation) -> std::result::Result<Completion, Ended> {
    loop {
        if let Event::Done(how) = reader.next().await {
            return how;
        }
    }
}

#[tokio::test]
async fn without_memory_for_a_pass_everybody_waits_and_writes_the_same_text() {
    let mut texts = Vec::new();
    for fails in [&[][..], &[(3, NO_MEMORY), (9, NO_MEMORY), (40, NO_MEMORY)]] {
        let (mut rig, rows) = rig(fails);
        let readers: Vec<Generation> = (0..3).map(|at| rig.ask(rig.cases[at].ids.clone(), 30, false)).collect();
        rig.batcher.take_up();
        let mut after = None;
        while !rig.batcher.running.is_empty() || !rig.batcher.aside.is_empty() {
            rig.batcher.take_up();
            let preempted = rig.batcher.figures.read().preemptions;
            assert!(rig.batcher.step().is_ok());
            if rig.batcher.figures.read().preemptions > preempted && after.is_none() {
                assert_eq!((rig.batcher.running.len(), rig.batcher.aside.len()), (0, 3), "all wait");
                assert_eq!(rig.batcher.pool.available(), 64, "and hold nothing");
                rig.batcher.take_up();
                assert_eq!((rig.batcher.running.len(), rig.batcher.aside.len()), (1, 2), "the oldest goes on alone");
                after = Some(rows.lock().unwrap().len());
            }
        }
        assert_eq!(after.is_some(), !fails.is_empty());
        if let Some(after) = after {
            let rows = rows.lock().unwrap();
            assert!(
                rows[after] <= 8 && rows[..after].iter().any(|rows| *rows > 8),
                "{rows:?}, smaller from {after} on"
            );
        }
        assert_eq!(rig.batcher.figures.read().broken, None);
        for reader in readers {
            let done = end(reader).await;
            assert_eq!(done.usage.output_tokens, 30);
            texts.push(done.text);
        }
    }
    assert_eq!(texts[..3], texts[3..]);
}

/// A lost card, and one whose memory did not come back, end the engine: every sequence with a failure that another node may
/// make good, and then the engine says so itself, which is what the node ends over.
#[tokio::test]
async fn a_card_of_no_more_use_breaks_the_engine() {
    for (fails, word) in [
        (&[(2, LOST)][..], "ECC"),
        (&[(2, NO_MEMORY), (3, NO_MEMORY)], "twice in a row"),
        (&[(2, NO_MEMORY), (3, LOST)], "ECC"),
    ] {
        let (rig, _) = rig(fails);
        let figures = rig.batcher.figures.clone();
        let readers: Vec<Generation> = (0..3).map(|at| rig.ask(rig.cases[at].ids.clone(), 30, false)).collect();
        let Rig { batcher, jobs, room, .. } = rig;
        drop(jobs);
        assert!(batcher.run().is_none(), "nothing of it is kept");
        let broken = figures.read().broken.expect("the node is told");
        assert!(broken.contains(word), "{broken}");
        for reader in readers {
            let Err(Ended::Failed(failure @ JobFailure::Engine { .. })) = ended(reader).await else {
                panic!("{fails:?}")
            };
            assert!(failure.may_retry() && failure.to_string().contains(word), "{failure}");
        }
        assert_eq!(room.running(), 0, "its room is free");
    }
}

#[tokio::test]
async fn a_card_that_is_lost_while_nobody_runs_breaks_the_engine_too() {
    let (rig, _) = rig(&[(1, LOST)]);
    let figures = rig.batcher.figures.clone();
    let tokens = rig.cases.last().unwrap().ids.clone();
    let Rig { batcher, jobs, .. } = rig;
    let (piece, answered) = Piece::new(Arc::new(Ahead { tokens, long: false, exact: false }));
    jobs.send(Order::Piece(piece)).unwrap();
    let thread = std::thread::spawn(move || batcher.run().is_none());
    assert_eq!(answered.await, Ok(Warmed::Enough));
    assert!(thread.join().unwrap());
    assert!(figures.read().broken.is_some_and(|said| said.contains("ECC")));
    drop(jobs);
}

#[tokio::test]
async fn nothing_is_computed_ahead_while_a_card_is_short_of_memory() {
    let (mut rig, rows) = rig(&[(1, NO_MEMORY)]);
    let reader = rig.ask(rig.cases[0].ids.clone(), 5, false);
    rig.batcher.take_up();
    assert!(rig.batcher.step().is_ok());
    drop(reader);
    rig.finish();
    let tokens = rig.cases.last().unwrap().ids.clone();
    let computed = rows.lock().unwrap().len();
    assert_eq!(rig.batcher.ahead(&Ahead { tokens, long: false, exact: false }), Warmed::Enough);
    assert_eq!(rows.lock().unwrap().len(), computed);
}

#[tokio::test]
async fn what_was_wrong_with_a_pass_alone_breaks_nothing() {
    let (mut rig, _) = rig(&[]);
    let unknown = rig.batcher.model.shape().vocabulary as u32;
    let reader = rig.ask(vec![1, unknown], 5, false);
    rig.batcher.take_up();
    rig.finish();
    assert!(matches!(ended(reader).await, Err(Ended::Failed(JobFailure::Engine { .. }))));
    let reader = rig.ask(rig.cases[0].ids.clone(), 5, false);
    rig.batcher.take_up();
    rig.finish();
    assert_eq!(end(reader).await.usage.output_tokens, 5);
}
