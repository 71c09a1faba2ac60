// What whole rows of weights look like, without derivative: how many keys hold most of the mass, which has the most, tr Cov[k],
// and the largest eigenvalue of Cov[k]. rows.py has the same in torch.
#pragma once
#include "derivatives.hpp"

// The fewest keys that hold `share` of each row's mass. Nothing is sorted: the largest threshold below which the weights sum
// to at most the rest is found by bisection on its bits (nonnegative numbers are ordered like their bits), all lanes at once. One
// weight is left between the bounds where the sums below them differ by less than two such weights.
template <class T> static void coverage(const Block<T>& b, const T* p, const T* total, double share, T* out) {
  using I = Ints<T>;
  constexpr int L = LANES<T>;
  const int64_t keys = b.to - b.from, W = b.W;
  const T slack = 64 * std::numeric_limits<T>::epsilon();
  for (int l = 0; l < W; l += L) {
    const Vec<T> mass = load(total + l), limit = mass * T(1 - share) + mass * slack;
    // Weights up to limit / keys fit; the largest weight is 1, and together they do not.
    I low = (I)(limit / T(keys + 1)), high = (I)all<T>(1);
    Vec<T> less{}, more = mass;  // the sums up to low and up to high
    auto sum_to = [&](Vec<T> bound) {
      Vec<T> s0{}, s1{};
      int64_t k = 0;
      for (; k + 1 < keys; k += 2) {
        Vec<T> x = load(p + k * W + l), y = load(p + (k + 1) * W + l);
        s0 += x <= bound ? x : Vec<T>{}, s1 += y <= bound ? y : Vec<T>{};
      }
      if (k < keys) {
        Vec<T> x = load(p + k * W + l);
        s0 += x <= bound ? x : Vec<T>{};
      }
      return s0 + s1;
    };
    less = sum_to((Vec<T>)low);
    for (int step = 0; step < 8 * int(sizeof(T)); step++) {
      const I middle = low + ((high - low) >> 1), open = ((high - low) > 1) & (more - less > T(1.5) * (Vec<T>)low);
      bool done = true;
      for (int i = 0; i < L; i++) done &= !open[i];
      if (done) break;
      const Vec<T> sum = sum_to((Vec<T>)middle);
      const I fits = (sum <= limit) & open, not_fits = (sum > limit) & open;
      less = fits ? sum : less, low = fits ? middle : low, more = not_fits ? sum : more, high = not_fits ? middle : high;
    }
    I dropped{};
    for (int64_t k = 0; k < keys; k++) dropped -= (I)(load(p + k * W + l) <= (Vec<T>)low);
    for (int i = 0; i < L; i++) {  // of equal weights some may fit
      const T equal = ((Vec<T>)high)[i], some = std::floor((limit[i] - less[i]) / equal);
      const T count = T(dropped[i]) + (some > 0 ? some : T(0));
      out[l + i] = mass[i] == 0 ? T(0) : std::max(T(1), T(keys) - count);
    }
  }
}

// The largest weights of each row in descending order, and their keys; of equal ones the first key, and none of weight 0.
template <class T> static void largest(const Block<T>& b, const T* p, const T* inverse) {
  const Tensor &weights = b.z.tensor[LARGEST], &keys = b.z.tensor[LARGEST_KEY];
  T *weight = b.at(LARGEST), *key = b.at(LARGEST_KEY);
  for (int l = 0; l < b.W; l += LANES<T>) {
    Vec<T> most[KEPT], who[KEPT];
    for (int r = 0; r < KEPT; r++) most[r] = Vec<T>{}, who[r] = all<T>(-1);
    for (int64_t j = b.from; j < b.to; j++) {
      Vec<T> x = load(p + (j - b.from) * b.W + l), number = all<T>(T(j));
      for (int r = 0; r < KEPT; r++) {  // what is less moves down
        const auto more = x > most[r];
        const Vec<T> less = most[r], other = who[r];
        most[r] = more ? x : less, who[r] = more ? number : other;
        x = more ? less : x, number = more ? other : number;
      }
    }
    for (int i = 0; i < LANES<T> && l + i < b.n; i++)
      for (int r = 0; r < KEPT; r++) {
        const int64_t row = b.first + l + i;
        weight[row * weights.row + r * weights.column] = most[r][i] * inverse[l + i];
        key[row * keys.row + r * keys.column] = who[r][i];
      }
  }
}

