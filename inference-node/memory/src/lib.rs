//! Memory accounting: the estimate of what a model needs before it is loaded, the
//! KV blocks, and admission to the KV pool.
//!
//! Pure arithmetic over a model file's header, without devices and files. Memory is a hard limit: a load that does not
//! fit is refused with the arithmetic, and [`KvAdmission`] never admits more tokens than the pool has. A process does
//! not hold a model as the file stores it: matrices are held in the layout of the kernels, and that is what is counted.

#![warn(missing_docs)]

mod block_table;
mod bytes;
mod device_map;
mod gpu_weights;
mod host_memory;
mod kv_admission;
mod kv_offload;
mod memory_estimate;
mod prefix_tree;
mod tokenizer_tables;
mod weights;

pub use block_table::{BlockTable, PrefixMatch};
pub use bytes::Bytes;
pub use device_map::{DeviceMap, GpuCapacity, GpuShare, LayerStack, NoDeviceMap, plan_device_map};
pub use gpu_weights::gpu_layout;
pub use host_memory::{HostMemorySplit, split_host_memory};
pub use kv_admission::{KvAdmission, KvPoolFull, Reservation};
pub use kv_offload::{CacheNamespace, OffloadIndex, OffloadNodeId};
pub use memory_estimate::{DoesNotFit, EstimateTerms, MAX_OVERHEAD_PER_MILLE, MemoryEstimate, ModelShape, fit_kv_pool};
pub use prefix_tree::{BlockId, BlockKey, PrefixId};
pub use tokenizer_tables::VocabularySize;
pub use weights::{CpuKernels, Format, Matrix, MatrixLayout, WeightSum, cpu_layout};
