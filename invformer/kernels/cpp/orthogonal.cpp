// Matrices of singular values near one, by products with polynomials of their Gram matrices.
//
// training/muon.py says what for. X ← X P(XᵀX), P(G) = aI + bG + cG², is G ← G P(G)² and Q ← Q P(G)
// from Q = I, and X Q in the end: products of small symmetric matrices, of which half is computed.

#include "panels.h"

namespace {

struct Quintic {
  double a, b, c;
};

// M ← aI + bG + cM.
template <typename T>
void polynomial(Panels<T> m, Panels<T> g, Quintic p) {
  for (int64_t at = 0; at < m.size(); ++at) m.data[at] = T(p.b) * g.data[at] + T(p.c) * m.data[at];
  for (int64_t i = 0; i < m.columns; ++i) m.at(i, i) += T(p.a);
}

// gain √rows · X Q for every W, from X = W/‖W‖_F, where `left` says and as W lies; zero for zero.
template <typename T>
void orthogonalise(Group<T> group, Quintic p, int times, double gain) {
  const int64_t columns = group.columns(), n = group.n, size = columns * columns;
  const Rooms<T> rooms(group.threads, 2 * group.most_rows() * columns + 4 * size);
#pragma omp parallel for num_threads(group.threads) schedule(dynamic)
  for (int64_t i = 0; i < group.count; ++i) {
    const Weight<T> w = group.weights[i];
    auto room = rooms.of_this_thread();
    const Panels<T> copied{room.take(w.rows * columns), w.rows, columns};
    const Panels<T> result{room.take(w.rows * columns), w.rows, columns};
    const Panels<T> g{room.take(size), columns, columns}, power{room.take(size), columns, columns};
    Panels<T> q{room.take(size), columns, columns}, other{room.take(size), columns, columns};
    const double scale = scale_of(w, n);
    if (!(scale > 0)) {
      std::fill_n(w.left, w.rows * n, T(scale));
      continue;
    }
    const double log_norm = gram_of_trace_one(g, copied, w, n, scale) - std::log(scale);
    for (int step = 0; step < times; ++step) {
      symmetric_product(power, g, g);
      polynomial(power, g, p);
      if (step > 0)
        symmetric_product(other, q, power);
      else
        std::copy_n(power.data, size, other.data);
      std::swap(q, other);
      if (step + 1 == times) break;
      symmetric_product(other, g, power);
      symmetric_product(g, other, power);
    }
    multiply_by(q, T(gain * std::sqrt(double(w.rows)) * std::exp(-log_norm)));
    for (int64_t j = 0; j < columns; j += PANEL<T>)
      for (int64_t k = 0; k < columns; k += PANEL<T>)
        multiply<T>({result.panel(j), PANEL<T>}, {copied.panel(k), PANEL<T>},
                    {q.panel(j) + k * PANEL<T>, PANEL<T>}, w.rows, PANEL<T>, PANEL<T>, k > 0);
    by_entries(result, w, n, [&](T& x, int64_t at) { w.left[at] = x; });
  }
}

}  // namespace

// Each returns whether there was enough memory.
#define EXPORT(T, NAME)                                                                           \
  bool NAME##_orthogonalise(const Weight<T>* weights, int64_t count, int64_t n, double a,         \
                            double b, double c, int times, double gain, int threads) {            \
    const Group<T> group{weights, count, n, threads};                                             \
    return had_memory_for([&] { orthogonalise<T>(group, {a, b, c}, times, gain); });              \
  }

extern "C" {
EXPORT(float, float32)
EXPORT(double, float64)
}
