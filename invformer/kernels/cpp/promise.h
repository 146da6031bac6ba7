// Which rows of attention are probably the largest: a step cannot try them all.
#pragma once

#include "branch.h"

namespace {

// Whether a < b, where what is no number is the largest: it is found and not lost.
template <typename T>
bool is_less(T a, T b) {
  return a == a && !(b <= a);
}

// C = A P for P that is zero at (j, i) of panels of columns before j; columns of C are tokens.
template <typename T>
void by_panels(Matrix<T> c, Matrix<T> a, Matrix<T> p, int64_t rows, int64_t tokens) {
  for (int64_t i = 0; i < tokens; i += PANEL<T>)
    multiply<T>({c.at(0, i), c.row}, {a.data, a.row}, {p.at(0, i), p.row}, rows,
                std::min(tokens, i + PANEL<T>),
                std::min(PANEL<T>, round_up(tokens - i, LANES<T>)), false);
}

// The token with the largest number of those that are not chosen yet.
template <typename T>
int64_t largest(const T* numbers, int64_t tokens, const int64_t* chosen, int64_t count) {
  int64_t found = -1;
  for (int64_t i = 0; i < tokens; ++i)
    if ((found < 0 || is_less(numbers[found], numbers[i])) &&
        std::find(chosen, chosen + count, i) == chosen + count)
      found = i;
  return found;
}

// What attention's rows promise: of the left vectors g of the largest rows, a = V g,
//
//     max_g Σ_h ‖a_h‖² + τ² Var_j(a_h·v_j) Σ_j P_ij ‖e_ij‖²,  e_ij = q_i, or q_i − q_j of distances
//
// where Var_j weighs the keys by P_i. It is large where ‖J_i‖ is, as far as one number can tell. Rows
// of plain dot products become the largest by directions g that no leader has; they promise
//
//     max_h τ² Σ_j P_ij ‖v_j − y_i‖² Σ_j P_ij ‖e_ij‖²,  y = P v.
template <typename T>
struct Promise {
  static constexpr int64_t G = 4, COLUMNS = round_up(G, LANES<T>);
  const Branch<T>& f;
  const int64_t tokens, row, count = f.is_tied || f.temperatures ? std::min(G, tokens) : 0;
  const int64_t rows = 2 * count + 1, each = std::max<int64_t>(count, 1);
  Matrix<T> a, terms;  // (outer, count), and of every head (each, tokens)

  static int64_t size(const Branch<T>& f, int64_t width, int64_t row) {
    return (f.outer + width) * COLUMNS + f.heads * G * row;
  }
  static int64_t size_of_head(int64_t row) { return (4 * G + 3) * row; }

  Promise(const Branch<T>& f, const T* left, const T* lengths, int64_t tokens, int64_t width,
          int64_t row, Room<T> room)
      : f(f), tokens(tokens), row(row) {
    const Matrix<T> g{room.take(width * COLUMNS), COLUMNS};
    a = {room.take(f.outer * COLUMNS), COLUMNS}, terms = {room.take(f.heads * each * row), row};
    std::fill_n(g.data, width * COLUMNS, T(0));
    int64_t told[G];
    for (int64_t m = 0; m < count; ++m) told[m] = largest(lengths, tokens, told, m);
    for (int64_t c = 0; c < width; ++c) {
      const T scale = f.log_scale ? std::exp(f.log_scale[c]) : 1;
      for (int64_t m = 0; m < count; ++m) *g.at(c, m) = left[told[m] * width + c] * scale;
    }
    if (count) multiply<T>(a, f.out(), g, f.outer, width, COLUMNS, false);
  }

  // The terms of a head, from P at (j, i) and y = P v.
  void of_head(int64_t h, const Point<T>& at, Matrix<T> p, Matrix<T> y, Room<T> room) const {
    const int64_t d = f.head_channels();
    const Matrix<T> q = at.z.from(h * d), v = q.from(f.inner - f.outer), own = terms.from(h * each);
    const Matrix<T> given{room.take(rows * row), row}, mean{room.take(rows * row), row};
    std::fill_n(given.data, rows * row, T(0));
    T *const square = given.at(2 * count), *const mean_square = mean.at(2 * count);
    T* const spread = room.take(row);
    std::fill_n(spread, row, T(0));
    for (int64_t c = 0; c < d; ++c) {
      const T *const q_c = q.at(c), *const v_c = v.at(c);
      for (int64_t j = 0; j < tokens; ++j) square[j] += v_c[j] * v_c[j];
      for (int64_t j = 0; j < tokens; ++j) spread[j] += q_c[j] * q_c[j];
      for (int64_t m = 0; m < count; ++m) {
        const T a_c = *a.at(h * d + c, m);
        T* const s = given.at(m);
        for (int64_t j = 0; j < tokens; ++j) s[j] += a_c * v_c[j];
      }
    }
    for (int64_t m = 0; m < count; ++m) {
      const T* const s = given.at(m);
      T* const square = given.at(count + m);
      for (int64_t j = 0; j < tokens; ++j) square[j] = s[j] * s[j];
    }
    by_panels(mean, given, p, rows, tokens);
    for (int64_t i = 0; f.is_tied && i < tokens; ++i) spread[i] += mean_square[i];
    for (int64_t c = 0; c < d; ++c) {
      const T *const q_c = q.at(c), *const y_c = y.at(c);
      for (int64_t i = 0; f.is_tied && i < tokens; ++i) spread[i] -= 2 * q_c[i] * y_c[i];
      for (int64_t i = 0; !count && i < tokens; ++i) mean_square[i] -= y_c[i] * y_c[i];
    }
    const T tau = f.logit_scale(h) * (f.is_tied ? 2 : 1);
    for (int64_t i = 0; !count && i < tokens; ++i)
      own.data[i] = tau * tau * mean_square[i] * spread[i];
    for (int64_t m = 0; m < count; ++m) {
      T a_square = 0;
      for (int64_t c = 0; c < d; ++c) a_square += *a.at(h * d + c, m) * *a.at(h * d + c, m);
      const T *const s = mean.at(m), *const square = mean.at(count + m);
      T* const term = own.at(m);
      for (int64_t i = 0; i < tokens; ++i)
        term[i] = a_square + tau * tau * (square[i] - s[i] * s[i]) * spread[i];
    }
  }

  // Of all heads.
  void join(T* promise) const {
    std::fill_n(promise, tokens, T(0));
    for (int64_t m = 0; m < count; ++m)
      for (int64_t h = 1; h < f.heads; ++h)
        for (int64_t i = 0; i < tokens; ++i) terms.at(m)[i] += terms.at(h * count + m)[i];
    for (int64_t n = 0; n < (count ? count : f.heads); ++n)
      for (int64_t i = 0; i < tokens; ++i) promise[i] = std::max(promise[i], *terms.at(n, i));
  }
};

}  // namespace
