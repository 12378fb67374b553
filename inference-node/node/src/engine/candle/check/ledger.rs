//! What the ledger predicts of a load, beside what the load took.
//!
//! On a card the driver is asked before and after, and NVML where it answers: both count the whole card, so nothing else may
//! begin or end there meanwhile. On the CPU it is this process's resident memory, in which pages that an earlier model gave
//! back are found again: small models may seem to take nothing.

use std::path::Path;
use std::sync::Arc;

use cfq_memory::Bytes;
use cfq_proto::model::ModelId;
use serde::Serialize;

use crate::engine::candle::card::{Card, memory};
use crate::engine::candle::check::{Under, Undone, shapes, with_file};
use crate::engine::candle::{CandleEngine, Limits};

#[derive(Debug, Clone, Serialize)]
pub struct LedgerRow {
    pub model: String,
    /// The sum, as `cfq models fit` prints it.
    pub sum: String,
    /// Bytes predicted to be held once it runs: weights, tables, the pool (on the CPU what of it was touched).
    pub predicted: u64,
    /// Bytes more than before the load.
    pub measured: u64,
    /// Who measured: `driver`, `nvml` or `process`.
    pub by: &'static str,
    /// How far apart they may be, in bytes, where that decides: by the driver's count only. NVML's has in it what the process
    /// keeps for the next pass, the process's what an earlier model left.
    pub allowed: Option<u64>,
}

impl LedgerRow {
    pub(super) fn of(model: &str, sum: String, predicted: u64, measured: u64, by: &'static str) -> Self {
        let allowed = (by == DRIVER).then_some(predicted / 10 + (64 << 20));
        Self { model: model.to_owned(), sum, predicted, measured, by, allowed }
    }

    pub fn failed(&self) -> bool {
        self.allowed.is_some_and(|allowed| self.predicted.abs_diff(self.measured) > allowed)
    }
}

const DRIVER: &str = "driver";

pub fn check(
    under: &Under,
    quick: bool,
    folder: &Path,
    tell: &mut dyn FnMut(&str),
    undone: &mut dyn FnMut(String, Undone),
) -> Vec<LedgerRow> {
    let mut rows = Vec::new();
    for (name, shape) in shapes::sizes(quick) {
        tell(&format!("the ledger of {name}"));
        let done = with_file(&shape, folder, |path| match under {
            Under::Cpu => on_cpu(name, path),
            Under::Card(card) => on_card(name, path, card),
        });
        match done {
            Ok(found) => rows.extend(found),
            Err(reason) => undone(format!("the ledger of {name}"), reason),
        }
    }
    rows
}

const SEQUENCES: u32 = 8;

fn on_card(name: &str, path: &Path, card: &Card) -> Result<Vec<LedgerRow>, Undone> {
    let driver = || {
        // What was given back is free once it was come to.
        card.device.synchronize().ok()?;
        memory(&card.device).map(|(free, total)| total.saturating_sub(free))
    };
    let meters: [(&'static str, &dyn Fn() -> Option<u64>); 2] =
        [(DRIVER, &driver), ("nvml", &|| by_nvml(card.uuid.as_deref()?))];
    let before = meters.map(|(by, read)| (by, read, read()));
    let limits = Limits { memory: u64::MAX, max_sequences: SEQUENCES };
    let model = "path:check".parse::<ModelId>().map_err(|error| Undone::Failed(error.to_string()))?;
    let engine = CandleEngine::load_on_cards(model, path, std::slice::from_ref(card), 1, limits, Arc::default(), None)
        .map_err(|error| Undone::of_load(&error))?;
    let row = |(by, read, before): (&'static str, &dyn Fn() -> Option<u64>, Option<u64>)| {
        let measured = read()?.saturating_sub(before?);
        let (sum, predicted) = (engine.need().to_string(), engine.need().held());
        Some(LedgerRow::of(name, sum, predicted, measured, by))
    };
    let rows: Vec<LedgerRow> = before.into_iter().filter_map(row).collect();
    match rows.iter().any(|row| row.allowed.is_some()) {
        true => Ok(rows),
        false => Err(Undone::NoRoom("the driver does not say what is free".to_owned())),
    }
}

/// Of the same card, and not of another that has its number.
fn by_nvml(uuid: &str) -> Option<u64> {
    let nvml = nvml_wrapper::Nvml::init().ok()?;
    let device = nvml.device_by_uuid(uuid).ok()?;
    Some(device.memory_info().ok()?.used)
}

fn on_cpu(name: &str, path: &Path) -> Result<Vec<LedgerRow>, Undone> {
    let untold = || Undone::NoRoom("this system does not say what a process holds".to_owned());
    let before = resident().ok_or_else(untold)?;
    let limits = Limits { memory: crate::gpu::available_memory(), max_sequences: SEQUENCES };
    let model = "path:check".parse::<ModelId>().map_err(|error| Undone::Failed(error.to_string()))?;
    let engine = CandleEngine::load(model, path, limits, Arc::default()).map_err(|error| Undone::of_load(&error))?;
    let measured = resident().unwrap_or(before).saturating_sub(before);
    let need = engine.need();
    // A block's memory is taken when it is used, and nothing was asked yet.
    let predicted = need.with_tokens(0).held();
    Ok(vec![LedgerRow::of(name, need.to_string(), predicted, measured, "process")])
}

fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

impl LedgerRow {
    pub fn words(&self) -> String {
        format!("predicted {}, measured {} ({})", Bytes(self.predicted), Bytes(self.measured), self.by)
    }
}
