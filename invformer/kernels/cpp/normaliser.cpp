// What layers need of ‖W‖₂ once a step: Gram matrices, and bounds on them by trial or squarings.
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
void to_unit(T* x, int64_t n) {
  const double l = std::sqrt(dot<double>(x, x, n));
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

// Numbers of normaliser.py; no trial if there are no vectors.
struct Method {
  int squarings, rescale_every, vectors;
  double least_lift, largest_lift;
};
constexpr int MOST_VECTORS = 64;

// log of a bound on λ₁ of G, which is overwritten, by squarings, and v, a column of the last one.
template <typename T>
double bound_by_squarings(Panels<T> g, Panels<T> other, int64_t n, Method method, T* v) {
  const double tiny = std::numeric_limits<T>::min();
  double log_bound = 0;
  for (int step = 0; step < method.squarings; ++step) {
    if (step % method.rescale_every == method.rescale_every - 1) {
      const double size = std::max(std::sqrt(sum_of_squares(g)), tiny);
      log_bound += std::ldexp(std::log(size), -step);
      multiply_by(g, T(1 / size));
    }
    symmetric_product(other, g, g);
    std::swap(g, other);
  }
  int64_t best = 0;
  for (int64_t c = 1; c < n; ++c)
    if (g.at(c, c) > g.at(best, best)) best = c;
  for (int64_t c = 0; c < g.columns; ++c) v[c] = g.at(best, c);
  to_unit(v, g.columns);
  return log_bound + std::ldexp(std::log(std::max(wolkowicz_styan(g, n), tiny)), -method.squarings);
}

// y, the leading eigenvector of the tridiagonal matrix of α and β ≥ 0 with eigenvalues in [0, 1]:
// by bisection for a number above them, and inverse iteration.
void leading_eigenvector(const double* along, const double* beside, int size, double* y) {
  double pivots[MOST_VECTORS];
  const auto is_above = [&](double x) {  // all pivots of T − xI are negative
    for (int i = 0; i < size; ++i) {
      pivots[i] = along[i] - x;
      if (i > 0) pivots[i] -= beside[i - 1] * beside[i - 1] / pivots[i - 1];
      if (!(pivots[i] < 0)) return false;
    }
    return true;
  };
  double low = 0, high = 1.01;
  for (int bit = 0; bit < 40; ++bit) {
    const double middle = (low + high) / 2;
    (is_above(middle) ? high : low) = middle;
  }
  is_above(high);
  std::fill_n(y, size, 1.0);
  for (int time = 0; time < 3; ++time) {
    for (int i = 1; i < size; ++i) y[i] -= beside[i - 1] / pivots[i - 1] * y[i - 1];
    for (int i = size - 1; i >= 0; --i)
      y[i] = (y[i] - (i + 1 < size ? beside[i] * y[i + 1] : 0)) / pivots[i];
  }
  to_unit(y, size);
}

// Whether bI − G has a Cholesky factor, whose upper half is written to `u`.
template <typename T>
bool has_factor(Panels<T> u, Panels<T> g, T b) {
  constexpr int64_t P = PANEL<T>;
  for (int64_t j = 0; j < g.columns; j += P) {
    const auto row = [&](int64_t r, int64_t i) { return u.panel(i) + (j + r) * P; };
    for (int64_t i = j; i < g.columns; i += P) {
      T* const block = row(0, i);
      multiply<T>({block, P}, {u.panel(j), 1, P}, {u.panel(i), P}, P, j, P, false);
      for (int64_t at = 0; at < P * P; ++at) block[at] = -g.panel(i)[j * P + at] - block[at];
    }
    for (int64_t r = 0; r < P; ++r) row(r, j)[r] += b;
    for (int64_t r = 0; r < P; ++r) {
      const T pivot = row(r, j)[r];
      if (!(pivot > 0)) return false;
      for (int64_t i = j; i < g.columns; i += P)
        for (int64_t c = 0; c < P; ++c) row(r, i)[c] *= 1 / std::sqrt(pivot);
      for (int64_t q = r + 1; q < P; ++q) {
        const T factor = row(r, j)[q];
        for (int64_t i = j; i < g.columns; i += P)
          for (int64_t c = 0; c < P; c += LANES<T>)
            store(row(q, i) + c, load(row(q, i) + c) - factor * load(row(r, i) + c));
      }
    }
  }
  return true;
}

// log of a bound on λ₁ of G by trial, no number if it fails, and the leading Ritz vector v of a
// Krylov space: orthonormal v_0 = G start and so on, α_s = v_sᵀ G v_s and β_s, the length of what
// is new in G v_s: zero where that is rounding.
template <typename T>
double bound_by_trial(Panels<T> g, Panels<T> factor, int64_t n, Method method, const T* start,
                      T* vectors, T* v, T* image) {
  constexpr double eps = std::numeric_limits<T>::epsilon();
  double alongs[MOST_VECTORS], besides[MOST_VECTORS], y[MOST_VECTORS];
  T shares[MOST_VECTORS];
  const int64_t columns = g.columns;
  std::fill(std::copy_n(start, n, v), v + columns, T(0));
  pull(vectors, g, v);
  to_unit(vectors, columns);
  for (int s = 0; s < method.vectors; ++s) {
    pull(image, g, vectors + s * columns);
    for (int time = 0; time < 2; ++time) {  // once leaves some rounding
      for (int r = 0; r <= s; ++r) shares[r] = -dot<T>(image, vectors + r * columns, columns);
      if (time == 0) alongs[s] = -shares[s];
      multiply<T>({image, columns}, {shares, 1}, {vectors, columns}, 1, s + 1, columns, true);
    }
    const double beside = std::sqrt(dot<double>(image, image, n));
    const bool is_lost = beside <= 8 * eps * std::abs(alongs[s]);
    besides[s] = is_lost ? 0 : beside;
    if (s + 1 < method.vectors)
      for (int64_t c = 0; c < columns; ++c)
        vectors[(s + 1) * columns + c] = is_lost ? T(0) : T(image[c] / beside);
  }
  leading_eigenvector(alongs, besides, method.vectors, y);
  std::fill_n(v, columns, T(0));
  for (int s = 0; s < method.vectors; ++s)
    for (int64_t c = 0; c < columns; ++c) v[c] += T(y[s]) * vectors[s * columns + c];
  to_unit(v, columns);
  pull(image, g, v);
  const double theta = dot<double>(image, v, n);
  for (int64_t c = 0; c < columns; ++c) image[c] -= T(theta) * v[c];
  const double residual = std::sqrt(dot<double>(image, image, n)) / theta;
  const double lift = std::clamp(residual, method.least_lift, method.largest_lift);
  for (const double b : {theta * (1 + lift), theta * (1 + method.largest_lift)})
    if (has_factor(factor, g, T(b))) return std::log(b * (1 + 2 * n * eps));
  return std::numeric_limits<double>::quiet_NaN();
}

// For every W the log of a bound on ‖W‖₂, by trial or by squarings, and unit vectors v and
// W v/‖W v‖. Zero has −∞ and zeros; what is no number has none.
template <typename T>
void normalise(Group<T> group, Method method, const T* start, double* log_norms, T* rights) {
  const int64_t columns = group.columns(), n = group.n;
  const Rooms<T> rooms(group.threads,
                       (group.most_rows() + 2 * columns + 2 + method.vectors) * columns);
#pragma omp parallel for num_threads(group.threads) schedule(dynamic)
  for (int64_t i = 0; i < group.count; ++i) {
    const Weight<T> w = group.weights[i];
    auto room = rooms.of_this_thread();
    const Panels<T> copied{room.take(w.rows * columns), w.rows, columns};
    const Panels<T> g{room.take(columns * columns), columns, columns};
    const Panels<T> other{room.take(columns * columns), columns, columns};
    T *const v = room.take(columns), *const image = room.take(columns);
    T *const vectors = room.take(method.vectors * columns), *const right = rights + i * n;
    const double scale = scale_of(w, n);
    if (!(scale > 0)) {
      log_norms[i] = std::log(scale);
      std::fill_n(right, n, T(scale));
      std::fill_n(w.left, w.rows, T(scale));
      continue;
    }
    const double log_scale = gram_of_trace_one(g, copied, w, n, scale);
    double log_bound = std::numeric_limits<double>::quiet_NaN();
    if (method.vectors) log_bound = bound_by_trial(g, other, n, method, start, vectors, v, image);
    if (std::isnan(log_bound)) log_bound = bound_by_squarings(g, other, n, method, v);
    log_norms[i] = log_bound / 2 + log_scale;
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

}  // namespace

// It returns whether there was enough memory.
#define EXPORT(T, NAME)                                                                         \
  bool NAME##_normalise(const Weight<T>* weights, int64_t count, int64_t n, int squarings,      \
                        int rescale_every, int vectors, double least_lift, double largest_lift, \
                        const T* start, double* log_norms, T* rights, int threads) {            \
    const Method method{squarings, rescale_every, vectors, least_lift, largest_lift};           \
    const Group<T> group{weights, count, n, threads};                                           \
    return had_memory_for([&] { normalise<T>(group, method, start, log_norms, rights); });      \
  }

extern "C" {
EXPORT(float, float32)
EXPORT(double, float64)
}
