//! Tests with damaged and unsupported model files: reading one returns an error with the reason, does not panic, and
//! allocates no more memory than the file's size justifies.

use std::path::Path;
use std::sync::{Once, OnceLock};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use cfq_engine::testing::ChatTemplate;
use cfq_engine::{EngineLimits, GgufHeader, HeaderError, LocalEngine, ModelFile, Vocabulary, estimate_memory};
use proptest::prelude::*;

use crate::allocations::peak;
use crate::smollm;

/// A valid Llama model file of a few kilobytes.
fn tiny_model() -> &'static [u8] {
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

const LIMITS: EngineLimits = EngineLimits { memory_bytes: 1 << 30, max_sequences: 1 };

/// Reads everything that the engine reads from a header: metadata, memory estimate, tokenizer and chat template. Does
/// not load weights.
fn read_all(path: &Path) -> Result<(), String> {
    let file = ModelFile::read(path).map_err(|e| e.to_string())?;
    estimate_memory(path, LIMITS, 0).map_err(|e| e.to_string())?;
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
async fn tiny_model_is_valid_and_generates() {
    let path = file_of(tiny_model());
    read_all(&path).unwrap();
    let engine = LocalEngine::builder("path:tiny.gguf".parse().unwrap(), &path).limits(LIMITS).load().unwrap();
    let mut prompt = smollm::user_prompt("abc");
    prompt.sampling.max_tokens = 4;
    assert_eq!(smollm::answer(&engine, prompt).await.usage.prompt_tokens, 2);
}

#[test]
fn every_truncation_is_an_error() {
    for length in 0..tiny_model().len() {
        let path = file_of(&tiny_model()[..length]);
        // Missing padding after the last tensor is not an error.
        if tiny_model().len() - length >= 32 {
            assert!(GgufHeader::read(&path).is_err(), "cut at {length}");
        }
    }
}

#[test]
fn truncated_model_is_reported_as_cut_off() {
    let whole = std::fs::read(smollm::file()).unwrap();
    let path = file_of(&whole[..whole.len() / 2]);
    let message = GgufHeader::read(&path).unwrap_err().to_string();
    assert!(message.contains("cut off or corrupt") && message.contains("fetch it again"), "{message}");
}

#[test]
fn unsupported_files_are_refused_with_the_reason() {
    assert!(matches!(GgufHeader::read(&file_of(b"hello")), Err(HeaderError::NotGguf { .. })));
    assert!(matches!(GgufHeader::read(&file_of(b"")), Err(HeaderError::NotGguf { .. })));
    assert!(matches!(GgufHeader::read(Path::new("/no/such/file")), Err(HeaderError::Open { .. })));
    assert!(matches!(GgufHeader::read(&std::env::temp_dir()), Err(HeaderError::NotGguf { .. })));
    let swap = |from: &str, to: &str| {
        let (from, to) = (from.as_bytes(), to.as_bytes());
        let at = tiny_model().windows(from.len()).position(|w| w == from).unwrap();
        let mut bytes = tiny_model().to_vec();
        bytes[at..at + to.len()].copy_from_slice(to);
        read_all(&file_of(&bytes)).unwrap_err()
    };
    let message = swap("\x05\0\0\0\0\0\0\0llama", "\x05\0\0\0\0\0\0\0mamba");
    assert!(message.contains("architecture is \"mamba\""), "{message}");
    let message = swap("smollm", "falcon");
    assert!(message.contains("pre-tokenizer is \"falcon\""), "{message}");
    let message = swap("blk.0.attn_q.weight", "blk.0.attn_x.weight");
    assert!(message.contains("attn_q.weight is missing"), "{message}");
}

#[test]
fn absurd_lengths_are_errors_and_allocate_nothing() {
    // A header that claims 2^60 tensors and 2^60 metadata entries.
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend_from_slice(&(1u64 << 60).to_le_bytes());
    bytes.extend_from_slice(&(1u64 << 60).to_le_bytes());
    assert!(matches!(GgufHeader::read(&file_of(&bytes)), Err(HeaderError::Corrupt { .. })));
    // An array of 2^40 bytes that the file does not contain, and an alignment of zero.
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
        assert!(matches!(GgufHeader::read(&file_of(&bytes)), Err(HeaderError::Corrupt { .. })), "{key}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn changed_bytes_are_an_error_or_harmless(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), prop_oneof![any::<u8>(), Just(0), Just(0xff)]), 1..6),
    ) {
        let mut bytes = tiny_model().to_vec();
        // Only the header is changed: the weights after it are not read.
        let header = bytes.len() - 8192.min(bytes.len() / 2);
        for (at, value) in changes {
            let at = at.index(header);
            bytes[at] = value;
        }
        // Reading must return without a panic; both success and an error are correct.
        let _ = read_all(&file_of(&bytes));
    }
}

/// The GGUF fixtures.
fn fixtures() -> &'static [Vec<u8>] {
    static FILES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models");
        let families =
            ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "deepseek-distill", "mistral-tekken"];
        families.map(|f| std::fs::read(folder.join(f).join("model.gguf")).unwrap()).to_vec()
    })
}

