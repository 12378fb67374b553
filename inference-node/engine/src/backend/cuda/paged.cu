// Paged attention for any mix of prefilling and decoding sequences, and the kernel that writes new keys and values into
// the pages.
//
// Keys and values are in pages: (block, KV head, BLOCK positions, head dim). A query tile is a few consecutive new
// positions of one sequence. One thread block computes one query tile for one KV head and one KV split of the sequence.
// It has up to QUERIES query vectors, namely the tile's positions times the query heads that share the KV head, and
// uses each loaded key or value for all of them. The softmax is computed online (Milakov and Gimelshein,
// https://arxiv.org/abs/1805.02867). If there are too few thread blocks to fill the GPU, sequences are split along the
// KV length, and `combine` reduces the partial results (Flash-Decoding). A query's result does not depend on the other
// queries of its tile.
//
// Each warp computes four query vectors. In the query-key products, each lane computes one position; in the sums of
// values, each lane computes one dimension of every 32.

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

#define BLOCK 32
#define WARPS 4
#define THREADS (WARPS * 32)
#define PER_WARP 4
#define QUERIES (WARPS * PER_WARP)
#define ALL_LANES 0xffffffffu
#define LOWEST (-INFINITY)

typedef unsigned int u32;

struct AttentionSizes {
    u32 heads, kv_heads, head_dim;
    // Number of query heads per thread block, and of such groups of query heads per KV head.
    u32 group, groups;
    // Number of KV splits of a sequence, and of pages per split.
    u32 splits, blocks_per_split;
    // Sliding window: number of positions a query attends to, its own included; 0: no window.
    u32 window;
    float scale;
    // Soft cap of the scores; 0: none.
    float softcap;
};

__device__ __forceinline__ float2 two(const float *at) { return make_float2(at[0], at[1]); }
__device__ __forceinline__ float2 two(const __half *at) { return __half22float2(*reinterpret_cast<const __half2 *>(at)); }
__device__ __forceinline__ float one(const float *at) { return *at; }
__device__ __forceinline__ float one(const __half *at) { return __half2float(*at); }
__device__ __forceinline__ void put(float *at, float value) { *at = value; }
__device__ __forceinline__ void put(__half *at, float value) { *at = __float2half(value); }

// Stride between a page's positions in shared memory, in elements: padded by four bytes, so that the 32 lanes hit 32
// different banks.
template <typename T> __device__ __forceinline__ u32 padded(u32 head_dim) { return head_dim + 4 / sizeof(T); }

template <typename T> __device__ __forceinline__ void load_page(T *to, const T *from, u32 head_dim) {
    const u32 words = head_dim * sizeof(T) / 4, row = words + 1;
    u32 *out = reinterpret_cast<u32 *>(to);
    if (words % 4 == 0) {
        const uint4 *in = reinterpret_cast<const uint4 *>(from);
        for (u32 at = threadIdx.x; at < BLOCK * words / 4; at += THREADS) {
            const uint4 four = in[at];
            u32 *place = out + at * 4 / words * row + at * 4 % words;
            place[0] = four.x;
            place[1] = four.y;
            place[2] = four.z;
            place[3] = four.w;
        }
    } else {
        const u32 *in = reinterpret_cast<const u32 *>(from);
        for (u32 at = threadIdx.x; at < BLOCK * words; at += THREADS) out[at / words * row + at % words] = in[at];
    }
}

