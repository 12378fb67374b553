//! The engine that runs a model in this process, with candle.

mod ahead;
mod architecture;
mod attention;
mod batcher;
mod card;
pub mod check;
mod dense;
mod elementwise;
mod feed_forward;
mod kv;
mod ledger;
mod linear;
mod lookup;
mod model;
mod opening;
mod others;
mod pace;
#[cfg(test)]
mod parity;
mod parked;
pub mod random;
mod rate;
mod room;
mod rope;
mod sequence;
mod settings;
mod share;
mod stretch;
mod team;
mod tensors;
mod tiles;
mod warm_up;
mod weights;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread::JoinHandle;
use std::time::{Instant, UNIX_EPOCH};

pub use cfq_memory::{Bytes, CardRoom, CardShare, Division, DoesNotFit, Need, divide};
use cfq_proto::job::{JobFailure, OutputFormat, Prompt, Written};
use cfq_proto::messages::WarmUp;
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, ModelState, Residency};
use futures::FutureExt;
use futures::future::BoxFuture;

use crate::engine::candle::ahead::{Piece, Turn};
use crate::engine::candle::architecture::Architecture;
pub use crate::engine::candle::card::{
    Card, Choice, DeviceChoice, Idle, Layout, NoCard, NoLayout, NoSuchDevice, Share, cards, choose_here,
    curated_that_fit, fit_on_cards, free_of, give_back, lasting_room, need_on_cards,
};
pub use crate::engine::candle::kv::{Arena, ParkedAs};
use crate::engine::candle::kv::{BLOCK, KvPool, Parking};
use crate::engine::candle::ledger::Sum;
pub use crate::engine::candle::ledger::{Estimate, estimate, need, need_corrected};
use crate::engine::candle::lookup::Lookup;
use crate::engine::candle::model::{Model, Network};
use crate::engine::candle::opening::{Opening, OpeningError};
use crate::engine::candle::others::{Other, OtherModel};
use crate::engine::candle::parked::Parts;
pub use crate::engine::candle::parked::{Parked, Stamp};
pub use crate::engine::candle::room::Changes;
use crate::engine::candle::room::{Figures, Room};
use crate::engine::candle::sequence::Job;
use crate::engine::candle::warm_up::warm_up;
use crate::engine::grammar::{GrammarError, Grammars};
use crate::engine::{Admitted, Ahead, Engine, Refused, Warmed, generation};
use crate::models::file::ModelFile;
use crate::models::header::HeaderError;
use crate::models::template::ChatTemplate;
use crate::models::tokenizer::Vocabulary;

/// How much of the machine a model may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes.
    pub memory: u64,
    pub max_sequences: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("{path} does not fit: it {source}. Free memory, raise memory_limit, or take a smaller model")]
    DoesNotFit { path: PathBuf, source: DoesNotFit },
    #[error("cannot load {path}")]
    Weights {
        path: PathBuf,
        #[source]
        source: candle_core::Error,
    },
    #[error("{path} cannot run on a card: its architecture runs on the CPU only, one sequence at a time")]
    NotOnCards { path: PathBuf },
    #[error("{path} does not fit on {cards}: it {source}")]
    NoLayout { path: PathBuf, cards: String, source: Box<NoLayout> },
    /// The sum said that it fits, and it did not.
    #[error("{path} was to fit on {cards} ({need}), and their memory ran out while it was loaded")]
    CardFull { path: PathBuf, cards: String, need: Box<Need>, source: Box<candle_core::Error> },
    #[error("cannot start the engine's thread")]
    Thread(#[source] std::io::Error),
}

/// What is read of a model before its weights.
struct Opened {
    began: Instant,
    file: ModelFile,
    vocabulary: Arc<Vocabulary>,
    template: Arc<ChatTemplate>,
}

