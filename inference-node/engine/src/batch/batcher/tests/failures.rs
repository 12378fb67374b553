//! Tests of GPU failures: the CUDA forward pass runs on candle's CPU device, and driver errors are injected.

use std::sync::Mutex;

use candle_core::{DType, Device, Error, Result, Tensor};
use cfq_memory::ModelShape;
use cfq_proto::job::JobFailure;

use super::*;
use crate::backend::cuda::{CudaModel, Stage};
use crate::batch::speculative_prefill::{ChunkSlot, PrefillChunk};

/// Driver errors as cudarc formats them.
const NO_MEMORY: &str = "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")";
const DEVICE_LOST: &str = "DriverError(CUDA_ERROR_ECC_UNCORRECTABLE, \"uncorrectable ECC error encountered\")";

/// A model whose forward passes fail at given pass numbers.
struct FailingModel {
    model: CudaModel,
    /// Number of passes so far, and the injected errors with the number of the pass in which each occurs, counted from
    /// 1.
    failures: Mutex<(usize, Vec<(usize, &'static str)>)>,
    /// Numbers of rows of the successful passes.
    rows: Arc<Mutex<Vec<usize>>>,
}

impl ForwardModel for FailingModel {
    type Memory = <CudaModel as ForwardModel>::Memory;

    fn shape(&self) -> &ModelShape {
        self.model.shape()
    }

    fn original_context(&self) -> Option<u64> {
        self.model.original_context()
    }

    fn forward(
        &self,
        pool: &mut KvPool<Self::Memory>,
        batch: &[BatchEntry<'_>],
        batch_invariant: bool,
    ) -> Result<Option<Tensor>> {
        let mut failures = self.failures.lock().unwrap();
        failures.0 += 1;
        let pass = failures.0;
        if let Some((_, error)) = failures.1.iter().find(|(at, _)| *at == pass) {
            return Err(Error::Cuda((*error).into()));
        }
        self.rows.lock().unwrap().push(batch.iter().map(|entry| entry.tokens.len()).sum());
        self.model.forward(pool, batch, batch_invariant)
    }

    fn failure(&self, error: &Error) -> ForwardFailure {
        self.model.failure(error)
    }
}

fn rig(failures: &[(usize, &'static str)]) -> (Rig<FailingModel>, Arc<Mutex<Vec<usize>>>) {
    let rows = Arc::<Mutex<Vec<usize>>>::default();
    let rig = Rig::with_model("llama", |file| {
        let architecture = Architecture::read(file).unwrap();
        let stage = Stage { device: Device::Cpu, layers: 0..architecture.shape.layers as usize };
        let model = CudaModel::load(file, architecture, vec![stage]).unwrap();
        let pool = model.pool(64, DType::F32).unwrap();
        (FailingModel { model, failures: Mutex::new((0, failures.to_vec())), rows: rows.clone() }, pool)
    });
    (rig, rows)
}

async fn ended(mut reader: Generation) -> std::result::Result<Completion, GenerationError> {
    loop {
        if let GenerationEvent::Done(result) = reader.next().await {
            return result;
        }
    }
}

#[tokio::test]
async fn pass_without_memory_preempts_all_and_changes_no_text() {
    let mut texts = Vec::new();
    for failures in [&[][..], &[(3, NO_MEMORY), (9, NO_MEMORY), (40, NO_MEMORY)]] {
        let (mut rig, rows) = rig(failures);
        let readers: Vec<Generation> = (0..3).map(|at| rig.submit(rig.cases[at].ids.clone(), 30, false)).collect();
        rig.batcher.drain_commands();
        let mut after_failure = None;
        while !rig.batcher.running.is_empty() || !rig.batcher.preempted.is_empty() {
            rig.batcher.drain_commands();
            let preempted = rig.batcher.stats.snapshot().preemptions;
            assert!(rig.batcher.step().is_ok());
            if rig.batcher.stats.snapshot().preemptions > preempted && after_failure.is_none() {
                assert_eq!((rig.batcher.running.len(), rig.batcher.preempted.len()), (0, 3), "all are preempted");
                assert_eq!(rig.batcher.pool.available(), 64, "and have released their blocks");
                rig.batcher.drain_commands();
                assert_eq!(
                    (rig.batcher.running.len(), rig.batcher.preempted.len()),
                    (1, 2),
                    "the oldest resumes alone"
                );
                after_failure = Some(rows.lock().unwrap().len());
            }
        }
        assert_eq!(after_failure.is_some(), !failures.is_empty());
        if let Some(after) = after_failure {
            let rows = rows.lock().unwrap();
            assert!(
                rows[after] <= 8 && rows[..after].iter().any(|rows| *rows > 8),
                "{rows:?}, expected smaller from {after} on"
            );
        }
        assert_eq!(rig.batcher.stats.snapshot().failure, None);
        for reader in readers {
            let done = end(reader).await;
            assert_eq!(done.usage.output_tokens, 30);
            texts.push(done.text);
        }
    }
    assert_eq!(texts[..3], texts[3..]);
}

/// A lost GPU, and a GPU that runs out of memory twice in a row, break the engine: every sequence fails with an error
/// after which its call may be retried on another node, and the stats report the failure.
#[tokio::test]
async fn unusable_gpu_breaks_the_engine() {
    for (failures, word, out_of_memory) in [
        (&[(2, DEVICE_LOST)][..], "ECC", false),
        (&[(2, NO_MEMORY), (3, NO_MEMORY)], "twice in a row", true),
        (&[(2, NO_MEMORY), (3, DEVICE_LOST)], "ECC", false),
    ] {
        let (rig, _) = rig(failures);
        let stats = rig.batcher.stats.clone();
        let readers: Vec<Generation> = (0..3).map(|at| rig.submit(rig.cases[at].ids.clone(), 30, false)).collect();
        let Rig { batcher, commands, admission, .. } = rig;
        drop(commands);
        assert!(batcher.run().is_none(), "the model is not kept");
        let recorded = stats.snapshot().failure.expect("the stats report it");
        assert_eq!(matches!(recorded, EngineFailure::OutOfMemory { .. }), out_of_memory, "{recorded}");
        assert_eq!(matches!(recorded, EngineFailure::DeviceLost { .. }), !out_of_memory, "{recorded}");
        assert!(recorded.to_string().contains(word), "{recorded}");
        for reader in readers {
            let Err(GenerationError::Failed(failure @ JobFailure::Engine { .. })) = ended(reader).await else {
                panic!("{failures:?}")
            };
            assert!(failure.may_retry() && failure.to_string().contains(word), "{failure}");
        }
        assert_eq!(admission.running(), 0, "all reservations are released");
    }
}

#[tokio::test]
async fn gpu_lost_during_speculative_prefill_breaks_the_engine() {
    let (rig, _) = rig(&[(1, DEVICE_LOST)]);
    let stats = rig.batcher.stats.clone();
    let tokens = rig.cases.last().unwrap().ids.clone();
    let Rig { batcher, commands, .. } = rig;
    let prompt = Arc::new(SpeculativePrompt { tokens, long_context: false, batch_invariant: false });
    let (chunk, result) = PrefillChunk::new(prompt, ChunkSlot::default().take().unwrap());
    commands.send(EngineCommand::PrefillChunk(chunk)).unwrap();
    let thread = std::thread::spawn(move || batcher.run().is_none());
    assert_eq!(result.await, Ok(PrefillProgress::Done));
    assert!(thread.join().unwrap());
    let recorded = stats.snapshot().failure.expect("the stats report it");
    assert!(matches!(&recorded, EngineFailure::DeviceLost { error } if error.contains("ECC")), "{recorded}");
    drop(commands);
}

#[tokio::test]
async fn no_speculative_prefill_while_the_gpu_is_short_of_memory() {
    let (mut rig, rows) = rig(&[(1, NO_MEMORY)]);
    let reader = rig.submit(rig.cases[0].ids.clone(), 5, false);
    rig.batcher.drain_commands();
    assert!(rig.batcher.step().is_ok());
    drop(reader);
    rig.run_until_idle();
    let tokens = rig.cases.last().unwrap().ids.clone();
    let computed = rows.lock().unwrap().len();
    let prompt = SpeculativePrompt { tokens, long_context: false, batch_invariant: false };
    assert_eq!(rig.batcher.prefill_speculatively(&prompt), PrefillProgress::Done);
    assert_eq!(rows.lock().unwrap().len(), computed);
}

#[tokio::test]
async fn failure_of_one_pass_does_not_break_the_engine() {
    let (mut rig, _) = rig(&[]);
    let unknown = rig.batcher.model.shape().vocabulary as u32;
    let reader = rig.submit(vec![1, unknown], 5, false);
    rig.batcher.drain_commands();
    rig.run_until_idle();
    assert!(matches!(ended(reader).await, Err(GenerationError::Failed(JobFailure::Engine { .. }))));
    let reader = rig.submit(rig.cases[0].ids.clone(), 5, false);
    rig.batcher.drain_commands();
    rig.run_until_idle();
    assert_eq!(end(reader).await.usage.output_tokens, 5);
}
