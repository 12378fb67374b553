//! Files that are not what they claim: refused with the reason, never a panic, never memory beyond the file's own.

use std::path::Path;
use std::sync::{Arc, Once, OnceLock};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use cfq_inference_node::engine::candle::{CandleEngine, Limits, need};
use cfq_inference_node::models::file::ModelFile;
use cfq_inference_node::models::header::{Header, HeaderError};
use cfq_inference_node::models::template::ChatTemplate;
use cfq_inference_node::models::tokenizer::Vocabulary;
use proptest::prelude::*;

use crate::allocations::peak;
use crate::smollm;

/// A whole Llama file of a few kilobytes.
fn tiny() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let text = |t: &str| Value::String(t.to_owned());
        let letters: Vec<String> = ('a'..='z').map(String::from).chain(["ab".into(), "<end>".into()]).collect();
        let count = letters.len();
        let mut kinds = vec![Value::I32(1); count];
        kinds[count - 1] = Value::I32(3);
        let metadata: Vec<(&str, Value)> = vec![
            ("general.architecture", text("llama")),
            ("llama.block_count", Value::U32(1)),
            ("llama.context_length", Value::U32(64)),
            ("llama.embedding_length", Value::U32(32)),
            ("llama.feed_forward_length", Value::U32(64)),
            ("llama.attention.head_count", Value::U32(2)),
            ("llama.attention.head_count_kv", Value::U32(1)),
            ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
            ("tokenizer.ggml.model", text("gpt2")),
            ("tokenizer.ggml.pre", text("smollm")),
            ("tokenizer.ggml.tokens", Value::Array(letters.iter().map(|l| text(l)).collect())),
            ("tokenizer.ggml.token_type", Value::Array(kinds)),
            ("tokenizer.ggml.merges", Value::Array(vec![text("a b")])),
            ("tokenizer.ggml.eos_token_id", Value::U32(count as u32 - 1)),
            ("tokenizer.chat_template", text("{% for m in messages %}{{ m.content }}{% endfor %}")),
        ];
        let tensor = |dims: &[usize], dtype| {
            QTensor::quantize(&Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap(), dtype).unwrap()
        };
        let mut tensors = vec![
            ("token_embd.weight".to_owned(), tensor(&[count, 32], GgmlDType::Q8_0)),
            ("output_norm.weight".to_owned(), tensor(&[32], GgmlDType::F32)),
        ];
        let layer: [(&str, &[usize]); 9] = [
            ("attn_q", &[32, 32]),
            ("attn_k", &[16, 32]),
            ("attn_v", &[16, 32]),
            ("attn_output", &[32, 32]),
            ("ffn_gate", &[64, 32]),
            ("ffn_up", &[64, 32]),
            ("ffn_down", &[32, 64]),
            ("attn_norm", &[32]),
            ("ffn_norm", &[32]),
        ];
        for (name, dims) in layer {
            let dtype = if dims.len() == 1 { GgmlDType::F32 } else { GgmlDType::Q5_1 };
            tensors.push((format!("blk.0.{name}.weight"), tensor(dims, dtype)));
        }
        let mut bytes = std::io::Cursor::new(Vec::new());
        let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (*k, v)).collect();
        let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
        gguf_file::write(&mut bytes, &metadata, &tensors).unwrap();
        bytes.into_inner()
    })
}

const LIMITS: Limits = Limits { memory: 1 << 30, max_sequences: 1 };

/// Everything that reads a header, without loading weights.
fn read_all(path: &Path) -> Result<(), String> {
    let file = ModelFile::read(path).map_err(|e| e.to_string())?;
    need(path, LIMITS).map_err(|e| e.to_string())?;
    let vocabulary = Vocabulary::read(&file).map_err(|e| e.to_string())?;
    ChatTemplate::read(&file, &vocabulary).map_err(|e| e.to_string())?;
    Ok(())
}

fn file_of(bytes: &[u8]) -> tempfile::TempPath {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, bytes).unwrap();
    file.into_temp_path()
}