impl Opened {
    /// `rows`: of the embedding, once the file was found to be one that can run.
    fn read(file: ModelFile, rows: u64, began: Instant) -> Result<Self, LoadError> {
        let vocabulary = Arc::new(Vocabulary::read(&file)?);
        if vocabulary.len() as u64 > rows {
            let tokens = vocabulary.len();
            return Err(file.unsupported(format!("it names {tokens} tokens and has {rows} embeddings")).into());
        }
        let template = Arc::new(ChatTemplate::read(&file, &vocabulary)?);
        Ok(Self { began, file, vocabulary, template })
    }
}

/// A model's weights and its pool, wherever they are.
struct Loaded<N: Network> {
    network: N,
    pool: KvPool<N::Memory>,
    need: Need,
    /// Bytes of the weights, counted.
    held: u64,
    /// All of it is computed in F32, see [`Model::is_plain`].
    plain: bool,
    on: On,
    /// What it is counted by, where it can be started again from its weights.
    sum: Option<Sum>,
}

/// What an engine computes on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct On {
    /// `cpu`, or its card or cards.
    device: String,
    /// What those cards give.
    shares: Vec<Share>,
}

impl On {
    fn cpu() -> Self {
        Self { device: "cpu".to_owned(), shares: Vec::new() }
    }
}

/// What the model's thread is asked for.
pub(crate) enum Order {
    Sequence(Box<Job>),
    Piece(Piece),
}

/// A loaded model.
pub struct CandleEngine {
    parts: Parts,
    need: Need,
    /// Bytes of the weights as held, counted after loading.
    weights: u64,
    room: Arc<Room>,
    jobs: SyncSender<Order>,
    turn: Turn,
    /// Gives the network back once nobody can send a job any more and the last has ended; `None` where it cannot be kept
    /// without its engine.
    thread: JoinHandle<Option<Model>>,
}

impl std::fmt::Debug for CandleEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CandleEngine").field("model", &self.parts.model).finish_non_exhaustive()
    }
}

impl CandleEngine {
    /// Loads the file and starts the model's thread; keys and values without room are lost. Takes seconds; not for an async
    /// thread.
    pub fn load(model: ModelId, path: &Path, limits: Limits, changes: Arc<Changes>) -> Result<Self, LoadError> {
        Self::load_parking(model, path, limits, changes, None)
    }

    /// The same, with keys and values parked in `arena` when there is no room for them or the model is unloaded.
    pub fn load_parking(
        model: ModelId,
        path: &Path,
        limits: Limits,
        changes: Arc<Changes>,
        arena: Option<Arc<Arena>>,
    ) -> Result<Self, LoadError> {
        Self::load_corrected(model, path, limits, 0, changes, arena)
    }

    /// The same where earlier loads took so many thousandths more than the sum says.
    pub fn load_corrected(
        model: ModelId,
        path: &Path,
        limits: Limits,
        correction: u64,
        changes: Arc<Changes>,
        arena: Option<Arc<Arena>>,
    ) -> Result<Self, LoadError> {
        let began = Instant::now();
        let file = ModelFile::read(path)?;
        let weights = |source| LoadError::Weights { path: path.to_owned(), source };
        if let Some(other) = Other::of(&file)? {
            let opened = Opened::read(file, other.shape.vocabulary, began)?;
            let need = Sum::of_other(&opened.file, &other)?.corrected(correction).fit(limits)?;
            tracing::info!(%model, %need, "loading model, which runs one sequence at a time");
            let network = OtherModel::load(&opened.file, &other).map_err(weights)?;
            let (held, pool) = (network.stored_bytes() as u64, network.pool(need.kv_tokens));
            let loaded = Loaded { network, pool, need, held, plain: true, on: On::cpu(), sum: None };
            return Self::start(model, opened, loaded, Limits { max_sequences: 1, ..limits }, changes, None);
        }
        let architecture = Architecture::read(&file)?;
        let opened = Opened::read(file, architecture.shape.vocabulary, began)?;
        let sum = Sum::of(&opened.file, &architecture, limits.max_sequences)?.corrected(correction);
        let need = sum.fit(limits)?;
        tracing::info!(%model, %need, "loading model");
        let network = Model::load(&opened.file, architecture, linear::kernels()).map_err(weights)?;
        let held = network.stored_bytes() as u64;
        let pool = KvPool::new(network.kv_shape(), need.kv_tokens as usize / BLOCK);
        let plain = network.is_plain();
        let loaded = Loaded { network, pool, need, held, plain, on: On::cpu(), sum: Some(sum) };
        Self::start(model, opened, loaded, limits, changes, arena)
    }