// Sums over features of x[feature][lane] y[feature][lane].
template <class T> static void inner(T* out, const T* x, const T* y, int64_t features, int W) {
  std::fill(out, out + W, T(0));
  for (int64_t f = 0; f < features; f++)
    for (int l = 0; l < W; l++) out[l] += x[f * W + l] * y[f * W + l];
}

// Moments of keys about the key of the largest weight, which then has no part in them: where one key holds nearly all the
// mass, nothing cancels.
template <class T> struct Moments {
  T *origin, *mean, *rest, *trace;
};

// The largest eigenvalues x of tridiagonal matrices with diagonal a[step][lane] and squares c[step][lane] beside it. Laguerre's
// method falls from any bound above to the largest of real roots; the quotients delta of neighboring minors stay positive above it.
static void largest_root(const double* a, const double* c, int64_t s, int W, double* out) {
  using V = Vec<double>;
  for (int l = 0; l < W; l += LANES<double>) {
    auto beside = [&](int64_t k) { return k < 0 || k + 1 >= s ? V{} : root<double>(load(c + k * W + l)); };
    V top = load(a + l) + beside(0);
    for (int64_t k = 1; k < s; k++) top = larger<double>(load(a + k * W + l) + beside(k - 1) + beside(k), top);  // Gershgorin
    const V size = larger<double>(top, all<double>(std::numeric_limits<double>::min()));
    V x = top + size * 1e-9;
    for (int turn = 0; turn < 30; turn++) {  // a few for a simple root, more for a double one
      V inverse = 1 / (x - load(a + l)), first = all<double>(1), second{}, one = inverse, two = inverse * inverse;
      auto above = inverse > 0;
      for (int64_t k = 1; k < s; k++) {
        const V square = load(c + (k - 1) * W + l), step = inverse * inverse;
        second = square * step * (second - 2 * first * first * inverse);
        first = 1 + square * first * step;
        inverse = 1 / (x - load(a + k * W + l) - square * inverse);
        above &= inverse > 0;
        one += first * inverse, two += first * first * inverse * inverse - second * inverse;
      }
      const V step = double(s) / (one + root<double>(double(s - 1) * (double(s) * two - one * one)));
      const auto moving = above & (step > 1e-13 * size);  // by rounding below the root: it is found
      x = moving ? x - step : x;
      bool done = true;
      for (int i = 0; i < LANES<double>; i++) done &= !moving[i];
      if (done) break;
    }
    store(out + l, larger<double>(x, V{}));
  }
}

