// The smoother's pass of filtering/backward.py for one series, in plain covariances: the formulas and their names are those
// explained there. Where a covariance is too close to singular for that, it says so, and the pass in square roots takes over.
#pragma once
#include "digits.hpp"

namespace filtering {

// What is found, in Task::to; beliefs lie as in Task::found, pairs (history, next mode) one step after another.
enum Smooth { SMOOTH_WEIGHTS, SMOOTH_MEANS, SMOOTH_COVARIANCES, SMOOTH_PAIRS };

// L with L L' = P, and its inverse; false if a direction has too little of the variance of the coordinates.
inline bool factor(const double* P, double* L, double* inverse, int n) {
  std::fill(L, L + n * n, 0.0), std::fill(inverse, inverse + n * n, 0.0);
  for (int i = 0; i < n; i++) {
    for (int j = 0; j <= i; j++) {
      double s = P[i * n + j];
      for (int c = 0; c < j; c++) s -= L[i * n + c] * L[j * n + c];
      if (i != j) L[i * n + j] = s / L[j * n + j];
      else if (!(P[i * n + i] > 0) || !(s >= LEAST_SHARE * P[i * n + i])) return false;
      else L[i * n + i] = std::sqrt(s);
    }
    for (int j = 0; j <= i; j++) {
      double s = i == j ? 1.0 : 0.0;
      for (int c = j; c < i; c++) s -= L[i * n + c] * inverse[c * n + j];
      inverse[i * n + j] = s / L[i * n + i];
    }
  }
  return true;
}
// Eigenvalues of the symmetric A, which is destroyed, and eigenvectors in the columns of V: Jacobi's rotations.
inline void eigen(double* A, double* V, int n) {
  for (int i = 0; i < n * n; i++) V[i] = i % (n + 1) ? 0.0 : 1.0;
  for (int sweep = 0; sweep < 30; sweep++) {
    double off = 0.0, on = 0.0;
    for (int i = 0; i < n; i++)
      for (int j = 0; j < n; j++) (i == j ? on : off) += A[i * n + j] * A[i * n + j];
    if (!(off > 1e-32 * on)) return;
    for (int i = 0; i < n; i++)
      for (int j = i + 1; j < n; j++) {
        if (A[i * n + j] == 0.0) continue;
        const double theta = (A[j * n + j] - A[i * n + i]) / (2 * A[i * n + j]);
        const double t = (theta < 0 ? -1.0 : 1.0) / (std::abs(theta) + std::sqrt(theta * theta + 1)), c = 1 / std::sqrt(t * t + 1), s = t * c;
        for (int k = 0; k < n; k++) {
          const double x = A[k * n + i], y = A[k * n + j];
          A[k * n + i] = c * x - s * y, A[k * n + j] = s * x + c * y;
        }
        for (int k = 0; k < n; k++) {
          const double x = A[i * n + k], y = A[j * n + k], v = V[k * n + i], w = V[k * n + j];
          A[i * n + k] = c * x - s * y, A[j * n + k] = s * x + c * y;
          V[k * n + i] = c * v - s * w, V[k * n + j] = s * v + c * w;
        }
      }
  }
}
// The inverse of A, which is destroyed, and log |A|; false unless the determinant is positive.
inline bool invert(double* A, double* inverse, double& log_size, int n) {
  for (int i = 0; i < n * n; i++) inverse[i] = i % (n + 1) ? 0.0 : 1.0;
  bool positive = true;
  log_size = 0.0;
  for (int i = 0; i < n; i++) {
    int best = i;
    for (int k = i + 1; k < n; k++)
      if (std::abs(A[k * n + i]) > std::abs(A[best * n + i])) best = k;
    if (!(std::abs(A[best * n + i]) > 0)) return false;
    if (best != i) {
      for (int c = 0; c < n; c++) std::swap(A[i * n + c], A[best * n + c]), std::swap(inverse[i * n + c], inverse[best * n + c]);
      positive = !positive;
    }
    const double pivot = A[i * n + i];
    positive = positive == (pivot > 0), log_size += std::log(std::abs(pivot));
    for (int c = 0; c < n; c++) A[i * n + c] /= pivot, inverse[i * n + c] /= pivot;
    for (int k = 0; k < n; k++) {
      const double f = A[k * n + i];
      if (k == i || f == 0.0) continue;
      for (int c = 0; c < n; c++) A[k * n + c] -= f * A[i * n + c], inverse[k * n + c] -= f * inverse[i * n + c];
    }
  }
  return positive && std::isfinite(log_size);
}
// out = A B A' + base
inline void around(double* out, const double* A, const double* B, const double* base, double* half, int n) {
  times(half, A, B, n, n, n);
  square(out, half, A, base, n, n);
}

class Smoother {
  const Task& z;
  const Place at;
  const int M, n, p, nn;
  double *now[WEIGHTS], *seen, *work[9];
  bool complete = true;
  Passage<double> passage;
  struct Mixture { double *weights, *means, *covariances; };
  Mixture filtered, following, later, before, after;  // beliefs; the states of pairs
  double *left, *gain, *ahead, *conditional, *shares;
  // What the future says, for each history and mode that is kept: X, a root, s, N, V (gained, lost) V'.
  double *whitener, *root, *pull, *information, *noise, *wider;
  using Store = Memory<double>;

