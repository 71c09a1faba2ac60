// Moments over all modes and histories: of the state after each step and before it, and of the observation to come.
#pragma once
#include "recursion.hpp"

namespace filtering {

// The numbers are those of `MOMENTS` in filtering/native/calls.py; they lie in Task::to, and the beliefs in Task::found.
enum Moment { MEAN, COVARIANCE, PREDICTED_MEAN, PREDICTED_COVARIANCE, OBSERVATION_MEAN, OBSERVATION_COVARIANCE };

template <class S, class N, class O> class Summary {
  const Task& z;
  const Place at;
  const int M;
  const N n;
  const O p;
  const int nn;
  S *weights, *means, *covariances, *now[WEIGHTS], *joint, *shares, *scratch, *mixed_mean, *mixed_covariance, *seen_mean, *seen_covariance;
  S *out_mean, *out_covariance;
  Passage<S> passage;
  using Store = Memory<S>;

  void read(int64_t t) {
    for (int k = 0; k < VALUES; k++) {
      Array x = z.given[k];
      if (t > 0 && !x.step) continue;
      x.data += t * x.step;
      for (int64_t i = 0, count = z.entries(k); i < count; i++) now[k][i] = Store::load(x, x, at, i);
    }
  }
  void belief(int64_t begin, int64_t count) {
    const Array none, &w = z.found[FOUND_WEIGHTS], &m = z.found[FOUND_MEANS], &P = z.found[FOUND_COVARIANCES];
    for (int64_t i = 0; i < count; i++) weights[i] = Store::load(w, none, at, begin + i);
    for (int64_t i = 0; i < count * n; i++) means[i] = Store::load(m, none, at, begin * n + i);
    for (int64_t i = 0; i < count * nn; i++) covariances[i] = Store::load(P, none, at, begin * nn + i);
  }
  void write(Moment which, int64_t t, const S* x, int64_t count) {
    const Array& out = z.to[which];
    for (int64_t i = 0; i < count; i++) Store::store(out, out, at, t * count + i, x[i]);
  }
  // Given the next mode, a mixture moves as the Gaussian with its moments does: one move for each mode is enough.
  void before(int64_t t, int64_t count) {
    read(t);
    for (int j = 0; j < M; j++) {
      for (int64_t h = 0; h < count; h++) joint[h] = weights[h] + now[TRANSITION][h % M * M + j];
      joint[count + j] = collapse(int(count), [&](int h) { return Member<S>{joint + h, means + h * n, covariances + h * nn}; }, shares, out_mean, out_covariance, n);
      const Affine<S> step{now[DYNAMICS] + j * nn, now[DYNAMICS_OFFSET] + j * n, now[DYNAMICS_NOISE] + j * nn};
      predict(step, out_mean, out_covariance, passage, scratch, n);
      std::copy(passage.predicted_mean, passage.predicted_mean + n, mixed_mean + j * n);
      std::copy(passage.predicted_covariance, passage.predicted_covariance + nn, mixed_covariance + j * nn);
      const S* C = now[EMISSION] + int64_t(j) * p * n;
      times(passage.cross, C, passage.predicted_covariance, p, n, n);
      square(seen_covariance + int64_t(j) * p * p, passage.cross, C, now[EMISSION_NOISE] + int64_t(j) * p * p, p, n);
      for (int a = 0; a < p; a++) {
        S s = now[EMISSION_OFFSET][j * p + a];
        for (int i = 0; i < n; i++) add(s, C[a * n + i] * passage.predicted_mean[i]);
        seen_mean[j * p + a] = s;
      }
    }
    collapse(M, [&](int j) { return Member<S>{joint + count + j, mixed_mean + j * n, mixed_covariance + j * nn}; }, shares, out_mean, out_covariance, n);
    write(PREDICTED_MEAN, t, out_mean, n), write(PREDICTED_COVARIANCE, t, out_covariance, nn);
    collapse(M, [&](int j) { return Member<S>{joint + count + j, seen_mean + j * p, seen_covariance + int64_t(j) * p * p}; }, shares, out_mean, out_covariance, p);
    write(OBSERVATION_MEAN, t, out_mean, p), write(OBSERVATION_COVARIANCE, t, out_covariance, p * p);
  }

 public:
  Summary(const Task& z, const Place& at, Arena& arena) : z(z), at(at), M(z.M), n(z.n), p(z.p), nn(z.n * z.n) {
    int64_t most = 1;
    for (int64_t t = 0; t <= z.steps; t++) most = std::max(most, z.histories[t] * M);
    auto take = [&](int64_t count) { return arena.take<S>(std::max<int64_t>(count, 1)); };
    for (int k = 0; k < VALUES; k++) now[k] = take(z.entries(k));
    weights = take(most), means = take(most * n), covariances = take(most * nn), joint = take(most + M), shares = take(most + M);
    mixed_mean = take(int64_t(M) * n), mixed_covariance = take(int64_t(M) * nn), seen_mean = take(int64_t(M) * p), seen_covariance = take(int64_t(M) * p * p);
    out_mean = take(n + p), out_covariance = take(nn + p * p), scratch = take(nn);
    passage.place(take(Passage<S>::size(n, p)), n, p);
  }
  void run() {
    int64_t begin = 0;
    for (int64_t t = 0; t <= z.steps; t++) {
      const int64_t count = z.histories[t] * M;
      belief(begin, count);
      begin += count;
      if (t > 0) {
        collapse(int(count), [&](int h) { return Member<S>{weights + h, means + h * n, covariances + h * nn}; }, shares, out_mean, out_covariance, n);
        write(MEAN, t - 1, out_mean, n), write(COVARIANCE, t - 1, out_covariance, nn);
      }
      if (t < z.steps) before(t, count);
    }
  }
};

}  // namespace filtering
