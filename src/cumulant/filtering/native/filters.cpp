// The C functions of the filters: value; gradient; gradient with its derivative along a direction.
#include "digits.hpp"
#include "moments.hpp"
#include "recursion.hpp"
#include "smoother.hpp"

using namespace filtering;

template <class S> static void store(const Array& x, const Array& d, const Place& at, int64_t offset, const S* from, int64_t count) {
  if (x.data || d.data)
    for (int64_t i = 0; i < count; i++) Memory<S>::store(x, d, at, offset + i, from[i]);
}

// What is found after step t, at the place of its belief among all.
template <class S> static void report(const Task& z, const Place& at, int64_t begin, const Belief<S>& b) {
  const int64_t count = b.G * z.M;
  store(z.found[FOUND_WEIGHTS], z.found_along[FOUND_WEIGHTS], at, begin, b.weights, count);
  store(z.found[FOUND_MEANS], z.found_along[FOUND_MEANS], at, begin * z.n, b.means, count * z.n);
  store(z.found[FOUND_COVARIANCES], z.found_along[FOUND_COVARIANCES], at, begin * z.n * z.n, b.covariances, count * z.n * z.n);
}

template <class S, class N, class O> static void forward_pass(const Task& z, const Place& at, Arena& arena) {
  Recursion<S, N, O> recursion(z, at, arena, false);
  int64_t most = 1;
  for (int64_t t = 0; t <= z.steps; t++) most = std::max(most, z.histories[t]);
  Belief<S> now = recursion.belief(most), next = recursion.belief(most);
  now.G = z.histories[0];
  recursion.start(now);
  Digits<S> digits(z, at, arena);
  digits.after_step(now);
  int64_t begin = 0;
  report(z, at, begin, now);
  S sum = S(0.0);
  for (int64_t t = 0; t < z.steps; t++) {
    next.G = z.histories[t + 1];
    const S total = recursion.forward(t, now, next);
    add(sum, total);
    store(z.found[PREDICTED], z.found_along[PREDICTED], at, t * z.M, recursion.log_predicted(), z.M);
    // Without steps of its own the total is that of all steps.
    if (z.found[TOTALS].step) store(z.found[TOTALS], z.found_along[TOTALS], at, t, &total, 1);
    begin += now.G * z.M;
    report(z, at, begin, next);
    digits.observed(recursion);
    digits.after_step(next);
    std::swap(now, next);
  }
  digits.at_end(now, arena);
  if (!z.found[TOTALS].step) store(z.found[TOTALS], z.found_along[TOTALS], at, 0, &sum, 1);
}

// Seeds are constants: an absent one is zero.
template <class S> static void seed(const Array& x, const Place& at, int64_t offset, S* into, int64_t count) {
  const Array none;
  for (int64_t i = 0; i < count; i++) into[i] = x.data ? Memory<S>::load(x, none, at, offset + i) : S(0.0);
}
template <class S> static void seed(const Task& z, const Place& at, int64_t begin, const Belief<S>& b) {
  const int64_t count = b.G * z.M;
  seed(z.seed[FOUND_WEIGHTS], at, begin, b.weights, count);
  seed(z.seed[FOUND_MEANS], at, begin * z.n, b.means, count * z.n);
  seed(z.seed[FOUND_COVARIANCES], at, begin * z.n * z.n, b.covariances, count * z.n * z.n);
  // Covariances change symmetrically, so that is all that counts of a seed.
  for (int64_t k = 0; k < count; k++)
    for (int i = 0; i < z.n; i++)
      for (int j = 0; j < i; j++) {
        S &lower = b.covariances[(k * z.n + i) * z.n + j], &upper = b.covariances[(k * z.n + j) * z.n + i];
        lower = upper = S(0.5) * (lower + upper);
      }
}

template <class S, class N, class O> static void backward_pass(const Task& z, const Place& at, Arena& arena) {
  Recursion<S, N, O> recursion(z, at, arena, true);
  Belief<S>* trail = arena.take<Belief<S>>(z.steps + 1);
  S* totals = arena.take<S>(z.steps + 1);
  int64_t begin = 0, most = 1;
  for (int64_t t = 0; t <= z.steps; t++) {
    trail[t] = recursion.belief(z.histories[t]);
    most = std::max(most, z.histories[t]);
    begin += z.histories[t] * z.M;
  }
  S sum = S(0.0);
  recursion.start(trail[0]);
  Digits<S> digits(z, at, arena);
  digits.after_step(trail[0]);
  for (int64_t t = 0; t < z.steps; t++) {
    totals[t] = recursion.forward(t, trail[t], trail[t + 1]);
    add(sum, totals[t]);
    digits.observed(recursion);
    digits.after_step(trail[t + 1]);
    store(z.found[PREDICTED], z.found_along[PREDICTED], at, t * z.M, recursion.log_predicted(), z.M);
  }
  digits.at_end(trail[z.steps], arena);
  store(z.found[TOTALS], z.found_along[TOTALS], at, 0, z.found[TOTALS].step ? totals : &sum, z.found[TOTALS].step ? z.steps : 1);
  Belief<S> now = recursion.belief(most), next = recursion.belief(most);
  S *predicted = arena.take<S>(z.M), total;
  next.G = z.histories[z.steps], begin -= next.G * z.M;
  seed(z, at, begin, next);
  report(z, at, begin, trail[z.steps]);
  for (int64_t t = z.steps - 1; t >= 0; t--) {
    now.G = z.histories[t], begin -= now.G * z.M;
    seed(z, at, begin, now);
    report(z, at, begin, trail[t]);
    seed(z.seed[PREDICTED], at, t * z.M, predicted, z.M);
    seed(z.seed[TOTALS], at, z.seed[TOTALS].step ? t : 0, &total, 1);
    recursion.recall(t, trail[t], trail[t + 1]);
    recursion.backward(t, trail[t], trail[t + 1], next, total, predicted, now);
    std::swap(now, next);
  }
  const int64_t count = next.G * z.M;
  store(z.to[WEIGHTS], z.to_along[WEIGHTS], at, 0, next.weights, count);
  store(z.to[MEANS], z.to_along[MEANS], at, 0, next.means, count * z.n);
  store(z.to[COVARIANCES], z.to_along[COVARIANCES], at, 0, next.covariances, count * z.n * z.n);
}

