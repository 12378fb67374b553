//! Mapping of the index N of `cuda:N` to a GPU.
//!
//! NVML orders GPUs by PCI bus. CUDA by default orders them by speed, the fastest first, and omits GPUs that
//! CUDA_VISIBLE_DEVICES does not name. Users see NVML's indices (`cfq doctor`, `cfq nodes`, nvidia-smi), so N is NVML's
//! index, and CUDA's ordinal is found by the UUID, which both report.
//!
//! If any GPU cannot be matched (a MIG slice, which has its own UUID, or a machine without NVML), N is CUDA's ordinal
//! for all GPUs: a mixture could give two GPUs the same index.

/// A GPU with its CUDA ordinal and its index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexedGpu {
    /// Ordinal of the GPU in CUDA.
    pub ordinal: usize,
    /// Index of the GPU: the N of `cuda:N`.
    pub index: usize,
    /// UUID of the GPU in NVML; `None` if it was not matched with NVML.
    pub uuid: Option<String>,
}

/// Returns all GPUs in the order of their indices, and whether they could be matched with NVML. `visible` contains the
/// UUIDs in CUDA's order, `nvml` the indices and UUIDs of NVML.
pub fn index_gpus(visible: &[Option<[u8; 16]>], nvml: &[(usize, String)]) -> (Vec<IndexedGpu>, bool) {
    let known = |(ordinal, uuid): (usize, &Option<[u8; 16]>)| {
        let uuid = nvml_uuid(&(*uuid)?);
        let (index, uuid) = nvml.iter().find(|(_, own)| own.eq_ignore_ascii_case(&uuid))?.clone();
        Some(IndexedGpu { ordinal, index, uuid: Some(uuid) })
    };
    let matched: Option<Vec<IndexedGpu>> = visible.iter().enumerate().map(known).collect();
    match matched {
        Some(mut all) => {
            all.sort_by_key(|gpu| gpu.index);
            // A driver may report one UUID for several slices of a GPU.
            let distinct = all.windows(2).all(|two| two[0].index != two[1].index);
            if distinct { (all, true) } else { (by_ordinal(visible.len()), false) }
        }
        None => (by_ordinal(visible.len()), false),
    }
}

fn by_ordinal(count: usize) -> Vec<IndexedGpu> {
    (0..count).map(|ordinal| IndexedGpu { ordinal, index: ordinal, uuid: None }).collect()
}

/// The UUID of a whole GPU as NVML formats it.
fn nvml_uuid(uuid: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let parts = [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]];
    format!("GPU-{}", parts.map(hex).join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: [u8; 16] = [1; 16];
    const FAST: [u8; 16] = [0xAB, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0xFF];

    fn nvml() -> Vec<(usize, String)> {
        let fast = "GPU-ab000102-0304-0506-0708-090a0b0c0dff".to_owned();
        vec![(0, "GPU-01010101-0101-0101-0101-010101010101".to_owned()), (1, fast)]
    }

    fn pairs(visible: &[Option<[u8; 16]>], nvml: &[(usize, String)]) -> (Vec<(usize, usize, bool)>, bool) {
        let (all, matched) = index_gpus(visible, nvml);
        (all.into_iter().map(|gpu| (gpu.index, gpu.ordinal, gpu.uuid.is_some())).collect(), matched)
    }

    #[test]
    fn cuda_index_is_nvmls_index() {
        assert_eq!(pairs(&[Some(FAST), Some(SLOW)], &nvml()), (vec![(0, 1, true), (1, 0, true)], true));
        assert_eq!(pairs(&[Some(SLOW), Some(FAST)], &nvml()), (vec![(0, 0, true), (1, 1, true)], true));
        // CUDA_VISIBLE_DEVICES names only the second GPU.
        assert_eq!(pairs(&[Some(FAST)], &nvml()), (vec![(1, 0, true)], true));
        assert_eq!(pairs(&[], &nvml()), (vec![], true));
    }

    #[test]
    fn unmatched_gpus_keep_cuda_ordinals() {
        let ordinals = (vec![(0, 0, false), (1, 1, false)], false);
        assert_eq!(pairs(&[Some(FAST), Some([9; 16])], &nvml()), ordinals);
        assert_eq!(pairs(&[Some(FAST), None], &nvml()), ordinals);
        assert_eq!(pairs(&[Some(FAST), Some(FAST)], &nvml()), ordinals);
        assert_eq!(pairs(&[Some(FAST), Some(SLOW)], &[]), ordinals);
    }
}
