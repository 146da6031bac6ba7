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

// What a head promises of its rows: how far the values lie apart that a softmax chooses from, times
// how far its logits move,
//
//     τ² Σ_j P_ij ‖v_j − y_i‖² Σ_j P_ij ‖e_ij‖²,  e_ij = q_i, or q_i − q_j of distances
//
// where y = P v. Where the largest of all heads is large, ‖J_i‖ is, as far as one number can tell.
template <typename T>
void promise_of_head(const Branch<T>& f, const Point<T>& at, int64_t h, int64_t tokens,
                     Matrix<T> p, Matrix<T> y, Room<T> room) {
  const int64_t d = f.head_channels(), row = p.row;
  const Matrix<T> q = at.z.from(h * d), v = q.from(f.inner - f.outer);
  const Matrix<T> square{room.take(row), row}, apart{room.take(row), row};
  T *const moved = room.take(row), *const promise = at.promise + h * row;
  std::fill_n(square.data, row, T(0));
  std::fill_n(moved, row, T(0));
  for (int64_t c = 0; c < d; ++c)
    for (int64_t j = 0; j < tokens; ++j) {
      square.data[j] += *v.at(c, j) * *v.at(c, j);
      moved[j] += *q.at(c, j) * *q.at(c, j);
    }
  by_panels(apart, square, p, 1, tokens);
  for (int64_t i = 0; f.is_tied && i < tokens; ++i) moved[i] += apart.data[i];
  for (int64_t c = 0; c < d; ++c)
    for (int64_t i = 0; i < tokens; ++i) {
      apart.data[i] -= *y.at(c, i) * *y.at(c, i);
      if (f.is_tied) moved[i] -= 2 * *q.at(c, i) * *y.at(c, i);
    }
  const T tau = f.logit_scale(h) * (f.is_tied ? 2 : 1);
  for (int64_t i = 0; i < tokens; ++i) promise[i] = tau * tau * apart.data[i] * moved[i];
}

}  // namespace
