// What tables.cu needs of CUDA, for a C++20 compiler: the 32 lanes of a warp are threads, and warps run one by one.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
using std::min;

struct float4 { float x, y, z, w; };
struct Place { unsigned x; };
static thread_local Place threadIdx, blockIdx;
static constexpr Place blockDim{32};

static std::barrier<> lanes(32);
static unsigned exchanged[32];

static void __syncwarp() { lanes.arrive_and_wait(); }

static unsigned take(unsigned value, unsigned lane) {
    exchanged[threadIdx.x] = value;
    __syncwarp();
    const unsigned taken = exchanged[lane];
    __syncwarp();
    return taken;
}

static float __shfl_xor_sync(unsigned, float value, int step) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    bits = take(bits, threadIdx.x ^ unsigned(step));
    std::memcpy(&value, &bits, 4);
    return value;
}

static unsigned __ballot_sync(unsigned, bool vote) {
    exchanged[threadIdx.x] = vote;
    __syncwarp();
    unsigned votes = 0;
    for (int lane = 0; lane < 32; lane++) votes |= exchanged[lane] << lane;
    __syncwarp();
    return votes;
}

static int __ffs(unsigned value) { return __builtin_ffs(int(value)); }
static void atomicAdd(float* place, float value) { std::atomic_ref<float>(*place) += value; }

template <typename Kernel, typename... Given> static void launch(int warps, Kernel kernel, Given... given) {
    std::vector<std::thread> threads;
    for (unsigned lane = 0; lane < 32; lane++) {
        threads.emplace_back([=] {
            threadIdx = {lane};
            for (int warp = 0; warp < warps; warp++) {
                blockIdx = {unsigned(warp)};
                kernel(given...);
                lanes.arrive_and_wait();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}
