// The kernels of an outer step of CA-SGD on a GPU; gpu.py launches them, five launches with its GEMM.
//
// Macros: REAL is the type of arithmetic, Gram, margins and weights (float or double). STORED is the type of the
// features: 0 bfloat16, 1 float16, 2 float32, 3 float64. ROUND_FEATURES, ROUND_GRAM and ROUND_MARGIN are the formats that
// a policy rounds these to: 0 that of the type, 1 bfloat16, 2 float16, 3 TF32, 4 float32. Gram and margins travel as
// REAL. No header is included, so NVRTC needs no path.
//
// The packed buffer holds the strictly lower Gram blocks, block row after block row: row r of block j = r / b has the
// j*b words that start at b*b*j*(j-1)/2 + (r - j*b)*j*b. The margins of the rows follow at `words`.

#ifndef REAL
#define REAL float
#endif
#ifndef STORED
#define STORED 2
#endif
#ifndef ROUND_FEATURES
#define ROUND_FEATURES 0
#endif
#ifndef ROUND_GRAM
#define ROUND_GRAM 0
#endif
#ifndef ROUND_MARGIN
#define ROUND_MARGIN 0
#endif

#define WARP 32
#define ALL_LANES 0xffffffffu

extern __shared__ unsigned char workspace[];

// float64 to float32 by rounding to odd, so that a second rounding to fewer bits is as good as a single one.
__device__ __forceinline__ float to_odd(double value) {
    const float nearest = static_cast<float>(value);
    unsigned bits = __float_as_uint(nearest);
    const double back = nearest;
    if (back == value || (bits & 1u) || (bits & 0x7f800000u) == 0x7f800000u) return nearest;
    const bool grows = (back < 0 ? -back : back) < (value < 0 ? -value : value);
    return __uint_as_float(grows ? bits + 1u : bits - 1u);
}
__device__ __forceinline__ float to_odd(float value) { return value; }

// To nearest, ties to even, with `cut` bits of the significand cut off: 16 for bfloat16, 13 for TF32.
__device__ __forceinline__ float round_bits(float value, int cut) {
    unsigned bits = __float_as_uint(value);
    if ((bits & 0x7f800000u) == 0x7f800000u) return value;  // infinity and NaN: the addition below would change them
    bits += (1u << (cut - 1)) - 1u + ((bits >> cut) & 1u);
    return __uint_as_float(bits >> cut << cut);
}

// cuda_fp16.h would need an include path; these are its two conversions.
__device__ __forceinline__ float half_to_float(unsigned short bits) {
#ifdef HALF_TO_FLOAT
    return HALF_TO_FLOAT(bits);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}
__device__ __forceinline__ unsigned short float_to_half(float value) {
#ifdef FLOAT_TO_HALF
    return FLOAT_TO_HALF(value);
#else
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#endif
}

template <int FORMAT, typename T>
__device__ __forceinline__ T round_stored(T value) {
    if (FORMAT == 1) return round_bits(to_odd(value), 16);
    if (FORMAT == 2) return half_to_float(float_to_half(to_odd(value)));
    if (FORMAT == 3) return round_bits(to_odd(value), 13);
    if (FORMAT == 4) return static_cast<float>(value);
    return value;
}

#if STORED == 0
typedef unsigned short stored;
__device__ __forceinline__ REAL widen(stored bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
template <typename T>
__device__ __forceinline__ stored narrow(T value) {
    return static_cast<stored>(__float_as_uint(round_bits(to_odd(value), 16)) >> 16);
}
#elif STORED == 1
typedef unsigned short stored;
__device__ __forceinline__ REAL widen(stored bits) { return half_to_float(bits); }
template <typename T>
__device__ __forceinline__ stored narrow(T value) { return float_to_half(to_odd(value)); }
#else
#if STORED == 2
typedef float stored;
#else
typedef double stored;
#endif
__device__ __forceinline__ REAL widen(stored value) { return value; }
template <typename T>
__device__ __forceinline__ stored narrow(T value) { return static_cast<stored>(round_stored<ROUND_FEATURES>(value)); }
#endif

__device__ __forceinline__ REAL sum_warp(REAL value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_down_sync(ALL_LANES, value, step);
    return value;  // in lane 0
}

// The sum over a block, in every thread; `partial` has a word for each warp. The order is fixed, so equal runs give
// equal bits.
__device__ __forceinline__ REAL sum_block(REAL value, REAL* partial) {
    value = sum_warp(value);
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = value;
    __syncthreads();
    REAL total = 0;
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / WARP; ++warp) total += partial[warp];
    __syncthreads();
    return total;
}

