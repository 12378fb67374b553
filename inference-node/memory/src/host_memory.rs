//! Division of a node's host memory between models and KV offload.

/// Default size of KV offload, as a divisor of the host memory: one eighth.
const DEFAULT_KV_OFFLOAD_DIVISOR: u64 = 8;
/// Maximum of the default size of KV offload, in bytes. It holds tens of thousands of tokens of a model that fits a
/// consumer GPU.
const MAX_DEFAULT_KV_OFFLOAD_BYTES: u64 = 4 << 30;

/// Division of host memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemorySplit {
    /// Memory for all models together.
    pub models: u64,
    /// Memory for offloaded keys and values.
    pub kv_offload: u64,
}

/// Divides `memory` bytes of host memory. `kv_offload` is the configured size of KV offload, in bytes; it is reserved
/// first, at most `memory`.
pub fn split_host_memory(memory: u64, kv_offload: Option<u64>) -> HostMemorySplit {
    let default = || (memory / DEFAULT_KV_OFFLOAD_DIVISOR).min(MAX_DEFAULT_KV_OFFLOAD_BYTES);
    let kv_offload = kv_offload.unwrap_or_else(default).min(memory);
    HostMemorySplit { models: memory - kv_offload, kv_offload }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configured_kv_offload_is_reserved_first_and_the_parts_add_up() {
        assert_eq!(split_host_memory(8 << 30, None), HostMemorySplit { models: 7 << 30, kv_offload: 1 << 30 });
        assert_eq!(split_host_memory(1 << 40, None).kv_offload, 4 << 30);
        assert_eq!(split_host_memory(1000, Some(0)), HostMemorySplit { models: 1000, kv_offload: 0 });
        assert_eq!(split_host_memory(1000, Some(300)), HostMemorySplit { models: 700, kv_offload: 300 });
        assert_eq!(split_host_memory(1000, Some(u64::MAX)), HostMemorySplit { models: 0, kv_offload: 1000 });
    }
}
