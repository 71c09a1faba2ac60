// Derivatives over whole rows: a block of queries keeps its weights for all keys, so every mean is taken of the very numbers
// it is subtracted from, and G and E[v] need not be known. Formulas: docs/theory.md, T12; formulas.py has them in torch.
#pragma once
#include "scores.hpp"

// Queries of a block: as many as keep `arrays` rows of keys within six megabytes.
template <class T> static int lanes_for(const Problem& z, int arrays) {
  int most = z.most_lanes();
  while (most > LANES<T> && most > 16 && int64_t(arrays) * z.N * most * int64_t(sizeof(T)) > (int64_t(6) << 20)) most /= 2;
  return most;
}

// Sums for keys are shared by blocks of queries, and by members that share keys: those form a unit.
template <class T> class Units {
  const Problem& z;
  int64_t shared = 1;
  bool is_shared[MOST_BATCH];

 public:
  const int64_t blocks, tiles;
  Turns turns;
  Units(const Problem& z, int most, int passes)
      : z(z), blocks((z.M + most - 1) / most), tiles((z.N + KEYS - 1) / KEYS + 1), turns(count_units(), tiles * passes) {}
  int64_t count_units() {
    shared = 1;
    for (int i = 0; i < z.dims; i++) {
      bool any = false;
      for (Slot s : {TO_KEY, TO_VALUE, TO_BIAS}) any |= z.has(s) && z.tensor[s].batch[i] == 0;
      is_shared[i] = any;
      if (any) shared *= z.size[i];
    }
    return z.batch / std::max<int64_t>(1, shared);
  }
  int64_t tasks() const { return z.batch * blocks; }
  int64_t per_unit() const { return shared * blocks; }
  // The member of the batch with these numbers along its own and its shared dimensions.
  int64_t member(int64_t unit, int64_t other) const {
    int64_t out = 0, stride = 1;
    for (int i = int(z.dims) - 1; i >= 0; i--) {
      int64_t& from = is_shared[i] ? other : unit;
      out += from % z.size[i] * stride;
      from /= z.size[i], stride *= z.size[i];
    }
    return out;
  }
};

// One block's access to sums for keys, in its turn.
template <class T> struct Adder {
  Units<T>& units;
  const Block<T>& b;
  int64_t unit, turn;
  // sum[key][.] += sum over lanes of x rows, for one or two terms
  template <int R> void add(Slot s, int64_t features, const Term<T> (&terms)[R], int count, int64_t j, int c, T* scratch) {
    T* out = b.at(s);
    if (!out) return;
    const int width = padded<T>(features);
    const int64_t row = b.z.tensor[s].row;
    if (width == features) return multiply<T, R>(c, width, terms, out + j * row, row, Into::ADD, nullptr, count);
    multiply<T, R>(c, width, terms, scratch, width, Into::FRESH, nullptr, count);
    for (int k = 0; k < c; k++)
      for (int64_t f = 0; f < features; f++) out[(j + k) * row + f] += scratch[k * width + f];
  }
  // The gradient of the bias is ds itself, summed along what the bias was broadcast along.
  void add_bias(const T* ds, const T* own, int64_t j, int c, T* row_sums) {
    T* out = b.at(TO_BIAS);
    const int64_t row = b.z.tensor[TO_BIAS].row, column = b.z.tensor[TO_BIAS].column;
    for (int k = 0; k < c; k++)
      for (int l = 0; l < b.n; l++) {
        const T x = ds[k * b.W + l] * own[l];
        if (column == 0) row_sums[l] += x;
        else out[(b.first + l) * row + (j + k) * column] += x;
      }
  }
  // Keys in common are added last, so that blocks that are at different tiles do not meet.
  void finish_bias(const T* row_sums) {
    T* out = b.at(TO_BIAS);
    if (b.z.tensor[TO_BIAS].column == 0)
      for (int l = 0; l < b.n; l++) out[(b.first + l) * b.z.tensor[TO_BIAS].row] += row_sums[l];
  }
  void wait(int pass, int64_t tile) { units.turns.wait(unit, pass * units.tiles + tile, turn, b.z.failed); }
  void pass(int pass, int64_t tile) { units.turns.pass(unit, pass * units.tiles + tile, turn); }
  // f on the block's tiles, each in turn; tiles outside the band are passed on, the last `tile` is for `finish`.
  template <class F, class E> void in_turn(int number, F f, E finish) {
    b.tiles([&](int64_t j, int c) { f(j, c); });
    for (int64_t t = 0; t + 1 < units.tiles; t++)
      if (t < b.from / KEYS || t * KEYS >= b.to) wait(number, t), pass(number, t);
    wait(number, units.tiles - 1);
    finish();
    pass(number, units.tiles - 1);
  }
};

