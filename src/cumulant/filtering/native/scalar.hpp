// The numbers a filter runs on: a double; eight series at once in the lanes of a vector; either of them with a derivative.
// One source of the recursion serves all: only the operations below know what a number is.
#pragma once
// GCC 12 for AVX-512 has been seen to make wrong code of small products of known size when it packs statements into vectors;
// what is worth packing here is in lanes already.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-slp-vectorize")
#endif
#include <cmath>
#include <cstdint>

namespace filtering {

constexpr int WIDTH = 8;
typedef double V8 __attribute__((vector_size(8 * WIDTH)));
#define INLINE inline __attribute__((always_inline))

struct Lanes {
  V8 v;
  Lanes() = default;
  INLINE Lanes(double x) : v(V8{} + x) {}
  INLINE explicit Lanes(V8 x) : v(x) {}
};
INLINE Lanes operator+(const Lanes& a, const Lanes& b) { return Lanes(a.v + b.v); }
INLINE Lanes operator-(const Lanes& a, const Lanes& b) { return Lanes(a.v - b.v); }
INLINE Lanes operator*(const Lanes& a, const Lanes& b) { return Lanes(a.v * b.v); }
INLINE Lanes operator/(const Lanes& a, const Lanes& b) { return Lanes(a.v / b.v); }
template <class F> INLINE Lanes each(const Lanes& a, F f) {
  Lanes out;
  for (int l = 0; l < WIDTH; l++) out.v[l] = f(a.v[l]);
  return out;
}
INLINE double root(double a) { return std::sqrt(a); }
INLINE double exponential(double a) { return std::exp(a); }
INLINE double logarithm(double a) { return std::log(a); }
INLINE double larger(double a, double b) { return a > b ? a : b; }
INLINE double smaller(double a, double b) { return a < b ? a : b; }
INLINE Lanes root(const Lanes& a) { return each(a, [](double x) { return std::sqrt(x); }); }
INLINE Lanes exponential(const Lanes& a) { return each(a, [](double x) { return std::exp(x); }); }
INLINE Lanes logarithm(const Lanes& a) { return each(a, [](double x) { return std::log(x); }); }
INLINE Lanes larger(const Lanes& a, const Lanes& b) { return Lanes(a.v > b.v ? a.v : b.v); }
INLINE Lanes smaller(const Lanes& a, const Lanes& b) { return Lanes(a.v < b.v ? a.v : b.v); }

template <class T> struct Dual {
  T v, d;
  Dual() = default;
  INLINE Dual(double x) : v(x), d(0.0) {}
  INLINE Dual(const T& v, const T& d) : v(v), d(d) {}
};
template <class T> INLINE Dual<T> operator+(const Dual<T>& a, const Dual<T>& b) { return {a.v + b.v, a.d + b.d}; }
template <class T> INLINE Dual<T> operator-(const Dual<T>& a, const Dual<T>& b) { return {a.v - b.v, a.d - b.d}; }
template <class T> INLINE Dual<T> operator*(const Dual<T>& a, const Dual<T>& b) { return {a.v * b.v, a.d * b.v + b.d * a.v}; }
template <class T> INLINE Dual<T> operator/(const Dual<T>& a, const Dual<T>& b) {
  const T inverse = T(1.0) / b.v, q = a.v * inverse;
  return {q, (a.d - b.d * q) * inverse};
}
template <class T> INLINE Dual<T> root(const Dual<T>& a) {
  const T s = root(a.v);
  return {s, a.d * T(0.5) / s};
}
template <class T> INLINE Dual<T> exponential(const Dual<T>& a) {
  const T e = exponential(a.v);
  return {e, a.d * e};
}
template <class T> INLINE Dual<T> logarithm(const Dual<T>& a) { return {logarithm(a.v), a.d / a.v}; }
// The larger one as a constant: what is taken off before an exponential has no derivative.
template <class T> INLINE Dual<T> larger(const Dual<T>& a, const Dual<T>& b) { return {larger(a.v, b.v), T(0.0)}; }

template <class T> INLINE Dual<T> smaller(const Dual<T>& a, const Dual<T>& b) { return {smaller(a.v, b.v), T(0.0)}; }

template <class S> INLINE void add(S& a, const S& b) { a = a + b; }

// A mean of equal numbers is that number in every bit: a mixture of messages that agree has no variance between them.
INLINE void common(double& mean, double most, double least) { mean = most == least ? most : mean; }
INLINE void common(Lanes& mean, const Lanes& most, const Lanes& least) { mean.v = most.v == least.v ? most.v : mean.v; }
template <class T> INLINE void common(Dual<T>& mean, const Dual<T>& most, const Dual<T>& least) { common(mean.v, most.v, least.v); }

// One of the series that a number stands for.
INLINE double lane(double x, int) { return x; }
INLINE double lane(const Lanes& x, int l) { return x.v[l]; }
template <class T> INLINE double lane(const Dual<T>& x, int l) { return lane(x.v, l); }
INLINE void set_lane(double& x, int, double value) { x = value; }
INLINE void set_lane(Lanes& x, int l, double value) { x.v[l] = value; }
template <class T> INLINE void set_lane(Dual<T>& x, int l, double value) { set_lane(x.v, l, value); }

// An array of doubles over series and steps; the entries of one step lie side by side. A stride of 0 broadcasts.
struct Array { double* data = nullptr; int64_t series = 0, step = 0; };

// Which series a number stands for: `first`, or the lanes from there on, of which the last `WIDTH - count` are idle.
struct Place { int64_t first; int count; };

template <class S> struct Memory;
template <> struct Memory<double> {
  static constexpr int width = 1;
  static INLINE double load(const Array& x, const Array&, const Place& at, int64_t k) { return x.data[at.first * x.series + k]; }
  static INLINE void store(const Array& x, const Array&, const Place& at, int64_t k, double s) { x.data[at.first * x.series + k] = s; }
};
template <> struct Memory<Lanes> {
  static constexpr int width = WIDTH;
  static INLINE Lanes load(const Array& x, const Array&, const Place& at, int64_t k) {
    Lanes out;
    for (int l = 0; l < WIDTH; l++) out.v[l] = x.data[(at.first + (l < at.count ? l : 0)) * x.series + k];
    return out;
  }
  static INLINE void store(const Array& x, const Array&, const Place& at, int64_t k, const Lanes& s) {
    for (int l = 0; l < at.count; l++) x.data[(at.first + l) * x.series + k] = s.v[l];
  }
};
template <class T> struct Memory<Dual<T>> {
  static constexpr int width = Memory<T>::width;
  static INLINE Dual<T> load(const Array& x, const Array& d, const Place& at, int64_t k) {
    return {Memory<T>::load(x, x, at, k), d.data ? Memory<T>::load(d, d, at, k) : T(0.0)};
  }
  static INLINE void store(const Array& x, const Array& d, const Place& at, int64_t k, const Dual<T>& s) {
    if (x.data) Memory<T>::store(x, x, at, k, s.v);
    if (d.data) Memory<T>::store(d, d, at, k, s.d);
  }
};

}  // namespace filtering
