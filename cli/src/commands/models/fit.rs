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
use schemars::JsonSchema;
use serde::Serialize;

use self::gpus::GpuFit;
use super::model_error;
use crate::config::{Config, NodeConfig};
use crate::exit;
use crate::output::{Line, Tone, View};

/// Context lengths for which the report has a row, in tokens. A last row shows the model's maximum length.
const CONTEXT_LENGTHS: [u64; 7] = [2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072];

/// Name of the overhead term of the memory estimate. The report omits this term if it is zero; it shows all others.
const OVERHEAD_TERM: &str = "overhead";

#[derive(Serialize, JsonSchema)]
pub struct FitReport {
    model: ModelId,
    path: PathBuf,
    /// File size, in bytes.
    file_bytes: u64,
    /// Longest sequence, in tokens.
    context_tokens: u64,
    /// True if the model runs only on the CPU, one sequence at a time.
    single_sequence: bool,
    /// The estimate on the CPU.
    terms: MemoryTerms,
    /// Memory that earlier loads of the model on this CPU used, and the memory that was predicted for these loads;
    /// `None` if no such load was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<MeasuredLoad>,
    /// Reason why the measurements of earlier loads are not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    measurement_error: Option<String>,
    devices: Vec<DeviceFit>,
}

/// The terms of a memory estimate, in bytes.
#[derive(Serialize, JsonSchema)]
pub struct MemoryTerms {
    weight_bytes: u64,
    table_bytes: u64,
    overhead_bytes: u64,
    kv_bytes_per_token: u64,
    scratch_bytes: u64,
    loading_bytes: u64,
    reserve_bytes: u64,
}

/// The estimate for one device, or for several GPUs together, whether the model fits there or not.
#[derive(Serialize, JsonSchema)]
pub struct DeviceFit {
    device: String,
    name: String,
    /// Memory that is free for a model, in bytes.
    available_bytes: u64,
    /// Additional memory for KV offload, in bytes.
    kv_offload_bytes: u64,
    /// True if this build can run models on the device and the `device` setting permits it.
    usable: bool,
    /// Estimate for GPUs; `None` for the CPU.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    on_gpus: Option<GpuFit>,
    lengths: Vec<LengthFit>,
}

/// Memory that the model needs for one sequence of `tokens` tokens.
#[derive(Serialize, JsonSchema)]
pub struct LengthFit {
    tokens: u64,
    total_bytes: u64,
    fits: bool,
}

pub fn fit(store: &ModelStore, config: &Config, model: ModelId) -> anyhow::Result<FitReport> {
    let path = match model.source() {
        ModelSource::Path(path) => path,
        _ if !model.is_file() => return Err(model_error(ModelError::Proxied { model })),
        _ => store.show(&model).map_err(model_error)?.path,
    };
    let mut sums = summarize_model(&path, config.node.max_sequences).map_err(|error| match error {
        // The file is not a supported model.
        LoadError::Header(source) => exit::usage(format!("{:#}", anyhow::Error::from(source))),
        error => error.into(),
    })?;
    let (measured, measurement_error) = match store.load_measurements(&model) {
        Ok(measured) => (measured, None),
        Err(error) => (None, Some(format!("{:#}", anyhow::Error::from(error)))),
    };
    let inventory = gpu::inventory().devices;
    let on_cpu = measured.as_ref().and_then(|measured| measured.on_device("cpu"));
    sums.cpu = sums.cpu.with_overhead(on_cpu.map_or(0, MeasuredLoad::overhead_per_mille));
    let on_host = |device: &Device| host_fit(device, &sums, &config.node);
    let mut devices: Vec<DeviceFit> = inventory.iter().filter_map(on_host).collect();
    if !sums.single_sequence {
        devices.extend(gpus::gpu_fits(&inventory, &path, sums.context, measured.as_ref(), &config.node)?);
    }
    let ModelSummary { file_bytes, context: context_tokens, cpu, single_sequence } = sums;
    let (terms, measured) = (cpu.into(), on_cpu);
    Ok(FitReport {
        model,
        path,
        file_bytes,
        context_tokens,
        single_sequence,
        terms,
        measured,
        measurement_error,
        devices,
    })
}

/// Returns the estimate on a CPU; `None` if `device` is a GPU.
fn host_fit(device: &Device, sums: &ModelSummary, node: &NodeConfig) -> Option<DeviceFit> {
    match device.kind {
        DeviceKind::Cpu => {}
        DeviceKind::Cuda => return None,
    }
    let free = device.memory_total.saturating_sub(device.memory_others);
    let division = split_host_memory(free.min(node.memory_limit.unwrap_or(u64::MAX)), node.kv_offload_bytes);
    let HostMemorySplit { models: available_bytes, kv_offload: kv_offload_bytes } = division;
    let length = |tokens| {
        let total_bytes = sums.cpu.with_kv_tokens(tokens).total();
        LengthFit { tokens, total_bytes, fits: total_bytes <= available_bytes }
    };
    let usable = matches!(node.device, DeviceChoice::Auto | DeviceChoice::Cpu);
    let (device, name) = (device.id.clone(), device.name.clone());
    let lengths = context_lengths(sums.context).map(length).collect();
    Some(DeviceFit { device, name, available_bytes, kv_offload_bytes, usable, on_gpus: None, lengths })
}

fn context_lengths(context: u64) -> impl Iterator<Item = u64> {
    CONTEXT_LENGTHS.into_iter().filter(move |tokens| *tokens < context).chain([context])
}

