// The part of CUDA that recurrence.cu uses, on fibres of one CPU thread; test_gpu_sources.py compiles it with KERNELS as
// the path of the kernels.
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>
using std::exp; using std::log1p;
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__
struct Place { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
static Place threadIdx, blockIdx, blockDim, gridDim;
static float __uint_as_float(unsigned bits) { float v; std::memcpy(&v, &bits, 4); return v; }
static unsigned __float_as_uint(float v) { unsigned bits; std::memcpy(&bits, &v, 4); return bits; }
static float shim_widen(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return h; }
static unsigned short shim_narrow(float v) { _Float16 h = v; unsigned short b; std::memcpy(&b, &h, 2); return b; }
#define HALF_TO_FLOAT(bits) shim_widen(bits)
#define FLOAT_TO_HALF(value) shim_narrow(value)

struct Fibre { ucontext_t context; std::vector<char> stack; Place place; bool done = false; unsigned waits = 0; };
struct Barrier { unsigned count = 0, arrived = 0, generation = 0; };
static std::vector<std::unique_ptr<Fibre>> fibres;
static std::vector<Barrier> barriers;  // [0] of the CTA, [1 + w] of warp w
static ucontext_t scheduler;
static Fibre* running;
static std::function<void()> body;
static double lanes[64][32];
static void yield() { Fibre* me = running; swapcontext(&me->context, &scheduler); running = me; threadIdx = me->place; }
static void wait_at(unsigned which) {
    const unsigned generation = barriers[which].generation;
    Barrier& here = barriers[which];
    if (++here.arrived == here.count) { here.arrived = 0; ++here.generation; }
    while (barriers[which].generation == generation) yield();
}
static unsigned flat() { return threadIdx.y * blockDim.x + threadIdx.x; }
static void __syncthreads() { wait_at(0); }
template <class T> T __shfl_down_sync(unsigned, T value, int step) {
    const unsigned warp = flat() / 32, lane = flat() % 32;
    lanes[warp][lane] = value;
    wait_at(1 + warp);
    const T found = static_cast<T>(lanes[warp][lane + step < 32 ? lane + step : lane]);
    wait_at(1 + warp);
    return found;
}
#include KERNELS
alignas(16) unsigned char workspace[65536];

static void enter() { body(); running->done = true; swapcontext(&running->context, &scheduler); }
static void run_block(Place index, Place block, std::mt19937& random) {
    const unsigned threads = block.x * block.y;
    blockIdx = index;
    std::memset(workspace, 0xff, sizeof workspace);  // NaN: nothing may count on zeros
    barriers.assign(1 + (threads + 31) / 32, {});
    barriers[0].count = threads;
    for (unsigned t = 0; t < threads; ++t) ++barriers[1 + t / 32].count;
    while (fibres.size() < threads) { fibres.push_back(std::make_unique<Fibre>()); fibres.back()->stack.resize(65536); }
    std::vector<unsigned> left;
    for (unsigned t = 0; t < threads; ++t) {
        Fibre& one = *fibres[t];
        one.done = false;
        one.place = {t % block.x, t / block.x, 0};
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = one.stack.data();
        one.context.uc_stack.ss_size = one.stack.size();
        makecontext(&one.context, enter, 0);
        left.push_back(t);
    }
    while (!left.empty()) {
        std::shuffle(left.begin(), left.end(), random);
        std::vector<unsigned> next;
        for (unsigned t : left) {
            running = fibres[t].get();
            threadIdx = running->place;
            swapcontext(&scheduler, &running->context);
            if (!fibres[t]->done) next.push_back(t);
        }
        left.swap(next);
    }
}
template <class... A, std::size_t... I>
static bool attach(void (*kernel)(A...), void** args, const int* sizes, int count, std::index_sequence<I...>) {
    const int wanted[] = {static_cast<int>(sizeof(A))...};
    if (count != static_cast<int>(sizeof...(A))) return false;
    for (int i = 0; i < count; ++i) if (sizes[i] != wanted[i]) return false;
    body = [=] { kernel(*static_cast<A*>(args[I])...); };
    return true;
}
template <class... A> static bool attach(void (*kernel)(A...), void** args, const int* sizes, int count) {
    return attach(kernel, args, sizes, count, std::index_sequence_for<A...>{});
}
extern "C" int launch(const char* name, unsigned grid, unsigned x, unsigned y,
                      void** args, const int* sizes, int count) {
    static std::mt19937 random(7);
    const std::string what = name;
    bool bound = false;
    if (what == "store_float32") bound = attach(store_float32, args, sizes, count);
    if (what == "store_float64") bound = attach(store_float64, args, sizes, count);
    if (what == "gather_rows") bound = attach(gather_rows, args, sizes, count);
    if (what == "margins") bound = attach(margins, args, sizes, count);
    if (what == "recurrence") bound = attach(recurrence, args, sizes, count);
    if (what == "increment") bound = attach(increment, args, sizes, count);
#ifdef HAS_WAIT_NS
    if (what == "wait_ns") bound = attach(wait_ns, args, sizes, count);
#endif
    if (!bound) return 1;
    gridDim = {grid, 1, 1};
    blockDim = {x, y, 1};
    for (unsigned block = 0; block < grid; ++block) run_block({block, 0, 0}, blockDim, random);
    return 0;
}
