// The recursion of filtering/recursion.py for one series, or for one in each lane: branch, move, observe, collapse; and its adjoint.
#pragma once
#include <algorithm>
#include "gaussian.hpp"
#include "threads.hpp"

namespace filtering {

// What is given, in this order; the numbers are those of `GIVEN` and `FOUND` in filtering/native/calls.py.
enum Given { TRANSITION, DYNAMICS, DYNAMICS_OFFSET, DYNAMICS_NOISE, EMISSION, EMISSION_OFFSET, EMISSION_NOISE, VALUES, WEIGHTS, MEANS, COVARIANCES, GIVENS };
enum Found { TOTALS, PREDICTED, FOUND_WEIGHTS, FOUND_MEANS, FOUND_COVARIANCES, DIGITS, FOUNDS };

// Up to here a gradient keeps what lies between beliefs; beyond, it is computed twice.
constexpr int64_t MOST_BYTES = int64_t(2) << 20;
// Relative to what they were computed from, numbers closer than this differ by rounding.
constexpr double AGREEMENT = 1e-13;

struct Task {
  int M, n, p;
  int64_t steps, series, threads;
  bool mixes, joins, alike;   // IMM; GPB1, which keeps one message for all modes; all modes begin with the same message
  bool exact;                 // some element is observed without noise
  const int64_t* histories;   // G before the first step and after each
  Array given[GIVENS], along[GIVENS], found[FOUNDS], found_along[FOUNDS], seed[FOUNDS], to[GIVENS], to_along[GIVENS];
  mutable std::atomic<bool> failed{false};

