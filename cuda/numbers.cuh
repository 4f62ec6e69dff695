// Numbers as they lie in memory, and the type to compute with.
#pragma once

#include "math.cuh"

namespace kn {

struct Half {
    unsigned short bits;
};
struct Bfloat {
    unsigned short bits;
};

/// Type to compute with.
template <class T>
struct Wide {
    typedef float type;
};
template <>
struct Wide<double> {
    typedef double type;
};

KN_FN float widen(float x) { return x; }
KN_FN double widen(double x) { return x; }
KN_FN float widen(Half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
KN_FN float widen(Bfloat x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

KN_FN void narrow(float x, float& y) { y = x; }
KN_FN void narrow(double x, double& y) { y = x; }
KN_FN void narrow(float x, Half& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
KN_FN void narrow(float x, Bfloat& y) {  // to nearest, ties to even; a NaN stays one
    const unsigned bits = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace kn