// f(block, adder) for every block of queries.
template <class T, class F> static void over_units(const Problem& z, int most, int passes, F f) {
  Units<T> units(z, most, passes);
  run_tasks(units.tasks(), z.threads, z.failed, [&](int64_t task, Arena& arena) {
    const int64_t unit = task / units.per_unit(), turn = task % units.per_unit();
    Block<T> b(z, arena, units.member(unit, turn / units.blocks), (units.blocks - 1 - turn % units.blocks) * most, most);
    Adder<T> adder{units, b, unit, turn};
    f(b, adder);
  });
}

// t = <dq, k> + <q, dk>, bent by the cap, + dbias, on a tile.
template <class T> class Direction {
  const Block<T>& b;
  const T *eta, *along;

 public:
  Direction(const Block<T>& b, const T* eta) : b(b), eta(eta), along(b.gather(ALONG_QUERY, b.z.d, T(b.z.scale))) {}
  static bool moves(const Problem& z) { return z.has(ALONG_QUERY) || z.has(ALONG_KEY) || z.has(ALONG_BIAS); }
  void tile(T* t, int64_t j, int c, const T* slope) const {
    Term<T> terms[2];
    int count = 0;
    if (along) terms[count++] = b.by_key(KEY, along, b.z.d, j);
    if (b.z.has(ALONG_KEY)) terms[count++] = b.by_key(ALONG_KEY, eta, b.z.d, j);
    multiply<T, 2>(c, b.W, terms, t, b.W, Into::FRESH, nullptr, count);
    if (slope)
      for (int64_t x = 0; x < int64_t(c) * b.W; x += LANES<T>) store(t + x, load(t + x) * load(slope + x));
    if (const T* bias = b.at(ALONG_BIAS)) {
      const int64_t row = b.z.tensor[ALONG_BIAS].row, column = b.z.tensor[ALONG_BIAS].column;
      for (int k = 0; k < c; k++)
        for (int l = 0; l < b.n; l++) t[k * b.W + l] += bias[(b.first + l) * row + (j + k) * column];
    }
  }
};

