// What is asked: sizes, the band, and tensors as pointers with strides. A stride of 0 broadcasts.
#pragma once
#include <algorithm>
#include <cstdint>
#include "gemm.hpp"
#include "threads.hpp"

constexpr int MOST_BATCH = 8, KEYS = 64, KEPT = 5;  // batch dimensions; keys of a tile; largest weights, as `_KEPT` in answers.py

// The numbers are those of `_SLOTS` in native.py.
enum Slot {
  QUERY, KEY, VALUE, BIAS, MASK, QUERY_TAG, KEY_TAG, SEED, CAP,                 // the measure
  ALONG_QUERY, ALONG_KEY, ALONG_VALUE, ALONG_BIAS,                              // a direction
  SEED_MEAN, SEED_NORMALIZER, SEED_ENTROPY, MARKS, START,                       // cotangents; keys to look up; Lanczos' start
  MEAN, NORMALIZER, ENTROPY, SCORE_MEAN, SCORE_VARIANCE, SCORE_MAX, TOP,        // results, one row per query
  TO_QUERY, TO_KEY, TO_VALUE, TO_BIAS, TO_MEAN, TO_NORMALIZER,                  // gradients
  VISIBLE, COVERAGE, TOP_WEIGHT, TRACE, LEADING, MARKED, RECEIVED, CENTER,      // statistics of rows
  LARGEST, LARGEST_KEY,                                                         // the KEPT largest weights of each row and their keys
  SLOTS
};

struct Tensor { char* data = nullptr; int64_t batch[MOST_BATCH] = {}, row = 0, column = 0; };

struct Problem {
  int64_t dims, batch, M, N, d, e, tags, lower, upper, threads, size[MOST_BATCH];
  double scale, rate;
  Tensor tensor[SLOTS];
  mutable std::atomic<bool> failed{false};

  // words: dims, M, N, d, e, tags, lower, upper, threads, tensors; the sizes of the batch; (slot, address, strides) of each tensor
  Problem(const int64_t* words, double scale, double rate) : scale(scale), rate(rate) {
    dims = words[0], M = words[1], N = words[2], d = words[3], e = words[4], tags = words[5], lower = words[6], upper = words[7], threads = words[8];
    const int64_t count = words[9], *w = words + 10;
    batch = 1;
    for (int i = 0; i < dims; i++) batch *= size[i] = *w++;
    for (int64_t k = 0; k < count; k++) {
      Tensor& t = tensor[*w++];
      t.data = (char*)*w++;
      for (int i = 0; i < dims; i++) t.batch[i] = *w++;
      t.row = *w++, t.column = *w++;
    }
  }
  bool has(Slot s) const { return tensor[s].data; }
  // The tensor's part in one member of the batch; null if there is none.
  template <class T> T* at(Slot s, int64_t member) const {
    const Tensor& t = tensor[s];
    if (!t.data) return nullptr;
    int64_t offset = 0;
    for (int i = int(dims) - 1; i >= 0; member /= size[i], i--) offset += member % size[i] * t.batch[i];
    return (T*)t.data + offset;
  }
  // Queries of a block. Thinner blocks skip more of what a band hides, and pay for it where keys are many.
  int most_lanes() const { return banded() && N <= 512 ? 32 : 64; }
  bool banded() const { return lower > -(int64_t(1) << 60) || upper < int64_t(1) << 60; }
};

