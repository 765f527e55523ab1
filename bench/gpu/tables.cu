// Table-batched embedding bags, sum pooling, all rows in device memory: a plain peer for the tier's kernels.
//
// Compiled for one width: DIM floats a row, a power of two from 4 to 128. A warp takes one bag or one segment of sorted
// positions. Each row is read by LANES lanes, 16 bytes a lane; the warp's TEAMS teams of lanes take rows in turn.
// Sums of rows that lie in several segments are added by atomics, so their last bits differ from run to run.

constexpr int LANES = DIM / 4;
constexpr int TEAMS = 32 / LANES;
constexpr int AHEAD = 4; // rows a team has in flight
constexpr int SEGMENT = 256; // positions, at most
constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ void add(float4& sum, float4 term) {
    sum.x += term.x;
    sum.y += term.y;
    sum.z += term.z;
    sum.w += term.w;
}

// The sum of all teams, in each of them.
__device__ __forceinline__ float4 over_teams(float4 sum) {
    for (int step = LANES; step < 32; step *= 2) {
        float4 other;
        other.x = __shfl_xor_sync(ALL, sum.x, step);
        other.y = __shfl_xor_sync(ALL, sum.y, step);
        other.z = __shfl_xor_sync(ALL, sum.z, step);
        other.w = __shfl_xor_sync(ALL, sum.w, step);
        add(sum, other);
    }
    return sum;
}

__device__ __forceinline__ int warp_number() {
    return (int)((blockIdx.x * (unsigned)blockDim.x + threadIdx.x) / 32);
}

// Result of bag k, feature-major: columns of feature k / batch, in the output's row k % batch.
__device__ __forceinline__ long long place_of(int bag, int batch, int tables) {
    return ((long long)(bag % batch) * tables + bag / batch) * DIM;
}

// weights [S, DIM]; rows int32 [N]; offsets int32 [bags + 1]; out [batch, tables * DIM].
extern "C" __global__ void forward(
    const float* __restrict__ weights, const int* __restrict__ rows, const int* __restrict__ offsets,
    float* __restrict__ out, int bags, int batch, int tables
) {
    const int bag = warp_number();
    if (bag >= bags) return;
    const int lane = threadIdx.x % 32, team = lane / LANES, column = lane % LANES * 4;
    const int last = offsets[bag + 1];
    float4 sum = {0.f, 0.f, 0.f, 0.f};
    for (int p = offsets[bag] + team; p < last; p += TEAMS * AHEAD) {
        float4 taken[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int q = p + i * TEAMS;
            taken[i] = {0.f, 0.f, 0.f, 0.f};
            if (q < last) taken[i] = *(const float4*)(weights + (long long)rows[q] * DIM + column);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) add(sum, taken[i]);
    }
    __syncwarp();
    sum = over_teams(sum);
    if (team == 0) *(float4*)(out + place_of(bag, batch, tables) + column) = sum;
}

// One optimizer step of a row by a warp; each team has the row's whole gradient.
__device__ __forceinline__ void step(
    float* __restrict__ weights, float* __restrict__ state, int row, float4 gradient, int column, bool writes,
    float lr, float eps, bool adagrad
) {
    float scale = lr;
    if (adagrad) {
        float squares = gradient.x * gradient.x + gradient.y * gradient.y + gradient.z * gradient.z
            + gradient.w * gradient.w;
        for (int step = LANES / 2; step > 0; step /= 2) squares += __shfl_xor_sync(ALL, squares, step);
        const float sum = state[row] + squares / DIM;
        __syncwarp();
        if (writes && column == 0) state[row] = sum;
        scale = lr / (sqrtf(sum) + eps);
    }
    if (!writes) return;
    float4* place = (float4*)(weights + (long long)row * DIM + column);
    float4 value = *place;
    value.x -= scale * gradient.x;
    value.y -= scale * gradient.y;
    value.z -= scale * gradient.z;
    value.w -= scale * gradient.w;
    *place = value;
}

// Which position the row of sorted[place] begins at.
__device__ __forceinline__ int begin_of(const int* __restrict__ sorted, int place) {
    const int row = sorted[place];
    int low = 0, high = place;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (sorted[middle] < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

// A warp for each place of sorted: it goes on where a row begins, or a new SEGMENT of one. Rows within one segment are
// updated; of others the sum is added to partial[segment of the row's first place].
// sorted int32 [N], rows in order; order int64 [N], their positions; bag_of int32 [N]; partial [segments, DIM], zero.
extern "C" __global__ void backward(
    const int* __restrict__ sorted, const long long* __restrict__ order, const int* __restrict__ bag_of,
    const float* __restrict__ grad_out, float* __restrict__ weights, float* __restrict__ state,
    float* __restrict__ partial, int count, int batch, int tables, double lr, double eps, int adagrad
) {
    const int first = warp_number();
    if (first >= count) return;
    const int row = sorted[first];
    const bool begins = first == 0 || sorted[first - 1] != row;
    if (!begins && first % SEGMENT) return;
    const int lane = threadIdx.x % 32, team = lane / LANES, column = lane % LANES * 4;
    const int stop = min(count, (first / SEGMENT + 1) * SEGMENT);
    int last = first + 1;
    while (last < stop) { // 32 places at a time
        const bool same = last + lane < stop && sorted[last + lane] == row;
        const unsigned others = ~__ballot_sync(ALL, same);
        if (others) {
            last += __ffs(others) - 1;
            break;
        }
        last += 32;
    }
    float4 sum = {0.f, 0.f, 0.f, 0.f};
    for (int p = first + team; p < last; p += TEAMS * AHEAD) {
        float4 taken[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int q = p + i * TEAMS;
            taken[i] = {0.f, 0.f, 0.f, 0.f};
            if (q < last) taken[i] = *(const float4*)(grad_out + place_of(bag_of[order[q]], batch, tables) + column);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) add(sum, taken[i]);
    }
    __syncwarp();
    sum = over_teams(sum);
    if (begins && (last == count || sorted[last] != row)) {
        step(weights, state, row, sum, column, team == 0, (float)lr, (float)eps, adagrad != 0);
    } else if (team == 0) {
        float* place = partial + (long long)(begin_of(sorted, first) / SEGMENT) * DIM + column;
        atomicAdd(place, sum.x);
        atomicAdd(place + 1, sum.y);
        atomicAdd(place + 2, sum.z);
        atomicAdd(place + 3, sum.w);
    }
}

// A warp for each segment: the update of the row that begins in it and goes on behind it, if there is one.
extern "C" __global__ void finish(
    const int* __restrict__ sorted, const float* __restrict__ partial, float* __restrict__ weights,
    float* __restrict__ state, int count, double lr, double eps, int adagrad
) {
    const long long begin = (long long)warp_number() * SEGMENT, next = begin + SEGMENT;
    if (next >= count) return;
    const int row = sorted[next];
    if (sorted[next - 1] != row) return;
    if (sorted[begin] == row && begin > 0 && sorted[begin - 1] == row) return; // it began before
    const int lane = threadIdx.x % 32, column = lane % LANES * 4;
    const float4 sum = *(const float4*)(partial + begin / SEGMENT * DIM + column);
    step(weights, state, row, sum, column, lane < LANES, (float)lr, (float)eps, adagrad != 0);
}
