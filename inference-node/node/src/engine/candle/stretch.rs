//! How a model's file says its positions turn, and how it stretches them over a longer context.

use cfq_memory::Shape;

use crate::engine::candle::rope::{Rope, Yarn};
use crate::engine::candle::tensors::Part;
use crate::models::file::{Key, ModelFile};
use crate::models::header::{Header, HeaderError};

/// The rotation of sequences longer than `original` positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Long {
    pub rope: Rope,
    pub original: usize,
}

const ROPE_DIMS: Key = gguf("rope.dimension_count");

/// A key only GGUF has.
const fn gguf(name: &'static str) -> Key {
    Key { gguf: name, config: "(none)" }
}

/// The rotations, the windowed layers' own second, and the one for long sequences.
pub fn ropes(file: &ModelFile, shape: &Shape, second: bool) -> Result<(Vec<Rope>, Option<Long>), HeaderError> {
    match file {
        ModelFile::Gguf(header) => gguf_ropes(file, header, shape, second),
        ModelFile::Folder(_) => config_ropes(file, shape, second),
    }
}

fn gguf_ropes(
    file: &ModelFile,
    header: &Header,
    shape: &Shape,
    second: bool,
) -> Result<(Vec<Rope>, Option<Long>), HeaderError> {
    let real = |name| file.real(gguf(name));
    let dims = file.number(ROPE_DIMS).unwrap_or(shape.head_dim);
    if dims == 0 || dims > shape.head_dim || !dims.is_multiple_of(2) {
        return Err(file.unsupported(format!("{dims} of {} values of a head turn", shape.head_dim)));
    }
    let mut rope = Rope::new(real("rope.freq_base").unwrap_or(10_000.0), dims as usize);
    let plain = rope.clone();
    let factors = |part: Part| {
        let name = part.gguf(0);
        let Some(facts) = file.tensor(&name) else { return Ok(None) };
        // Before it is read: a crafted file may claim any size.
        if facts.dims != [dims / 2] {
            return Err(file.unsupported(format!("tensor {name} is {:?}, expected [{}]", facts.dims, dims / 2)));
        }
        header.vector(&name).map(Some)
    };
    match header.text(&format!("{}.rope.scaling.type", file.architecture())) {
        None => {
            let factor =
                ["rope.scaling.factor", "rope.scale_linear"].into_iter().find_map(|name| Some((name, real(name)?)));
            if let Some((name, factor)) = factor.filter(|(_, factor)| !matches!(*factor, 0.0 | 1.0)) {
                return Err(file.unsupported(format!("its {name} is {factor}, with no rope.scaling.type beside it")));
            }
        }
        Some("none") => {}
        Some("linear") => rope = rope.stretched(real("rope.scaling.factor").unwrap_or(1.0)),
        Some("longrope") => {}
        Some("yarn") => rope = gguf_yarn(file, shape, rope)?,
        Some(other) => {
            return Err(file.unsupported(format!(
                "it stretches its context by {other:?} rope scaling, which this version does not do"
            )));
        }
    }
    if let Some(factors) = factors(Part::RopeFactors)? {
        rope = rope.divided(&factors);
    }
    let mut long = None;
    if let (Some(short), Some(factors)) = (factors(Part::RopeFactorsShort)?, factors(Part::RopeFactorsLong)?) {
        let original = file.number(gguf("rope.scaling.original_context_length")).unwrap_or(shape.context);
        rope.magnitude =
            real("rope.scaling.attn_factor").unwrap_or_else(|| longrope_magnitude(shape.context, original));
        long = long_rope(&rope, &factors, shape, original);
        rope = rope.divided(&short);
    }
    let mut ropes = vec![rope];
    if second {
        let base = real("rope.freq_base_swa").unwrap_or(10_000.0);
        ropes.push(Rope { magnitude: 1.0, ..Rope::new(base, plain.frequencies.len() * 2) });
    }
    Ok((ropes, long))
}

fn gguf_yarn(file: &ModelFile, shape: &Shape, rope: Rope) -> Result<Rope, HeaderError> {
    let real = |name| file.real(gguf(name));
    // How much of the stretching is YaRN's, and DeepSeek's way of scaling its scores with the logarithm.
    for (name, usual) in [("rope.scaling.yarn_ext_factor", 1.0), ("rope.scaling.yarn_log_multiplier", 0.0)] {
        if let Some(value) = real(name).filter(|value| *value != usual) {
            return Err(file.unsupported(format!("its {name} is {value}, which this version does not do")));
        }
    }
    let factor = real("rope.scaling.factor").filter(|factor| *factor > 0.0);
    let factor = factor.ok_or_else(|| file.unsupported("its yarn rope scaling has no rope.scaling.factor"))?;
    let original = file.number(gguf("rope.scaling.original_context_length"));
    let own = ["rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"].into_iter().find_map(real).unwrap_or(1.0);
    let yarn = Yarn {
        factor,
        original: original.unwrap_or(shape.context) as f32,
        fast: real("rope.scaling.yarn_beta_fast").unwrap_or(Yarn::FAST),
        slow: real("rope.scaling.yarn_beta_slow").unwrap_or(Yarn::SLOW),
        magnitude: own * Yarn::magnitude(factor),
    };
    Ok(rope.yarn(real("rope.freq_base").unwrap_or(10_000.0), yarn))
}

/// LongRoPE's attention factor, <https://arxiv.org/abs/2402.13753>.
fn longrope_magnitude(context: u64, original: u64) -> f32 {
    if context <= original {
        return 1.0;
    }
    let (context, original) = (context as f32, original as f32);
    (1.0 + (context / original).ln() / original.ln()).sqrt()
}

fn long_rope(rope: &Rope, factors: &[f32], shape: &Shape, original: u64) -> Option<Long> {
    (original < shape.context).then(|| Long { rope: rope.clone().divided(factors), original: original as usize })
}

