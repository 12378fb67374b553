// Runs the kernels of paged.cu on the CPU and compares them with a direct implementation of attention in double
// precision. Each thread of a thread block is a coroutine; barriers and shuffles switch to the next thread. This checks
// arithmetic, indices and barriers, but not the GPU's compiler, memory ordering or speed.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

struct uint3_ { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
typedef _Float16 __half;
struct __half2 { __half x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float2 __half22float2(__half2 v) { return {(float)v.x, (float)v.y}; }
static float __half2float(__half v) { return (float)v; }
static __half __float2half(float v) { return (__half)v; }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

// Dynamic shared memory of the thread block, under the name that the kernel uses.
extern float4 shared[8 << 10];

// Indices of the running thread. Thread blocks run one after the other; the threads of a block take turns on one CPU
// thread.
static uint3_ threadIdx, blockIdx, blockDim;
static const int MAX_THREADS = 256, STACK_BYTES = 64 << 10;

namespace machine {
enum State { RUNNING, AT_BARRIER, AT_SHUFFLE, DONE };
static ucontext_t scheduler, first[MAX_THREADS];
// Jump targets. A coroutine is started by swapcontext; after that it is suspended and resumed by longjmp, which needs
// no system call.
static jmp_buf back, thread[MAX_THREADS];
static bool started[MAX_THREADS];
static std::vector<char> stacks(MAX_THREADS *STACK_BYTES);
static State state[MAX_THREADS];
static float lane_value[2][MAX_THREADS];
static unsigned shuffles[MAX_THREADS];
static std::function<void()> body;
static unsigned current;

static void suspend(State at) {
    state[current] = at;
    if (_setjmp(thread[current]) == 0) _longjmp(back, 1);
}

static void run_thread() {
    body();
    state[current] = DONE;
    _longjmp(back, 1);
}

static void resume(unsigned t) {
    current = t;
    threadIdx = {t, 0, 0};
    if (_setjmp(back) != 0) return;
    if (started[t]) _longjmp(thread[t], 1);
    started[t] = true;
    swapcontext(&scheduler, &first[t]);
}

static void block(unsigned threads) {
    for (unsigned t = 0; t < threads; t++) {
        state[t] = RUNNING;
        started[t] = false;
        shuffles[t] = 0;
        getcontext(&first[t]);
        first[t].uc_stack.ss_sp = &stacks[t * STACK_BYTES];
        first[t].uc_stack.ss_size = STACK_BYTES;
        makecontext(&first[t], run_thread, 0);
    }
    for (;;) {
        bool moved = false;
        // Threads run in descending order, so that no kernel can rely on thread 0 running first.
        for (unsigned t = threads; t-- > 0;) {
            if (state[t] != RUNNING) continue;
            resume(t);
            moved = true;
        }
        unsigned done = 0, barrier = 0;
        for (unsigned t = 0; t < threads; t++) done += state[t] == DONE, barrier += state[t] == AT_BARRIER;
        if (done == threads) return;
        if (done + barrier == threads && done == 0) {
            for (unsigned t = 0; t < threads; t++) state[t] = RUNNING;
            moved = true;
        }
        for (unsigned warp = 0; warp < threads; warp += 32) {
            bool all = true;
            for (unsigned t = warp; t < warp + 32; t++) all = all && state[t] == AT_SHUFFLE;
            if (!all) continue;
            for (unsigned t = warp; t < warp + 32; t++) state[t] = RUNNING;
            moved = true;
        }
        if (!moved) {
            fprintf(stderr, "emulated: deadlock: threads wait at different barriers or shuffles\n");
            exit(1);
        }
    }
}

template <typename F> void grid(unsigned x, unsigned y, unsigned z, unsigned threads, F kernel) {
    blockDim = {threads, 1, 1};
    body = kernel;
    for (unsigned k = 0; k < z; k++)
        for (unsigned j = 0; j < y; j++)
            for (unsigned i = 0; i < x; i++) {
                blockIdx = {i, j, k};
                // Fills shared memory with garbage, as a previous thread block may leave it.
                memset(shared, 0x7f, sizeof shared);
                block(threads);
            }
}
}  // namespace machine

static void __syncthreads() { machine::suspend(machine::AT_BARRIER); }
static float exchange(float value, unsigned from) {
    // Two slots per thread, used alternately: a thread overwrites a slot two shuffles later, when the whole warp has
    // read it.
    const unsigned self = machine::current, slot = machine::shuffles[self]++ % 2;
    machine::lane_value[slot][self] = value;
    machine::suspend(machine::AT_SHUFFLE);
    return machine::lane_value[slot][self / 32 * 32 + from];
}
static float __shfl_xor_sync(unsigned, float value, int mask) { return exchange(value, machine::current % 32 ^ mask); }
static float __shfl_sync(unsigned, float value, unsigned from) { return exchange(value, from); }

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __shared__
float4 shared[8 << 10];

#include "paged.cu"

struct Sequence { unsigned past, new_rows; };

template <typename T> struct Kernels;
template <> struct Kernels<__half> {
    static constexpr auto write = write_f16;
    static constexpr decltype(&attend_f16_2) attend[3] = {attend_f16_2, attend_f16_4, attend_f16_8};
};
template <> struct Kernels<float> {
    static constexpr auto write = write_f32;
    static constexpr decltype(&attend_f32_2) attend[3] = {attend_f32_2, attend_f32_4, attend_f32_8};
};

static std::mt19937 dice(7);
static float draw() { return std::uniform_real_distribution<float>(-2.0f, 2.0f)(dice); }

// Writes the keys and values of all positions, computes attention of the new positions and returns the largest absolute
// error.
template <typename T>
double run(unsigned heads, unsigned kv_heads, unsigned dim, const std::vector<Sequence> &sequences, unsigned window,
           float cap, unsigned blocks_per_split) {
    const unsigned all = heads / kv_heads, group = min(all, QUERIES), groups = (all + group - 1) / group;
    const unsigned height = max(1, QUERIES / all);
    // Pages are assigned to the sequences in random order; page 0 belongs to no sequence.
    std::vector<u32> tables, tiles;
    std::vector<unsigned> table_of, lengths;
    unsigned pages = 1, rows = 0, longest = 0;
    for (const Sequence &sequence : sequences) pages += (sequence.past + sequence.new_rows + BLOCK - 1) / BLOCK;
    std::vector<u32> free_pages(pages - 1);
    for (unsigned i = 0; i + 1 < pages; i++) free_pages[i] = i + 1;
    std::shuffle(free_pages.begin(), free_pages.end(), dice);
    for (const Sequence &sequence : sequences) {
        table_of.push_back(tables.size());
        const unsigned length = sequence.past + sequence.new_rows;
        for (unsigned b = 0; b * BLOCK < length; b++) tables.push_back(free_pages[tables.size()]);
        for (unsigned first = 0; first < sequence.new_rows; first += height)
            tiles.insert(tiles.end(), {rows + first, min(height, sequence.new_rows - first), table_of.back(),
                                       sequence.past + first});
        rows += sequence.new_rows;
        longest = max(longest, length);
    }
    const size_t page = (size_t)kv_heads * BLOCK * dim;
    std::vector<T> keys(pages * page, (T)NAN), values(pages * page, (T)NAN);
    std::vector<std::vector<float>> k(sequences.size()), v(sequences.size());
    for (size_t p = 0; p < sequences.size(); p++) {
        const unsigned length = sequences[p].past + sequences[p].new_rows;
        std::vector<u32> own;
        for (unsigned at = 0; at < length; at++) own.push_back(tables[table_of[p] + at / BLOCK] * BLOCK + at % BLOCK);
        for (auto [all_rows, where] : {std::pair{&k[p], &keys}, std::pair{&v[p], &values}}) {
            for (unsigned i = 0; i < length * kv_heads * dim; i++) all_rows->push_back((float)(T)draw());
            const float *from = all_rows->data();
            T *to = where->data();
            machine::grid((length * kv_heads * dim + 255) / 256, 1, 1, 256,
                          [&, from, to] { Kernels<T>::write(from, to, own.data(), length, kv_heads, dim); });
        }
    }
    std::vector<float> queries((size_t)rows * heads * dim);
    for (float &q : queries) q = draw();

    const unsigned blocks = (longest + BLOCK - 1) / BLOCK;
    if (blocks_per_split == 0) blocks_per_split = blocks;
    const unsigned splits = (blocks + blocks_per_split - 1) / blocks_per_split;
    std::vector<float> out(queries.size(), NAN), partials((size_t)rows * heads * splits * (dim + 2), NAN);
    const float scale = 1.0f / std::sqrt((float)dim);
    const auto attend = Kernels<T>::attend[dim <= 64 ? 0 : dim <= 128 ? 1 : 2];
    machine::grid(tiles.size() / 4, kv_heads * groups, splits, THREADS, [&] {
        attend(queries.data(), keys.data(), values.data(), out.data(), partials.data(), tables.data(),
               (const uint4 *)tiles.data(), heads, kv_heads, dim, group, groups, splits, blocks_per_split, window, scale,
               cap);
    });
    if (splits > 1)
        machine::grid(rows * heads, 1, 1, THREADS, [&] { combine_splits(partials.data(), out.data(), splits, dim); });

    double worst = 0;
    unsigned row = 0;
    for (size_t p = 0; p < sequences.size(); p++)
        for (unsigned at = sequences[p].past; at < sequences[p].past + sequences[p].new_rows; at++, row++)
            for (unsigned head = 0; head < heads; head++) {
                const unsigned first = window && at + 1 > window ? at + 1 - window : 0;
                const float *q = &queries[((size_t)row * heads + head) * dim];
                std::vector<double> weights;
                double total = 0;
                for (unsigned of = first; of <= at; of++) {
                    const float *key = &k[p][((size_t)of * kv_heads + head / all) * dim];
                    double score = 0;
                    for (unsigned d = 0; d < dim; d++) score += (double)q[d] * key[d];
                    score *= scale;
                    if (cap != 0) score = cap * std::tanh(score / cap);
                    weights.push_back(std::exp(score));
                    total += weights.back();
                }
                for (unsigned d = 0; d < dim; d++) {
                    double want = 0;
                    for (unsigned of = first; of <= at; of++)
                        want += weights[of - first] / total * v[p][((size_t)of * kv_heads + head / all) * dim + d];
                    const double off = std::fabs(want - out[((size_t)row * heads + head) * dim + d]);
                    // NaN counts as an infinite error.
                    worst = off <= worst ? worst : std::isnan(off) ? INFINITY : off;
                }
            }
    return worst;
}

int main() {
    const std::vector<Sequence> sequences = {{0, 1}, {75, 19}, {31, 1}, {0, 33}, {63, 2}, {130, 1}};
    const struct { unsigned heads, kv_heads, dim; } shapes[] = {{4, 2, 64},  {7, 1, 128}, {3, 3, 40}, {20, 1, 80},
                                                                {2, 1, 256}, {16, 1, 2},  {28, 4, 96}};
    int runs = 0;
    double worst = 0;
    const struct { unsigned window; float cap; } kinds[] = {{0, 0.0f}, {1, 1.5f}, {7, 0.0f}, {64, 1.5f}};
    for (auto shape : shapes)
        for (auto kind : kinds)
            for (unsigned split : {0u, 1u, 2u}) {
                const auto [heads, kv_heads, dim] = shape;
                const double half = run<__half>(heads, kv_heads, dim, sequences, kind.window, kind.cap, split);
                const double single = run<float>(heads, kv_heads, dim, sequences, kind.window, kind.cap, split);
                for (double off : {half, single})
                    if (!(off < 2e-5)) {
                        fprintf(stderr,
                                "emulated: error %g with %u heads, %u KV heads of %u, window %u, cap %g, %u blocks per split\n",
                                off, heads, kv_heads, dim, kind.window, kind.cap, split);
                        return 1;
                    }
                worst = std::max({worst, half, single});
                runs += 2;
            }
    printf("emulated: %d runs of the GPU kernels on the CPU, largest error %.1g\n", runs, worst);
}