// The largest eigenvalue of Cov[k] by Lanczos' method. Cov[k] u = E[x <x, u>] - E[x] <E[x], u>, x = k - origin: two products with
// the weights at hand for each step. Divided by the trace, so that squares of tiny covariances do not vanish.
template <class T> static void leading(const Block<T>& b, const T* p, const T* inverse, const Moments<T>& m, int64_t steps) {
  const int W = b.W;
  const int64_t d = b.z.d;
  const T* start = b.at(START);
  T *v = b.lanes(d), *w = b.lanes(d), *before = b.zeros(d), *t = b.lanes(KEYS), *sum = b.lanes(1), *shift = b.lanes(1), *dot = b.lanes(1), *beside = b.zeros(1), *unit = b.lanes(1);
  double *diagonal = b.arena.template take<double>(steps * W), *squares = b.arena.template take<double>(steps * W), *value = b.arena.template take<double>(W);
  for (int l = 0; l < W; l++) unit[l] = m.trace[l] > 0 ? 1 / m.trace[l] : T(0);
  for (int64_t f = 0; f < d; f++) std::fill(v + f * W, v + (f + 1) * W, start[f * b.z.tensor[START].column]);
  for (int64_t step = 0; step < steps; step++) {
    inner(shift, m.origin, v, d, W);
    std::fill(w, w + d * W, T(0)), std::fill(sum, sum + W, T(0));
    b.tiles([&](int64_t j, int c) {
      multiply<T>(c, W, {b.by_key(CENTER, v, d, j)}, t, W, Into::FRESH);
      const T* q = p + (j - b.from) * W;
      for (int l = 0; l < W; l += LANES<T>) {
        Vec<T> total = load(sum + l);
        const Vec<T> off = load(shift + l);
        for (int64_t k = l; k < int64_t(c) * W; k += W) {
          Vec<T> x = (load(t + k) - off) * load(q + k);
          store(t + k, x), total += x;
        }
        store(sum + l, total);
      }
      multiply<T>(int(d), W, {b.over_keys(CENTER, t, j, c)}, w, W, Into::ADD);
    });
    inner(dot, m.mean, v, d, W);
    for (int64_t f = 0; f < d; f++)
      for (int l = 0; l < W; l++) {
        const int64_t i = f * W + l;
        w[i] = ((w[i] - sum[l] * m.origin[i]) * inverse[l] - m.mean[i] * dot[l]) * unit[l] - beside[l] * before[i];
      }
    inner(dot, w, v, d, W);
    for (int64_t f = 0; f < d; f++)
      for (int l = 0; l < W; l++) w[f * W + l] -= dot[l] * v[f * W + l];
    inner(beside, w, w, d, W);
    for (int l = 0; l < W; l++) {
      beside[l] = std::sqrt(beside[l]);
      const bool done = beside[l] <= 32 * std::numeric_limits<T>::epsilon();
      shift[l] = done ? T(0) : 1 / beside[l];
      if (done) beside[l] = 0;
      diagonal[step * W + l] = double(dot[l]), squares[step * W + l] = double(beside[l]) * double(beside[l]);
    }
    std::swap(before, v);
    for (int64_t f = 0; f < d; f++)
      for (int l = 0; l < W; l++) v[f * W + l] = shift[l] == 0 ? T(0) : w[f * W + l] * shift[l];
  }
  largest_root(diagonal, squares, steps, W, value);
  b.each_row(LEADING, [&](int l) { return T(value[l]) * m.trace[l]; });
}

