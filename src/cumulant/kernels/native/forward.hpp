// Mean, G, entropy; mean, variance and maximum of the score: one pass over the keys, rescaled when the maximum moves.
#pragma once
#include "scores.hpp"

// Sums of a row relative to e^peak.
template <class T> struct Sums {
  T *peak, *mass, *heat;       // max s; sum p; sum p (s - peak)
  T *center, *spread, *where;  // mean of the plain score so far, sum p (score - center)^2; the key of the maximum
  T* factor;                   // what older sums shrank by
  explicit Sums(const Block<T>& b)
      : peak(b.lanes(1)), mass(b.zeros(1)), heat(b.zeros(1)), center(b.zeros(1)), spread(b.zeros(1)), where(b.zeros(1)), factor(b.lanes(1)) {
    std::fill(peak, peak + b.W, -std::numeric_limits<T>::infinity());
  }
};

// s becomes p = exp(s - peak); returns whether a maximum moved.
template <class T, bool HEAT> static bool absorb(Sums<T>& a, T* s, int W, int c, T* part) {
  constexpr T NONE = -std::numeric_limits<T>::infinity();
  bool moved = false;
  for (int l = 0; l < W; l += LANES<T>) {
    T* x = s + l;
    const Vec<T> old = load(a.peak + l);
    Vec<T> top = old, other = old;
    int k = 0;
    for (; k + 1 < c; k += 2) top = larger<T>(load(x + k * W), top), other = larger<T>(load(x + (k + 1) * W), other);
    if (k < c) top = larger<T>(load(x + k * W), top);
    top = larger<T>(top, other);
    const Vec<T> peak = top == all<T>(NONE) ? Vec<T>{} : top;
    Vec<T> p0{}, p1{}, h0{}, h1{};
    for (k = 0; k + 1 < c; k += 2) {
      Vec<T> y0 = below<T>(load(x + k * W), peak), y1 = below<T>(load(x + (k + 1) * W), peak);
      Vec<T> w0 = exponential<T>(y0), w1 = exponential<T>(y1);
      p0 += w0, p1 += w1;
      if (HEAT) h0 += w0 * y0, h1 += w1 * y1;
      store(x + k * W, w0), store(x + (k + 1) * W, w1);
    }
    if (k < c) {
      Vec<T> y = below<T>(load(x + k * W), peak), w = exponential<T>(y);
      p0 += w;
      if (HEAT) h0 += w * y;
      store(x + k * W, w);
    }
    const Vec<T> shift = below<T>(old, peak), r = exponential<T>(shift), mass = load(a.mass + l);
    if (HEAT) store(a.heat + l, r * (load(a.heat + l) + shift * mass) + (h0 + h1));
    store(part + l, p0 + p1);
    store(a.mass + l, r * mass + (p0 + p1));
    store(a.peak + l, top);
    store(a.factor + l, r);
    for (int i = 0; i < LANES<T>; i++) moved |= !(r[i] == T(1));
  }
  return moved;
}

// Mean and variance of the plain scores x under the weights p of a tile, centered first; joined with those so far (Chan).
template <class T> static void scatter_scores(Sums<T>& a, const T* p, const T* x, int W, int c, const T* part) {
  for (int l = 0; l < W; l += LANES<T>) {
    const Vec<T> mass = load(part + l), inverse = mass > 0 ? T(1) / mass : Vec<T>{};
    auto seen = [&](int k) { return load(p + k * W + l) > 0; };
    Vec<T> sum{}, rest{}, square{};
    for (int k = 0; k < c; k++) sum += load(p + k * W + l) * (seen(k) ? load(x + k * W + l) : Vec<T>{});
    const Vec<T> mean = sum * inverse;
    for (int k = 0; k < c; k++) {
      Vec<T> w = load(p + k * W + l), t = seen(k) ? load(x + k * W + l) - mean : Vec<T>{};
      rest += w * t, square += w * t * t;
    }
    const Vec<T> center = mean + rest * inverse;  // what the sum of large numbers lost
    const Vec<T> total = load(a.mass + l), old = total - mass, share = total > 0 ? mass / total : Vec<T>{};
    const Vec<T> before = load(a.center + l), gap = center - before;
    store(a.center + l, before + gap * share);
    store(a.spread + l, load(a.factor + l) * load(a.spread + l) + (square - rest * rest * inverse) + gap * gap * share * old);
  }
}

template <class T> static void find_largest(const Sums<T>& a, const T* s, int W, int64_t j, int c) {
  for (int l = 0; l < W; l++) {
    T top = a.peak[l];
    for (int k = 0; k < c; k++)
      if (s[k * W + l] > top) top = s[k * W + l], a.where[l] = T(j + k);
  }
}

template <class T> static void forward(const Problem& z) {
  const int most = z.most_lanes();
  const int64_t blocks = (z.M + most - 1) / most;
  const bool heat = z.has(ENTROPY), spread = z.has(SCORE_VARIANCE) || z.has(SCORE_MEAN), where = z.has(TOP);
  run_tasks(z.batch * blocks, z.threads, z.failed, [&](int64_t task, Arena& arena) {
    Block<T> b(z, arena, task / blocks, (blocks - 1 - task % blocks) * most, most);  // under a causal band the long rows first
    Scores<T> scores(b);
    Dropout<T> dropout(b);
    Sums<T> a(b);
    const int W = b.W;
    T *s = b.lanes(KEYS), *plain = spread ? b.lanes(KEYS) : nullptr, *part = b.lanes(1), *mean = b.zeros(z.e);
    b.tiles([&](int64_t j, int c) {
      scores.tile(s, j, c, plain);
      if (where) find_largest(a, s, W, j, c);
      const bool moved = heat ? absorb<T, true>(a, s, W, c, part) : absorb<T, false>(a, s, W, c, part);
      if (spread) scatter_scores(a, s, plain, W, c, part);
      dropout.apply(s, j, c);
      if (z.e) multiply<T>(int(z.e), W, {b.over_keys(VALUE, s, j, c)}, mean, W, moved ? Into::SCALED : Into::ADD, a.factor);
    });
    T* inverse = a.factor;
    for (int l = 0; l < W; l++) inverse[l] = a.mass[l] == 0 ? T(0) : 1 / a.mass[l];
    b.scatter(MEAN, z.e, mean, inverse);
    const T none = -std::numeric_limits<T>::infinity();
    auto empty = [&](int l) { return a.mass[l] == 0; };
    b.each_row(NORMALIZER, [&](int l) { return empty(l) ? none : a.peak[l] + std::log(a.mass[l]); });
    b.each_row(ENTROPY, [&](int l) {
      const T h = empty(l) ? T(0) : std::log(a.mass[l]) - a.heat[l] * inverse[l];
      return h < 0 ? T(0) : h;
    });
    b.each_row(SCORE_MEAN, [&](int l) { return a.center[l]; });
    b.each_row(SCORE_VARIANCE, [&](int l) { return a.spread[l] * inverse[l]; });
    b.each_row(SCORE_MAX, [&](int l) { return a.mass[l] == a.mass[l] ? a.peak[l] : a.mass[l]; });
    b.each_row(TOP, [&](int l) { return empty(l) ? T(-1) : a.where[l]; });
  });
}