  int64_t entries(int which) const {
    const int64_t m = M, N = n, P = p, sizes[GIVENS] = {m * m, m * N * N, m * N, m * N * N, m * P * N, m * P, m * P * P, P, 0, 0, 0};
    return sizes[which];
  }
};

template <class S> struct Belief { int64_t G; S *weights, *means, *covariances; };

// What lies between two beliefs: weights and messages of the branches.
template <class S> struct Between {
  S *seen, *joint, *predicted, *shares, *mixed_mean, *mixed_covariance, *weights, *kept_mean, *kept_covariance;
  Passage<S>* passages;
};

template <class S, class N, class O> class Recursion : Between<S> {
  using Between<S>::seen;
  using Between<S>::joint;
  using Between<S>::predicted;
  using Between<S>::shares;
  using Between<S>::mixed_mean;
  using Between<S>::mixed_covariance;
  using Between<S>::weights;
  using Between<S>::kept_mean;
  using Between<S>::kept_covariance;
  using Between<S>::passages;
  const Task& z;
  const Place at;
  Arena& arena;
  const int M;
  const N n;
  const O p;
  const int nn;
  S *now[WEIGHTS], *scratch;
  Between<S>* steps = nullptr;  // one for each step, if there is room
  bool complete = true;
  int64_t H = 1;  // histories that branch
  using Store = Memory<S>;

  // Adjoints.
  S *bar[WEIGHTS], *weights_bar, *joint_bar, *mean_bar, *covariance_bar, *kept_mean_bar, *kept_covariance_bar;

  S* take(int64_t count) { return arena.take<S>(std::max<int64_t>(count, 1)); }
  static void zero(S* x, int64_t count) { for (int64_t i = 0; i < count; i++) x[i] = S(0.0); }
  bool first_alike(int64_t t) const { return t == 0 ? z.alike : z.joins; }
  Affine<S> affine(int which, int j) const {
    const int rows = which == DYNAMICS ? int(n) : int(p);
    return {now[which] + int64_t(j) * rows * n, now[which + 1] + j * rows, now[which + 2] + int64_t(j) * rows * rows};
  }
  AffineBar<S> affine_bar(int which, int j) const {
    const int rows = which == DYNAMICS ? int(n) : int(p);
    return {bar[which] + int64_t(j) * rows * n, bar[which + 1] + j * rows, bar[which + 2] + int64_t(j) * rows * rows};
  }
  // The parameters of step t; constants are read once.
  void read(int64_t t) {
    for (int k = 0; k < WEIGHTS; k++) {
      const Array &x = z.given[k], &d = z.along[k];
      if (t > 0 && !x.step && !d.step) continue;
      Array a = x, b = d;
      a.data += t * x.step;
      if (b.data) b.data += t * d.step;
      for (int64_t i = 0, count = z.entries(k); i < count; i++) now[k][i] = Store::load(a, b, at, i);
    }
    mark();
  }
  void mark();

 public:
  Recursion(const Task& z, const Place& at, Arena& arena, bool adjoint) : z(z), at(at), arena(arena), M(z.M), n(z.n), p(z.p), nn(z.n * z.n) {
    int64_t branches = 1, most = 1;
    for (int64_t t = 0; t < z.steps; t++) {
      most = std::max(most, z.histories[t] * M);
      if (!z.mixes && !first_alike(t)) branches = std::max(branches, z.histories[t] * M);
    }
    for (int64_t t = 0; t <= z.steps; t++) most = std::max(most, z.histories[t]);
    const int64_t pairs = branches * M;
    for (int k = 0; k < WEIGHTS; k++) now[k] = take(z.entries(k));
    const int64_t size = pairs * (Passage<S>::size(n, p) + 1 + n + nn) + 2 * most * M + M * (1 + n + nn) + p;
    if (adjoint && z.steps * size * int64_t(sizeof(S)) <= MOST_BYTES) {
      steps = arena.take<Between<S>>(z.steps);
      for (int64_t t = 0; t < z.steps; t++) steps[t] = between(most, pairs);
    } else (Between<S>&)*this = between(most, pairs);
    scratch = take(most * M + 4 * nn + 3 * p * p + 3 * p * n + 4 * n + 2 * p);
    if (!adjoint) return;
    for (int k = 0; k < WEIGHTS; k++) zero(bar[k] = take(z.entries(k)), z.entries(k));
    weights_bar = take(pairs), joint_bar = take(most * M), mean_bar = take(pairs * n), covariance_bar = take(pairs * nn);
    kept_mean_bar = take(pairs * n), kept_covariance_bar = take(pairs * nn);
  }
  Belief<S> belief(int64_t G) { return {G, take(G * M), take(G * M * n), take(G * M * nn)}; }
  void start(const Belief<S>& out) {
    const int64_t count = out.G * M;
    for (int64_t i = 0; i < count; i++) out.weights[i] = Store::load(z.given[WEIGHTS], z.along[WEIGHTS], at, i);
    for (int64_t i = 0; i < count * n; i++) out.means[i] = Store::load(z.given[MEANS], z.along[MEANS], at, i);
    for (int64_t i = 0; i < count * nn; i++) out.covariances[i] = Store::load(z.given[COVARIANCES], z.along[COVARIANCES], at, i);
  }

  // Back to what lay between the beliefs around step t: kept, or computed once more.
  void recall(int64_t t, const Belief<S>& in, const Belief<S>& out) {
    if (steps) begin(t, in);
    else forward(t, in, out);
  }
  // One step; returns log p(y_t | past).
  S forward(int64_t t, const Belief<S>& in, const Belief<S>& out) {
    begin(t, in);
    const int64_t waiting = in.G * M;
    const bool alike = first_alike(t), one = z.mixes || alike;
    for (int64_t h = 0; h < waiting; h++)
      for (int j = 0; j < M; j++) joint[h * M + j] = in.weights[h] + now[TRANSITION][h % M * M + j];
    for (int j = 0; j < M; j++) {
      if (z.mixes && !alike)
        predicted[j] = collapse(int(waiting), [&](int h) { return Member<S>{joint + h * M + j, in.means + h * n, in.covariances + h * nn}; },
                                shares + j * waiting, mixed_mean + j * n, mixed_covariance + j * nn, n);
      else predicted[j] = log_sum<S>(int(waiting), [&](int h) { return joint[h * M + j]; });
    }
    S top = S(-1e308);
    for (int64_t h = 0; h < H; h++)
      for (int j = 0; j < M; j++) {
        Passage<S>& x = passages[h * M + j];
        predict(affine(DYNAMICS, j), before_mean(in, t, h, j), before_covariance(in, t, h, j), x, scratch, n);
        observe(affine(EMISSION, j), now[VALUES], complete ? nullptr : seen, x, scratch, n, p);
        top = larger(top, x.log_likelihood);
      }
    if (z.exact) agree();
    // A common part is taken off first, so that an outlier does not swamp the weights.
    for (int64_t k = 0; k < H * M; k++) weights[k] = (one ? predicted[k] : joint[k]) + (passages[k].log_likelihood - top);
    const S rest = log_sum<S>(int(H * M), [&](int k) { return weights[k]; });
    for (int64_t k = 0; k < H * M; k++) weights[k] = weights[k] - rest;
    remember(out);
    return rest + top;
  }
  const S* log_predicted() const { return predicted; }
  // Whether each branch found the variance of what it observed without cancellation that leaves too few digits, in lane l.
  bool pivots(int l, double least) const {
    for (int64_t k = 0; k < H * M; k++) {
      const Affine<S> emission = affine(EMISSION, int(k % M));
      for (int a = 0; a < p; a++) {
        if (!complete && lane(seen[a], l) == 0.0) continue;
        double size = 0.0;
        for (int i = 0; i < n; i++)
          size += std::abs(lane(emission.matrix[a * n + i], l)) * std::sqrt(std::abs(lane(passages[k].predicted_covariance[i * n + i], l)));
        const double pivot = lane(passages[k].root[a * p + a], l);
        if (!(pivot * pivot >= least * (size * size + lane(emission.noise[a * p + a], l)))) return false;
      }
    }
    return true;
  }

  // Adds to the bars of `in` what those of `out`, of the total and of the predicted modes make of them; after forward(t).
  void backward(int64_t t, const Belief<S>& in, const Belief<S>& out, const Belief<S>& out_bar, const S& total_bar, const S* predicted_bar,
                const Belief<S>& in_bar) {
    forget(out, out_bar);
    const int64_t waiting = in.G * M;
    const bool alike = first_alike(t), one = z.mixes || alike;
    S sum = S(0.0);
    for (int64_t k = 0; k < H * M; k++) add(sum, weights_bar[k]);
    for (int64_t k = 0; k < H * M; k++) weights_bar[k] = weights_bar[k] - exponential(weights[k]) * (sum - total_bar);
    S *mixed_mean_bar = kept_mean_bar, *mixed_covariance_bar = kept_covariance_bar;  // free from here on
    if (z.mixes && !alike) zero(mixed_mean_bar, int64_t(M) * n), zero(mixed_covariance_bar, int64_t(M) * nn);
    for (int64_t h = 0; h < H; h++)
      for (int j = 0; j < M; j++) {
        const int64_t k = h * M + j;
        S *m = mean_bar + k * n, *P = covariance_bar + k * nn;
        observe_bar(affine(EMISSION, j), complete ? nullptr : seen, passages[k], weights_bar[k], m, P, affine_bar(EMISSION, j), bar[VALUES], scratch, n, p);
        const bool mixed = z.mixes && !alike;
        predict_bar(affine(DYNAMICS, j), before_mean(in, t, h, j), before_covariance(in, t, h, j), m, P, affine_bar(DYNAMICS, j),
                    mixed ? mixed_mean_bar + j * n : in_bar.means + (alike ? 0 : h) * n,
                    mixed ? mixed_covariance_bar + j * nn : in_bar.covariances + (alike ? 0 : h) * nn, scratch, n);
      }
    zero(joint_bar, waiting * M);
    for (int j = 0; j < M; j++) {
      const S to_predicted = (predicted_bar ? predicted_bar[j] : S(0.0)) + (one ? weights_bar[j] : S(0.0));
      if (z.mixes && !alike)
        collapse_bar(int(waiting), [&](int h) { return Member<S>{joint + h * M + j, in.means + h * n, in.covariances + h * nn}; },
                     shares + j * waiting, mixed_mean + j * n, to_predicted, mixed_mean_bar + j * n, mixed_covariance_bar + j * nn, scratch,
                     [&](int h, const S& w, const S& factor, const S* m) {
                       add(joint_bar[h * M + j], w);
                       for (int i = 0; i < n; i++) add(in_bar.means[h * n + i], m[i]);
                       for (int i = 0; i < nn; i++) add(in_bar.covariances[h * nn + i], factor * mixed_covariance_bar[j * nn + i]);
                     }, n);
      else
        for (int64_t h = 0; h < waiting; h++) {
          add(joint_bar[h * M + j], exponential(joint[h * M + j] - predicted[j]) * to_predicted);
          if (!one) add(joint_bar[h * M + j], weights_bar[h * M + j]);
        }
    }
    for (int64_t h = 0; h < waiting; h++)
      for (int j = 0; j < M; j++) {
        add(in_bar.weights[h], joint_bar[h * M + j]);
        add(bar[TRANSITION][h % M * M + j], joint_bar[h * M + j]);
      }
    written(t);
  }

 private:
  void begin(int64_t t, const Belief<S>& in) {
    if (steps) (Between<S>&)*this = steps[t];
    read(t);
    H = z.mixes || first_alike(t) ? 1 : in.G * M;
  }
  Between<S> between(int64_t most, int64_t pairs) {
    Between<S> x;
    x.seen = take(p), x.joint = take(most * M), x.predicted = take(M), x.shares = take(std::max(most * M, pairs));
    x.mixed_mean = take(int64_t(M) * n), x.mixed_covariance = take(int64_t(M) * nn), x.weights = take(pairs);
    x.kept_mean = take(pairs * n), x.kept_covariance = take(pairs * nn);
    x.passages = arena.take<Passage<S>>(pairs);
    const int64_t size = Passage<S>::size(n, p);
    S* space = take(pairs * size);
    for (int64_t k = 0; k < pairs; k++) x.passages[k].place(space + k * size, n, p);
    return x;
  }
  const S* before_mean(const Belief<S>& in, int64_t t, int64_t h, int j) const {
    return first_alike(t) ? in.means : z.mixes ? mixed_mean + j * n : in.means + h * n;
  }
  const S* before_covariance(const Belief<S>& in, int64_t t, int64_t h, int j) const {
    return first_alike(t) ? in.covariances : z.mixes ? mixed_covariance + j * nn : in.covariances + h * nn;
  }
  // Branches that know a coordinate exactly, and to the same number but for rounding, get the same in every bit.
  void agree() {
    const int64_t count = H * M;
    for (int i = 0; i < n; i++)
      for (int l = 0; l < at.count; l++)
        for (int64_t k = 1; k < count; k++) {
          const Passage<S>& x = passages[k];
          if (lane(x.covariance[i * n + i], l) != 0.0) continue;
          const double own = lane(x.mean[i], l), before = lane(x.predicted_mean[i], l);
          const double size = std::abs(own) + std::abs(before) + std::sqrt(std::abs(lane(x.predicted_covariance[i * n + i], l)));
          for (int64_t b = 0; b < k; b++) {
            const double other = lane(passages[b].mean[i], l);
            if (lane(passages[b].covariance[i * n + i], l) != 0.0 || !(std::abs(own - other) <= AGREEMENT * size)) continue;
            set_lane(x.mean[i], l, other);
            break;
          }
        }
  }
  // Members that are kept as one: branch (o, k, j) for each o.
  Member<S> branch(int64_t keep, int64_t k, int j, int o) const {
    const int64_t at = (o * keep + k) * M + j;
    return {weights + at, passages[at].mean, passages[at].covariance};
  }
  Member<S> kept(const Belief<S>& out, int j) const { return {out.weights + j, kept_mean + j * n, kept_covariance + j * nn}; }

  // Collapse the oldest mode of each history that there is no room for.
  void remember(const Belief<S>& out) {
    const int64_t keep = out.G;
    const int old = int(H / keep);
    const bool joins = z.joins && M > 1;
    S *means = joins ? kept_mean : out.means, *covariances = joins ? kept_covariance : out.covariances;
    for (int64_t k = 0; k < keep; k++)
      for (int j = 0; j < M; j++) {
        const int64_t i = k * M + j;
        if (old == 1) {
          out.weights[i] = weights[i];
          std::copy(passages[i].mean, passages[i].mean + n, means + i * n);
          std::copy(passages[i].covariance, passages[i].covariance + nn, covariances + i * nn);
        } else {
          out.weights[i] = collapse(old, [&](int o) { return branch(keep, k, j, o); }, scratch, means + i * n, covariances + i * nn, n);
        }
      }
    if (!joins) return;
    collapse(M, [&](int j) { return kept(out, j); }, scratch, out.means, out.covariances, n);
    for (int j = 1; j < M; j++) {
      std::copy(out.means, out.means + n, out.means + j * n);
      std::copy(out.covariances, out.covariances + nn, out.covariances + j * nn);
    }
  }
  // The adjoint of `remember`, into weights_bar, mean_bar and covariance_bar of the branches.
  void forget(const Belief<S>& out, const Belief<S>& out_bar) {
    const int64_t keep = out.G;
    const int old = int(H / keep);
    S *means_bar = out_bar.means, *covariances_bar = out_bar.covariances;
    if (z.joins && M > 1) {
      means_bar = kept_mean_bar, covariances_bar = kept_covariance_bar;
      for (int j = 1; j < M; j++) {  // all modes share one message
        for (int i = 0; i < n; i++) add(out_bar.means[i], out_bar.means[j * n + i]);
        for (int i = 0; i < nn; i++) add(out_bar.covariances[i], out_bar.covariances[j * nn + i]);
      }
      S* portions = shares;
      const S total = log_sum<S>(M, [&](int j) { return out.weights[j]; });
      for (int j = 0; j < M; j++) portions[j] = exponential(out.weights[j] - total);
      collapse_bar(M, [&](int j) { return kept(out, j); }, portions, out.means, S(0.0), out_bar.means, out_bar.covariances, scratch,
                   [&](int j, const S& w, const S& factor, const S* m) {
                     add(out_bar.weights[j], w);
                     std::copy(m, m + n, means_bar + j * n);
                     for (int i = 0; i < nn; i++) covariances_bar[j * nn + i] = factor * out_bar.covariances[i];
                   }, n);
    }
    const S* means = z.joins && M > 1 ? kept_mean : out.means;
    for (int64_t k = 0; k < keep; k++)
      for (int j = 0; j < M; j++) {
        const int64_t i = k * M + j;
        S *portions = scratch, *rest = scratch + old;
        for (int o = 0; o < old; o++) portions[o] = old == 1 ? S(1.0) : exponential(*branch(keep, k, j, o).log_weight - out.weights[i]);
        collapse_bar(old, [&](int o) { return branch(keep, k, j, o); }, portions, means + i * n, out_bar.weights[i], means_bar + i * n,
                     covariances_bar + i * nn, rest,
                     [&](int o, const S& w, const S& factor, const S* m) {
                       const int64_t b = (o * keep + k) * M + j;
                       weights_bar[b] = w;
                       std::copy(m, m + n, mean_bar + b * n);
                       for (int e = 0; e < nn; e++) covariance_bar[b * nn + e] = factor * covariances_bar[i * nn + e];
                     }, n);
      }
  }
  // What changes with time is written step by step, and constants at the last (the first) step.
  void written(int64_t t) {
    for (int k = 0; k < WEIGHTS; k++) {
      const Array &x = z.to[k], &d = z.to_along[k];
      if ((!x.data && !d.data) || (t > 0 && !x.step && !d.step)) continue;
      Array a = x, b = d;
      if (a.data) a.data += t * x.step;
      if (b.data) b.data += t * d.step;
      for (int64_t i = 0, count = z.entries(k); i < count; i++) Store::store(a, b, at, i, bar[k][i]);
      zero(bar[k], z.entries(k));
    }
  }
};

// NaN is missing: the value becomes zero, and says so in `seen`.
INLINE bool missing(double& value, double& seen) {
  const bool none = value != value;
  seen = none ? 0.0 : 1.0;
  if (none) value = 0.0;
  return none;
}
INLINE bool missing(Lanes& value, Lanes& seen) {
  bool any = false;
  for (int l = 0; l < WIDTH; l++) {
    double v = value.v[l], s;
    any |= missing(v, s);
    value.v[l] = v, seen.v[l] = s;
  }
  return any;
}
template <class T> INLINE bool missing(Dual<T>& value, Dual<T>& seen) {
  T s;
  const bool any = missing(value.v, s);
  seen = Dual<T>(s, T(0.0));
  value.d = value.d * s;
  return any;
}
template <class S, class N, class O> void Recursion<S, N, O>::mark() {
  complete = true;
  for (int a = 0; a < p; a++) complete &= !missing(now[VALUES][a], seen[a]);
}

}  // namespace filtering
