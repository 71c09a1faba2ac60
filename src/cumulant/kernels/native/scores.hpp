// Scores of a tile, S[key][lane]: s = scale <q, k>, capped, plus the bias, -inf where a pair may not meet.
#pragma once
#include "problem.hpp"

// Whether a weight survives is a hash of (seed, i, j): the same as in dropout.py, however the grid is cut.
INLINE uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

template <class T> class Dropout {
  uint32_t *row = nullptr, column = 0;
  int64_t limit = 0;
  T kept = 1;
  int W = 0;

 public:
  explicit Dropout(const Block<T>& b) {
    if (!b.z.has(SEED)) return;
    const uint32_t seed = *b.z.template at<uint32_t>(SEED, b.member);
    W = b.W, limit = int64_t((b.z.rate - 0.5) * 4294967296.0), kept = b.z.rate < 1 ? T(1 / (1 - b.z.rate)) : T(1);
    row = b.arena.template take<uint32_t>(W);
    for (int l = 0; l < W; l++) row[l] = mix(uint32_t(b.first + l) ^ mix(seed));
    column = 0x5BD1E995u ^ mix(mix(seed));
  }
  explicit operator bool() const { return row; }
  // x <- x / (1 - rate) where kept, else 0
  void apply(T* x, int64_t j, int c) const {
    if (!row) return;
    for (int k = 0; k < c; k++, x += W) {
      const uint32_t key = mix(uint32_t(j + k) ^ column) * 0x2545F491u;
      for (int l = 0; l < W; l++) x[l] *= int64_t(int32_t(mix(row[l] ^ key))) >= limit ? kept : T(0);
    }
  }
};

template <class T> class Scores {
  const Block<T>& b;
  const T *eta, *bias;
  const bool* mask;
  const int64_t *query_tag, *key_tag;
  T cap = 0;

 public:
  explicit Scores(const Block<T>& b)
      : b(b), eta(b.gather(QUERY, b.z.d, T(b.z.scale))), bias(b.at(BIAS)), mask(b.z.template at<bool>(MASK, b.member)),
        query_tag(b.z.template at<int64_t>(QUERY_TAG, b.member)), key_tag(b.z.template at<int64_t>(KEY_TAG, b.member)) {
    if (b.z.has(CAP)) cap = *b.at(CAP);
  }
  const T* queries() const { return eta; }
  bool capped() const { return b.z.has(CAP); }

  // `plain`, if given, gets the scores before bias and masks; `slope` the derivative of the cap.
  void tile(T* s, int64_t j, int c, T* plain = nullptr, T* slope = nullptr) const {
    multiply<T>(c, b.W, {b.by_key(KEY, eta, b.z.d, j)}, s, b.W, Into::FRESH);
    if (capped()) bend(s, c, slope);
    if (plain) memcpy(plain, s, sizeof(T) * size_t(c) * b.W);
    if (bias) lift(s, j, c);
    if (mask) hide(s, j, c);
    if (query_tag) hide_tagged(s, j, c);
    if (b.z.banded()) hide_outside(s, j, c);
  }

 private:
  static constexpr T HIDDEN = -std::numeric_limits<T>::infinity();

  void bend(T* s, int c, T* slope) const {
    for (int64_t x = 0; x < int64_t(c) * b.W; x += LANES<T>) {
      Vec<T> u = hyperbolic_tangent<T>(load(s + x) / cap);
      store(s + x, u * cap);
      if (slope) store(slope + x, T(1) - u * u);
    }
  }
  void lift(T* s, int64_t j, int c) const {
    const int64_t row = b.z.tensor[BIAS].row, column = b.z.tensor[BIAS].column;
    const T* x = bias + b.first * row + j * column;
    auto add = [](T& to, T by) { to = by == HIDDEN ? HIDDEN : to + by; };  // -inf hides NaN as well
    if (row == 0) {
      for (int k = 0; k < c; k++)
        for (int l = 0; l < b.W; l++) add(s[k * b.W + l], x[k * column]);
      return;
    }
    for (int l0 = 0; l0 < b.n; l0 += 16)
      for (int k = 0; k < c; k++)
        for (int l = l0; l < std::min(l0 + 16, b.n); l++) add(s[k * b.W + l], x[l * row + k * column]);
  }
  void hide(T* s, int64_t j, int c) const {
    const int64_t row = b.z.tensor[MASK].row, column = b.z.tensor[MASK].column;
    const bool* x = mask + b.first * row + j * column;
    if (row == 0) {
      for (int k = 0; k < c; k++)
        if (!x[k * column]) std::fill(s + k * b.W, s + (k + 1) * b.W, HIDDEN);
      return;
    }
    for (int l = 0; l < b.n; l++, x += row) {
      int k = 0;
      if (column == 1)
        for (; k + 8 <= c; k += 8) {  // eight at a time where all are visible
          uint64_t eight;
          memcpy(&eight, x + k, 8);
          if (eight == 0x0101010101010101u) continue;
          for (int i = k; i < k + 8; i++)
            if (!x[i]) s[i * b.W + l] = HIDDEN;
        }
      for (; k < c; k++)
        if (!x[k * column]) s[k * b.W + l] = HIDDEN;
    }
  }
  void hide_tagged(T* s, int64_t j, int c) const {
    const Tensor &q = b.z.tensor[QUERY_TAG], &t = b.z.tensor[KEY_TAG];
    for (int k = 0; k < c; k++)
      for (int l = 0; l < b.n; l++)
        for (int64_t i = 0; i < b.z.tags; i++)
          if (query_tag[(b.first + l) * q.row + i * q.column] == key_tag[(j + k) * t.row + i * t.column]) s[k * b.W + l] = HIDDEN;
  }
  // lower <= j - i <= upper; only tiles that an edge of the band crosses pay for it
  void hide_outside(T* s, int64_t j, int c) const {
    if (j + c - 1 - b.first > b.z.upper)
      for (int k = 0; k < c; k++) {
        const int64_t stop = std::min<int64_t>(b.W, j + k - b.first - b.z.upper);
        for (int64_t l = 0; l < stop; l++) s[k * b.W + l] = HIDDEN;
      }
    if (j - (b.first + b.n - 1) < b.z.lower)
      for (int k = 0; k < c; k++)
        for (int64_t l = std::max<int64_t>(0, j + k - b.first - b.z.lower + 1); l < b.W; l++) s[k * b.W + l] = HIDDEN;
  }
};