    /// Measures what was loaded and starts its thread.
    fn start<N>(
        model: ModelId,
        opened: Opened,
        loaded: Loaded<N>,
        limits: Limits,
        changes: Arc<Changes>,
        arena: Option<Arc<Arena>>,
    ) -> Result<Self, LoadError>
    where
        N: Network<Memory: Send> + Send + 'static,
    {
        let Opened { began, file, vocabulary, template } = opened;
        let Loaded { network, pool, need, held, plain, on, sum } = loaded;
        let load_rate = file.size() as f64 / began.elapsed().as_secs_f64();
        let figures = Figures::new(load_rate, changes.clone());
        let parking = arena.map(|arena| Parking::new(arena, &version(&model, &file, &on.device), plain));
        let mut pool = pool.parked_in(parking.clone());
        warm_up(&network, &mut pool, &figures)
            .map_err(|source| LoadError::Weights { path: file.path().to_owned(), source })?;
        let parts = Parts {
            model,
            on,
            sum,
            context: network.shape().context,
            original: network.original(),
            rewinds: N::REWINDS,
            grammars: Arc::new(Grammars::new(vocabulary.clone())),
            vocabulary,
            template,
            figures,
            parking,
        };
        let engine = parts.start(network, pool, need, held, limits, changes)?;
        let numbers = engine.parts.figures.read();
        tracing::info!(
            model = %engine.parts.model,
            device = engine.parts.on.device,
            seconds = began.elapsed().as_secs_f64(),
            prefill_rate = numbers.prefill_rate,
            decode_rate = numbers.decode_rate,
            "model loaded"
        );
        Ok(engine)
    }

    /// Ends what runs, parks its keys and values and gives the memory back. Blocks for as long as that takes.
    pub fn unload(self) {
        drop(self.park());
    }

    /// `cpu`, or its card or cards.
    pub fn device(&self) -> &str {
        &self.parts.on.device
    }

    /// What it has of cards; nothing on the CPU.
    pub fn shares(&self) -> &[Share] {
        &self.parts.on.shares
    }

    /// Bytes of the host's memory that it may yet take: what [`Self::need`] counts beside what a load leaves there. None on
    /// cards.
    pub fn to_come(&self) -> u64 {
        if !self.shares().is_empty() {
            return 0;
        }
        // A block's memory is taken when it is first used and kept; that of a pass is there from time to time only.
        let touched = self.need.kv_per_token.saturating_mul(self.parts.figures.read().kv_tokens);
        let pool = self.need.kv().saturating_sub(touched);
        pool.saturating_add(self.need.scratch).saturating_add(self.need.reserve)
    }

    pub fn need(&self) -> &Need {
        &self.need
    }

    /// Bytes that were predicted for what is in memory right after the load.
    pub fn predicted(&self) -> u64 {
        let warm = (warm_up::PROMPT.next_multiple_of(BLOCK) + BLOCK) as u64;
        self.need.weights + self.need.tables + self.need.kv_per_token * warm.min(self.need.kv_tokens)
    }

    /// Bytes of the weights as held; what [`Need::weights`] predicted.
    pub fn weights(&self) -> u64 {
        self.weights
    }

    /// Sequences put aside for want of room since the load; each went on later.
    pub fn preemptions(&self) -> u64 {
        self.parts.figures.read().preemptions
    }

    pub fn vocabulary(&self) -> &Vocabulary {
        &self.parts.vocabulary
    }

