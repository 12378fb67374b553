//! Reads the RoPE parameters and the RoPE scaling of a model's file.
//!
//! Supported scaling: linear (position interpolation), Llama 3, YaRN and LongRoPE; each formula is in [`super::rope`].
//! Any other type, and any parameter of these that is not implemented, is an error: a model with wrong positions still
//! answers, only worse.

use cfq_memory::ModelShape;

use crate::model::file::{MetadataKey, ModelFile};
use crate::model::gguf::{GgufHeader, HeaderError};
use crate::model::rope::{Rope, Yarn};
use crate::model::tensors::TensorRole;

/// LongRoPE's second set of frequencies, for sequences longer than the original context (Phi-3).
#[derive(Debug, Clone, PartialEq)]
pub struct LongContextRope {
    /// RoPE with LongRoPE's long factors.
    pub rope: Rope,
    /// Longest sequence that still uses the short factors, in tokens.
    pub original_context: usize,
}

/// The RoPEs of a model.
pub struct ModelRopes {
    /// The RoPE of layers with full attention, then that of windowed layers where it differs (Gemma 3).
    pub ropes: Vec<Rope>,
    /// LongRoPE's long-context form of the first RoPE, if the model has one.
    pub long: Option<LongContextRope>,
}

const ROPE_DIMS: MetadataKey = gguf_key("rope.dimension_count");

/// A metadata key that exists only in GGUF.
const fn gguf_key(name: &'static str) -> MetadataKey {
    MetadataKey { gguf: name, config: "(none)" }
}

/// Reads the model's RoPEs; `windowed` adds a separate RoPE for layers with a sliding window.
///
/// # Errors
/// [`HeaderError::Unsupported`] for a scaling that is not implemented, [`HeaderError::Corrupt`] for unreadable factors.
pub fn read_ropes(file: &ModelFile, shape: &ModelShape, windowed: bool) -> Result<ModelRopes, HeaderError> {
    match file {
        ModelFile::Gguf(header) => gguf_ropes(file, header, shape, windowed),
        ModelFile::Folder(_) => config_ropes(file, shape, windowed),
    }
}

fn unsupported_type(file: &ModelFile, kind: &str) -> HeaderError {
    file.unsupported(format!("its rope scaling type is {kind:?}, which this version does not support"))
}

fn gguf_ropes(
    file: &ModelFile,
    header: &GgufHeader,
    shape: &ModelShape,
    windowed: bool,
) -> Result<ModelRopes, HeaderError> {
    let float = |name| file.get_f32(gguf_key(name));
    let dims = file.get_u64(ROPE_DIMS).unwrap_or(shape.head_dim);
    if dims == 0 || dims > shape.head_dim || !dims.is_multiple_of(2) {
        let max = shape.head_dim;
        let what = format!("its rope.dimension_count is {dims}; expected an even number from 2 to {max}");
        return Err(file.unsupported(what));
    }
    let mut rope = Rope::new(float("rope.freq_base").unwrap_or(10_000.0), dims as usize);
    let factors = |role: TensorRole| {
        let name = role.gguf_name(0);
        let Some(info) = file.tensor(&name) else { return Ok(None) };
        // Checked before the tensor is read: a crafted file may claim any size.
        if info.dims != [dims / 2] {
            return Err(file.unsupported(format!("tensor {name} has shape {:?}, expected [{}]", info.dims, dims / 2)));
        }
        header.vector(&name).map(Some)
    };
    match header.get_str(&format!("{}.rope.scaling.type", file.architecture())) {
        None => {
            let factor =
                ["rope.scaling.factor", "rope.scale_linear"].into_iter().find_map(|name| Some((name, float(name)?)));
            if let Some((name, factor)) = factor.filter(|(_, factor)| !matches!(*factor, 0.0 | 1.0)) {
                return Err(file.unsupported(format!("its {name} is {factor}, but it has no rope.scaling.type")));
            }
        }
        Some("none") => {}
        Some("linear") => rope = rope.linear_scaled(float("rope.scaling.factor").unwrap_or(1.0)),
        // LongRoPE is defined by its factor tensors alone, which are read below.
        Some("longrope") => {}
        Some("yarn") => rope = gguf_yarn(file, shape, rope)?,
        Some(other) => return Err(unsupported_type(file, other)),
    }
    // Llama 3 scaling, whose factors the converter has computed.
    if let Some(factors) = factors(TensorRole::RopeFactors)? {
        rope = rope.divided_by(&factors);
    }
    let mut long = None;
    let (short, long_factors) = (factors(TensorRole::RopeFactorsShort)?, factors(TensorRole::RopeFactorsLong)?);
    if let (Some(short), Some(long_factors)) = (short, long_factors) {
        let original = file.get_u64(gguf_key("rope.scaling.original_context_length")).unwrap_or(shape.context);
        rope.attention_factor =
            float("rope.scaling.attn_factor").unwrap_or_else(|| longrope_attention_factor(shape.context, original));
        long = long_context_rope(&rope, &long_factors, shape, original);
        rope = rope.divided_by(&short);
    }
    let mut ropes = vec![rope];
    if windowed {
        let base = float("rope.freq_base_swa").unwrap_or(10_000.0);
        ropes.push(Rope::new(base, dims as usize));
    }
    Ok(ModelRopes { ropes, long })
}