// dG = E[t],   dE[v] = E[(t - E[t]) v] + E[dv],   dH = -E[(t - E[t]) log p]
template <class T> static void tangent(const Problem& z) {
  const bool moves = Direction<T>::moves(z), heat = z.has(ENTROPY) && moves;
  const int most = lanes_for<T>(z, 1 + moves + heat);
  const int64_t blocks = (z.M + most - 1) / most;
  run_tasks(z.batch * blocks, z.threads, z.failed, [&](int64_t task, Arena& arena) {
    Block<T> b(z, arena, task / blocks, (blocks - 1 - task % blocks) * most, most);
    Scores<T> scores(b);
    Dropout<T> dropout(b);
    Direction<T> direction(b, scores.queries());
    Rows<T> rows(b);
    const int W = b.W;
    const int64_t keys = b.to - b.from;
    T *p = b.lanes(keys), *t = moves ? b.lanes(keys) : nullptr, *y = heat ? b.lanes(keys) : nullptr;
    T *slope = scores.capped() ? b.lanes(KEYS) : nullptr, *mean = b.zeros(z.e), *tilt = b.zeros(1), *rest = b.zeros(1), *hot = b.zeros(1);
    auto at = [&](T* x, int64_t j) { return x + (j - b.from) * W; };
    b.tiles([&](int64_t j, int c) {
      scores.tile(at(p, j), j, c, nullptr, slope);
      rows.see(at(p, j), c);
      if (moves) direction.tile(at(t, j), j, c, slope);
    });
    rows.seen();
    b.tiles([&](int64_t j, int c) {
      for (int l = 0; l < W; l += LANES<T>) {
        const Vec<T> peak = load(rows.peak + l);
        Vec<T> mass{}, sum{};  // a tile's own: long sums of small numbers lose digits
        T *x = at(p, j) + l, *u = moves ? at(t, j) + l : nullptr, *v = heat ? at(y, j) + l : nullptr;
        for (int k = 0; k < c; k++, x += W) {
          Vec<T> log = below<T>(load(x), peak), w = exponential<T>(log);
          mass += w;
          store(x, w);
          if (moves) sum += w * load(u + k * W);
          if (heat) store(v + k * W, log);
        }
        store(rows.mass + l, load(rows.mass + l) + mass), store(tilt + l, load(tilt + l) + sum);
      }
    });
    rows.weighed();
    if (moves) rows.center(p, t, tilt, rest);
    b.tiles([&](int64_t j, int c) {
      T *w = at(p, j), *u = moves ? at(t, j) : nullptr;
      if (moves) {
        for (int l = 0; l < W; l += LANES<T>) {
          const Vec<T> mid = load(tilt + l), off = load(rest + l);
          Vec<T> sum = load(hot + l);
          for (int k = 0; k < c; k++) {
            Vec<T> x = load(w + k * W + l) * ((load(u + k * W + l) - mid) - off);
            store(u + k * W + l, x);
            if (heat) sum += x * load(at(y, j) + k * W + l);
          }
          store(hot + l, sum);
        }
        dropout.apply(u, j, c);
      }
      dropout.apply(w, j, c);
      Term<T> terms[2];
      int count = 0;
      if (moves) terms[count++] = b.over_keys(VALUE, u, j, c);
      if (z.has(ALONG_VALUE)) terms[count++] = b.over_keys(ALONG_VALUE, w, j, c);
      multiply<T, 2>(int(z.e), W, terms, mean, W, Into::ADD, nullptr, count);
    });
    b.scatter(MEAN, z.e, mean, rows.inverse);
    b.each_row(NORMALIZER, [&](int l) { return tilt[l] + rest[l]; });
    b.each_row(ENTROPY, [&](int l) { return -hot[l] * rows.inverse[l]; });
  });
}

// The same where G alone is differentiated, as in losses: sums for many wide keys are written once for each block, so blocks are
// large; but where there are few queries, no more than a megabyte or 1/32 of the matrix of scores that is not stored.
template <class T> static int lanes_for_losses(const Problem& z, int arrays) {
  int most = z.M >= 2048 || int64_t(arrays) * z.N * 64 * int64_t(sizeof(T)) <= (int64_t(1) << 20) ? 64 : 32;
  while (most > LANES<T> && most > 16 && int64_t(arrays) * z.N * most * int64_t(sizeof(T)) > (int64_t(8) << 20)) most /= 2;
  return most;
}