// A range of queries of one member, in the lanes of vectors: X[.][lane]. Lanes past the last query hold zeros.
template <class T> struct Block {
  const Problem& z;
  Arena& arena;
  int64_t member, first;  // the first query
  int n, W;               // queries; lanes
  int64_t from, to;       // keys that some query may meet, from a tile's beginning on

  Block(const Problem& z, Arena& arena, int64_t member, int64_t first, int most)
      : z(z), arena(arena), member(member), first(first), n(int(std::min<int64_t>(most, z.M - first))), W(padded<T>(n)) {
    from = std::max<int64_t>(0, first + z.lower) / KEYS * KEYS;
    to = std::min(z.N, first + n + std::min(z.upper, z.N));
    if (from >= to) from = to = 0;
  }
  T* at(Slot s) const { return z.at<T>(s, member); }
  T* lanes(int64_t rows) const { return arena.take<T>(rows * W); }
  T* zeros(int64_t rows) const {
    T* p = lanes(rows);
    std::fill(p, p + rows * W, T(0));
    return p;
  }
  template <class F> void tiles(F f) const {
    for (int64_t j = from; j < to; j += KEYS) f(j, int(std::min<int64_t>(KEYS, to - j)));
  }
  // out[feature][lane] = factor * x[query][feature]
  T* gather(Slot s, int64_t features, T factor) const {
    if (!z.has(s)) return nullptr;
    const T* x = at(s);
    const int64_t row = z.tensor[s].row, column = z.tensor[s].column;
    T* out = lanes(features);
    x += first * row;
    for (int64_t f = 0; f < features; f += 16)
      for (int l = 0; l < n; l++)
        for (int64_t g = f; g < std::min(f + 16, features); g++) out[g * W + l] = x[l * row + g * column] * factor;
    if (n < W)
      for (int64_t f = 0; f < features; f++) std::fill(out + f * W + n, out + (f + 1) * W, T(0));
    return out;
  }
  // The same as rows of whole vectors, each times `factor` and its query's own.
  T* rows(Slot s, int64_t features, T factor, const T* own = nullptr) const {
    if (!z.has(s)) return nullptr;
    const T* x = at(s);
    const int64_t row = z.tensor[s].row, column = z.tensor[s].column;
    const int width = padded<T>(features);
    T* out = arena.take<T>(int64_t(n) * width);
    x += first * row;
    for (int l = 0; l < n; l++) {
      const T by = own ? factor * own[l] : factor;
      for (int64_t f = 0; f < features; f++) out[l * width + f] = x[l * row + f * column] * by;
      std::fill(out + l * width + features, out + (l + 1) * width, T(0));
    }
    return out;
  }
  // result[query][feature] = x[feature][lane] * own[lane]; results are made in one piece
  void scatter(Slot s, int64_t features, const T* x, const T* own) const {
    T* out = at(s);
    if (!out) return;
    const int64_t row = z.tensor[s].row;
    out += first * row;
    for (int64_t f = 0; f < features; f += 16)
      for (int l = 0; l < n; l++)
        for (int64_t g = f; g < std::min(f + 16, features); g++) out[l * row + g] = x[g * W + l] * own[l];
  }
  // A result of one number per query.
  template <class F> void each_row(Slot s, F f) const {
    T* out = at(s);
    if (!out) return;
    const int64_t row = z.tensor[s].row;
    for (int l = 0; l < n; l++) out[(first + l) * row] = f(l);
  }
  // A column of numbers, one per lane; zeros if there is none.
  T* column(Slot s) const {
    T* out = zeros(1);
    if (const T* x = at(s))
      for (int l = 0; l < n; l++) out[l] = x[(first + l) * z.tensor[s].row];
    return out;
  }
  // The products of a tile of keys. Each may be a term of a sum of two.
  Term<T> by_key(Slot s, const T* lanes, int64_t features, int64_t j) const {  // <k_j, q_lane>
    const Tensor& t = z.tensor[s];
    return {at(s) + j * t.row, t.row, t.column, lanes, W, features};
  }
  Term<T> over_keys(Slot s, const T* p, int64_t j, int c) const {  // sum_j v_j[feature] P[j][lane]
    const Tensor& t = z.tensor[s];
    return {at(s) + j * t.row, t.column, t.row, p, W, c};
  }
  Term<T> over_lanes(const T* x, const T* rows, int64_t features) const {  // sum_lane X[j][lane] q_lane[.]
    return {x, W, 1, rows, padded<T>(features), n};
  }
};
