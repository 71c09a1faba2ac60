// Whether plain covariances have the digits that a filter needs; where they do not, filtering/roots.py carries square roots along.
// The rule is that of `GaussianBank.loses_digits` in filtering/kalman.py.
#pragma once
#include <cmath>
#include <limits>
#include "recursion.hpp"

namespace filtering {

// Below this share of another variance, the digits of a double no longer suffice for smoothing.
constexpr double LEAST_SHARE = 1e-7;

INLINE double lane(double x, int) { return x; }
INLINE double lane(const Lanes& x, int l) { return x.v[l]; }
template <class T> INLINE double lane(const Dual<T>& x, int l) { return lane(x.v, l); }

template <class S> class Digits {
  const Task& z;
  const Place at;
  double *largest, *before;
  bool *reach, *fine;

 public:
  Digits(const Task& z, const Place& at, Arena& arena) : z(z), at(at) {
    const int n = z.n;
    largest = arena.take<double>(n * at.count + 1), before = arena.take<double>(n + 1);
    reach = arena.take<bool>(n * n + 1), fine = arena.take<bool>(at.count);
    std::fill(largest, largest + n * at.count, 0.0);
    std::fill(fine, fine + at.count, true);
    // Which coordinates the dynamics make of which, sooner or later.
    for (int i = 0; i < n * n; i++) reach[i] = i % (n + 1) == 0;
    const Array& W = z.given[DYNAMICS];
    for (int64_t t = 0; t < (W.step ? z.steps : 1); t++)
      for (int l = 0; l < (W.series ? at.count : 1); l++)
        for (int64_t i = 0; i < z.entries(DYNAMICS); i++)
          if (W.data[(at.first + l) * W.series + t * W.step + i] != 0) reach[i % (n * n)] = true;
    for (int k = 0; k < n; k++)
      for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) reach[i * n + j] |= reach[i * n + k] && reach[k * n + j];
  }
  void after_step(const Belief<S>& b) {
    const int n = z.n;
    for (int l = 0; l < at.count; l++) {
      double* most = largest + l * n;
      for (int i = 0; i < n; i++)
        for (int64_t k = 0; k < b.G * z.M; k++) most[i] = std::max(most[i], lane(b.covariances[(k * n + i) * n + i], l));
      for (int i = 0; i < n; i++) {
        before[i] = 0.0;
        for (int j = 0; j < n; j++)
          if (reach[i * n + j]) before[i] = std::max(before[i], most[j]);
        for (int64_t k = 0; k < b.G * z.M; k++) {
          const double variance = lane(b.covariances[(k * n + i) * n + i], l);
          if (variance > 0 && !(variance >= LEAST_SHARE * before[i])) fine[l] = false;
        }
      }
    }
  }
  // At the end, a direction with far less variance than the coordinates counts as well: the next observation may pin them.
  void at_end(const Belief<S>& b, Arena& arena) {
    const int n = z.n;
    double *unit = arena.take<double>(n + 1), *L = arena.take<double>(n * n + 1);
    for (int l = 0; l < at.count; l++) {
      for (int64_t k = 0; k < b.G * z.M; k++) {
        const S* P = b.covariances + k * n * n;
        for (int i = 0; i < n; i++) {
          const double variance = lane(P[i * n + i], l);
          unit[i] = variance > 0 ? std::sqrt(variance) : 1.0;
          for (int j = 0; j <= i; j++) {
            double s = lane(P[i * n + j], l) / unit[i] / unit[j];
            if (i == j && !(variance > 0)) s += 1.0;
            for (int c = 0; c < j; c++) s -= L[i * n + c] * L[j * n + c];
            if (i == j) {
              if (!(s >= LEAST_SHARE)) fine[l] = false;
              L[i * n + i] = std::sqrt(s);
            } else L[i * n + j] = s / L[j * n + j];
          }
        }
      }
      if (z.found[DIGITS].data) z.found[DIGITS].data[(at.first + l) * z.found[DIGITS].series] = fine[l];
    }
  }
};

}  // namespace filtering