#[tokio::test]
async fn the_tiny_file_itself_is_whole_and_answers() {
    let path = file_of(tiny());
    read_all(&path).unwrap();
    let engine = CandleEngine::load("path:tiny.gguf".parse().unwrap(), &path, LIMITS, Arc::default()).unwrap();
    let mut prompt = smollm::ask("abc");
    prompt.sampling.max_tokens = 4;
    assert_eq!(smollm::answer(&engine, prompt).await.usage.prompt_tokens, 2);
}

#[test]
fn every_truncation_is_an_error() {
    for length in 0..tiny().len() {
        let path = file_of(&tiny()[..length]);
        // The last tensor's padding may be missing without harm.
        if tiny().len() - length >= 32 {
            assert!(Header::read(&path).is_err(), "cut at {length}");
        }
    }
}

#[test]
fn a_model_cut_in_half_says_so() {
    let whole = std::fs::read(smollm::file()).unwrap();
    let path = file_of(&whole[..whole.len() / 2]);
    let said = Header::read(&path).unwrap_err().to_string();
    assert!(said.contains("cut off or corrupt") && said.contains("fetch it again"), "{said}");
}

#[test]
fn what_is_no_model_of_ours_is_named() {
    assert!(matches!(Header::read(&file_of(b"hello")), Err(HeaderError::NotGguf { .. })));
    assert!(matches!(Header::read(&file_of(b"")), Err(HeaderError::NotGguf { .. })));
    assert!(matches!(Header::read(Path::new("/no/such/file")), Err(HeaderError::Open { .. })));
    assert!(matches!(Header::read(&std::env::temp_dir()), Err(HeaderError::NotGguf { .. })));
    let swap = |from: &str, to: &str| {
        let (from, to) = (from.as_bytes(), to.as_bytes());
        let at = tiny().windows(from.len()).position(|w| w == from).unwrap();
        let mut bytes = tiny().to_vec();
        bytes[at..at + to.len()].copy_from_slice(to);
        read_all(&file_of(&bytes)).unwrap_err()
    };
    let said = swap("\x05\0\0\0\0\0\0\0llama", "\x05\0\0\0\0\0\0\0mamba");
    assert!(said.contains("architecture is \"mamba\""), "{said}");
    let said = swap("smollm", "falcon");
    assert!(said.contains("pre-tokenizer is \"falcon\""), "{said}");
    let said = swap("blk.0.attn_q.weight", "blk.0.attn_x.weight");
    assert!(said.contains("attn_q.weight is missing"), "{said}");
}

#[test]
fn absurd_claims_allocate_nothing() {
    // 2^60 tensors, 2^60 entries.
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend_from_slice(&(1u64 << 60).to_le_bytes());
    bytes.extend_from_slice(&(1u64 << 60).to_le_bytes());
    assert!(matches!(Header::read(&file_of(&bytes)), Err(HeaderError::Corrupt { .. })));
    // An array of 2^40 bytes in a file that has none of them, and an alignment of zero.
    for (key, rest) in [
        ("k", [&9u32.to_le_bytes()[..], &0u32.to_le_bytes(), &(1u64 << 40).to_le_bytes()].concat()),
        ("general.alignment", [&4u32.to_le_bytes()[..], &0u32.to_le_bytes()].concat()),
    ] {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend_from_slice(&0u64.to_le_bytes());
        bytes.extend_from_slice(&1u64.to_le_bytes());
        bytes.extend_from_slice(&(key.len() as u64).to_le_bytes());
        bytes.extend_from_slice(key.as_bytes());
        bytes.extend_from_slice(&rest);
        assert!(matches!(Header::read(&file_of(&bytes)), Err(HeaderError::Corrupt { .. })), "{key}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn damage_is_an_error_or_harmless(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), prop_oneof![any::<u8>(), Just(0), Just(0xff)]), 1..6),
    ) {
        let mut bytes = tiny().to_vec();
        // The header is what is read here; the weights behind it are only numbers.
        let header = bytes.len() - 8192.min(bytes.len() / 2);
        for (at, value) in changes {
            let at = at.index(header);
            bytes[at] = value;
        }
        // Whatever it says, it returns.
        let _ = read_all(&file_of(&bytes));
    }
}

/// Header and first tensors of every family's fixture.
fn fixtures() -> &'static [Vec<u8>] {
    static FILES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models");
        let families =
            ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "deepseek-distill", "mistral-tekken"];
        families.map(|f| std::fs::read(folder.join(f).join("model.gguf")).unwrap()).to_vec()
    })
}