    async fn prepare(&self, prompt: Prompt, written: Written) -> Result<Prepared, Refused> {
        let Parts { template, vocabulary, grammars, .. } = &self.parts;
        let (template, vocabulary, grammars) = (template.clone(), vocabulary.clone(), grammars.clone());
        // Long prompts and new grammars take milliseconds to seconds of one core.
        let prepared =
            tokio::task::spawn_blocking(move || prepare(&template, &vocabulary, &grammars, prompt, &written)).await;
        let prepared = prepared.unwrap_or_else(|panic| {
            Err(JobFailure::Engine { reason: format!("preparing the prompt failed: {panic}") })
        });
        prepared.map_err(Refused::Failed)
    }
}

/// Names the content of a model's file as it is now, as far as its size and times tell.
fn version(model: &ModelId, file: &ModelFile, device: &str) -> String {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|m| m.modified()).ok();
    let inside = std::fs::read_dir(file.path()).into_iter().flatten().flatten();
    let newest = inside.filter_map(|entry| changed(&entry.path())).chain(changed(file.path())).max();
    let newest = newest.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    format!("{model} {} {} {} {device}", file.path().display(), file.size(), newest.as_nanos())
}

/// Tokens of the prompt that the rate is told of.
const TOLD_OF: f64 = 1000.0;

impl Engine for CandleEngine {
    fn state(&self) -> ModelState {
        let numbers = self.parts.figures.read();
        let residency = match numbers.broken {
            Some(reason) => Residency::Unusable { reason: format!("the engine stopped: {reason}") },
            None => Residency::Resident,
        };
        ModelState {
            model: self.parts.model.clone(),
            residency,
            device: self.parts.on.device.clone(),
            need_bytes: self.need.total(),
            context_tokens: u32::try_from(self.parts.context.min(self.room.capacity())).unwrap_or(u32::MAX),
            kv_tokens_free: self.room.free(),
            kv_tiers: KvTiers {
                device: numbers.kv_tokens,
                parked: self.parts.parking.as_ref().map_or(0, Parking::tokens),
            },
            running: self.room.running() as u32,
            max_sequences: self.room.max_sequences() as u32,
            prefill_rate: coarse(numbers.rate.of_prompt(TOLD_OF).unwrap_or(numbers.prefill_rate)),
            decode_rate: coarse(numbers.decode_rate),
            load_rate: coarse(numbers.load_rate),
            tokens_per_byte: coarse(numbers.tokens_per_byte),
        }
    }

    fn broken(&self) -> Option<String> {
        self.parts.figures.read().broken
    }

    fn vocabulary(&self) -> Option<i64> {
        Some(self.parts.vocabulary.name())
    }

    fn admit_after(&self, prompt: Prompt, written: Written) -> BoxFuture<'_, Result<Admitted, Refused>> {
        async move {
            let Prepared { opening, lookup, bytes, sampling } = self.prepare(prompt, written).await?;
            if sampling.deterministic && !self.parts.rewinds {
                let reason =
                    format!("{} cannot be deterministic here: it runs in candle-transformers", self.parts.model);
                return Err(Refused::Never { reason });
            }
            self.parts.figures.counted(opening.prompt, bytes);
            let (prompt, resumed) = (opening.prompt as u64, opening.resumed() as u64);
            let count = prompt + resumed;
            if count + 1 > self.parts.context {
                return Err(Refused::Failed(JobFailure::TooLong { need: count + 1, have: self.parts.context }));
            }
            let capacity = self.room.capacity();
            if count + 1 > capacity && prompt < capacity {
                // Written where there was more room; the prompt alone fits.
                let tokens = resumed as usize;
                let why = "this node's KV pool has no room for them beside the prompt";
                let reason = OpeningError::Contradicts { tokens, why }.to_string();
                return Err(Refused::Failed(JobFailure::Engine { reason }));
            }
            if count + 1 > capacity {
                let reason = format!("the prompt has {count} tokens, this node's KV pool {capacity}: {}", self.need);
                return Err(Refused::Never { reason });
            }
            if self.parts.figures.read().broken.is_some() {
                return Err(Refused::NotNow { need: Some(count + 1), have: 0 });
            }
            let asked = (prompt + u64::from(sampling.max_tokens.max(1))).min(self.parts.context);
            let longest = asked.min(capacity);
            let long = self.parts.original.is_some_and(|original| asked > original);
            let expected = count + self.room.expected(longest.saturating_sub(count));
            // A sequence takes whole blocks.
            let expected = expected.next_multiple_of(BLOCK as u64).min(capacity);
            let held =
                self.room.hold(expected).map_err(|full| Refused::NotNow { need: Some(full.need), have: full.have })?;
            let jobs = self.jobs.clone();
            Ok(Admitted::new(move || {
                let (outbox, reader) = generation();
                let job = Job { opening, lookup, sampling, longest: longest as usize, long, held, outbox };
                // If the thread is gone the job is dropped, and the reader hears of the failure.
                if jobs.try_send(Order::Sequence(Box::new(job))).is_err() {
                    tracing::warn!("the engine's thread takes no more work");
                }
                reader
            })
            .after(resumed as u32))
        }
        .boxed()
    }

    fn foresee(&self, expected: &WarmUp) -> BoxFuture<'_, Option<Ahead>> {
        let expected = expected.clone();
        async move { self.ahead(&expected).await }.boxed()
    }

    fn warm(&self, ahead: Arc<Ahead>) -> BoxFuture<'_, Warmed> {
        self.piece(ahead).boxed()
    }
}