fn gguf_yarn(file: &ModelFile, shape: &ModelShape, rope: Rope) -> Result<Rope, HeaderError> {
    let float = |name| file.get_f32(gguf_key(name));
    // Two options that are not implemented: the blend between YaRN and linear scaling, and DeepSeek's logarithmic
    // scaling of attention scores.
    for (name, default) in [("rope.scaling.yarn_ext_factor", 1.0), ("rope.scaling.yarn_log_multiplier", 0.0)] {
        if let Some(value) = float(name).filter(|value| *value != default) {
            return Err(file.unsupported(format!("its {name} is {value}, which this version does not support")));
        }
    }
    let factor = float("rope.scaling.factor").filter(|factor| *factor > 0.0);
    let factor = factor.ok_or_else(|| file.unsupported("its yarn rope scaling has no rope.scaling.factor"))?;
    let original = file.get_u64(gguf_key("rope.scaling.original_context_length"));
    // GGUF stores a multiplier of the paper's attention factor, under a newer or an older key.
    let multiplier =
        ["rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"].into_iter().find_map(float).unwrap_or(1.0);
    let yarn = Yarn {
        factor,
        original_context: original.unwrap_or(shape.context) as f32,
        beta_fast: float("rope.scaling.yarn_beta_fast").unwrap_or(Yarn::DEFAULT_BETA_FAST),
        beta_slow: float("rope.scaling.yarn_beta_slow").unwrap_or(Yarn::DEFAULT_BETA_SLOW),
        attention_factor: multiplier * Yarn::default_attention_factor(factor),
    };
    Ok(rope.yarn_scaled(float("rope.freq_base").unwrap_or(10_000.0), yarn))
}

/// LongRoPE's attention factor, sqrt(1 + ln(context / original) / ln(original)). <https://arxiv.org/abs/2402.13753>.
fn longrope_attention_factor(context: u64, original: u64) -> f32 {
    if context <= original {
        return 1.0;
    }
    let (context, original) = (context as f32, original as f32);
    (1.0 + (context / original).ln() / original.ln()).sqrt()
}

/// `rope` with the long factors, if the model's context exceeds its original one.
fn long_context_rope(rope: &Rope, factors: &[f32], shape: &ModelShape, original: u64) -> Option<LongContextRope> {
    (original < shape.context)
        .then(|| LongContextRope { rope: rope.clone().divided_by(factors), original_context: original as usize })
}

fn config_ropes(file: &ModelFile, shape: &ModelShape, windowed: bool) -> Result<ModelRopes, HeaderError> {
    if !windowed {
        let (rope, long) = config_rope(
            file,
            shape,
            &["rope_parameters.full_attention", "rope_parameters", "rope_scaling"],
            "rope_theta",
        )?;
        return Ok(ModelRopes { ropes: vec![rope], long });
    }
    // Newer files nest both RoPEs in rope_parameters; older files have one key for each.
    if file.config("rope_parameters").is_some() && file.config("rope_parameters.full_attention").is_none() {
        return Err(file.unsupported(
            "its rope_parameters lack the entries full_attention and sliding_attention, which its layers need",
        ));
    }
    let (full, long) = config_rope(file, shape, &["rope_parameters.full_attention", "rope_scaling"], "rope_theta")?;
    let (sliding, _) = config_rope(file, shape, &["rope_parameters.sliding_attention"], "rope_local_base_freq")?;
    Ok(ModelRopes { ropes: vec![full, sliding], long })
}

