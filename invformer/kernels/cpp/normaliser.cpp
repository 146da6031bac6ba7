// What layers need of ‖W‖₂ once a step: Gram matrices, their squarings, a Krylov space.
//
// normaliser.py says what for. Matrices are taken one at a time, each by one thread that keeps it
// in its cache, and of symmetric products only half is computed. W is tall here, (rows, n),
// whatever way it lies in memory; it is scaled by a power of two, exactly, so that squares stay in
// range.

#include "vectors.h"

namespace {

// Rows of both factors of a product that are to stay in a first-level cache.
constexpr int64_t DEPTH = 128;

// W, whose entry (k, c) lies at data[k * row + c * column], one of which is 1, and where
// its left vector goes.
template <typename T>
struct Weight {
  const T* data;
  int64_t rows, row, column;
  T* left;
};

// A matrix as panels of PANEL columns, each with its rows one after the other; zeros beyond the
// last.
template <typename T>
struct Panels {
  T* data;
  int64_t rows, columns;
  T* panel(int64_t first_column) const { return data + first_column * rows; }
  T& at(int64_t k, int64_t c) const {  // and the rest of its panel row after it
    return panel(c / PANEL<T> * PANEL<T>)[k * PANEL<T> + c % PANEL<T>];
  }
  int64_t size() const { return rows * columns; }
};

// The largest |W_kc|, not a number where one of them is infinite or none.
template <typename T>
T largest_entry(Weight<T> w, int64_t n) {
  Vector<T> most{}, least{}, zero{};
  int64_t i = 0;
  for (; i + LANES<T> <= w.rows * n; i += LANES<T>) {
    const Vector<T> x = load(w.data + i);
    most = most > x ? most : x;
    least = least < x ? least : x;
    zero += x * T(0);
  }
  T largest = 0, nothing = sum<T>(zero);
  for (int lane = 0; lane < LANES<T>; ++lane)
    largest = std::max({largest, most[lane], -least[lane]});
  for (; i < w.rows * n; ++i) {
    largest = std::max(largest, std::abs(w.data[i]));
    nothing += w.data[i] * T(0);
  }
  return largest + nothing;
}

template <typename T>
void copy(Panels<T> out, Weight<T> w, int64_t n, T scale) {
  for (int64_t first = 0; first < out.columns; first += PANEL<T>) {
    T* const panel = out.panel(first);
    const int64_t columns = std::clamp<int64_t>(n - first, 0, PANEL<T>);
    if (columns < PANEL<T>) std::fill_n(panel, out.rows * PANEL<T>, T(0));
    if (w.column == 1) {
      for (int64_t k = 0; k < w.rows; ++k)
        for (int64_t c = 0; c < columns; ++c)
          panel[k * PANEL<T> + c] = scale * w.data[k * w.row + first + c];
      continue;
    }
    for (int64_t begin = 0; begin < w.rows; begin += DEPTH)  // what is written stays at hand
      for (int64_t c = 0; c < columns; ++c)
        for (int64_t k = begin; k < std::min(begin + DEPTH, w.rows); ++k)
          panel[k * PANEL<T> + c] = scale * w.data[k + (first + c) * w.column];
  }
}

// out = AᵀA: the blocks on and below the diagonal, and their mirror images.
template <typename T>
void gram(Panels<T> out, Panels<T> a) {
  constexpr int64_t P = PANEL<T>;
  for (int64_t first = 0; first < a.rows; first += DEPTH) {
    const int64_t depth = std::min(DEPTH, a.rows - first);
    for (int64_t j = 0; j < a.columns; j += P)
      for (int64_t i = j; i < a.columns; i += P)
        multiply<T>({out.panel(j) + i * P, P}, {a.panel(i) + first * P, 1, P},
                    {a.panel(j) + first * P, P}, P, depth, P, first > 0);
  }
  for (int64_t j = 0; j < a.columns; j += P)
    for (int64_t i = j + P; i < a.columns; i += P)
      for (int64_t r = 0; r < P; ++r)
        for (int64_t c = 0; c < P; ++c)
          out.panel(i)[(j + c) * P + r] = out.panel(j)[(i + r) * P + c];
}

template <typename T>
double trace(Panels<T> m) {
  double total = 0;
  for (int64_t i = 0; i < m.columns; ++i) total += m.at(i, i);
  return total;
}

template <typename T>
double sum_of_squares(Panels<T> m) {
  double total = 0;
  for (int64_t at = 0; at < m.size(); at += PANEL<T>) {
    const auto x = load(m.data + at), y = load(m.data + at + LANES<T>);
    total += sum<T>(x * x + y * y);
  }
  return total;
}

template <typename T>
void multiply_by(Panels<T> m, T factor) {
  for (int64_t at = 0; at < m.size(); ++at) m.data[at] *= factor;
}

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

// The power of two that W is divided by; zero where W is, and no number where it is none.
template <typename T>
double scale_of(Weight<T> w, int64_t n) {
  const T largest = largest_entry(w, n);
  if (!(largest > 0)) return largest;
  int exponent;
  std::frexp(largest, &exponent);
  // Neither it nor its inverse leaves the normal numbers.
  using Limits = std::numeric_limits<T>;
  return std::ldexp(1.0, std::clamp(exponent, Limits::min_exponent, Limits::max_exponent - 2));
}

// G = WᵀW/‖W‖_F² of a scaled copy of W; log ‖W‖_F.
template <typename T>
double gram_of_trace_one(Panels<T> g, Panels<T> copied, Weight<T> w, int64_t n, double scale) {
  copy(copied, w, n, T(1 / scale));
  gram(g, copied);
  const double t = trace(g);
  multiply_by(g, T(1 / t));
  return std::log(scale) + std::log(t) / 2;
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

template <typename T>
struct Group {
  const Weight<T>* weights;
  int64_t count, n;
  int threads;
  int64_t columns() const { return round_up(n, PANEL<T>); }
  int64_t most_rows() const {
    int64_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, weights[i].rows);
    return most;
  }
};

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
      gram(other, g);
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