fn config_ropes(file: &ModelFile, shape: &Shape, second: bool) -> Result<(Vec<Rope>, Option<Long>), HeaderError> {
    if !second {
        let (rope, long) = config_rope(
            file,
            shape,
            &["rope_parameters.full_attention", "rope_parameters", "rope_scaling"],
            "rope_theta",
        )?;
        return Ok((vec![rope], long));
    }
    // Newer files say both under one roof; older ones beside each other.
    if file.config("rope_parameters").is_some() && file.config("rope_parameters.full_attention").is_none() {
        return Err(
            file.unsupported("its rope_parameters do not say what is full_attention's and what is the window's")
        );
    }
    let (full, long) = config_rope(file, shape, &["rope_parameters.full_attention", "rope_scaling"], "rope_theta")?;
    let (own, _) = config_rope(file, shape, &["rope_parameters.sliding_attention"], "rope_local_base_freq")?;
    Ok((vec![full, own], long))
}

/// The rotation said in the first of `objects` that exists, or in plain sight.
fn config_rope(
    file: &ModelFile,
    shape: &Shape,
    objects: &[&str],
    base: &str,
) -> Result<(Rope, Option<Long>), HeaderError> {
    let mut said = objects.iter().filter_map(|path| file.config(path));
    let object = said.next();
    // Libraries have written both names side by side; only if they agree is it no matter which is read.
    if let Some(other) = said.find(|other| object.is_some_and(|o| o != *other) && !is_outer(other)) {
        return Err(file.unsupported(format!("it says two things about its rope: {other} is one of them")));
    }
    let real_of = |value: Option<&serde_json::Value>| value.and_then(|v| v.as_f64()).map(|v| v as f32);
    let real = |name: &str| real_of(object.and_then(|o| o.get(name)));
    let share = real("partial_rotary_factor").or_else(|| real_of(file.config("partial_rotary_factor"))).unwrap_or(1.0);
    let dims = (shape.head_dim as f32 * share) as usize / 2 * 2;
    if dims == 0 || dims as u64 > shape.head_dim {
        return Err(file.unsupported(format!("partial_rotary_factor is {share}")));
    }
    let base = real("rope_theta").or_else(|| real_of(file.config(base))).unwrap_or(10_000.0);
    let rope = Rope::new(base, dims);
    let kind = object.and_then(|o| o.get("rope_type").or_else(|| o.get("type"))).and_then(|v| v.as_str());
    let more = |o: &serde_json::Map<String, serde_json::Value>| {
        o.keys().any(|key| !matches!(key.as_str(), "rope_theta" | "partial_rotary_factor"))
    };
    if kind.is_none() && object.and_then(|o| o.as_object()).is_some_and(more) {
        let given = object.map(ToString::to_string).unwrap_or_default();
        return Err(file.unsupported(format!("its rope scaling has no rope_type: {given}")));
    }
    let needed = |name: &str| real(name).ok_or_else(|| file.unsupported(format!("its rope scaling has no {name}")));
    let original = || {
        let inside = object.and_then(|o| o.get("original_max_position_embeddings"));
        inside.or_else(|| file.config("original_max_position_embeddings")).and_then(|v| v.as_u64())
    };
    match kind.unwrap_or("default") {
        "default" => Ok((rope, None)),
        "linear" => Ok((rope.stretched(needed("factor")?), None)),
        "llama3" => {
            let original = original().unwrap_or(8192) as f32;
            let (factor, low, high) = (needed("factor")?, needed("low_freq_factor")?, needed("high_freq_factor")?);
            Ok((rope.llama3(factor, low, high, original), None))
        }
        "yarn" => {
            if let Some(name) = ["mscale", "mscale_all_dim"].into_iter().find(|name| real(name).is_some()) {
                return Err(
                    file.unsupported(format!("its yarn rope scaling has {name}, which this version does not do"))
                );
            }
            if object.and_then(|o| o.get("truncate")).and_then(|v| v.as_bool()) == Some(false) {
                return Err(
                    file.unsupported("its yarn rope scaling is not to be truncated, which this version does not do")
                );
            }
            let factor = needed("factor")?;
            let yarn = Yarn {
                factor,
                original: original().unwrap_or(shape.context) as f32,
                fast: real("beta_fast").unwrap_or(Yarn::FAST),
                slow: real("beta_slow").unwrap_or(Yarn::SLOW),
                magnitude: real("attention_factor").unwrap_or_else(|| Yarn::magnitude(factor)),
            };
            Ok((rope.yarn(base, yarn), None))
        }
        "longrope" | "su" => {
            let factors = |name: &str| -> Result<Vec<f32>, HeaderError> {
                let list = object.and_then(|o| o.get(name)).and_then(|v| v.as_array());
                let list: Option<Vec<f32>> =
                    list.and_then(|l| l.iter().map(|v| v.as_f64().map(|v| v as f32)).collect());
                list.filter(|l| l.len() == dims / 2)
                    .ok_or_else(|| file.unsupported(format!("its {name} is not {} numbers", dims / 2)))
            };
            let original = original().unwrap_or(shape.context);
            let mut rope = rope;
            rope.magnitude = real("attention_factor").unwrap_or_else(|| longrope_magnitude(shape.context, original));
            let long = long_rope(&rope, &factors("long_factor")?, shape, original);
            Ok((rope.divided(&factors("short_factor")?), long))
        }
        other => Err(file.unsupported(format!(
            "it stretches its context by {other:?} rope scaling, which this version does not do"
        ))),
    }
}

/// Whether the value holds a rotation for each kind of layer, instead of being one.
fn is_outer(value: &serde_json::Value) -> bool {
    value.get("full_attention").is_some()
}