// Attention of one thread block. DIMS: dimensions per lane, at least head_dim / 32. Shared memory: the query vectors
// (QUERIES x head_dim floats), then one padded page.
template <typename T, int DIMS>
__device__ void attend(const float *queries, const T *keys, const T *values, float *out, float *partials,
                       const u32 *page_tables, const uint4 *tiles, const AttentionSizes s) {
    extern __shared__ float4 shared[];
    float *own = reinterpret_cast<float *>(shared);
    T *page = reinterpret_cast<T *>(own + QUERIES * s.head_dim);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Query tile: first row in the pass, number of rows, offset of the page table, position of the first row.
    const uint4 tile = tiles[blockIdx.x];
    const u32 kv_head = blockIdx.y / s.groups;
    const u32 all = s.heads / s.kv_heads, first_in_group = blockIdx.y % s.groups * s.group;
    const u32 group = min(s.group, all - first_in_group);
    const u32 count = tile.y * group, first_head = kv_head * all + first_in_group;
    const u32 last = tile.w + tile.y - 1;

    for (u32 at = threadIdx.x; at < QUERIES * s.head_dim; at += THREADS) {
        const u32 query = at / s.head_dim, dim = at % s.head_dim;
        const u32 row = tile.x + query / group, head = first_head + query % group;
        own[at] = query < count ? queries[(row * s.heads + head) * s.head_dim + dim] * s.scale : 0.0f;
    }

    const u32 lowest = s.window != 0 && tile.w + 1 > s.window ? tile.w + 1 - s.window : 0;
    const u32 begin = max(lowest / BLOCK, blockIdx.z * s.blocks_per_split);
    const u32 end = min(last / BLOCK + 1, (blockIdx.z + 1) * s.blocks_per_split);
    const bool works = warp * PER_WARP < count;
    const u32 stride = padded<T>(s.head_dim);

    float highest[PER_WARP], total[PER_WARP], sums[PER_WARP][DIMS];
#pragma unroll
    for (int j = 0; j < PER_WARP; j++) {
        highest[j] = LOWEST;
        total[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < DIMS; i++) sums[j][i] = 0.0f;
    }

    for (u32 block = begin; block < end; block++) {
        const size_t from = ((size_t)page_tables[tile.z + block] * s.kv_heads + kv_head) * BLOCK * s.head_dim;
        __syncthreads();
        load_page(page, keys + from, s.head_dim);
        __syncthreads();
        float weight[PER_WARP];
        if (works) {
            const u32 position = block * BLOCK + lane;
            float score[PER_WARP] = {0.0f, 0.0f, 0.0f, 0.0f};
            const T *key = page + lane * stride;
            const float *query = own + warp * PER_WARP * s.head_dim;
            for (u32 dim = 0; dim < s.head_dim; dim += 2) {
                const float2 k = two(key + dim);
#pragma unroll
                for (int j = 0; j < PER_WARP; j++) {
                    const float2 q = two(query + j * s.head_dim + dim);
                    score[j] += q.x * k.x + q.y * k.y;
                }
            }
#pragma unroll
            for (int j = 0; j < PER_WARP; j++) {
                const u32 index = warp * PER_WARP + j, at = tile.w + index / group;
                const bool seen = index < count && position <= at && (s.window == 0 || position + s.window > at);
                if (s.softcap != 0.0f) score[j] = s.softcap * tanhf(score[j] / s.softcap);
                float high = seen ? score[j] : LOWEST;
#pragma unroll
                for (int step = 16; step > 0; step /= 2) high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, step));
                high = fmaxf(high, highest[j]);
                weight[j] = seen ? expf(score[j] - high) : 0.0f;
                // If no position was attended so far, there is nothing to rescale.
                const float rescale = highest[j] == LOWEST ? 1.0f : expf(highest[j] - high);
                float sum = weight[j];
#pragma unroll
                for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
                total[j] = total[j] * rescale + sum;
                highest[j] = high;
#pragma unroll
                for (int i = 0; i < DIMS; i++) sums[j][i] *= rescale;
            }
        }
        __syncthreads();
        load_page(page, values + from, s.head_dim);
        __syncthreads();
        if (works) {
            // Values of positions beyond the last one are uninitialized and may be NaN.
            const u32 filled = min((u32)BLOCK, last + 1 - block * BLOCK);
            for (u32 key = 0; key < filled; key++) {
                const T *value = page + key * stride;
                float own_weight[PER_WARP];
#pragma unroll
                for (int j = 0; j < PER_WARP; j++) own_weight[j] = __shfl_sync(ALL_LANES, weight[j], key);
#pragma unroll
                for (int i = 0; i < DIMS; i++) {
                    const u32 dim = lane + 32 * i;
                    const float v = dim < s.head_dim ? one(value + dim) : 0.0f;
#pragma unroll
                    for (int j = 0; j < PER_WARP; j++) sums[j][i] += own_weight[j] * v;
                }
            }
        }
    }