// What has to be known of whole rows before a derivative can be formed: max s, sum of exp(s - max s).
template <class T> struct Rows {
  const Block<T>& b;
  T *peak, *mass, *inverse;
  explicit Rows(const Block<T>& b) : b(b), peak(b.lanes(1)), mass(b.zeros(1)), inverse(b.zeros(1)) {
    std::fill(peak, peak + b.W, -std::numeric_limits<T>::infinity());
  }
  void see(const T* s, int c) {
    for (int l = 0; l < b.W; l += LANES<T>) {
      Vec<T> top = load(peak + l), other = top;
      int k = 0;
      for (; k + 1 < c; k += 2) top = larger<T>(load(s + k * b.W + l), top), other = larger<T>(load(s + (k + 1) * b.W + l), other);
      if (k < c) top = larger<T>(load(s + k * b.W + l), top);
      store(peak + l, larger<T>(top, other));
    }
  }
  // A row without keys has peak -inf; 0 in its place keeps its weights 0.
  void seen() {
    for (int l = 0; l < b.W; l++)
      if (peak[l] == -std::numeric_limits<T>::infinity()) peak[l] = 0;
  }
  void weighed() {
    for (int l = 0; l < b.W; l++) inverse[l] = mass[l] == 0 ? T(0) : 1 / mass[l];
  }
  // E[x] of every row, to the last digits of what x does not have in common: a first estimate, and the mean of what differs
  // from it. `sum` holds sum p x and becomes the estimate; `rest` gets the other part.
  void center(const T* p, const T* x, T* sum, T* rest) const {
    for (int l = 0; l < b.W; l++) sum[l] *= inverse[l], rest[l] = 0;
    b.tiles([&](int64_t j, int c) {
      for (int l = 0; l < b.W; l += LANES<T>) {
        const Vec<T> mean = load(sum + l);
        Vec<T> even{}, odd{};
        int64_t k = (j - b.from) * b.W + l, stop = k + int64_t(c - 1) * b.W;
        for (; k < stop; k += 2 * b.W) {
          even += load(p + k) * (load(x + k) - mean);
          odd += load(p + k + b.W) * (load(x + k + b.W) - mean);
        }
        if (k == stop) even += load(p + k) * (load(x + k) - mean);
        store(rest + l, load(rest + l) + (even + odd));
      }
    });
    for (int l = 0; l < b.W; l++) rest[l] *= inverse[l];
  }
  T log_normalizer(int l) const { return mass[l] == 0 ? -std::numeric_limits<T>::infinity() : peak[l] + std::log(mass[l]); }
};
