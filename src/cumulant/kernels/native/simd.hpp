// Vectors of float or double by the compiler's own extension: one source for AVX-512, AVX2, NEON and plain SSE.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16, REGISTERS = 32;
#else
constexpr int VECTOR_BYTES = 16, REGISTERS = 16;
#endif

#define INLINE static inline __attribute__((always_inline))

// Loads need no alignment beyond the element's.
template <class T> struct Simd;
template <> struct Simd<float> {
  typedef float V __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
  typedef int32_t I __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
  using Int = int32_t;
  static constexpr float ROUND = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr int MANTISSA = 23;
  static constexpr float SIGN = -0.f;
#if defined(__AVX512F__)
  static constexpr float LEAST = -104.f;  // exp is exactly 0 from here down
#else
  static constexpr float LEAST = -87.3f;
#endif
  static constexpr float LN2 = 0.693147180559945f, LN2_REST = 0;
};
template <> struct Simd<double> {
  typedef double V __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t I __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
  using Int = int64_t;
  static constexpr double ROUND = 6755399441055744.0;
  static constexpr int MANTISSA = 52;
  static constexpr double SIGN = -0.0;
#if defined(__AVX512F__)
  static constexpr double LEAST = -746.0;
#else
  static constexpr double LEAST = -708.3;
#endif
  static constexpr double LN2 = 0.693147180369123816490, LN2_REST = 1.90821492927058770002e-10;  // 33 bits and the rest
};
template <class T> using Vec = typename Simd<T>::V;
template <class T> using Ints = typename Simd<T>::I;
template <class T> constexpr int LANES = VECTOR_BYTES / int(sizeof(T));
template <class T> constexpr int padded(int64_t n) { return int((n + LANES<T> - 1) / LANES<T> * LANES<T>); }

template <class T> INLINE Vec<T> load(const T* p) { return *(const Vec<T>*)p; }
template <class T> INLINE void store(T* p, Vec<T> x) { *(Vec<T>*)p = x; }
template <class T> INLINE Vec<T> all(T x) { return x - Vec<T>{}; }

// The larger; b where either is NaN.
template <class T> INLINE Vec<T> larger(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_maskz_max_ps(0xFFFF, (__m512)a, (__m512)b);
  else return (Vec<T>)_mm512_maskz_max_pd(0xFF, (__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_max_ps((__m256)a, (__m256)b);
  else return (Vec<T>)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
  return a > b ? a : b;
#endif
}

// The square root, of negative numbers 0.
template <class T> INLINE Vec<T> root(Vec<T> x) {
  for (int i = 0; i < LANES<T>; i++) x[i] = x[i] > 0 ? std::sqrt(x[i]) : T(0);
  return x;
}

// p 2^n for whole n.
template <class T> INLINE Vec<T> times_power(Vec<T> p, [[maybe_unused]] Vec<T> rounded, [[maybe_unused]] Vec<T> n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_maskz_scalef_ps(0xFFFF, (__m512)p, (__m512)n);
  else return (Vec<T>)_mm512_maskz_scalef_pd(0xFF, (__m512d)p, (__m512d)n);
#else
  return (Vec<T>)(((Ints<T>)rounded << Simd<T>::MANTISSA) + (Ints<T>)p);  // ROUND's low bits are zero
#endif
}

// x = n log 2 + f, and (e^f - 1) / f by the polynomial of least relative error on |f| <= log(2) / 2 (3e-9 and 2e-17).
template <class T> struct Reduced { Vec<T> rounded, n, f, slope; };
template <class T> INLINE Reduced<T> reduce(Vec<T> x) {
  using S = Simd<T>;
  Vec<T> z = x * T(1.44269504088896340736) + S::ROUND, n = z - S::ROUND, f = x - n * S::LN2, q;
  if constexpr (sizeof(T) == 4) {
    q = f * 0.0014061604418821318419f + 0.008379106934442968813f;
    q = q * f + 0.041664769335246976423f;
    q = q * f + 0.16666364175164525217f;
    q = q * f + 0.5000000437119081326f;
    q = q * f + 1.000000049953773083f;
  } else {
    f = f - n * S::LN2_REST;
    constexpr double c[] = {2.2981346201457573995e-8, 2.7626434617372664279e-7, 2.7564268884927530412e-6, 0.000024801504179449883607,
                            0.00019841261457811689543, 0.0013888888932602014541, 0.0083333333377418767055, 0.041666666666572889627,
                            0.16666666666657227143, 0.50000000000000056284, 1.0000000000000005644};
    q = all<T>(c[0]);
    for (int i = 1; i < 11; i++) q = q * f + c[i];
  }
  return {z, n, f, q};
}

// s - peak, kept finite: 0 * log 0 is 0. NaN stays.
template <class T> INLINE Vec<T> below(Vec<T> s, Vec<T> peak) { return larger<T>(all<T>(Simd<T>::LEAST), s - peak); }

// e^x for LEAST <= x <= 80; 1 at 0 and 0 at LEAST exactly. NaN stays.
template <class T> INLINE Vec<T> exponential(Vec<T> x) {
  Reduced<T> r = reduce<T>(x);
  Vec<T> e = times_power<T>(r.f * r.slope + T(1), r.rounded, r.n);
#if defined(__AVX512F__)
  return e;
#else
  return x > Simd<T>::LEAST ? e : larger<T>(Vec<T>{}, x);
#endif
}

// tanh x = (e^2x - 1) / (e^2x + 1), by e^2x - 1 so that small x keep their digits.
template <class T> INLINE Vec<T> hyperbolic_tangent(Vec<T> x) {
  Ints<T> sign = (Ints<T>)all<T>(Simd<T>::SIGN);
  Vec<T> size = (Vec<T>)((Ints<T>)x & ~sign), most = all<T>(20);
  Vec<T> y = size > most ? most : size;
  Reduced<T> r = reduce<T>(y + y);
  Vec<T> power = times_power<T>(all<T>(1), r.rounded, r.n), less = power * (r.f * r.slope) + (power - T(1)), out = less / (less + T(2));
  return (Vec<T>)((Ints<T>)out | ((Ints<T>)x & sign));
}
