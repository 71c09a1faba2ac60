// One Gaussian message through one mode, and a mixture onto one Gaussian: values, and adjoints of the same formulas.
// A bar marks the derivative of the result in a quantity. Covariances are symmetric in every bit, and so are their bars.
#pragma once
#include "scalar.hpp"

namespace filtering {

constexpr double HALF_LOG_2PI = 0.91893853320467274178;
// (64 eps)^2: what rounding leaves of a variance that an exact observation takes away is less than this share of it.
constexpr double ROUNDING = 2.0e-28;

// A number of states or observations known to the compiler: its loops have no overhead. Where it is not, an int takes its place.
template <int size> struct Fixed {
  explicit Fixed(int) {}
  constexpr operator int() const { return size; }
};

// y = matrix x + offset + N(0, noise)
template <class S> struct Affine { const S *matrix, *offset, *noise; };
template <class S> struct AffineBar { S *matrix, *offset, *noise; };

// out (a, c) = A (a, b) B (b, c)
template <class S, class I, class J, class K> INLINE void times(S* out, const S* A, const S* B, I a, J b, K c) {
  for (int i = 0; i < a; i++) {
    S* row = out + i * c;
    for (int k = 0; k < c; k++) row[k] = S(0.0);
    for (int j = 0; j < b; j++)
      for (int k = 0; k < c; k++) add(row[k], A[i * b + j] * B[j * c + k]);
  }
}
// out (b, c) = A' B for A (a, b), B (a, c)
template <class S, class I, class J, class K> INLINE void transposed_times(S* out, const S* A, const S* B, I a, J b, K c) {
  for (int i = 0; i < b * c; i++) out[i] = S(0.0);
  for (int j = 0; j < a; j++)
    for (int i = 0; i < b; i++)
      for (int k = 0; k < c; k++) add(out[i * c + k], A[j * b + i] * B[j * c + k]);
}
// out (a, a) = H A' + base, symmetric, for H and A (a, b); base may be absent
template <class S, class I, class J> INLINE void square(S* out, const S* H, const S* A, const S* base, I a, J b) {
  for (int i = 0; i < a; i++)
    for (int k = 0; k <= i; k++) {
      S x = base ? base[i * a + k] : S(0.0);
      for (int j = 0; j < b; j++) add(x, H[i * b + j] * A[k * b + j]);
      out[i * a + k] = out[k * a + i] = x;
    }
}

// A message before and after an observation, and what the observation left for the adjoint.
template <class S> struct Passage {
  S *predicted_mean, *predicted_covariance, *mean, *covariance;
  S *cross, *root, *half, *gain, *pull;  // C P, L with L L' = S, L^-1 C P, P C' S^-1, S^-1 (y - expected)
  S log_likelihood;
  static int64_t size(int n, int p) { return 2 * n + 2 * n * n + 3 * p * n + p * p + p; }
  void place(S* at, int n, int p) {
    auto take = [&](S*& x, int count) { x = at, at += count; };
    take(predicted_mean, n), take(predicted_covariance, n * n), take(mean, n), take(covariance, n * n);
    take(cross, p * n), take(root, p * p), take(half, p * n), take(gain, n * p), take(pull, p);
  }
};

// The message N(m, P) moved by the dynamics.
template <class S, class N> void predict(const Affine<S>& step, const S* m, const S* P, Passage<S>& out, S* scratch, N n) {
  for (int i = 0; i < n; i++) {
    S x = step.offset[i];
    for (int j = 0; j < n; j++) add(x, step.matrix[i * n + j] * m[j]);
    out.predicted_mean[i] = x;
  }
  times(scratch, step.matrix, P, n, n, n);
  square(out.predicted_covariance, scratch, step.matrix, step.noise, n, n);
}

// Whether an observation without noise left a coordinate certain, in some lane: then `factor` takes away what rounding made up.
INLINE bool certain(double noisy, double after, double before, double& factor) {
  factor = noisy == 0.0 && after <= ROUNDING * before ? 0.0 : 1.0;
  return factor == 0.0;
}
INLINE bool certain(const Lanes& noisy, const Lanes& after, const Lanes& before, Lanes& factor) {
  bool any = false;
  for (int l = 0; l < WIDTH; l++) {
    double f;
    any |= certain(noisy.v[l], after.v[l], before.v[l], f);
    factor.v[l] = f;
  }
  return any;
}
INLINE void shrink(double& x, double factor) { x *= factor; }
INLINE void shrink(Lanes& x, const Lanes& factor) { x = x * factor; }
template <class T> INLINE void shrink(Dual<T>& x, const Dual<T>& factor) { shrink(x.v, factor.v); }  // as a function of the noise, it changes
template <class T> INLINE bool certain(const Dual<T>& noisy, const Dual<T>& after, const Dual<T>& before, Dual<T>& factor) {
  factor.d = T(0.0);
  return certain(noisy.v, after.v, before.v, factor.v);
}

// Condition on value = C x + d + noise. `seen` is 1 or 0 for each element, null if all were seen; one that was not becomes
// an independent element of variance 1 that came as expected. The covariance is Joseph's (I - K C) P (I - K C)' + K R K'.
template <class S, class N, class O> void observe(const Affine<S>& emission, const S* value, const S* seen, Passage<S>& x, S* scratch, N n, O p) {
  S *L = x.root, *white = scratch, *keep = scratch + p, *kept = keep + n * n;
  times(x.cross, emission.matrix, x.predicted_covariance, p, n, n);
  S count = S(0.0);
  for (int a = 0; a < p; a++) {
    S expected = emission.offset[a];
    for (int i = 0; i < n; i++) add(expected, emission.matrix[a * n + i] * x.predicted_mean[i]);
    for (int b = 0; b <= a; b++) {
      S s = emission.noise[a * p + b];
      for (int i = 0; i < n; i++) add(s, x.cross[a * n + i] * emission.matrix[b * n + i]);
      if (seen) s = s * seen[a] * seen[b] + (a == b ? S(1.0) - seen[a] : S(0.0));
      L[a * p + b] = s;
    }
    white[a] = seen ? (value[a] - expected) * seen[a] : value[a] - expected;
    add(count, seen ? seen[a] : S(1.0));
    if (seen)
      for (int i = 0; i < n; i++) x.cross[a * n + i] = x.cross[a * n + i] * seen[a];
  }
  S log_likelihood = S(-HALF_LOG_2PI) * count;
  for (int a = 0; a < p; a++) {
    for (int b = 0; b <= a; b++) {
      S s = L[a * p + b];
      for (int c = 0; c < b; c++) s = s - L[a * p + c] * L[b * p + c];
      L[a * p + b] = a == b ? root(s) : s / L[b * p + b];
    }
    const S inverse = S(1.0) / L[a * p + a];
    for (int b = 0; b < a; b++) white[a] = white[a] - L[a * p + b] * white[b];
    white[a] = white[a] * inverse;
    for (int i = 0; i < n; i++) {
      S s = x.cross[a * n + i];
      for (int b = 0; b < a; b++) s = s - L[a * p + b] * x.half[b * n + i];
      x.half[a * n + i] = s * inverse;
    }
    log_likelihood = log_likelihood - S(0.5) * white[a] * white[a];
    // Two standard deviations at a time: their product is a double, and a logarithm is dear.
    if (a % 2) log_likelihood = log_likelihood - logarithm(L[a * p + a] * L[(a - 1) * p + a - 1]);
    else if (a == p - 1) log_likelihood = log_likelihood - logarithm(L[a * p + a]);
  }
  for (int a = p - 1; a >= 0; a--) {
    const S inverse = S(1.0) / L[a * p + a];
    S s = white[a];
    for (int b = a + 1; b < p; b++) s = s - L[b * p + a] * x.pull[b];
    x.pull[a] = s * inverse;
    for (int i = 0; i < n; i++) {
      S g = x.half[a * n + i];
      for (int b = a + 1; b < p; b++) g = g - L[b * p + a] * x.gain[i * p + b];
      x.gain[i * p + a] = g * inverse;
    }
  }
  x.log_likelihood = log_likelihood;
  for (int i = 0; i < n; i++) {
    S s = x.predicted_mean[i];
    for (int a = 0; a < p; a++) add(s, x.half[a * n + i] * white[a]);
    x.mean[i] = s;
    for (int j = 0; j < n; j++) {
      S k = S(i == j ? 1.0 : 0.0);
      for (int a = 0; a < p; a++) k = k - x.gain[i * p + a] * emission.matrix[a * n + j];
      keep[i * n + j] = k;
    }
  }
  times(kept, x.gain, emission.noise, n, p, p);
  square(x.covariance, kept, x.gain, (const S*)nullptr, n, p);
  S* noisy = kept + n * (n > p ? n : p);
  for (int i = 0; i < n; i++) noisy[i] = x.covariance[i * n + i];
  times(kept, keep, x.predicted_covariance, n, n, n);
  square(x.covariance, kept, keep, x.covariance, n, n);
  for (int i = 0; i < n; i++) {
    S factor = S(1.0);
    if (!certain(noisy[i], x.covariance[i * n + i], x.predicted_covariance[i * n + i], factor)) continue;
    for (int j = 0; j < n; j++) {
      shrink(x.covariance[i * n + j], factor);
      x.covariance[j * n + i] = x.covariance[i * n + j];
    }
  }
}

// The adjoint of `observe`. Joseph's form is P - P C' S^-1 C P as a function of everything, so that is what is differentiated:
//   dl = -a'dv + a'dS a / 2 - tr(S^-1 dS) / 2,  dm = dm' + d(P C') a + K (dv - dS a),  v = y - C m - d,  a = S^-1 v,
//   dP = (I - K C) dP' (I - K C)' - 2 sym(P dC' K') ... + K dS K',  S = C P C' + R.
// mean_bar and covariance_bar come in for the message after, and leave for the one before.
template <class S, class N, class O>
void observe_bar(const Affine<S>& emission, const S* seen, const Passage<S>& x, const S& bar, S* mean_bar, S* covariance_bar,
                 const AffineBar<S>& to, S* value_bar, S* scratch, N n, O p) {
  S *v = scratch, *spread = v + p, *KP = spread + p * p, *moved = KP + p * n, *back = moved + n, *work = back + n;
  transposed_times(KP, x.gain, covariance_bar, n, p, n);                 // K' P-bar
  times(moved, x.predicted_covariance, mean_bar, n, n, 1);               // P m-bar
  transposed_times(back, emission.matrix, x.pull, p, n, 1);              // C' a
  S* inverse = work;                                                     // S^-1, column by column
  for (int c = 0; c < p; c++) {
    for (int a = 0; a < p; a++) {
      S s = S(a == c ? 1.0 : 0.0);
      for (int b = 0; b < a; b++) s = s - x.root[a * p + b] * inverse[b * p + c];
      inverse[a * p + c] = s / x.root[a * p + a];
    }
    for (int a = p - 1; a >= 0; a--) {
      S s = inverse[a * p + c];
      for (int b = a + 1; b < p; b++) s = s - x.root[b * p + a] * inverse[b * p + c];
      inverse[a * p + c] = s / x.root[a * p + a];
    }
  }
  for (int a = 0; a < p; a++) {
    S g = S(0.0);
    for (int i = 0; i < n; i++) add(g, x.gain[i * p + a] * mean_bar[i]);
    spread[a * p + a] = g;  // K' m-bar, until the next loop
  }
  for (int a = 0; a < p; a++) v[a] = spread[a * p + a];
  for (int a = 0; a < p; a++)
    for (int b = 0; b <= a; b++) {
      S s = S(0.5) * (bar * (x.pull[a] * x.pull[b] - inverse[a * p + b]) - v[a] * x.pull[b] - x.pull[a] * v[b]);
      for (int i = 0; i < n; i++) add(s, KP[a * n + i] * x.gain[i * p + b]);
      if (seen) s = s * seen[a] * seen[b];
      spread[a * p + b] = spread[b * p + a] = s;
    }
  for (int a = 0; a < p; a++) {
    v[a] = v[a] - bar * x.pull[a];
    if (seen) v[a] = v[a] * seen[a];
  }
  // C P once more without the mask: x.cross has it, and rows that were not seen meet zeros.
  S* keep = work + p * p;
  for (int i = 0; i < n; i++)
    for (int j = 0; j < n; j++) {
      S k = S(i == j ? 1.0 : 0.0);
      for (int a = 0; a < p; a++) k = k - x.gain[i * p + a] * emission.matrix[a * n + j];
      keep[i * n + j] = k;
    }
  for (int a = 0; a < p; a++) {
    for (int i = 0; i < n; i++) {
      S c = x.pull[a] * moved[i] - v[a] * x.predicted_mean[i];
      for (int b = 0; b < p; b++) add(c, S(2.0) * spread[a * p + b] * x.cross[b * n + i]);
      for (int j = 0; j < n; j++) c = c - S(2.0) * KP[a * n + j] * x.predicted_covariance[j * n + i];
      add(to.matrix[a * n + i], c);
    }
    to.offset[a] = to.offset[a] - v[a];
    add(value_bar[a], v[a]);
    for (int b = 0; b < p; b++) add(to.noise[a * p + b], spread[a * p + b]);
  }
  // P-bar = (I - K C)' P-bar (I - K C) + sym(m-bar a'C) + C' (spread - K' P-bar K) C
  for (int a = 0; a < p; a++)
    for (int b = 0; b < p; b++) {
      S s = spread[a * p + b];
      for (int i = 0; i < n; i++) s = s - KP[a * n + i] * x.gain[i * p + b];
      work[a * p + b] = s;  // the inverse is done with
    }
  S *first = keep + n * n, *second = first + n * n;
  times(first, covariance_bar, keep, n, n, n);
  times(second, work, emission.matrix, p, p, n);
  for (int i = 0; i < n; i++)
    for (int j = 0; j <= i; j++) {
      S s = S(0.5) * (mean_bar[i] * back[j] + back[i] * mean_bar[j]);
      for (int k = 0; k < n; k++) add(s, keep[k * n + i] * first[k * n + j]);
      for (int a = 0; a < p; a++) add(s, emission.matrix[a * n + i] * second[a * n + j]);
      covariance_bar[i * n + j] = covariance_bar[j * n + i] = s;
    }
  for (int i = 0; i < n; i++)
    for (int a = 0; a < p; a++) mean_bar[i] = mean_bar[i] - emission.matrix[a * n + i] * v[a];
}

// The adjoint of `predict`; adds to the bars of the message before.
template <class S, class N>
void predict_bar(const Affine<S>& step, const S* m, const S* P, const S* mean_bar, const S* covariance_bar, const AffineBar<S>& to,
                 S* m_bar, S* P_bar, S* scratch, N n) {
  S *half = scratch, *moved = half + n * n;
  times(half, covariance_bar, step.matrix, n, n, n);  // P-bar W
  times(moved, half, P, n, n, n);
  for (int i = 0; i < n; i++) {
    add(to.offset[i], mean_bar[i]);
    for (int j = 0; j < n; j++) {
      add(to.matrix[i * n + j], mean_bar[i] * m[j] + S(2.0) * moved[i * n + j]);
      add(to.noise[i * n + j], covariance_bar[i * n + j]);
      add(m_bar[j], step.matrix[i * n + j] * mean_bar[i]);
    }
  }
  for (int i = 0; i < n; i++)
    for (int j = 0; j <= i; j++) {
      S s = S(0.0);
      for (int k = 0; k < n; k++) add(s, step.matrix[k * n + i] * half[k * n + j]);
      add(P_bar[i * n + j], s);
      if (i != j) add(P_bar[j * n + i], s);
    }
}

// Members of a mixture: number k has its log-weight, mean and covariance at these addresses.
template <class S> struct Member { const S *log_weight, *mean, *covariance; };

template <class S, class F> S log_sum(int count, F at) {
  S top = at(0);
  for (int k = 0; k < count; k++) top = larger(top, at(k));
  S sum = S(0.0);
  for (int k = 0; k < count; k++) add(sum, exponential(at(k) - top));
  return logarithm(sum) + top;
}

// The Gaussian with the moments of a mixture; `shares` gets the weights. Returns the log of their sum.
template <class S, class F, class N> S collapse(int count, F member, S* shares, S* mean, S* covariance, N n) {
  S top = *member(0).log_weight, sum = S(0.0);
  for (int k = 1; k < count; k++) top = larger(top, *member(k).log_weight);
  for (int k = 0; k < count; k++) add(sum, shares[k] = exponential(*member(k).log_weight - top));
  const S scale = S(1.0) / sum;
  for (int i = 0; i < n * n; i++) covariance[i] = S(0.0);
  for (int k = 0; k < count; k++) shares[k] = shares[k] * scale;
  for (int i = 0; i < n; i++) {
    S sum = S(0.0), most = member(0).mean[i], least = most;
    for (int k = 0; k < count; k++) {
      const S& m = member(k).mean[i];
      add(sum, shares[k] * m);
      most = larger(most, m), least = smaller(least, m);
    }
    common(sum, most, least);
    mean[i] = sum;
  }
  for (int k = 0; k < count; k++) {
    const Member<S> x = member(k);
    for (int i = 0; i < n; i++) {
      const S away = shares[k] * (x.mean[i] - mean[i]);
      for (int j = 0; j <= i; j++) add(covariance[i * n + j], shares[k] * x.covariance[i * n + j] + away * (x.mean[j] - mean[j]));
    }
  }
  for (int i = 0; i < n; i++)
    for (int j = 0; j < i; j++) covariance[j * n + i] = covariance[i * n + j];
  return logarithm(sum) + top;
}

// The adjoint of `collapse`: into(k, weight-bar, factor, mean away) is told what each member gets: the bar of its log-weight,
// and m-bar = factor (mean_bar + 2 covariance_bar away), P-bar = factor covariance_bar.
template <class S, class F, class G, class N>
void collapse_bar(int count, F member, const S* shares, const S* mean, const S& total_bar, const S* mean_bar, const S* covariance_bar,
                  S* scratch, G into, N n) {
  S *gains = scratch, *pulled = gains + count, average = S(0.0);
  for (int k = 0; k < count; k++) {
    const Member<S> x = member(k);
    S gain = S(0.0);
    for (int i = 0; i < n; i++) {
      add(gain, mean_bar[i] * x.mean[i]);
      S row = S(0.0);
      for (int j = 0; j < n; j++) add(row, covariance_bar[i * n + j] * (x.covariance[i * n + j] + (x.mean[i] - mean[i]) * (x.mean[j] - mean[j])));
      add(gain, row);
    }
    gains[k] = gain;
    add(average, shares[k] * gain);
  }
  for (int k = 0; k < count; k++) {
    const Member<S> x = member(k);
    for (int i = 0; i < n; i++) {
      S s = mean_bar[i];
      for (int j = 0; j < n; j++) add(s, S(2.0) * covariance_bar[i * n + j] * (x.mean[j] - mean[j]));
      pulled[i] = shares[k] * s;
    }
    into(k, shares[k] * (total_bar + gains[k] - average), shares[k], pulled);
  }
}

}  // namespace filtering
