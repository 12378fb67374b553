//! `cfq models fit`: the memory estimate of one model, without loading it and without a server.

mod gpus;

use std::path::PathBuf;

use cfq_engine::{LoadError, ModelSummary, summarize_model};
use cfq_inference_node::gpu;
use cfq_inference_node::gpu::DeviceChoice;
use cfq_inference_node::models::{MeasuredLoad, ModelError, ModelStore};
use cfq_memory::{Bytes, HostMemorySplit, MemoryEstimate, split_host_memory};
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::node::{Device, DeviceKind};
use serde::Serialize;

use self::gpus::GpuPlacement;
use super::model_error;
use crate::config::{Config, NodeConfig};
use crate::exit;
use crate::output;

/// Context lengths for which the report has a row, in tokens. A last row shows the model's maximum length.
const CONTEXT_LENGTHS: [u64; 7] = [2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072];

/// Name of the only term that the report omits if its value is zero.
const OVERHEAD_TERM: &str = "overhead";

#[derive(Serialize)]
pub struct FitReport {
    model: ModelId,
    path: PathBuf,
    /// File size, in bytes.
    file: u64,
    /// Longest sequence, in tokens.
    context: u64,
    /// True if the model runs only on the CPU, one sequence at a time.
    alone: bool,
    /// The estimate on the CPU.
    terms: MemoryTerms,
    /// Memory that earlier loads on this machine used, and the prediction for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<MeasuredLoad>,
    /// Reason why the measurements of earlier loads are not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    unmeasured: Option<String>,
    places: Vec<Placement>,
}

/// The terms of a memory estimate, in bytes.
#[derive(Serialize)]
pub struct MemoryTerms {
    weights: u64,
    tables: u64,
    overhead: u64,
    kv_per_token: u64,
    scratch: u64,
    loading: u64,
    reserve: u64,
}

/// A device, or several GPUs together, on which the model could run.
#[derive(Serialize)]
struct Placement {
    device: String,
    name: String,
    /// Memory that is free for a model, in bytes.
    available: u64,
    /// Additional memory for KV offload, in bytes.
    kv_offload_bytes: u64,
    /// True if this build can run models on the device and the `device` setting permits it.
    used: bool,
    /// Estimate for GPUs; `None` for the CPU.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    on_gpus: Option<GpuPlacement>,
    lengths: Vec<LengthFit>,
}

/// Memory that the model needs for one sequence of `tokens` tokens.
#[derive(Serialize)]
struct LengthFit {
    tokens: u64,
    total: u64,
    fits: bool,
}

pub fn fit(store: &ModelStore, config: &Config, model: ModelId) -> anyhow::Result<FitReport> {
    let path = match model.source() {
        ModelSource::Path(path) => path,
        _ if model.endpoint().is_some() => return Err(model_error(ModelError::BehindEndpoint { model })),
        _ => store.show(&model).map_err(model_error)?.path,
    };
    let mut sums = summarize_model(&path, config.node.max_sequences).map_err(|error| match error {
        // The file is not a supported model.
        LoadError::Header(source) => exit::usage(format!("{:#}", anyhow::Error::from(source))),
        error => error.into(),
    })?;
    let (measured, unmeasured) = match store.load_measurements(&model) {
        Ok(measured) => (measured, None),
        Err(error) => (None, Some(format!("{:#}", anyhow::Error::from(error)))),
    };
    let devices = gpu::inventory().devices;
    let on_cpu = measured.as_ref().and_then(|measured| measured.on_device("cpu"));
    sums.cpu = sums.cpu.with_overhead(on_cpu.map_or(0, MeasuredLoad::overhead_per_mille));
    let mut places: Vec<Placement> = devices.iter().filter_map(|device| on_host(device, &sums, &config.node)).collect();
    if !sums.single_sequence {
        places.extend(gpus::placements(&devices, &path, sums.context, measured.as_ref(), &config.node)?);
    }
    let ModelSummary { file_bytes: file, context, cpu, single_sequence: alone } = sums;
    Ok(FitReport { model, path, file, context, alone, terms: cpu.into(), measured: on_cpu, unmeasured, places })
}

