//! Memory accounting: the estimate of a model's memory before it is loaded, the allocation of KV blocks, and admission
//! to the KV pool.
//!
//! This crate only computes: it accesses neither devices nor files. Memory is a hard limit: a load that does not fit is
//! refused with an error that lists all terms, and [`KvAdmission`] never admits more tokens than the pool has. Matrices
//! are not held in memory as the file stores them but in the layout of the kernels; the estimate counts that layout.

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
pub use weights::{CpuKernels, Matrix, MatrixLayout, TILE_ROWS, WeightFormat, WeightSum, cpu_layout};
