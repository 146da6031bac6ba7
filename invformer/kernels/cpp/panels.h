// What compiled code does with whole matrices: symmetric products and Gram matrices, by panels.
#pragma once

#include "vectors.h"

namespace {

// Rows of both factors of a product that are to stay in a first-level cache.
constexpr int64_t DEPTH = 128;

// W, whose entry (k, c) lies at data[k * row + c * column], one of which is 1, and where its left
// vector, or a matrix like it, goes.
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

// Work on every entry of the first n columns, given where that of W lies, in the order that W has.
template <typename T, typename Work>
void by_entries(Panels<T> m, Weight<T> w, int64_t n, Work work) {
  for (int64_t first = 0; first < n; first += PANEL<T>) {
    T* const panel = m.panel(first);
    const int64_t columns = std::min(PANEL<T>, n - first);
    if (w.column == 1) {
      for (int64_t k = 0; k < w.rows; ++k)
        for (int64_t c = 0; c < columns; ++c) work(panel[k * PANEL<T> + c], k * w.row + first + c);
      continue;
    }
    for (int64_t begin = 0; begin < w.rows; begin += DEPTH)  // what is written stays at hand
      for (int64_t c = 0; c < columns; ++c)
        for (int64_t k = begin; k < std::min(begin + DEPTH, w.rows); ++k)
          work(panel[k * PANEL<T> + c], k + (first + c) * w.column);
  }
}

// out = AᵀB where that is symmetric: the blocks on and below the diagonal, and their mirror images.
template <typename T>
void symmetric_product(Panels<T> out, Panels<T> a, Panels<T> b) {
  constexpr int64_t P = PANEL<T>;
  for (int64_t first = 0; first < a.rows; first += DEPTH) {
    const int64_t depth = std::min(DEPTH, a.rows - first);
    for (int64_t j = 0; j < a.columns; j += P)
      for (int64_t i = j; i < a.columns; i += LANES<T>) {
        const int64_t seen = i > j ? P : LANES<T>;  // the rest lies above the diagonal
        multiply<T>({out.panel(j) + i * P, P}, {&a.at(first, i), 1, P}, {b.panel(j) + first * P, P},
                    LANES<T>, depth, seen, first > 0);
      }
  }
  for (int64_t j = 0; j < a.columns; j += LANES<T>)
    for (int64_t i = j + LANES<T>; i < a.columns; i += LANES<T>) {
      Vector<T> rows[LANES<T>];
      for (int64_t r = 0; r < LANES<T>; ++r) rows[r] = load(&out.at(i + r, j));
      transpose<T>(rows);
      for (int64_t r = 0; r < LANES<T>; ++r) store(&out.at(j + r, i), rows[r]);
    }
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
  if (n < copied.columns)
    std::fill_n(copied.panel(copied.columns - PANEL<T>), copied.rows * PANEL<T>, T(0));
  by_entries(copied, w, n, [&](T& x, int64_t at) { x = T(1 / scale) * w.data[at]; });
  symmetric_product(g, copied, copied);
  const double t = trace(g);
  multiply_by(g, T(1 / t));
  return std::log(scale) + std::log(t) / 2;
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

}  // namespace
