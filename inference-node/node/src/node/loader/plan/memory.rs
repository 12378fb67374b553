//! Three quantities of free memory, for the host and for GPUs: the memory that is reserved for no model, the part of it
//! that is free on the machine now, and the memory that would be free after all permitted evictions.

use super::state::{GpuBytes, LoaderState, PlannedGpu, ResidentModel};

/// Resolution of [`LoaderState::loadable_bytes`], in bytes. Each change of the ledger is sent to the scheduler, so
/// small changes of the free memory are not reported.
const REPORTED_STEP_BYTES: u64 = 64 << 20;

impl LoaderState {
    /// Bytes of host memory that are reserved for no model. Cached weights count as unreserved, since they are dropped
    /// when memory is needed.
    pub fn unreserved_bytes(&self) -> u64 {
        self.config.host_bytes.saturating_sub(self.engines().map(|(_, loaded)| loaded.host_bytes).sum())
    }

    /// The part of [`Self::unreserved_bytes`] that is free on the machine now. Cached weights do not count as free.
    pub fn free_bytes_now(&self) -> u64 {
        let available = self.observed.available_bytes.saturating_sub(self.unallocated_bytes());
        self.unreserved_bytes().saturating_sub(self.cached_bytes()).min(available)
    }

    /// Bytes that a load may take without evicting a model, for the ledger. Cached weights count as free.
    pub fn loadable_bytes(&self) -> u64 {
        let bytes = self.free_bytes_now().saturating_add(self.cached_bytes()).min(self.unreserved_bytes());
        bytes - bytes % REPORTED_STEP_BYTES
    }

    /// Bytes of all cached weights.
    pub fn cached_bytes(&self) -> u64 {
        self.cached.iter().map(|cached| cached.bytes).sum()
    }

    /// Bytes that the kernel reports as available although they are reserved: the unallocated parts of the KV pools and
    /// of the host KV cache.
    pub fn unallocated_bytes(&self) -> u64 {
        let engines = self.engines().map(|(model, _)| self.unallocated_bytes_of(model)).sum::<u64>();
        engines.saturating_add(self.observed.kv_cache_unallocated_bytes)
    }

    /// Bytes of host memory that would be free after all permitted evictions and without cached weights. An evicted
    /// model is assumed to free all of its reservation.
    pub fn bytes_after_evictions(&self) -> u64 {
        let (staying, evictable) = self.staying_and_evictable();
        let bytes = |of: &[&ResidentModel]| of.iter().map(|loaded| loaded.host_bytes).fold(0, u64::saturating_add);
        let freed = bytes(&evictable).saturating_add(self.cached_bytes());
        let available = self.observed.available_bytes.saturating_add(freed).saturating_sub(self.unallocated_bytes());
        self.config.host_bytes.saturating_sub(bytes(&staying)).min(available)
    }

    /// Returns the engines that are never evicted (pinned), and those that may be evicted or are already being
    /// unloaded.
    fn staying_and_evictable(&self) -> (Vec<&ResidentModel>, Vec<&ResidentModel>) {
        let (mut staying, mut evictable) = (Vec::new(), Vec::new());
        for (model, loaded) in &self.loaded {
            if self.is_pinned(model) { staying.push(loaded) } else { evictable.push(loaded) }
        }
        evictable.extend(self.unloading.iter().map(|(_, loaded)| loaded));
        (staying, evictable)
    }

    /// Capacities of the GPUs.
    pub(super) fn gpu_capacities(&self) -> Vec<u64> {
        self.gpus().iter().map(|gpu| gpu.free_bytes_at_open).collect()
    }

    /// Free bytes of each GPU now.
    pub fn gpu_free_now(&self) -> Vec<u64> {
        self.gpu_free_bytes(&self.engines().map(|(_, loaded)| loaded).collect::<Vec<_>>(), &[])
    }

    /// Free bytes of each GPU after all permitted evictions.
    pub(super) fn gpu_free_after_evictions(&self) -> Vec<u64> {
        let (staying, evictable) = self.staying_and_evictable();
        self.gpu_free_bytes(&staying, &evictable)
    }

    /// Free bytes of each GPU after the `leaving` engines have been unloaded, if the `staying` engines stay loaded.
    ///
    /// All models together may use the memory that was free when the GPU was opened. The memory that the driver reports
    /// as free now is a further limit; from it the scratch memory of the staying models is subtracted, since it is
    /// allocated only during a pass.
    fn gpu_free_bytes(&self, staying: &[&ResidentModel], leaving: &[&ResidentModel]) -> Vec<u64> {
        let sum = |of: &[&ResidentModel], gpu: &PlannedGpu, bytes: fn(&GpuBytes) -> u64| {
            let on_gpu = of.iter().flat_map(|loaded| &loaded.gpus).filter(|share| share.gpu == gpu.index);
            on_gpu.map(bytes).sum::<u64>()
        };
        let free = |(at, gpu): (usize, &PlannedGpu)| {
            let unreserved = gpu.free_bytes_at_open.saturating_sub(sum(staying, gpu, |share| share.bytes));
            let driver = self.observed.gpu_free_bytes.get(at).copied().flatten().map(|free| {
                let after = free.saturating_add(sum(leaving, gpu, |share| share.bytes));
                after.saturating_sub(sum(staying, gpu, |share| share.scratch_bytes))
            });
            unreserved.min(driver.unwrap_or(u64::MAX))
        };
        self.gpus().iter().enumerate().map(free).collect()
    }
}