// w = <g, v> - gH log p,   ds = p (w - E[w] + gG);   q: ds k,   k: ds' q,   v: p' g,   bias: ds
template <class T> static void gradient(const Problem& z) {
  const bool values = z.has(SEED_MEAN), heat = z.has(SEED_ENTROPY), weighs = values || heat;
  const bool slopes = z.has(CAP), scores_too = z.has(TO_QUERY) || z.has(TO_KEY) || z.has(TO_BIAS);
  const int most = weighs ? lanes_for<T>(z, 2 + slopes) : lanes_for_losses<T>(z, 1 + slopes);
  over_units<T>(z, most, 1, [&](Block<T>& b, Adder<T>& adder) {
    Scores<T> scores(b);
    Dropout<T> dropout(b);
    Rows<T> rows(b);
    const int W = b.W;
    const int64_t keys = b.to - b.from;
    const T *g = b.gather(SEED_MEAN, z.e, T(1)), *level = b.column(SEED_NORMALIZER), *cool = b.column(SEED_ENTROPY);
    T *p = b.lanes(keys), *w = b.lanes(weighs ? keys : KEYS), *slope = slopes ? b.lanes(keys) : nullptr;
    T *mid = b.zeros(1), *lift = b.zeros(1), *to_query = b.zeros(z.d), *bias_rows = b.zeros(1);
    T* scratch = b.arena.template take<T>(int64_t(KEYS) * padded<T>(std::max(z.d, z.e)));
    auto at = [&](T* x, int64_t j) { return x ? x + (j - b.from) * W : nullptr; };
    b.tiles([&](int64_t j, int c) {
      scores.tile(at(p, j), j, c, nullptr, at(slope, j));
      rows.see(at(p, j), c);
      if (values) {
        multiply<T>(c, W, {b.by_key(VALUE, g, z.e, j)}, at(w, j), W, Into::FRESH);
        dropout.apply(at(w, j), j, c);
      }
    });
    rows.seen();
    b.tiles([&](int64_t j, int c) {
      for (int l = 0; l < W; l += LANES<T>) {
        const Vec<T> peak = load(rows.peak + l), cold = load(cool + l);
        Vec<T> mass{}, sum{};
        T *x = at(p, j) + l, *u = weighs ? at(w, j) + l : nullptr;
        for (int k = 0; k < c; k++, x += W) {
          Vec<T> log = below<T>(load(x), peak), q = exponential<T>(log);
          mass += q;
          store(x, q);
          if (!weighs) continue;
          Vec<T> y = values ? load(u + k * W) : Vec<T>{};
          if (heat) y -= cold * log, store(u + k * W, y);
          sum += q * y;
        }
        store(rows.mass + l, load(rows.mass + l) + mass), store(mid + l, load(mid + l) + sum);
      }
    });
    rows.weighed();
    if (weighs) rows.center(p, w, mid, lift);
    for (int l = 0; l < W; l++) lift[l] = level[l] - lift[l];  // with -mid it is gG - E[w]
    // not the weights are normalized but what they are multiplied with
    const T *g_rows = z.has(TO_VALUE) ? b.rows(SEED_MEAN, z.e, T(1), rows.inverse) : nullptr;
    const T *q_rows = z.has(TO_KEY) ? b.rows(QUERY, z.d, T(z.scale), rows.inverse) : nullptr;
    adder.in_turn(0, [&](int64_t j, int c) {
      T *q = at(p, j), *ds = weighs ? at(w, j) : w;
      if (scores_too)
        for (int l = 0; l < W; l += LANES<T>) {
          const Vec<T> mean = load(mid + l), up = load(lift + l);
          for (int64_t x = l; x < int64_t(c) * W; x += W) store(ds + x, load(q + x) * (weighs ? (load(ds + x) - mean) + up : up));
        }
      if (g_rows) dropout.apply(q, j, c);
      adder.wait(0, j / KEYS);
      if (g_rows) adder.template add<1>(TO_VALUE, z.e, {b.over_lanes(q, g_rows, z.e)}, 1, j, c, scratch);
      if (z.has(TO_BIAS)) adder.add_bias(ds, rows.inverse, j, c, bias_rows);
      if (slopes && scores_too)
        for (int64_t x = 0; x < int64_t(c) * W; x += LANES<T>) store(ds + x, load(ds + x) * load(at(slope, j) + x));
      if (q_rows) adder.template add<1>(TO_KEY, z.d, {b.over_lanes(ds, q_rows, z.d)}, 1, j, c, scratch);
      adder.pass(0, j / KEYS);
      if (z.has(TO_QUERY)) multiply<T>(int(z.d), W, {b.over_keys(KEY, ds, j, c)}, to_query, W, Into::ADD);
    }, [&] { if (z.has(TO_BIAS)) adder.finish_bias(bias_rows); });
    for (int l = 0; l < W; l++) mid[l] = T(z.scale) * rows.inverse[l];
    b.scatter(TO_QUERY, z.d, to_query, mid);
    b.each_row(NORMALIZER, [&](int l) { return rows.log_normalizer(l); });
  });
}