// Objectives: 0 logistic, y in {-1, +1}; 1 squared; 2 Poisson with log link, whose exponential is clipped at z = 30
// and continues as its tangent in the loss (as in objectives.py).
#define LARGEST_LOG_MEAN static_cast<REAL>(30)

__device__ __forceinline__ REAL derivative(int objective, REAL z, REAL y) {
    if (objective == 0) return -y / (1 + exp(y * z));  // where exp overflows the quotient is the right zero
    if (objective == 1) return z - y;
    return exp(z < LARGEST_LOG_MEAN ? z : LARGEST_LOG_MEAN) - y;
}

__device__ __forceinline__ REAL loss(int objective, REAL z, REAL y) {
    if (objective == 0) {
        const REAL t = y * z;
        return (t < 0 ? -t : static_cast<REAL>(0)) + log1p(exp(t < 0 ? t : -t));
    }
    if (objective == 1) return static_cast<REAL>(0.5) * (z - y) * (z - y);
    const REAL clipped = z < LARGEST_LOG_MEAN ? z : LARGEST_LOG_MEAN;
    return exp(clipped) * (1 + (z - clipped)) - y * z;
}

template <typename T>
__device__ __forceinline__ void store(const T* source, long long rows, int columns, int stride, stored* target) {
    const long long place = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (place >= rows * stride) return;
    const long long row = place / stride;
    const int column = static_cast<int>(place - row * stride);
    target[place] = narrow(column < columns ? source[row * columns + column] : static_cast<T>(0));
}

