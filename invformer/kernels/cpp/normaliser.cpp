// What layers need of ‖W‖₂ once a step: Gram matrices, their squarings, a Krylov space.
//
// normaliser.py says what for. Matrices are taken one at a time, each by one thread that keeps it
// in its cache, and of symmetric products only half is computed. W is tall here, (rows, n),
// whatever way it lies in memory; it is scaled by a power of two, exactly, so that squares stay in
// range.

#include "panels.h"

namespace {

// out = M x for a row of panels: out_c = Σ_k M_kc x_k, M symmetric or not.
template <typename T>
void pull(T* out, Panels<T> m, const T* x) {
  for (int64_t j = 0; j < m.columns; j += PANEL<T>)
    tile<T, 1, 2>({out + j, 1}, {x, 1}, {m.panel(j), PANEL<T>}, m.rows, false);
}

template <typename T>
double length(const T* x, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += double(x[i]) * x[i];
  return std::sqrt(total);
}

template <typename T>
void to_unit(T* x, int64_t n) {
  const double l = length(x, n);
  for (int64_t i = 0; i < n; ++i) x[i] = l > 0 ? T(x[i] / l) : T(0);
}

// λ₁ ≤ t/r + √((r − 1)/r · (f − t²/r)) of semidefinite M, t = tr M, f = ‖M‖_F² (Wolkowicz & Styan
// 1980), with what rounding may have cancelled.
template <typename T>
double wolkowicz_styan(Panels<T> m, int64_t n) {
  const double r = n, mean = trace(m) / r, squares = sum_of_squares(m);
  const double lost = n > 1 ? 8 * std::numeric_limits<T>::epsilon() * squares : 0;
  const double variance = std::max(squares - r * mean * mean, 0.0) + lost;
  return mean + std::sqrt((r - 1) / r * variance);
}

// For every W the log of a bound on ‖W‖₂, by Gram matrices squared so many times, and unit vectors
// v, a column of the last one, and W v/‖W v‖. Zero has −∞ and zeros; what is no number has none.
template <typename T>
void squarings(Group<T> group, int times, int rescale_every, double* log_norms, T* rights) {
  const int64_t columns = group.columns(), n = group.n;
  const double tiny = std::numeric_limits<T>::min();
  const Rooms<T> rooms(group.threads, (group.most_rows() + 2 * columns + 1) * columns);
#pragma omp parallel for num_threads(group.threads) schedule(dynamic)
  for (int64_t i = 0; i < group.count; ++i) {
    const Weight<T> w = group.weights[i];
    auto room = rooms.of_this_thread();
    const Panels<T> copied{room.take(w.rows * columns), w.rows, columns};
    Panels<T> g{room.take(columns * columns), columns, columns};
    Panels<T> other{room.take(columns * columns), columns, columns};
    T *const v = room.take(columns), *const right = rights + i * n;
    const double scale = scale_of(w, n);
    if (!(scale > 0)) {
      log_norms[i] = std::log(scale);
      std::fill_n(right, n, T(scale));
      std::fill_n(w.left, w.rows, T(scale));
      continue;
    }
    const double log_scale = gram_of_trace_one(g, copied, w, n, scale);
    double log_bound = 0;
    for (int step = 0; step < times; ++step) {
      if (step % rescale_every == rescale_every - 1) {
        const double size = std::max(std::sqrt(sum_of_squares(g)), tiny);
        log_bound += std::ldexp(std::log(size), -step);
        multiply_by(g, T(1 / size));
      }
      symmetric_product(other, g, g);
      std::swap(g, other);
    }
    log_bound += std::ldexp(std::log(std::max(wolkowicz_styan(g, n), tiny)), -times);
    log_norms[i] = log_bound / 2 + log_scale;
    int64_t best = 0;
    for (int64_t c = 1; c < n; ++c)
      if (g.at(c, c) > g.at(best, best)) best = c;
    for (int64_t c = 0; c < columns; ++c) v[c] = g.at(best, c);
    to_unit(v, columns);
    std::copy_n(v, n, right);
    for (int64_t k = 0; k < w.rows; ++k) {
      Vector<T> product{};
      for (int64_t c = 0; c < columns; c += LANES<T>)
        product += load(&copied.at(k, c)) * load(v + c);
      w.left[k] = sum<T>(product);
    }
    to_unit(w.left, w.rows);
  }
}

// For every W its G as a whole matrix, log ‖W‖_F, and a Krylov space of G: unit vectors v_0 = G
// start and so on, made orthogonal to the two before them, α_s = v_sᵀ G v_s and β_s, the length of
// what is new in G v_s: zero, and so the next vector, where that is rounding.
template <typename T>
void krylov(Group<T> group, int num_vectors, const T* start, T* grams, double* log_scales,
            T* vectors, T* alongs, T* besides) {
  const int64_t columns = group.columns(), n = group.n;
  const Rooms<T> rooms(group.threads, (group.most_rows() + columns + 4) * columns);
#pragma omp parallel for num_threads(group.threads) schedule(dynamic)
  for (int64_t i = 0; i < group.count; ++i) {
    const Weight<T> w = group.weights[i];
    const double scale = scale_of(w, n);
    log_scales[i] = std::log(scale);
    if (!(scale > 0)) continue;
    auto room = rooms.of_this_thread();
    const Panels<T> copied{room.take(w.rows * columns), w.rows, columns};
    const Panels<T> g{room.take(columns * columns), columns, columns};
    T *v = room.take(columns), *next = room.take(columns), *before = room.take(columns);
    log_scales[i] = gram_of_trace_one(g, copied, w, n, scale);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t c = 0; c < n; c += PANEL<T>)
        std::copy_n(&g.at(r, c), std::min(PANEL<T>, n - c), grams + (i * n + r) * n + c);
    std::fill_n(before, columns, T(0));
    std::fill(std::copy_n(start, n, next), next + columns, T(0));
    pull(v, g, next);
    to_unit(v, columns);
    T last = 0;
    for (int64_t s = i * num_vectors; s < (i + 1) * num_vectors; ++s) {
      std::copy_n(v, n, vectors + s * n);
      pull(next, g, v);
      double along = 0;
      for (int64_t c = 0; c < n; ++c) along += double(next[c]) * v[c];
      for (int64_t c = 0; c < n; ++c) next[c] -= T(along) * v[c] + last * before[c];
      const double beside = length(next, n);
      const bool is_lost = beside <= 8 * std::numeric_limits<T>::epsilon() * std::abs(along);
      alongs[s] = T(along);
      besides[s] = last = is_lost ? T(0) : T(beside);
      for (int64_t c = 0; c < n; ++c) next[c] = is_lost ? T(0) : T(next[c] / beside);
      std::swap(before, v);
      std::swap(v, next);
    }
  }
}

}  // namespace

// Each returns whether there was enough memory.
#define EXPORT(T, NAME)                                                                           \
  bool NAME##_squarings(const Weight<T>* weights, int64_t count, int64_t n, int times,            \
                        int rescale_every, double* log_norms, T* rights, int threads) {           \
    const Group<T> group{weights, count, n, threads};                                             \
    return had_memory_for([&] { squarings<T>(group, times, rescale_every, log_norms, rights); }); \
  }                                                                                               \
  bool NAME##_krylov(const Weight<T>* weights, int64_t count, int64_t n, int num_vectors,         \
                     const T* start, T* grams, double* log_scales, T* vectors, T* alongs,         \
                     T* besides, int threads) {                                                   \
    const Group<T> group{weights, count, n, threads};                                             \
    return had_memory_for([&] {                                                                   \
      krylov<T>(group, num_vectors, start, grams, log_scales, vectors, alongs, besides);          \
    });                                                                                           \
  }

extern "C" {
EXPORT(float, float32)
EXPORT(double, float64)
}