template <class S, class N, class O> static void moments_pass(const Task& z, const Place& at, Arena& arena) { Summary<S, N, O>(z, at, arena).run(); }

static void smoother_pass(const Task& z, const Place& at, Arena& arena) {
  const bool fine = Smoother(z, at, arena).run();
  z.found[DIGITS].data[at.first * z.found[DIGITS].series] = fine;
}

template <class S> static void all(const Task& z, void (*pass)(const Task&, const Place&, Arena&)) {
  constexpr int width = Memory<S>::width;
  run_tasks((z.series + width - 1) / width, z.threads, z.failed, [&](int64_t task, Arena& arena) {
    pass(z, {task * width, int(std::min<int64_t>(width, z.series - task * width))}, arena);
  });
}

// Whether some element of the observations has no noise of its own in some mode, at some step, in some series.
static bool without_noise(const Task& z) {
  const Array& R = z.given[EMISSION_NOISE];
  if (!R.data || !z.n) return false;
  for (int64_t b = 0; b < (R.series ? z.series : 1); b++)
    for (int64_t t = 0; t < (R.step ? z.steps : 1); t++)
      for (int64_t j = 0; j < z.M; j++)
        for (int64_t a = 0; a < z.p; a++)
          if (R.data[b * R.series + t * R.step + (j * z.p + a) * z.p + a] == 0.0) return true;
  return false;
}

// words: M, n, p, steps, series, threads, mixes, joins, alike, the address of `histories`; then (address, stride of series, stride
// of steps) of each array, in the order of Task. Returns 0 if all went well, 1 if memory ran out.
static void read(Task& z, const int64_t* w) {
  z.M = int(w[0]), z.n = int(w[1]), z.p = int(w[2]), z.steps = w[3], z.series = w[4], z.threads = w[5];
  z.mixes = w[6], z.joins = w[7], z.alike = w[8], z.histories = (const int64_t*)w[9];
  w += 10;
  auto arrays = [&](Array* x, int count) {
    for (int k = 0; k < count; k++, w += 3) x[k] = {(double*)w[0], w[1], w[2]};
  };
  arrays(z.given, GIVENS), arrays(z.along, GIVENS), arrays(z.found, FOUNDS), arrays(z.found_along, FOUNDS);
  arrays(z.seed, FOUNDS), arrays(z.to, GIVENS), arrays(z.to_along, GIVENS);
  z.exact = without_noise(z);
}

// Usual sizes are known to the compiler; one series alone runs on doubles, several in lanes.
#define SIZED(pass, S, states, observed) z.n == states && z.p == observed ? all<S>(z, pass<S, Fixed<states>, Fixed<observed>>)
#define EVERY_SIZE(pass, S)                                                                              \
  SIZED(pass, S, 0, 1) : SIZED(pass, S, 1, 1) : SIZED(pass, S, 2, 1) : SIZED(pass, S, 2, 2)              \
                       : SIZED(pass, S, 4, 2) : all<S>(z, pass<S, int, int>)

static bool few(const Task& z) { return z.series < WIDTH / 2; }
static void forward(const Task& z) { few(z) ? EVERY_SIZE(forward_pass, double) : EVERY_SIZE(forward_pass, Lanes); }
static void backward(const Task& z) { few(z) ? EVERY_SIZE(backward_pass, double) : all<Lanes>(z, backward_pass<Lanes, int, int>); }
static void summary(const Task& z) { few(z) ? EVERY_SIZE(moments_pass, double) : all<Lanes>(z, moments_pass<Lanes, int, int>); }
static void along(const Task& z) { all<Dual<Lanes>>(z, backward_pass<Dual<Lanes>, int, int>); }

static void smooth(const Task& z) { all<double>(z, smoother_pass); }

static int answer(const int64_t* words, void (*kernel)(const Task&)) {
  try {
    Task z;
    read(z, words);
    kernel(z);
    return z.failed;
  } catch (const std::bad_alloc&) { return 1; }
}

#define API extern "C" __attribute__((visibility("default")))
API int cumulant_filter(const int64_t* words, double, double) { return answer(words, forward); }
API int cumulant_filter_moments(const int64_t* words, double, double) { return answer(words, summary); }
API int cumulant_filter_smooth(const int64_t* words, double, double) { return answer(words, smooth); }
API int cumulant_filter_gradient(const int64_t* words, double, double) { return answer(words, backward); }
API int cumulant_filter_curvature(const int64_t* words, double, double) { return answer(words, along); }