// The gradient of <a, gradient>: t = <a_q, k> + <q, a_k> + a_b and w = <g, v> centered, w <- w + gG, u = <g, a_v>:
//   e = w t + u,   x = p (e - E[e]),   y = p w
//   q: x k + y a_k    k: x' q + y' a_q    bias: x    v: (p t)' g    g: (p t) v + p a_v    gG: E[t] before centering
// `pair` of triton/sums.py has the same lines. The numbers of a tile have an s: `ts` are its t, `vs` its p t.
template <class T> static void curvature(const Problem& z) {
  const bool moves = Direction<T>::moves(z), values = z.has(SEED_MEAN), lifts = values && z.has(ALONG_VALUE);
  const int most = lanes_for<T>(z, 3);
  over_units<T>(z, most, 2, [&](Block<T>& b, Adder<T>& adder) {
    Scores<T> scores(b);
    Dropout<T> dropout(b);
    Direction<T> direction(b, scores.queries());
    Rows<T> rows(b);
    const int W = b.W;
    const int64_t keys = b.to - b.from;
    const T *g = b.gather(SEED_MEAN, z.e, T(1)), *level = b.column(SEED_NORMALIZER);
    T *p_rows = b.lanes(keys), *t_rows = b.lanes(keys), *w_rows = b.lanes(keys);
    T *us = b.lanes(KEYS), *vs = b.lanes(KEYS), *kept = b.lanes(KEYS);
    T *tilt = b.zeros(1), *mid = b.zeros(1), *excess = b.zeros(1), *tilt_rest = b.lanes(1), *up = b.lanes(1), *excess_rest = b.lanes(1);
    T *to_mean = b.zeros(z.e), *to_query = b.zeros(z.d), *bias_rows = b.zeros(1);
    T* scratch = b.arena.template take<T>(int64_t(KEYS) * padded<T>(std::max(z.d, z.e)));
    auto at = [&](T* rows, int64_t j) { return rows + (j - b.from) * W; };
    b.tiles([&](int64_t j, int c) {
      T *ps = at(p_rows, j), *ts = at(t_rows, j), *ws = at(w_rows, j);
      scores.tile(ps, j, c);
      rows.see(ps, c);
      if (moves) direction.tile(ts, j, c, nullptr);
      else std::fill(ts, ts + c * W, T(0));
      if (values) {
        multiply<T>(c, W, {b.by_key(VALUE, g, z.e, j)}, ws, W, Into::FRESH);
        dropout.apply(ws, j, c);
      } else std::fill(ws, ws + c * W, T(0));
    });
    rows.seen();
    b.tiles([&](int64_t j, int c) {
      for (int l = 0; l < W; l += LANES<T>) {
        const Vec<T> peak = load(rows.peak + l);
        Vec<T> mass{}, first{}, second{};
        T *ps = at(p_rows, j), *ts = at(t_rows, j), *ws = at(w_rows, j);
        for (int64_t k = l; k < int64_t(c) * W; k += W) {
          const Vec<T> p = exponential<T>(below<T>(load(ps + k), peak));
          store(ps + k, p);
          mass += p, first += p * load(ts + k), second += p * load(ws + k);
        }
        store(rows.mass + l, load(rows.mass + l) + mass);
        store(tilt + l, load(tilt + l) + first), store(mid + l, load(mid + l) + second);
      }
    });
    rows.weighed();
    rows.center(p_rows, t_rows, tilt, tilt_rest), rows.center(p_rows, w_rows, mid, up);
    for (int l = 0; l < W; l++) up[l] = level[l] - up[l];  // with -mid it is gG - E[w]
    // not the weights are normalized but what they are multiplied with
    const T* g_rows = z.has(TO_VALUE) && values ? b.rows(SEED_MEAN, z.e, T(1), rows.inverse) : nullptr;
    adder.in_turn(0, [&](int64_t j, int c) {
      T *ps = at(p_rows, j), *es = at(t_rows, j), *ys = at(w_rows, j), *ts = es, *ws = ys;  // e takes the place of t, y that of w
      if (lifts) {
        multiply<T>(c, W, {b.by_key(ALONG_VALUE, g, z.e, j)}, us, W, Into::FRESH);
        dropout.apply(us, j, c);
      } else std::fill(us, us + c * W, T(0));
      for (int l = 0; l < W; l += LANES<T>) {
        const Vec<T> tilt_l = load(tilt + l), tilt_off = load(tilt_rest + l), mid_l = load(mid + l), up_l = load(up + l);
        Vec<T> sum{};
        for (int64_t k = l; k < int64_t(c) * W; k += W) {
          const Vec<T> p = load(ps + k);
          const Vec<T> t = (load(ts + k) - tilt_l) - tilt_off;
          const Vec<T> w = (load(ws + k) - mid_l) + up_l;
          const Vec<T> e = w * t + load(us + k);
          sum += p * e;
          store(es + k, e), store(ys + k, p * w), store(vs + k, p * t), store(kept + k, p);
        }
        store(excess + l, load(excess + l) + sum);
      }
      dropout.apply(vs, j, c), dropout.apply(kept, j, c);
      if (z.has(TO_MEAN)) {
        Term<T> terms[2];
        int count = 0;
        if (moves) terms[count++] = b.over_keys(VALUE, vs, j, c);
        if (z.has(ALONG_VALUE)) terms[count++] = b.over_keys(ALONG_VALUE, kept, j, c);
        multiply<T, 2>(int(z.e), W, terms, to_mean, W, Into::ADD, nullptr, count);
      }
      adder.wait(0, j / KEYS);
      if (g_rows && moves) adder.template add<1>(TO_VALUE, z.e, {b.over_lanes(vs, g_rows, z.e)}, 1, j, c, scratch);
      adder.pass(0, j / KEYS);
    }, [] {});
    rows.center(p_rows, t_rows, excess, excess_rest);
    const T *q_rows = z.has(TO_KEY) ? b.rows(QUERY, z.d, T(z.scale), rows.inverse) : nullptr;
    const T *a_rows = z.has(TO_KEY) ? b.rows(ALONG_QUERY, z.d, T(z.scale), rows.inverse) : nullptr;
    adder.in_turn(1, [&](int64_t j, int c) {
      T *ps = at(p_rows, j), *xs = at(t_rows, j), *ys = at(w_rows, j), *es = xs;
      for (int l = 0; l < W; l += LANES<T>) {
        const Vec<T> excess_l = load(excess + l), excess_off = load(excess_rest + l);
        for (int64_t k = l; k < int64_t(c) * W; k += W) {
          const Vec<T> p = load(ps + k), e = load(es + k);
          store(xs + k, p * ((e - excess_l) - excess_off));
        }
      }
      adder.wait(1, j / KEYS);
      if (z.has(TO_BIAS)) adder.add_bias(xs, rows.inverse, j, c, bias_rows);
      Term<T> terms[2] = {b.over_lanes(xs, q_rows, z.d), b.over_lanes(ys, a_rows, z.d)};
      if (q_rows) adder.template add<2>(TO_KEY, z.d, terms, 1 + (a_rows != nullptr), j, c, scratch);
      adder.pass(1, j / KEYS);
      if (z.has(TO_QUERY)) {
        Term<T> back[2] = {b.over_keys(KEY, xs, j, c), z.has(ALONG_KEY) ? b.over_keys(ALONG_KEY, ys, j, c) : Term<T>{}};
        multiply<T, 2>(int(z.d), W, back, to_query, W, Into::ADD, nullptr, 1 + z.has(ALONG_KEY));
      }
    }, [&] { if (z.has(TO_BIAS)) adder.finish_bias(bias_rows); });
    b.scatter(TO_MEAN, z.e, to_mean, rows.inverse);
    b.each_row(TO_NORMALIZER, [&](int l) { return tilt[l] + tilt_rest[l]; });
    for (int l = 0; l < W; l++) mid[l] = T(z.scale) * rows.inverse[l];
    b.scatter(TO_QUERY, z.d, to_query, mid);
  });
}
