//! `cfq models fit`: the memory ledger's sum for one model, without loading it and without a server.

mod cards;

use std::path::PathBuf;

use cfq_inference_node::engine::candle::{Bytes, DeviceChoice, Division, Estimate, LoadError, Need, divide, estimate};
use cfq_inference_node::gpu;
use cfq_inference_node::models::{ModelError, Store, Took};
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::node::{Device, DeviceKind};
use serde::Serialize;

use self::cards::OnCards;
use super::refused;
use crate::config::{Config, Node};
use crate::exit;
use crate::output;

/// Lengths worth a line; a model's own longest comes last.
const LENGTHS: [u64; 7] = [2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072];

/// The term that is left out where there is none.
const MORE: &str = "correction";

#[derive(Serialize)]
pub struct Fit {
    model: ModelId,
    path: PathBuf,
    /// Bytes.
    file: u64,
    /// Longest sequence, in tokens.
    context: u64,
    /// It runs on no card, and one sequence at a time.
    alone: bool,
    /// On the CPU.
    terms: Terms,
    /// What loads here took, and what was predicted for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<Took>,
    /// Why what was measured is not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    unmeasured: Option<String>,
    places: Vec<Place>,
}

/// In bytes.
#[derive(Serialize)]
pub struct Terms {
    weights: u64,
    tables: u64,
    correction: u64,
    kv_per_token: u64,
    scratch: u64,
    loading: u64,
    reserve: u64,
}

/// Where it could run.
#[derive(Serialize)]
struct Place {
    device: String,
    name: String,
    /// Bytes that are free there for a model.
    available: u64,
    /// Bytes beside them for parked KV.
    parked_kv: u64,
    /// This build runs models there, and the configuration's `device` lets it.
    used: bool,
    /// Where it is a card, or all of them together.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    on_cards: Option<OnCards>,
    lengths: Vec<Length>,
}

/// One sequence of so many tokens.
#[derive(Serialize)]
struct Length {
    tokens: u64,
    total: u64,
    fits: bool,
}

pub fn fit(store: &Store, config: &Config, model: ModelId) -> anyhow::Result<Fit> {
    let path = match model.source() {
        ModelSource::Path(path) => path,
        _ if model.endpoint().is_some() => return Err(refused(ModelError::Proxied { model })),
        _ => store.show(&model).map_err(refused)?.path,
    };
    let mut sums = estimate(&path, config.node.max_sequences).map_err(|error| match error {
        // The file asked about is not one of ours.
        LoadError::Header(source) => exit::usage(format!("{:#}", anyhow::Error::from(source))),
        error => error.into(),
    })?;
    let (measured, unmeasured) = match store.measured(&model) {
        Ok(measured) => (measured, None),
        Err(error) => (None, Some(format!("{:#}", anyhow::Error::from(error)))),
    };
    let devices = gpu::inventory().devices;
    let on_cpu = measured.as_ref().and_then(|measured| measured.on("cpu"));
    sums.cpu = sums.cpu.corrected(on_cpu.map_or(0, Took::thousandths));
    let mut places: Vec<Place> = devices.iter().filter_map(|device| on_host(device, &sums, &config.node)).collect();
    if !sums.alone {
        places.extend(cards::places(&devices, &path, sums.context, measured.as_ref(), &config.node)?);
    }
    let Estimate { file, context, cpu, alone } = sums;
    Ok(Fit { model, path, file, context, alone, terms: cpu.into(), measured: on_cpu, unmeasured, places })
}

/// `None`: it is a card.
fn on_host(device: &Device, sums: &Estimate, node: &Node) -> Option<Place> {
    match device.kind {
        DeviceKind::Cpu => {}
        DeviceKind::Cuda => return None,
    }
    let free = device.memory_total.saturating_sub(device.memory_others);
    let division = divide(free.min(node.memory_limit.unwrap_or(u64::MAX)), node.parked_kv);
    let Division { models: available, parked: parked_kv } = division;
    let length = |tokens| {
        let total = sums.cpu.with_tokens(tokens).total();
        Length { tokens, total, fits: total <= available }
    };
    let used = matches!(node.device, DeviceChoice::Auto | DeviceChoice::Cpu);
    let (device, name) = (device.id.clone(), device.name.clone());
    let lengths = lengths(sums.context).map(length).collect();
    Some(Place { device, name, available, parked_kv, used, on_cards: None, lengths })
}

fn lengths(context: u64) -> impl Iterator<Item = u64> {
    LENGTHS.into_iter().filter(move |tokens| *tokens < context).chain([context])
}

impl From<Need> for Terms {
    fn from(need: Need) -> Self {
        let Need { weights, tables, correction, kv_per_token, kv_tokens: _, scratch, loading, reserve } = need;
        Self { weights, tables, correction, kv_per_token, scratch, loading, reserve }
    }
}

pub fn words(fit: &Fit) -> String {
    let t = &fit.terms;
    let mut lines = vec![
        format!(
            "{}: {} in {}, sequences of up to {} tokens",
            fit.model,
            Bytes(fit.file),
            fit.path.display(),
            fit.context
        ),
        String::new(),
    ];
    let rows: Vec<Vec<String>> = [
        ("weights", Bytes(t.weights).to_string(), "as the CPU's kernels want them"),
        ("tables", Bytes(t.tables).to_string(), "norms, biases, the tokenizer"),
        (MORE, Bytes(t.correction).to_string(), "by which earlier loads took more than weights and tables"),
        ("KV", format!("{} a token", Bytes(t.kv_per_token)), "keys and values"),
        ("scratch", Bytes(t.scratch).to_string(), "activations of the largest pass"),
        ("loading", Bytes(t.loading).to_string(), "beside weights and tables, before there are keys and values"),
        ("reserve", Bytes(t.reserve).to_string(), "the rest of the process"),
    ]
    .into_iter()
    .filter(|(term, ..)| *term != MORE || t.correction > 0)
    .map(|(term, size, what)| vec![term.to_owned(), size, what.to_owned()])
    .collect();
    lines.push(output::table(&["TERM", "SIZE", "WHAT"], &rows));
    if fit.alone {
        lines.push("\nits architecture runs on the CPU only, one sequence at a time, in 32 bits".to_owned());
    }
    if let Some(took) = &fit.measured {
        lines.push(format!(
            "\nmeasured: loads here took {}, predicted were {}",
            Bytes(took.took),
            Bytes(took.predicted)
        ));
    }
    if let Some(why) = &fit.unmeasured {
        lines.push(format!("\n{}", output::plain(why)));
    }
    for place in &fit.places {
        let how = match (&place.on_cards, place.used) {
            (None, true) => format!(" to models, {} beside that for parked KV", Bytes(place.parked_kv)),
            (Some(_), true) => String::new(),
            (Some(_), false) if !gpu::uses_cards() => format!("; {}, so what it would take", gpu::use_of_cards()),
            (_, false) => "; the configuration's device puts nothing there, so what it would take".to_owned(),
        };
        lines.push(format!(
            "\n{} ({}): {} available{how}",
            place.device,
            output::plain(&place.name),
            Bytes(place.available)
        ));
        lines.extend(place.on_cards.as_ref().map(OnCards::words));
        if place.lengths.is_empty() {
            continue;
        }
        let row = |l: &Length| {
            vec![l.tokens.to_string(), Bytes(l.total).to_string(), if l.fits { "yes" } else { "no" }.to_owned()]
        };
        lines.push(output::table(
            &["ONE SEQUENCE OF", "TOTAL", "FITS"],
            &place.lengths.iter().map(row).collect::<Vec<_>>(),
        ));
    }
    lines.join("\n")
}
