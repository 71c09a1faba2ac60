// The one product: C[i][.] = (C | C * factor | 0) + sum over terms and t of A(i, t) B[t][.], with any strides of A.
// Columns of C and B are whole vectors. Six rows by four vectors of accumulators fill the registers.
#pragma once
#include <algorithm>
#include "simd.hpp"

template <class T> struct Term {  // A(i, t) = a[i * ai + t * at], B[t] = b + t * bt, t < count
  const T* a;
  int64_t ai, at;
  const T* b;
  int64_t bt, count;
};
enum class Into { FRESH, ADD, SCALED };

constexpr int WIDE = REGISTERS == 32 ? 4 : 2;  // vectors of the widest strip
constexpr int tall(int vectors) { return vectors == 4 ? 6 : REGISTERS == 32 || vectors == 1 ? 12 : 6; }

template <class T, int M, int N>
static __attribute__((noinline)) void micro(const Term<T>* terms, int count, int64_t i, int64_t j, T* c, int64_t ci, Into into, const T* factor) {
  constexpr int L = LANES<T>;
  Vec<T> sum[M][N];
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sum[m][n] = into == Into::FRESH ? Vec<T>{} : load(c + m * ci + n * L);
  if (into == Into::SCALED) {
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[m][n] *= load(factor + n * L);
  }
  for (int r = 0; r < count; r++) {
    const int64_t ai = terms[r].ai, at = terms[r].at, bt = terms[r].bt;
    const T *a = terms[r].a + i * ai, *b = terms[r].b + j;
    for (int64_t t = terms[r].count; t > 0; t--, a += at, b += bt) {
      Vec<T> x[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) x[n] = load(b + n * L);
#pragma GCC unroll 12
      for (int m = 0; m < M; m++) {
        Vec<T> y = all<T>(a[m * ai]);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sum[m][n] += y * x[n];
      }
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(c + m * ci + n * L, sum[m][n]);
}

template <class T, int N>
static void strip(int rows, const Term<T>* terms, int count, int64_t j, T* c, int64_t ci, Into into, const T* factor) {
  constexpr int TALL = tall(N);
  int i = 0;
  auto go = [&](auto height) {
    constexpr int M = decltype(height)::value;
    for (; i + M <= rows; i += M) micro<T, M, N>(terms, count, i, j, c + i * ci + j, ci, into, factor ? factor + j : nullptr);
  };
  go(std::integral_constant<int, TALL>{});
  go(std::integral_constant<int, 4>{});
  go(std::integral_constant<int, 2>{});
  go(std::integral_constant<int, 1>{});
}

template <class T, int R>
static void multiply(int rows, int width, const Term<T> (&terms)[R], T* c, int64_t ci, Into into, const T* factor = nullptr, int count = R) {
  constexpr int L = LANES<T>;
  int j = 0;
  for (; j + WIDE * L <= width; j += WIDE * L) strip<T, WIDE>(rows, terms, count, j, c, ci, into, factor);
  if constexpr (WIDE > 2)
    if (j + 2 * L <= width) strip<T, 2>(rows, terms, count, j, c, ci, into, factor), j += 2 * L;
  if (j < width) strip<T, 1>(rows, terms, count, j, c, ci, into, factor);
}
