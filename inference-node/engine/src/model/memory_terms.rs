//! Terms of the memory estimate that depend on the model file alone. The estimates for the CPU and for GPUs share them.

use cfq_memory::ModelShape;

use crate::model::architecture::Architecture;
use crate::model::file::ModelFile;

/// The model's shape for calculating the size of a forward pass's activations; for a mixture of experts, with a larger
/// feed-forward.
pub fn activation_shape(architecture: &Architecture) -> ModelShape {
    let shape = &architecture.shape;
    // In a mixture of experts, buffers of hidden size are added: the rows of an expert are gathered before it and
    // scattered after it.
    let feed_forward = match architecture.experts {
        Some(_) => shape.feed_forward.saturating_add(shape.hidden),
        None => shape.feed_forward,
    };
    ModelShape { feed_forward, ..*shape }
}

/// Memory for all one-dimensional tensors (norms and biases), in bytes; they are held as F32.
pub fn vector_bytes(file: &ModelFile) -> u64 {
    let tensors = file.tensor_names().into_iter().filter_map(|name| file.tensor(name));
    let lengths = tensors.filter_map(|tensor| match tensor.dims[..] {
        [length] => Some(length),
        _ => None,
    });
    lengths.fold(0, |sum: u64, length| sum.saturating_add(length.saturating_mul(4)))
}