extern "C" {

// Features (rows, columns) rounded once to their storage format, each row padded with zeros to `stride` columns. One
// thread for each element.
__global__ void store_float32(const float* source, long long rows, int columns, int stride, stored* target) {
    store(source, rows, columns, stride, target);
}
__global__ void store_float64(const double* source, long long rows, int columns, int stride, stored* target) {
    store(source, rows, columns, stride, target);
}

// target[r] = features[order[r]], in pieces of 16 bytes: `stride` is a multiple of 8 elements. One CTA for each row.
__global__ void gather_rows(const stored* features, const int* order, int stride, stored* target) {
    const int pieces = stride * static_cast<int>(sizeof(stored)) / 16;
    const long long from = static_cast<long long>(order[blockIdx.x]) * stride;
    const uint4* source = reinterpret_cast<const uint4*>(features + from);
    uint4* row = reinterpret_cast<uint4*>(target + static_cast<long long>(blockIdx.x) * stride);
    for (int piece = threadIdx.x; piece < pieces; piece += blockDim.x) row[piece] = source[piece];
}

// The margin v_r = x_r . w of each row, and its strictly lower Gram blocks. One CTA for each row.
//
// `order` names the rows of `features`. gram (rows x rows) may be null with one block (b >= rows).
// The AllReduce that follows adds the parts of the ranks, so a part is rounded here.
__global__ void margins(const stored* features, const int* order, const REAL* weights, int stride, const REAL* gram,
                        int b, long long words, REAL* packed) {
    REAL* partial = reinterpret_cast<REAL*>(workspace);
    const int row = blockIdx.x;
    const stored* x = features + static_cast<long long>(order[row]) * stride;
    REAL value = 0;
    for (int k = threadIdx.x; k < stride; k += blockDim.x) value += widen(x[k]) * weights[k];
    value = sum_block(value, partial);
    if (threadIdx.x == 0) packed[words + row] = round_stored<ROUND_MARGIN>(value);
    const long long block = row / b;
    if (block == 0) return;
    const int length = static_cast<int>(block) * b;
    const long long start = block * (block - 1) / 2 * b * b + static_cast<long long>(row - length) * length;
    const REAL* source = gram + static_cast<long long>(row) * gridDim.x;
    for (int i = threadIdx.x; i < length; i += blockDim.x) packed[start + i] = round_stored<ROUND_GRAM>(source[i]);
}

// s steps of SGD on the packed Gram and margins (arXiv 2011.08281, with L2 and an intercept: see ca_sgd.py). One CTA.
//
//   z_j = P v_j + intercept - sum_{i<j} G_ji c_i;  c_i *= rho_j (i < j);  c_j = scale_j phi'(z_j, y_j);  P *= rho_j;
//   intercept -= sum c_j
//
// In the order of the steps: targets y; scales, eta_t a / b_t of each row; importance a, or null for all ones; shrinks
// rho_t = 1 - eta_t l2, one a step. state: [0] the intercept, in and out; [1] P, out; [2] the sum of a phi at the
// margins seen, added to. coefficients (rows): c. Shared memory: rows + blockDim.x / 32 words.
__global__ void recurrence(const REAL* packed, long long words, int rows, int b, const REAL* targets,
                           const REAL* scales, const REAL* importance, const REAL* shrinks, int penalised,
                           int objective, int fit_intercept, REAL* coefficients, double* state) {
    REAL* c = reinterpret_cast<REAL*>(workspace);
    REAL* partial = c + rows;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    REAL intercept = static_cast<REAL>(state[0]);
    REAL shrink = 1;
    REAL losses = 0;
    for (int first = 0, step = 0; first < rows; first += b, ++step) {
        const int last = first + b < rows ? first + b : rows;
        const REAL* lower = packed + static_cast<long long>(step) * (step - 1) / 2 * b * b;
        REAL change = 0;
        for (int row = first + warp; row < last; row += warps) {
            const REAL* gram = lower + static_cast<long long>(row - first) * first;
            REAL dot = 0;
            // Gram and margins are rounded after the sum over the ranks too, as the NumPy back end does.
            for (int i = lane; i < first; i += WARP) dot += round_stored<ROUND_GRAM>(gram[i]) * c[i];
            dot = sum_warp(dot);
            if (lane == 0) {
                const REAL y = targets[row];
                const REAL z = shrink * round_stored<ROUND_MARGIN>(packed[words + row]) + intercept - dot;
                const REAL taken = scales[row] * derivative(objective, z, y);
                losses += (importance ? importance[row] : static_cast<REAL>(1)) * loss(objective, z, y);
                c[row] = taken;  // no other warp reads it before the barrier: sums stop at `first`
                change += taken;
            }
        }
        if (fit_intercept) intercept -= sum_block(change, partial);
        if (penalised) {
            const REAL keep = shrinks[step];
            __syncthreads();
            for (int i = threadIdx.x; i < first; i += blockDim.x) c[i] *= keep;
            shrink *= keep;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < rows; i += blockDim.x) coefficients[i] = c[i];
    losses = sum_block(losses, partial);
    if (threadIdx.x == 0) {
        state[0] = intercept;
        state[1] = shrink;
        state[2] += losses;
    }
}

// weights = P weights - sum_r c_r x_r. A CTA of 32 x blockDim.y threads for 32 columns. Shared: 32 blockDim.y words.
__global__ void increment(const stored* features, const int* order, const REAL* coefficients, const double* state,
                          int rows, int stride, REAL* weights) {
    REAL* partial = reinterpret_cast<REAL*>(workspace);
    const int column = blockIdx.x * WARP + threadIdx.x;
    REAL sum = 0;
    if (column < stride) {
        for (int row = threadIdx.y; row < rows; row += blockDim.y) {
            sum += widen(features[static_cast<long long>(order[row]) * stride + column]) * coefficients[row];
        }
    }
    partial[threadIdx.y * WARP + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= stride) return;
    for (int strip = 1; strip < static_cast<int>(blockDim.y); ++strip) sum += partial[strip * WARP + threadIdx.x];
    weights[column] = static_cast<REAL>(state[1]) * weights[column] - sum;
}

}  // extern "C"