/// What may happen to a file on its way.
#[derive(Debug, Clone)]
enum Damage {
    Cut(prop::sample::Index),
    Byte(prop::sample::Index, u8),
    /// Where a length or a count may stand.
    Number(prop::sample::Index, u64),
    Removed(prop::sample::Index, usize),
    Doubled(prop::sample::Index, usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<prop::sample::Index>;
    let number = prop_oneof![
        any::<u64>(),
        (0u32..64).prop_map(|bit| 1 << bit),
        (0u32..64).prop_map(|bit| u64::MAX >> bit),
        0u64..70_000
    ];
    prop_oneof![
        1 => at().prop_map(Damage::Cut),
        4 => (at(), any::<u8>()).prop_map(|(at, value)| Damage::Byte(at, value)),
        4 => (at(), number).prop_map(|(at, value)| Damage::Number(at, value)),
        1 => (at(), 1usize..64).prop_map(|(at, length)| Damage::Removed(at, length)),
        1 => (at(), 1usize..64).prop_map(|(at, length)| Damage::Doubled(at, length)),
    ]
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>, header: usize) {
        let header = header.min(bytes.len());
        if header < 16 {
            return;
        }
        match self {
            Self::Cut(at) => bytes.truncate(at.index(header)),
            Self::Byte(at, value) => bytes[at.index(header)] = *value,
            Self::Number(at, value) => {
                let at = at.index(header - 8);
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            Self::Removed(at, length) => {
                let at = at.index(header);
                bytes.drain(at..(at + length).min(header));
            }
            Self::Doubled(at, length) => {
                let at = at.index(header);
                let again = bytes[at..(at + length).min(header)].to_vec();
                bytes.splice(at..at, again);
            }
        }
    }
}

/// Where the tensors begin in a fixture.
fn header_of(bytes: &[u8]) -> usize {
    let content = gguf_file::Content::read(&mut std::io::Cursor::new(bytes)).unwrap();
    content.tensor_data_offset as usize
}

/// What readers of a header may take at once: its values as they are kept (see models/header.rs), and the tables made of
/// them; and what any tokenizer takes.
fn allowed(file: usize) -> u64 {
    64 * file as u64 + (8 << 20)
}

/// An error of candle's says where it arose if RUST_BACKTRACE asks for it. The first such error of a process reads the
/// program's debug information, which is tens of megabytes and none of the file's doing.
fn read_debug_information() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| drop(candle_core::Error::Msg("the first".to_owned()).bt().to_string()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 700, ..ProptestConfig::default() })]

    /// Whatever is done to a header, of whichever family: an error or a model, never a panic, never more memory than the
    /// file's own size accounts for.
    #[test]
    fn no_damage_of_any_family_panics_or_takes_memory(
        which in any::<prop::sample::Index>(), damages in proptest::collection::vec(damage(), 1..5),
    ) {
        let whole = &fixtures()[which.index(fixtures().len())];
        let header = header_of(whole);
        let mut bytes = whole.clone();
        for damage in &damages {
            damage.apply(&mut bytes, header);
        }
        let path = file_of(&bytes);
        read_debug_information();
        let (taken, _) = peak(|| read_all(&path));
        prop_assert!(taken <= allowed(bytes.len()), "{taken} bytes for a file of {}", bytes.len());
    }
}

#[test]
fn whole_files_stay_within_what_damaged_ones_are_allowed() {
    for bytes in fixtures() {
        let path = file_of(bytes);
        let (taken, read) = peak(|| read_all(&path));
        read.unwrap();
        assert!(taken <= allowed(bytes.len()), "{taken} bytes for a file of {}", bytes.len());
        assert!(taken > bytes.len() as u64 / 100, "the counter counts");
    }
}
