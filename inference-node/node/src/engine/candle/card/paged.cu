// Attention over keys and values in blocks, for any mix of prompts and decoding sequences; and the write into the blocks.
//
// Pages are (block, KV head, BLOCK positions, head dim), for keys and for values. A tile is a few consecutive new
// positions of one sequence; one thread block takes one tile, one KV head and one stretch of the sequence, and computes up
// to QUERIES query vectors: the tile's positions times the heads that share the KV head. They share every load. The softmax
// is computed as the keys come (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867); where a sequence is cut into
// stretches to fill the card, `combine` puts the parts together (Flash-Decoding). A query's result does not depend on which
// others are in its tile.
//
// Each warp owns four queries. In the products with keys a lane is a position, in the sums of values a dimension.

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

struct Sizes {
    u32 heads, kv_heads, head_dim;
    // Query heads of one thread block, and how many thread blocks share a KV head.
    u32 group, groups;
    // Stretches a sequence is cut into, and blocks of pages in each.
    u32 stretches, stretch;
    // Positions back that are seen; 0: all.
    u32 window;
    float scale;
    // 0: scores are not squeezed.
    float cap;
};

__device__ __forceinline__ float2 two(const float *at) { return make_float2(at[0], at[1]); }
__device__ __forceinline__ float2 two(const __half *at) { return __half22float2(*reinterpret_cast<const __half2 *>(at)); }
__device__ __forceinline__ float one(const float *at) { return *at; }
__device__ __forceinline__ float one(const __half *at) { return __half2float(*at); }
__device__ __forceinline__ void put(float *at, float value) { *at = value; }
__device__ __forceinline__ void put(__half *at, float value) { *at = __float2half(value); }

// Values of a row of a page in shared memory: padded by four bytes, so that lanes in 32 rows hit 32 banks.
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

// DIMS: dimensions of a lane, at least head_dim / 32. Shared memory: QUERIES x head_dim floats, then a padded page.
template <typename T, int DIMS>
__device__ void attend(const float *queries, const T *keys, const T *values, float *out, float *parts, const u32 *tables,
                       const uint4 *tiles, const Sizes s) {
    extern __shared__ float4 shared[];
    float *own = reinterpret_cast<float *>(shared);
    T *page = reinterpret_cast<T *>(own + QUERIES * s.head_dim);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // First row of the pass, rows, where its blocks are listed, position of the first row.
    const uint4 tile = tiles[blockIdx.x];
    const u32 kv_head = blockIdx.y / s.groups;
    const u32 all = s.heads / s.kv_heads, skipped = blockIdx.y % s.groups * s.group;
    const u32 group = min(s.group, all - skipped);
    const u32 count = tile.y * group, first_head = kv_head * all + skipped;
    const u32 last = tile.w + tile.y - 1;

    for (u32 at = threadIdx.x; at < QUERIES * s.head_dim; at += THREADS) {
        const u32 query = at / s.head_dim, dim = at % s.head_dim;
        const u32 row = tile.x + query / group, head = first_head + query % group;
        own[at] = query < count ? queries[(row * s.heads + head) * s.head_dim + dim] * s.scale : 0.0f;
    }

    const u32 lowest = s.window != 0 && tile.w + 1 > s.window ? tile.w + 1 - s.window : 0;
    const u32 begin = max(lowest / BLOCK, blockIdx.z * s.stretch);
    const u32 end = min(last / BLOCK + 1, (blockIdx.z + 1) * s.stretch);
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
        const size_t from = ((size_t)tables[tile.z + block] * s.kv_heads + kv_head) * BLOCK * s.head_dim;
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
                if (s.cap != 0.0f) score[j] = s.cap * tanhf(score[j] / s.cap);
                float high = seen ? score[j] : LOWEST;
#pragma unroll
                for (int step = 16; step > 0; step /= 2) high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, step));
                high = fmaxf(high, highest[j]);
                weight[j] = seen ? expf(score[j] - high) : 0.0f;
                // Nothing seen so far: there is nothing to shrink.
                const float shrink = highest[j] == LOWEST ? 1.0f : expf(highest[j] - high);
                float sum = weight[j];
#pragma unroll
                for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
                total[j] = total[j] * shrink + sum;
                highest[j] = high;
#pragma unroll
                for (int i = 0; i < DIMS; i++) sums[j][i] *= shrink;
            }
        }
        __syncthreads();
        load_page(page, values + from, s.head_dim);
        __syncthreads();
        if (works) {
            // What lies behind the last position is nobody's, perhaps not even a number.
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
        if (s.stretches == 1) {
#pragma unroll
            for (int i = 0; i < DIMS; i++) {
                const u32 dim = lane + 32 * i;
                if (dim < s.head_dim) out[vector * s.head_dim + dim] = sums[j][i] / total[j];
            }
        } else {
            float *part = parts + (vector * s.stretches + blockIdx.z) * (s.head_dim + 2);
            if (lane == 0) {
                part[0] = highest[j];
                part[1] = total[j];
            }
#pragma unroll
            for (int i = 0; i < DIMS; i++) {
                const u32 dim = lane + 32 * i;
                if (dim < s.head_dim) part[2 + dim] = sums[j][i];
            }
        }
    }
}

// One thread block a query vector.
__device__ void combine(const float *parts, float *out, u32 stretches, u32 head_dim) {
    const float *own = parts + (size_t)blockIdx.x * stretches * (head_dim + 2);
    float high = LOWEST;
    for (u32 at = 0; at < stretches; at++) high = fmaxf(high, own[at * (head_dim + 2)]);
    for (u32 dim = threadIdx.x; dim < head_dim; dim += THREADS) {
        float sum = 0.0f, total = 0.0f;
        for (u32 at = 0; at < stretches; at++) {
            const float *part = own + at * (head_dim + 2);
            const float shrink = part[0] == LOWEST ? 0.0f : expf(part[0] - high);
            sum += part[2 + dim] * shrink;
            total += part[1] * shrink;
        }
        out[(size_t)blockIdx.x * head_dim + dim] = sum / total;
    }
}

// Rows are (new, KV heads, head dim); a slot is block x BLOCK + position.
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
        attend_##NAME##_##DIMS(const float *queries, const T *keys, const T *values, float *out, float *parts,          \
                               const u32 *tables, const uint4 *tiles, u32 heads, u32 kv_heads, u32 head_dim, u32 group, \
                               u32 groups, u32 stretches, u32 stretch, u32 window, float scale, float cap) {            \
        const Sizes s = {heads, kv_heads, head_dim, group, groups, stretches, stretch, window, scale, cap};             \
        attend<T, DIMS>(queries, keys, values, out, parts, tables, tiles, s);                                           \
    }

KERNELS(__half, f16)
KERNELS(float, f32)

extern "C" __global__ void combine_parts(const float *parts, float *out, u32 stretches, u32 head_dim) {
    combine(parts, out, stretches, head_dim);
}