  static double* take(Arena& arena, int64_t count) { return arena.take<double>(std::max<int64_t>(count, 1)); }
  Mixture mixture(Arena& arena, int64_t count) { return {take(arena, count), take(arena, count * n), take(arena, count * nn)}; }
  void read(int64_t t) {
    for (int k = 0; k < WEIGHTS; k++) {
      Array x = z.given[k];
      x.data += t * x.step;
      for (int64_t i = 0, count = z.entries(k); i < count; i++) now[k][i] = Store::load(x, x, at, i);
    }
    complete = true;
    for (int a = 0; a < p; a++) complete &= !missing(now[VALUES][a], seen[a]);
  }
  Affine<double> affine(int which, int j) const {
    const int rows = which == DYNAMICS ? n : p;
    return {now[which] + int64_t(j) * rows * n, now[which + 1] + j * rows, now[which + 2] + int64_t(j) * rows * rows};
  }
  void belief(int64_t begin, int64_t count, const Mixture& out) const {
    const Array none, &w = z.found[FOUND_WEIGHTS], &m = z.found[FOUND_MEANS], &P = z.found[FOUND_COVARIANCES];
    for (int64_t i = 0; i < count; i++) out.weights[i] = Store::load(w, none, at, begin + i);
    for (int64_t i = 0; i < count * n; i++) out.means[i] = Store::load(m, none, at, begin * n + i);
    for (int64_t i = 0; i < count * nn; i++) out.covariances[i] = Store::load(P, none, at, begin * nn + i);
  }
  void write(Smooth which, int64_t begin, const double* x, int64_t count) const {
    const Array& out = z.to[which];
    for (int64_t i = 0; i < count; i++) Store::store(out, out, at, begin + i, x[i]);
  }
  void write(int64_t begin, const Mixture& x, int64_t count) const {
    write(SMOOTH_WEIGHTS, begin, x.weights, count);
    write(SMOOTH_MEANS, begin * n, x.means, count * n), write(SMOOTH_COVARIANCES, begin * nn, x.covariances, count * nn);
  }
  // What turned the filter's message b into the smoothed one.
  bool future(int64_t b) {
    double *X = whitener + b * nn, *A = work[0], *V = work[1], *half = work[2], *away = work[3], *values = work[4];
    if (!factor(following.covariances + b * nn, root + b * nn, X, n)) return false;
    for (int i = 0; i < n; i++) away[i] = later.means[b * n + i] - following.means[b * n + i];
    times(pull + b * n, X, away, n, n, 1);
    around(A, X, later.covariances + b * nn, nullptr, half, n);
    eigen(A, V, n);
    for (int i = 0; i < n; i++) values[i] = A[i * n + i];
    for (int i = 0; i < n; i++)
      for (int j = 0; j < n; j++) {
        double more = 0.0, rough = 0.0, wide = 0.0;
        for (int k = 0; k < n; k++) {
          const double vv = V[i * n + k] * V[j * n + k], rest = std::max(values[k], 0.0), gained = std::max(1 - rest, 0.0);
          more += vv * gained, rough += vv * gained * std::min(rest, 1.0), wide += vv * std::max(rest - 1, 0.0);
        }
        information[b * nn + i * n + j] = more, noise[b * nn + i * n + j] = rough, wider[b * nn + i * n + j] = wide;
      }
    return true;
  }
  // What the future makes of a pair's later state N(m, P), in place; returns its log-weight.
  double informed(int64_t b, double* m, double* P) {
    const double *X = whitener + b * nn, *N = information + b * nn, *s = pull + b * n;
    double *S = work[0], *A = work[1], *back = work[2], *half = work[3], *own = work[4], *out = work[5], *d = work[6], *u = work[7], *keep = work[8];
    around(S, X, P, nullptr, half, n);
    for (int i = 0; i < n; i++) half[i] = m[i] - following.means[b * n + i];
    times(d, X, half, n, n, 1);
    for (int i = 0; i < nn; i++) keep[i] = S[i] - (i % (n + 1) ? 0.0 : 1.0);  // S - I
    times(A, N, keep, n, n, n);
    for (int i = 0; i < n; i++) A[i * n + i] += 1.0;
    double log_size, exponent = 0.0;
    bool fine = invert(A, back, log_size, n);
    if (fine) {
      times(own, back, N, n, n, n);
      for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++) own[i * n + j] = own[j * n + i] = 0.5 * (own[i * n + j] + own[j * n + i]);
      for (int i = 0; i < n; i++) {
        double bent = 0.0;
        for (int j = 0; j < n; j++) bent += keep[i * n + j] * s[j];
        u[i] = d[i] + bent, exponent += s[i] * (0.5 * bent + d[i]);
      }
      times(half, own, u, n, n, 1);
      for (int i = 0; i < n; i++) exponent -= 0.5 * u[i] * half[i], d[i] = s[i] - half[i];
      exponent -= 0.5 * log_size;
      fine = std::isfinite(exponent);
    }
    if (!fine) {  // the pair is certain of what the future contradicts: it has no weight of its own
      std::copy(later.means + b * n, later.means + (b + 1) * n, m);
      std::copy(later.covariances + b * nn, later.covariances + (b + 1) * nn, P);
      return 0.0;
    }
    for (int i = 0; i < n; i++)  // out = P X'
      for (int j = 0; j < n; j++) {
        double x = 0.0;
        for (int k = 0; k < n; k++) x += P[i * n + k] * X[j * n + k];
        out[i * n + j] = x;
      }
    for (int i = 0; i < n; i++)
      for (int j = 0; j < n; j++) m[i] += out[i * n + j] * d[j];
    times(half, out, own, n, n, n), times(keep, half, X, n, n, n);
    for (int i = 0; i < nn; i++) keep[i] = (i % (n + 1) ? 0.0 : 1.0) - keep[i];
    around(S, keep, P, nullptr, half, n);
    times(A, out, back, n, n, n);
    around(S, A, noise + b * nn, S, half, n);
    around(P, root + b * nn, wider + b * nn, S, half, n);
    return exponent;
  }
  // J = P W' (predicted)^-1, and what of x_t's covariance it leaves.
  bool gains(int64_t pair, int j, const double* P) {
    const Affine<double> step = affine(DYNAMICS, j);
    double *J = gain + pair * nn, *L = work[0], *inverse = work[1], *half = work[2], *other = work[3], *keep = work[4];
    if (!factor(passage.predicted_covariance, L, inverse, n)) return false;
    times(half, step.matrix, P, n, n, n);       // W P
    times(other, inverse, half, n, n, n);       // L^-1 W P
    transposed_times(half, other, inverse, n, n, n);  // P W' S^-1
    std::copy(half, half + nn, J);
    times(other, J, step.matrix, n, n, n);
    for (int i = 0; i < nn; i++) keep[i] = (i % (n + 1) ? 0.0 : 1.0) - other[i];
    around(other, J, step.noise, nullptr, half, n);
    around(left + pair * nn, keep, P, other, half, n);
    return true;
  }