#pragma unroll
    for (int j = 0; j < PER_WARP; j++) {
        const u32 index = warp * PER_WARP + j;
        if (index >= count) continue;
        const size_t vector = (size_t)(tile.x + index / group) * s.heads + first_head + index % group;
        if (s.splits == 1) {
#pragma unroll
            for (int i = 0; i < DIMS; i++) {
                const u32 dim = lane + 32 * i;
                if (dim < s.head_dim) out[vector * s.head_dim + dim] = sums[j][i] / total[j];
            }
        } else {
            float *partial = partials + (vector * s.splits + blockIdx.z) * (s.head_dim + 2);
            if (lane == 0) {
                partial[0] = highest[j];
                partial[1] = total[j];
            }
#pragma unroll
            for (int i = 0; i < DIMS; i++) {
                const u32 dim = lane + 32 * i;
                if (dim < s.head_dim) partial[2 + dim] = sums[j][i];
            }
        }
    }
}

// Combines the partial results of the KV splits; one thread block per query vector.
__device__ void combine(const float *partials, float *out, u32 splits, u32 head_dim) {
    const float *own = partials + (size_t)blockIdx.x * splits * (head_dim + 2);
    float high = LOWEST;
    for (u32 at = 0; at < splits; at++) high = fmaxf(high, own[at * (head_dim + 2)]);
    for (u32 dim = threadIdx.x; dim < head_dim; dim += THREADS) {
        float sum = 0.0f, total = 0.0f;
        for (u32 at = 0; at < splits; at++) {
            const float *partial = own + at * (head_dim + 2);
            const float rescale = partial[0] == LOWEST ? 0.0f : expf(partial[0] - high);
            sum += partial[2 + dim] * rescale;
            total += partial[1] * rescale;
        }
        out[(size_t)blockIdx.x * head_dim + dim] = sum / total;
    }
}

// Writes new keys or values, (rows, KV heads, head dim), into their slots; slot = block x BLOCK + position in the
// block.
template <typename T>
__device__ void write(const float *rows, T *pages, const u32 *slots, u32 count, u32 kv_heads, u32 head_dim) {
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count * kv_heads * head_dim) return;
    const u32 dim = at % head_dim, head = at / head_dim % kv_heads, slot = slots[at / head_dim / kv_heads];
    const size_t to = (((size_t)(slot / BLOCK) * kv_heads + head) * BLOCK + slot % BLOCK) * head_dim + dim;
    put(pages + to, rows[at]);
}

#define KERNELS(T, NAME)                                                                                                \
    ATTEND(T, NAME, 2)                                                                                                  \
    ATTEND(T, NAME, 4)                                                                                                  \
    ATTEND(T, NAME, 8)                                                                                                  \
    extern "C" __global__ void write_##NAME(const float *rows, T *pages, const u32 *slots, u32 count, u32 kv_heads,     \
                                            u32 head_dim) {                                                             \
        write<T>(rows, pages, slots, count, kv_heads, head_dim);                                                        \
    }

#define ATTEND(T, NAME, DIMS)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        attend_##NAME##_##DIMS(const float *queries, const T *keys, const T *values, float *out, float *partials,       \
                               const u32 *page_tables, const uint4 *tiles, u32 heads, u32 kv_heads, u32 head_dim,       \
                               u32 group, u32 groups, u32 splits, u32 blocks_per_split, u32 window, float scale,        \
                               float softcap) {                                                                         \
        const AttentionSizes s = {heads,  kv_heads,         head_dim, group, groups,                                    \
                                  splits, blocks_per_split, window,   scale, softcap};                                  \
        attend<T, DIMS>(queries, keys, values, out, partials, page_tables, tiles, s);                                   \
    }

KERNELS(__half, f16)
KERNELS(float, f32)

extern "C" __global__ void combine_splits(const float *partials, float *out, u32 splits, u32 head_dim) {
    combine(partials, out, splits, head_dim);
}