/// Returns the placement on a CPU; `None` if `device` is a GPU.
fn on_host(device: &Device, sums: &ModelSummary, node: &NodeConfig) -> Option<Placement> {
    match device.kind {
        DeviceKind::Cpu => {}
        DeviceKind::Cuda => return None,
    }
    let free = device.memory_total.saturating_sub(device.memory_others);
    let division = split_host_memory(free.min(node.memory_limit.unwrap_or(u64::MAX)), node.kv_offload_bytes);
    let HostMemorySplit { models: available, kv_offload: kv_offload_bytes } = division;
    let length = |tokens| {
        let total = sums.cpu.with_kv_tokens(tokens).total();
        LengthFit { tokens, total, fits: total <= available }
    };
    let used = matches!(node.device, DeviceChoice::Auto | DeviceChoice::Cpu);
    let (device, name) = (device.id.clone(), device.name.clone());
    let lengths = context_lengths(sums.context).map(length).collect();
    Some(Placement { device, name, available, kv_offload_bytes, used, on_gpus: None, lengths })
}

fn context_lengths(context: u64) -> impl Iterator<Item = u64> {
    CONTEXT_LENGTHS.into_iter().filter(move |tokens| *tokens < context).chain([context])
}

impl From<MemoryEstimate> for MemoryTerms {
    fn from(need: MemoryEstimate) -> Self {
        let MemoryEstimate { weights, tables, overhead, kv_per_token, kv_tokens: _, scratch, loading, reserve } = need;
        Self { weights, tables, overhead, kv_per_token, scratch, loading, reserve }
    }
}

pub fn render(fit: &FitReport) -> String {
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
        ("weights", Bytes(t.weights).to_string(), "in the layout of the CPU kernels"),
        ("tables", Bytes(t.tables).to_string(), "norms, biases, tokenizer"),
        (OVERHEAD_TERM, Bytes(t.overhead).to_string(), "measured overhead of earlier loads"),
        ("KV", format!("{} per token", Bytes(t.kv_per_token)), "keys and values"),
        ("scratch", Bytes(t.scratch).to_string(), "activations of the largest forward pass"),
        ("loading", Bytes(t.loading).to_string(), "peak while loading, before keys and values are allocated"),
        ("reserve", Bytes(t.reserve).to_string(), "the rest of the process"),
    ]
    .into_iter()
    .filter(|(term, ..)| *term != OVERHEAD_TERM || t.overhead > 0)
    .map(|(term, size, what)| vec![term.to_owned(), size, what.to_owned()])
    .collect();
    lines.push(output::table(&["TERM", "SIZE", "WHAT"], &rows));
    if fit.alone {
        lines.push("\nthis model's architecture runs only on the CPU, in 32 bits, one sequence at a time".to_owned());
    }
    if let Some(load) = &fit.measured {
        lines.push(format!(
            "\nmeasured: earlier loads on this machine took {}, the prediction was {}",
            Bytes(load.measured),
            Bytes(load.predicted)
        ));
    }
    if let Some(why) = &fit.unmeasured {
        lines.push(format!("\n{}", output::sanitize(why)));
    }
    for place in &fit.places {
        let how = match (&place.on_gpus, place.used) {
            (None, true) => format!(" for models, and {} for KV offload", Bytes(place.kv_offload_bytes)),
            (Some(_), true) => String::new(),
            (Some(_), false) if !gpu::supports_gpus() => {
                format!("; {}, so models do not run here", gpu::gpu_support_text())
            }
            (_, false) => "; `device` in cfq.toml excludes it, so models do not run here".to_owned(),
        };
        lines.push(format!(
            "\n{} ({}): {} available{how}",
            place.device,
            output::sanitize(&place.name),
            Bytes(place.available)
        ));
        lines.extend(place.on_gpus.as_ref().map(GpuPlacement::describe));
        if place.lengths.is_empty() {
            continue;
        }
        let row = |l: &LengthFit| {
            vec![l.tokens.to_string(), Bytes(l.total).to_string(), if l.fits { "yes" } else { "no" }.to_owned()]
        };
        lines.push(output::table(&["CONTEXT", "TOTAL", "FITS"], &place.lengths.iter().map(row).collect::<Vec<_>>()));
    }
    lines.join("\n")
}