/// The RoPE, and its long-context form if it has one, described by the first of `objects` that exists in config.json;
/// if none exists, by the top-level key whose name is `base`.
fn config_rope(
    file: &ModelFile,
    shape: &ModelShape,
    objects: &[&str],
    base: &str,
) -> Result<(Rope, Option<LongContextRope>), HeaderError> {
    let mut found = objects.iter().filter_map(|path| file.config(path));
    let object = found.next();
    // Some libraries write both rope_parameters and rope_scaling. That is accepted only if their values agree.
    if let Some(other) = found.find(|other| object.is_some_and(|o| o != *other) && !is_per_layer_type(other)) {
        return Err(file.unsupported(format!("it has conflicting rope parameters: one of them is {other}")));
    }
    let to_f32 = |value: Option<&serde_json::Value>| value.and_then(|v| v.as_f64()).map(|v| v as f32);
    let float = |name: &str| to_f32(object.and_then(|o| o.get(name)));
    let rotated = float("partial_rotary_factor").or_else(|| to_f32(file.config("partial_rotary_factor")));
    let rotated = rotated.unwrap_or(1.0);
    let dims = (shape.head_dim as f32 * rotated) as usize / 2 * 2;
    if dims == 0 || dims as u64 > shape.head_dim {
        let what = format!("its partial_rotary_factor is {rotated}; expected a number above 0 and up to 1");
        return Err(file.unsupported(what));
    }
    let base = float("rope_theta").or_else(|| to_f32(file.config(base))).unwrap_or(10_000.0);
    let rope = Rope::new(base, dims);
    let kind = object.and_then(|o| o.get("rope_type").or_else(|| o.get("type"))).and_then(|v| v.as_str());
    let has_scaling = |o: &serde_json::Map<String, serde_json::Value>| {
        o.keys().any(|key| !matches!(key.as_str(), "rope_theta" | "partial_rotary_factor"))
    };
    if kind.is_none() && object.and_then(|o| o.as_object()).is_some_and(has_scaling) {
        let given = object.map(ToString::to_string).unwrap_or_default();
        return Err(file.unsupported(format!("its rope scaling has no rope_type: {given}")));
    }
    let required = |name: &str| float(name).ok_or_else(|| file.unsupported(format!("its rope scaling has no {name}")));
    let original_context = || {
        let nested = object.and_then(|o| o.get("original_max_position_embeddings"));
        nested.or_else(|| file.config("original_max_position_embeddings")).and_then(|v| v.as_u64())
    };
    match kind.unwrap_or("default") {
        "default" => Ok((rope, None)),
        "linear" => Ok((rope.linear_scaled(required("factor")?), None)),
        "llama3" => {
            let original = original_context().unwrap_or(8192) as f32;
            let (factor, low, high) =
                (required("factor")?, required("low_freq_factor")?, required("high_freq_factor")?);
            Ok((rope.llama3_scaled(factor, low, high, original), None))
        }
        "yarn" => {
            if let Some(name) = ["mscale", "mscale_all_dim"].into_iter().find(|name| float(name).is_some()) {
                return Err(
                    file.unsupported(format!("its yarn rope scaling has {name}, which this version does not support"))
                );
            }
            if object.and_then(|o| o.get("truncate")).and_then(|v| v.as_bool()) == Some(false) {
                return Err(file
                    .unsupported("its yarn rope scaling sets truncate to false, which this version does not support"));
            }
            let factor = required("factor")?;
            let yarn = Yarn {
                factor,
                original_context: original_context().unwrap_or(shape.context) as f32,
                beta_fast: float("beta_fast").unwrap_or(Yarn::DEFAULT_BETA_FAST),
                beta_slow: float("beta_slow").unwrap_or(Yarn::DEFAULT_BETA_SLOW),
                attention_factor: float("attention_factor").unwrap_or_else(|| Yarn::default_attention_factor(factor)),
            };
            Ok((rope.yarn_scaled(base, yarn), None))
        }
        "longrope" | "su" => {
            let factors = |name: &str| -> Result<Vec<f32>, HeaderError> {
                let list = object.and_then(|o| o.get(name)).and_then(|v| v.as_array());
                let list: Option<Vec<f32>> =
                    list.and_then(|l| l.iter().map(|v| v.as_f64().map(|v| v as f32)).collect());
                list.filter(|l| l.len() == dims / 2)
                    .ok_or_else(|| file.unsupported(format!("its {name} is not a list of {} numbers", dims / 2)))
            };
            let original = original_context().unwrap_or(shape.context);
            let mut rope = rope;
            rope.attention_factor =
                float("attention_factor").unwrap_or_else(|| longrope_attention_factor(shape.context, original));
            let long = long_context_rope(&rope, &factors("long_factor")?, shape, original);
            Ok((rope.divided_by(&factors("short_factor")?), long))
        }
        other => Err(unsupported_type(file, other)),
    }
}

/// Whether `value`, the `rope_parameters` of config.json, holds one set of parameters per attention type instead of a
/// single set.
fn is_per_layer_type(value: &serde_json::Value) -> bool {
    value.get("full_attention").is_some()
}