struct Prepared {
    opening: Opening,
    lookup: Lookup,
    /// Of the messages' contents.
    bytes: usize,
    sampling: cfq_proto::job::Sampling,
}

fn prepare(
    template: &ChatTemplate,
    vocabulary: &Vocabulary,
    grammars: &Grammars,
    prompt: Prompt,
    written: &Written,
) -> Result<Prepared, JobFailure> {
    let rejected = |reason: String| JobFailure::Rejected { reason };
    let text = template.render(&prompt.messages).map_err(|e| rejected(e.to_string()))?;
    let tokens = vocabulary.encode_sequence(&text).map_err(|e| rejected(e.to_string()))?;
    if tokens.is_empty() {
        return Err(rejected("the prompt is empty".to_owned()));
    }
    let opening = Opening::new(tokens, &prompt.sampling, &prompt.format, written, (vocabulary, grammars));
    let opening = opening.map_err(|error| match error {
        OpeningError::Grammar(GrammarError::Unusable { .. }) => rejected(error.to_string()),
        OpeningError::Grammar(GrammarError::Tokens { .. } | GrammarError::Step { .. })
        | OpeningError::Contradicts { .. } => JobFailure::Engine { reason: error.to_string() },
    })?;
    let lookup = match prompt.sampling.prompt_lookup {
        true => {
            let previous = whole_chars(&prompt.sampling.previous);
            let mut previous = vocabulary.encode(previous).map_err(|e| rejected(e.to_string()))?;
            // What is longer than the answer cannot be repeated in it.
            previous.truncate(prompt.sampling.max_tokens as usize);
            Lookup::new(previous, opening.prompt).read(&opening.tokens)
        }
        false => Lookup::new(Vec::new(), opening.prompt),
    };
    let mut sampling = prompt.sampling;
    if !matches!(prompt.format, OutputFormat::JsonSchema { .. }) {
        // What is free to say anything may draft its answer first.
        sampling.enough.clear();
    }
    let bytes = prompt.messages.iter().map(|m| m.content.len()).sum();
    Ok(Prepared { opening, lookup, bytes, sampling })
}

/// What is looked at of a text to guess from: longer than any answer.
const PREVIOUS_BYTES: usize = 1 << 20;

fn whole_chars(text: &str) -> &str {
    &text[..text.floor_char_boundary(PREVIOUS_BYTES)]
}

/// Two significant digits: a rate that only trembles is no change of the ledger.
fn coarse(rate: f64) -> f64 {
    if rate <= 0.0 || !rate.is_finite() {
        return 0.0;
    }
    let unit = 10f64.powi(rate.log10().floor() as i32 - 1);
    (rate / unit).round() * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_coarse() {
        assert_eq!(coarse(1234.0), 1200.0);
        assert_eq!(coarse(0.0), 0.0);
        assert!((coarse(0.2871) - 0.29).abs() < 1e-9);
    }
}
