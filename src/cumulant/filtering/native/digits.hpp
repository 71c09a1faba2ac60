// Whether plain covariances have the digits that a filter needs; where they do not, filtering/roots.py carries square roots along.
// The rule is that of `GaussianBank.loses_digits` in filtering/kalman.py.
#pragma once
#include <cmath>
#include <limits>
#include "recursion.hpp"

namespace filtering {

// Below this share of another variance, the digits of a double no longer suffice for smoothing.
constexpr double LEAST_SHARE = 1e-7;
// Where something is observed without noise, a direction with less than this share of the variance of the coordinates is certain.
constexpr double NOTHING = 1e-13;

template <class S> class Digits {
  const Task& z;
  const Place at;
  double *largest, *before;  // variances that a variance was made from, by lane
  bool *moves, *fine;

 public:
  Digits(const Task& z, const Place& at, Arena& arena) : z(z), at(at) {
    const int n = z.n;
    largest = arena.take<double>(n * at.count + 1), before = arena.take<double>(n + 1);
    moves = arena.take<bool>(n * n + 1), fine = arena.take<bool>(at.count);
    std::fill(largest, largest + n * at.count, 0.0);
    std::fill(fine, fine + at.count, true);
    // Which coordinates the dynamics make of which.
    std::fill(moves, moves + n * n, false);
    const Array& W = z.given[DYNAMICS];
    for (int64_t t = 0; t < (W.step ? z.steps : 1); t++)
      for (int l = 0; l < (W.series ? at.count : 1); l++)
        for (int64_t i = 0; i < z.entries(DYNAMICS); i++)
          if (W.data[(at.first + l) * W.series + t * W.step + i] != 0) moves[i % (n * n)] = true;
  }
  // A variance is rounded to the digits of those that it was made from; one that is certain forgets them.
  void after_step(const Belief<S>& b) {
    const int n = z.n;
    for (int l = 0; l < at.count; l++) {
      double* most = largest + l * n;
      for (int i = 0; i < n; i++) {
        before[i] = 0.0;
        for (int j = 0; j < n; j++)
          if (moves[i * n + j]) before[i] = std::max(before[i], most[j]);
      }
      for (int i = 0; i < n; i++) {
        double own = 0.0, least = std::numeric_limits<double>::infinity();
        for (int64_t k = 0; k < b.G * z.M; k++) {
          const double variance = lane(b.covariances[(k * n + i) * n + i], l);
          own = std::max(own, variance);
          if (variance > 0) least = std::min(least, variance);
          else if (!(variance == 0)) fine[l] = false;
        }
        most[i] = own > 0 ? std::max(own, before[i]) : 0.0;
        if (!(least >= LEAST_SHARE * most[i])) fine[l] = false;
      }
    }
  }
  template <class R> void observed(const R& recursion) {
    if (z.exact)
      for (int l = 0; l < at.count; l++)
        if (!recursion.pivots(l, LEAST_SHARE)) fine[l] = false;
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
              const bool certain = z.exact && std::abs(s) <= NOTHING;
              if (!(s >= LEAST_SHARE) && !certain) fine[l] = false;
              L[i * n + i] = certain ? 0.0 : std::sqrt(s);
            } else L[i * n + j] = L[j * n + j] > 0 ? s / L[j * n + j] : 0.0;
          }
        }
      }
      if (z.found[DIGITS].data) z.found[DIGITS].data[(at.first + l) * z.found[DIGITS].series] = fine[l];
    }
  }
};

}  // namespace filtering