/// One way to damage the header of a file.
#[derive(Debug, Clone)]
enum Damage {
    Truncate(prop::sample::Index),
    Byte(prop::sample::Index, u8),
    /// Overwrites eight bytes, which may be a length or a count.
    Number(prop::sample::Index, u64),
    Remove(prop::sample::Index, usize),
    Duplicate(prop::sample::Index, usize),
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
        1 => at().prop_map(Damage::Truncate),
        4 => (at(), any::<u8>()).prop_map(|(at, value)| Damage::Byte(at, value)),
        4 => (at(), number).prop_map(|(at, value)| Damage::Number(at, value)),
        1 => (at(), 1usize..64).prop_map(|(at, length)| Damage::Remove(at, length)),
        1 => (at(), 1usize..64).prop_map(|(at, length)| Damage::Duplicate(at, length)),
    ]
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>, header: usize) {
        let header = header.min(bytes.len());
        if header < 16 {
            return;
        }
        match self {
            Self::Truncate(at) => bytes.truncate(at.index(header)),
            Self::Byte(at, value) => bytes[at.index(header)] = *value,
            Self::Number(at, value) => {
                let at = at.index(header - 8);
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            Self::Remove(at, length) => {
                let at = at.index(header);
                bytes.drain(at..(at + length).min(header));
            }
            Self::Duplicate(at, length) => {
                let at = at.index(header);
                let copy = bytes[at..(at + length).min(header)].to_vec();
                bytes.splice(at..at, copy);
            }
        }
    }
}

/// Length of a fixture's header, in bytes.
fn header_len(bytes: &[u8]) -> usize {
    let content = gguf_file::Content::read(&mut std::io::Cursor::new(bytes)).unwrap();
    content.tensor_data_offset as usize
}

/// Maximum number of bytes that reading the header of a file of `file` bytes may allocate: parsed values and tables in
/// proportion to the file, and a constant that every tokenizer takes.
fn allowed_bytes(file: usize) -> u64 {
    64 * file as u64 + (8 << 20)
}

/// Loads the program's debug information, tens of megabytes, before anything is measured: with RUST_BACKTRACE set, the
/// first error of candle in a process loads it for its backtrace.
fn load_debug_information() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| drop(candle_core::Error::Msg("the first".to_owned()).bt().to_string()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 700, ..ProptestConfig::default() })]

    /// A damaged header results in an error or in a model, without a panic, and no more memory is allocated than the
    /// file's size justifies.
    #[test]
    fn damaged_header_neither_panics_nor_allocates_too_much(
        which in any::<prop::sample::Index>(), damages in proptest::collection::vec(damage(), 1..5),
    ) {
        let whole = &fixtures()[which.index(fixtures().len())];
        let header = header_len(whole);
        let mut bytes = whole.clone();
        for damage in &damages {
            damage.apply(&mut bytes, header);
        }
        let path = file_of(&bytes);
        load_debug_information();
        let (taken, _) = peak(|| read_all(&path));
        prop_assert!(taken <= allowed_bytes(bytes.len()), "{taken} bytes for a file of {}", bytes.len());
    }
}

#[test]
fn valid_files_stay_within_the_allowed_memory() {
    for bytes in fixtures() {
        let path = file_of(bytes);
        let (taken, read) = peak(|| read_all(&path));
        read.unwrap();
        assert!(taken <= allowed_bytes(bytes.len()), "{taken} bytes for a file of {}", bytes.len());
        assert!(taken > bytes.len() as u64 / 100, "the allocations are counted");
    }
}