 public:
  Smoother(const Task& z, const Place& at, Arena& arena) : z(z), at(at), M(z.M), n(z.n), p(z.p), nn(z.n * z.n) {
    int64_t most = 1;
    for (int64_t t = 0; t <= z.steps; t++) most = std::max(most, z.histories[t] * M);
    for (int k = 0; k < WEIGHTS; k++) now[k] = take(arena, z.entries(k));
    seen = take(arena, p);
    for (double*& x : work) x = take(arena, nn + 4 * (n + p) * (n + p));
    passage.place(take(arena, Passage<double>::size(n, p)), n, p);
    filtered = mixture(arena, most), following = mixture(arena, most), later = mixture(arena, most);
    before = mixture(arena, most * M), after = mixture(arena, most * M);
    left = take(arena, most * M * nn), gain = take(arena, most * M * nn), ahead = take(arena, most * M * n);
    conditional = take(arena, most * M), shares = take(arena, most * M);
    for (double** x : {&whitener, &root, &information, &noise, &wider}) *x = take(arena, most * nn);
    pull = take(arena, most * n);
  }
  bool run() {
    int64_t begin = 0, pairs = 0;
    for (int64_t t = 0; t < z.steps; t++) begin += z.histories[t] * M, pairs += z.histories[t] * M * M;
    belief(begin, z.histories[z.steps] * M, later);
    belief(begin, z.histories[z.steps] * M, following);
    write(begin, later, z.histories[z.steps] * M);
    for (int64_t t = z.steps - 1; t >= 0; t--) {
      const int64_t count = z.histories[t] * M;
      begin -= count, pairs -= count * M;
      belief(begin, count, filtered);
      read(t);
      if (!step(count, z.histories[t + 1])) return false;
      write(SMOOTH_PAIRS, pairs, before.weights, count * M);
      write(begin, later, count);
      std::swap(filtered, following);
    }
    return true;
  }