template <class T> static void statistics(const Problem& z) {
  constexpr T NONE = -std::numeric_limits<T>::infinity();
  const int most = lanes_for<T>(z, 2);
  const int64_t blocks = (z.M + most - 1) / most;
  run_tasks(z.batch * blocks, z.threads, z.failed, [&](int64_t task, Arena& arena) {
    Block<T> b(z, arena, task / blocks, (blocks - 1 - task % blocks) * most, most);
    Scores<T> scores(b);
    Rows<T> rows(b);
    const int W = b.W;
    const int64_t keys = b.to - b.from;
    const bool biased = z.has(BIAS);
    T *p = b.lanes(keys), *x = b.lanes(keys), *visible = b.zeros(1), *heat = b.zeros(1), *spread = b.zeros(1), *top = b.zeros(1), *count = b.zeros(1);
    auto at = [&](T* y, int64_t j) { return y + (j - b.from) * W; };
    b.tiles([&](int64_t j, int c) {
      T* s = at(p, j);
      scores.tile(s, j, c, biased ? at(x, j) : nullptr);
      for (int l = 0; l < W; l += LANES<T>) {
        Vec<T> peak = load(rows.peak + l), where = load(top + l), number = all<T>(T(j)), seen = load(visible + l);
        for (int k = 0; k < c; k++, number += T(1)) {
          const Vec<T> y = load(s + k * W + l);
          const auto more = y > peak;
          peak = more ? y : peak, where = more ? number : where;
          seen += y == all<T>(NONE) ? Vec<T>{} : all<T>(1);
        }
        store(rows.peak + l, peak), store(top + l, where), store(visible + l, seen);
      }
    });
    rows.seen();
    b.tiles([&](int64_t j, int c) {
      for (int l = 0; l < W; l += LANES<T>) {
        const Vec<T> peak = load(rows.peak + l);
        Vec<T> mass = load(rows.mass + l), hot = load(heat + l), mean = load(spread + l);
        for (int64_t k = l; k < int64_t(c) * W; k += W) {
          Vec<T> y = below<T>(load(at(p, j) + k), peak), q = exponential<T>(y);
          mass += q, hot += q * y;
          if (biased) mean += q > 0 ? q * load(at(x, j) + k) : Vec<T>{};
          else store(at(x, j) + k, y);
          store(at(p, j) + k, q);
        }
        store(rows.mass + l, mass), store(heat + l, hot), store(spread + l, mean);
      }
    });
    rows.weighed();
    T *center = b.lanes(1);
    for (int l = 0; l < W; l++) center[l] = (biased ? spread[l] : heat[l]) * rows.inverse[l], spread[l] = 0;
    b.tiles([&](int64_t j, int c) {
      for (int l = 0; l < W; l += LANES<T>) {
        const Vec<T> middle = load(center + l);
        Vec<T> sum = load(spread + l);
        for (int64_t k = l; k < int64_t(c) * W; k += W) {
          Vec<T> q = load(at(p, j) + k), t = load(at(x, j) + k) - middle;
          sum += q > 0 ? q * t * t : Vec<T>{};
        }
        store(spread + l, sum);
      }
    });
    b.each_row(NORMALIZER, [&](int l) { return rows.log_normalizer(l); });
    b.each_row(ENTROPY, [&](int l) {
      const T h = rows.mass[l] == 0 ? T(0) : std::log(rows.mass[l]) - heat[l] * rows.inverse[l];
      return h < 0 ? T(0) : h;
    });
    b.each_row(SCORE_VARIANCE, [&](int l) { return spread[l] * rows.inverse[l]; });
    b.each_row(VISIBLE, [&](int l) { return visible[l]; });
    b.each_row(TOP, [&](int l) { return top[l]; });
    b.each_row(TOP_WEIGHT, [&](int l) { return rows.inverse[l]; });  // the largest weight is e^0 before normalization
    if (z.has(COVERAGE)) coverage(b, p, rows.mass, z.rate, count);
    b.each_row(COVERAGE, [&](int l) { return count[l]; });
    if (const T* marks = b.at(MARKS)) {
      const Tensor &from = z.tensor[MARKS], &to = z.tensor[MARKED];
      T* out = b.at(MARKED);
      for (int l = 0; l < b.n; l++)
        for (int64_t i = 0; i < z.tags; i++) {
          const T mark = marks[(b.first + l) * from.row + i * from.column];
          const bool here = mark >= T(b.from) && mark < T(b.to);
          out[(b.first + l) * to.row + i] = here ? p[(int64_t(mark) - b.from) * W + l] * rows.inverse[l] : T(0);
        }
    }
    if (z.has(LARGEST)) largest(b, p, rows.inverse);
    // from here on without the largest weight
    const int64_t d = z.d;
    Moments<T> m{b.zeros(d), b.lanes(d), b.zeros(1), b.lanes(1)};
    const T* moved = b.at(CENTER);
    const int64_t row = z.tensor[CENTER].row, column = z.tensor[CENTER].column;
    for (int l = 0; l < b.n; l++) {
      const int64_t j = int64_t(top[l]);
      for (int64_t f = 0; f < d; f++) m.origin[f * W + l] = moved[j * row + f * column];
      if (j >= b.from && j < b.to) p[(j - b.from) * W + l] = 0;
    }
    T* sums = b.zeros(d + 1);
    b.tiles([&](int64_t j, int c) {
      multiply<T>(int(d + 1), W, {b.over_keys(CENTER, at(p, j), j, c)}, sums, W, Into::ADD);
      for (int k = 0; k < c; k++)
        for (int l = 0; l < W; l++) m.rest[l] += at(p, j)[k * W + l];
    });
    T *cross = b.lanes(1), *own = b.lanes(1), *square = b.lanes(1);
    inner(cross, sums, m.origin, d, W), inner(own, m.origin, m.origin, d, W);
    for (int64_t f = 0; f < d; f++)
      for (int l = 0; l < W; l++) m.mean[f * W + l] = (sums[f * W + l] - m.rest[l] * m.origin[f * W + l]) * rows.inverse[l];
    inner(square, m.mean, m.mean, d, W);
    for (int l = 0; l < W; l++) {
      const T second = (sums[d * W + l] - 2 * cross[l] + m.rest[l] * own[l]) * rows.inverse[l];
      m.trace[l] = second - square[l] < 0 ? T(0) : second - square[l];
    }
    b.each_row(TRACE, [&](int l) { return m.trace[l]; });
    if (z.has(LEADING)) leading(b, p, rows.inverse, m, z.e);
  });
}
