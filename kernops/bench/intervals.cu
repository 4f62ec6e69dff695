// Pooling with one thread for each (interval, channel), the way the public BEV pooling operators work: the stretch of
// sorted points that fall into one cell is an interval, and a thread walks through it. The benchmark compares with these;
// the library does not use them.

namespace {

struct Pool {
    const float* depth;        // (points of the frustum,); null: `feat` holds lifted points, one row each, sorted
    const float* feat;         // (rows, channels)
    const int* ranks_depth;    // (n,) places in `depth`
    const int* ranks_feat;     // (n,) rows of `feat`
    const int* ranks_bev;      // (n,) cells
    const int* starts;         // (intervals,)
    const int* lengths;        // (intervals,)
    const float* grad;         // (cells, channels), for the backward kernels
    float* out;                // (cells, channels); backward: gradient by the lifted points, or by the features
    float* grad_depth;         // (points of the frustum,)
    int intervals;
    int channels;
};

}  // namespace

/// The sum of a cell's lifted points, one channel a thread.
extern "C" __global__ void pool_lifted(const Pool p) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, interval = thread / p.channels, channel = thread % p.channels;
    if (interval >= p.intervals) return;
    const int first = __ldg(p.starts + interval), end = first + __ldg(p.lengths + interval);
    float sum = 0.f;
    for (int k = first; k < end; ++k) sum += __ldg(p.feat + static_cast<long long>(k) * p.channels + channel);
    p.out[static_cast<long long>(__ldg(p.ranks_bev + first)) * p.channels + channel] = sum;
}

/// The gradient of every lifted point is that of its cell.
extern "C" __global__ void pool_lifted_backward(const Pool p) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, interval = thread / p.channels, channel = thread % p.channels;
    if (interval >= p.intervals) return;
    const int first = __ldg(p.starts + interval), end = first + __ldg(p.lengths + interval);
    const float value = __ldg(p.grad + static_cast<long long>(__ldg(p.ranks_bev + first)) * p.channels + channel);
    for (int k = first; k < end; ++k) p.out[static_cast<long long>(k) * p.channels + channel] = value;
}

/// The sum of depth times feature of a cell's points, one channel a thread.
extern "C" __global__ void pool_fused(const Pool p) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, interval = thread / p.channels, channel = thread % p.channels;
    if (interval >= p.intervals) return;
    const int first = __ldg(p.starts + interval), end = first + __ldg(p.lengths + interval);
    float sum = 0.f;
    for (int k = first; k < end; ++k)
        sum += __ldg(p.depth + __ldg(p.ranks_depth + k)) *
               __ldg(p.feat + static_cast<long long>(__ldg(p.ranks_feat + k)) * p.channels + channel);
    p.out[static_cast<long long>(__ldg(p.ranks_bev + first)) * p.channels + channel] = sum;
}

/// Both gradients; here the points are sorted by pixel, an interval is a pixel's points, and one thread does all of it.
extern "C" __global__ void pool_fused_backward(const Pool p) {
    const int interval = blockIdx.x * blockDim.x + threadIdx.x;
    if (interval >= p.intervals) return;
    const int first = __ldg(p.starts + interval), end = first + __ldg(p.lengths + interval);
    const long long pixel = static_cast<long long>(__ldg(p.ranks_feat + first)) * p.channels;
    for (int k = first; k < end; ++k) {
        const float* grad = p.grad + static_cast<long long>(__ldg(p.ranks_bev + k)) * p.channels;
        float sum = 0.f;
        for (int channel = 0; channel < p.channels; ++channel)
            sum += __ldg(grad + channel) * __ldg(p.feat + pixel + channel);
        p.grad_depth[p.ranks_depth[k]] = sum;
    }
    for (int channel = 0; channel < p.channels; ++channel) {
        float sum = 0.f;
        for (int k = first; k < end; ++k)
            sum += __ldg(p.grad + static_cast<long long>(__ldg(p.ranks_bev + k)) * p.channels + channel) *
                   __ldg(p.depth + __ldg(p.ranks_depth + k));
        p.out[pixel + channel] = sum;
    }
}