impl From<MemoryEstimate> for MemoryTerms {
    fn from(estimate: MemoryEstimate) -> Self {
        Self {
            weight_bytes: estimate.weights,
            table_bytes: estimate.tables,
            overhead_bytes: estimate.overhead,
            kv_bytes_per_token: estimate.kv_per_token,
            scratch_bytes: estimate.scratch,
            loading_bytes: estimate.loading,
            reserve_bytes: estimate.reserve,
        }
    }
}

pub fn render(fit: &FitReport) -> Vec<Line> {
    let t = &fit.terms;
    let mut view = View::default();
    view.push_toned(
        Tone::Heading,
        format!(
            "{}: {} in {}, sequences of up to {} tokens",
            fit.model,
            Bytes(fit.file_bytes),
            fit.path.display(),
            fit.context_tokens
        ),
    );
    view.push_blank();
    let rows: Vec<Vec<String>> = [
        ("weights", Bytes(t.weight_bytes).to_string(), "in the layout of the CPU kernels"),
        ("tables", Bytes(t.table_bytes).to_string(), "norms, biases, tokenizer"),
        (OVERHEAD_TERM, Bytes(t.overhead_bytes).to_string(), "measured overhead of earlier loads"),
        ("KV", format!("{} per token", Bytes(t.kv_bytes_per_token)), "keys and values"),
        ("scratch", Bytes(t.scratch_bytes).to_string(), "activations of the largest forward pass"),
        ("loading", Bytes(t.loading_bytes).to_string(), "peak while loading, before keys and values are allocated"),
        ("reserve", Bytes(t.reserve_bytes).to_string(), "the rest of the process"),
    ]
    .into_iter()
    .filter(|(term, ..)| *term != OVERHEAD_TERM || t.overhead_bytes > 0)
    .map(|(term, size, what)| vec![term.to_owned(), size, what.to_owned()])
    .collect();
    view.push_table(&["TERM", "SIZE", "WHAT"], &rows);
    if fit.single_sequence {
        view.push_blank();
        view.push("this model's architecture runs only on the CPU, in 32 bits, one sequence at a time");
    }
    if let Some(load) = &fit.measured {
        view.push_blank();
        view.push(format!(
            "measured: earlier loads on this machine took {} of memory; the prediction was {}",
            Bytes(load.measured),
            Bytes(load.predicted)
        ));
    }
    if let Some(error) = &fit.measurement_error {
        view.push_blank();
        view.push(error);
    }
    for device in &fit.devices {
        let how = match (&device.on_gpus, device.usable) {
            (None, true) => format!(" for models, and {} for KV offload", Bytes(device.kv_offload_bytes)),
            (Some(_), true) => String::new(),
            (Some(_), false) if !gpu::supports_gpus() => {
                format!("; {}, so models do not run here", gpu::gpu_support_text())
            }
            (_, false) => "; `device` in cfq.toml excludes it, so models do not run here".to_owned(),
        };
        view.push_blank();
        view.push(format!("{} ({}): {} available{how}", device.device, device.name, Bytes(device.available_bytes)));
        for line in device.on_gpus.iter().flat_map(GpuFit::describe) {
            view.push(line);
        }
        if device.lengths.is_empty() {
            continue;
        }
        let row = |l: &LengthFit| {
            vec![l.tokens.to_string(), Bytes(l.total_bytes).to_string(), if l.fits { "yes" } else { "no" }.to_owned()]
        };
        view.push_table(&["CONTEXT", "TOTAL", "FITS"], &device.lengths.iter().map(row).collect::<Vec<_>>());
    }
    view.lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_fits_the_terminal() {
        let lengths = |fits: u64| -> Vec<LengthFit> {
            let length = |tokens| LengthFit { tokens, total_bytes: (1 << 33) + (tokens << 15), fits: tokens <= fits };
            [2_048, 32_768, 131_072].map(length).into()
        };
        let device = |device: &str, name: &str, usable, lengths| DeviceFit {
            device: device.into(),
            name: name.into(),
            available_bytes: 12 << 30,
            kv_offload_bytes: 1 << 30,
            usable,
            on_gpus: None,
            lengths,
        };
        let report = FitReport {
            model: "hf:Qwen/Qwen2.5-Coder-14B-Instruct-GGUF:qwen2.5-coder-14b-instruct-q4_k_m.gguf".parse().unwrap(),
            path: "/home/anna/.local/share/cfq/models/qwen2.5-coder-14b-instruct-q4_k_m.gguf".into(),
            file_bytes: 8_988_110_976,
            context_tokens: 131_072,
            single_sequence: false,
            terms: MemoryTerms {
                weight_bytes: 8_800_000_000,
                table_bytes: 9_000_000,
                overhead_bytes: 0,
                kv_bytes_per_token: 196_608,
                scratch_bytes: 310_000_000,
                loading_bytes: 120_000_000,
                reserve_bytes: 256 << 20,
            },
            measured: Some(
                serde_json::from_value(
                    serde_json::json!({ "measured": 9_100_000_000_u64, "predicted": 9_000_000_000_u64 }),
                )
                .unwrap(),
            ),
            measurement_error: None,
            devices: vec![
                device("cpu", "AMD Ryzen 5 3600 6-Core Processor", true, lengths(40_000)),
                device("cuda:0", "NVIDIA GeForce RTX 3090", false, lengths(0)),
            ],
        };
        insta::assert_snapshot!("view_models_fit", crate::output::at_widths(|_| render(&report)));
    }
}