 private:
  bool step(int64_t count, int64_t keep) {
    const int64_t old = count / keep;
    if (old > 1)
      for (int64_t b = 0; b < keep * M; b++)
        if (!future(b)) return false;
    for (int64_t h = 0; h < count; h++)
      for (int j = 0; j < M; j++) {
        const int64_t pair = h * M + j;
        predict(affine(DYNAMICS, j), filtered.means + h * n, filtered.covariances + h * nn, passage, work[0], n);
        observe(affine(EMISSION, j), now[VALUES], complete ? nullptr : seen, passage, work[0], n, p);
        conditional[pair] = filtered.weights[h] + now[TRANSITION][h % M * M + j] + passage.log_likelihood;
        std::copy(passage.predicted_mean, passage.predicted_mean + n, ahead + pair * n);
        std::copy(passage.mean, passage.mean + n, after.means + pair * n);
        std::copy(passage.covariance, passage.covariance + nn, after.covariances + pair * nn);
        if (!gains(pair, j, filtered.covariances + h * nn)) return false;
      }
    for (int64_t k = 0; k < keep; k++)
      for (int j = 0; j < M; j++) {
        const int64_t b = k * M + j;
        auto place = [&](int o) { return (o * keep + k) * M + j; };
        const double all = log_sum<double>(int(old), [&](int o) { return conditional[place(o)]; });
        for (int o = 0; o < old; o++) {
          const int64_t pair = place(o);
          double *m = after.means + pair * n, *P = after.covariances + pair * nn;
          after.weights[pair] = conditional[pair] - all;
          if (old > 1) after.weights[pair] += informed(b, m, P);
          else std::copy(later.means + b * n, later.means + (b + 1) * n, m), std::copy(later.covariances + b * nn, later.covariances + (b + 1) * nn, P);
        }
        const double own = log_sum<double>(int(old), [&](int o) { return after.weights[place(o)]; });
        for (int o = 0; o < old; o++) before.weights[place(o)] = later.weights[b] + after.weights[place(o)] - own;
      }
    for (int64_t pair = 0; pair < count * M; pair++) {
      const int64_t h = pair / M;
      double *away = work[0], *m = before.means + pair * n;
      for (int i = 0; i < n; i++) away[i] = after.means[pair * n + i] - ahead[pair * n + i];
      times(m, gain + pair * nn, away, n, n, 1);
      for (int i = 0; i < n; i++) m[i] += filtered.means[h * n + i];
      around(before.covariances + pair * nn, gain + pair * nn, after.covariances + pair * nn, left + pair * nn, work[1], n);
    }
    for (int64_t h = 0; h < count; h++)
      later.weights[h] = collapse(M, [&](int j) { return Member<double>{before.weights + h * M + j, before.means + (h * M + j) * n, before.covariances + (h * M + j) * nn}; },
                                  shares, later.means + h * n, later.covariances + h * nn, n);
    return true;
  }
};

}  // namespace filtering
