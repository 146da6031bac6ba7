// A residual branch as compiled code sees it: its weights, where it is linearised, and P.
#pragma once

#include "rows.h"

namespace {

// A residual layer; a pointer to what it does not have is null.
template <typename T>
struct Branch {
  const T *w, *b, *v, *c;             // (kernel · width, inner), (inner), (outer, width), (width)
  const T *scale, *shift, *inverse;   // of D x + b, or of LN, and D⁻¹
  const T* log_scale;                 // of a D that is folded into W and V
  const T *norm_scale, *norm_shift;   // of an ActivationNorm that follows
  const T *biases, *temperatures;     // of each head: at lags from one on; where it is in a ball
  T *left, *lengths, *estimate;       // (sequences, tokens, width), (sequences, tokens), one number
  int64_t* turn;
  int64_t w_row, w_column, v_row, v_column;  // distances in memory
  int64_t inner, outer, kernel, activation, heads, bias_stride, is_tied, strictly_causal, at_once;
  int64_t leaders, promising, in_turn;  // of the tokens that a step advances: those with the largest
                                        // gains, those that promise most, others
  int64_t reads, writes;   // the first channel of the stream that it reads, and that it adds to
  double radius, epsilon;  // of ψ_R and LN; zero is none

  int64_t head_channels() const { return outer / heads; }
  Matrix<const T> in() const { return {w, w_row, w_column}; }
  Matrix<const T> out() const { return {v, v_row, v_column}; }
  T logit_scale(int64_t head) const {
    return temperatures ? temperatures[head] : (is_tied ? -1 : 1) / std::sqrt(T(head_channels()));
  }
};

// Where a branch is linearised.
template <typename T>
struct Point {
  Matrix<T> u, z;  // after ψ_R or before γ of LN; after W: q, or q, k and v, or φ′
  T *u_rho, *rho;  // of u; of q, k and v of every head, in the ball
  T* biases;       // of every head, the largest lag first
  T* promise;      // of every token
  bool is_packed;  // of units there are only columns of the tokens that a step advances
};

// P_ij of the keys j of token i, and how many there are. If strictly causal, keys are those of tokens
// before, and of one that is zero, of which nothing but its share of P counts.
template <typename T>
int64_t softmax(const Branch<T>& f, const Point<T>& at, int64_t tokens, int64_t head, int64_t i,
                T* p) {
  const int64_t d = f.head_channels(), keys = i + 1 - f.strictly_causal;
  const int64_t end = round_up(keys, LANES<T>);
  const Matrix<T> q = at.z.from(head * d), k = f.is_tied ? q : q.from(f.outer);
  const T factor = f.logit_scale(head);
  const T* const biases = at.biases + head * q.row + tokens;  // of lag l at −1 − l
  constexpr T INFINITE = std::numeric_limits<T>::infinity();
  std::fill_n(p, end, T(0));
  for (int64_t c = 0; c < d; ++c) {
    const T q_i = *q.at(c, i);
    const T* const k_c = k.at(c);
    if (f.is_tied)
      for (int64_t j = 0; j < keys; ++j) p[j] += (q_i - k_c[j]) * (q_i - k_c[j]);
    else
      for (int64_t j = 0; j < keys; ++j) p[j] += q_i * k_c[j];
  }
  for (int64_t j = 0; j < keys; ++j) p[j] = factor * p[j] + biases[j - keys];
  std::fill(p + keys, p + end, -INFINITE);
  Vector<T> sums{}, largest = sums + (f.strictly_causal ? biases[-1 - i] : -INFINITE);
  for (int64_t j = 0; j < end; j += LANES<T>) {
    const Vector<T> x = load(p + j);
    largest = x > largest ? x : largest;
  }
  const T most = maximum<T>(largest);
  T total = f.strictly_causal ? std::exp(biases[-1 - i] - most) : T(0);
  for (int64_t j = 0; j < end; j += LANES<T>) {
    const Vector<T> e = exponential<T>(load(p + j) - most);
    store(p + j, e);
    sums += e;
  }
  total += sum<T>(sums);
  for (int64_t j = 0; j < keys; ++j) p[j] /= total;
  return keys;
}

// The same of all tokens i, at (j, i), and zeros at later keys of a panel; by_lag are the biases from
// lag zero on, and −∞ before.
template <typename T>
void softmax_of_all(const Branch<T>& f, Matrix<T> z, int64_t tokens, int64_t head, const T* by_lag,
                    Matrix<T> p) {
  const int64_t d = f.head_channels(), strict = f.strictly_causal;
  const Matrix<T> q = z.from(head * d), k = f.is_tied ? q : q.from(f.outer);
  const T factor = f.logit_scale(head);
  for (int64_t i = 0; i < tokens; i += LANES<T>) {
    const int64_t keys = std::min(tokens, i + LANES<T>) - strict;
    const int64_t end = std::min(tokens, round_up(i + 1, PANEL<T>));
    Vector<T> sums{}, most = strict ? load(by_lag + i) : sums - std::numeric_limits<T>::infinity();
    for (int64_t j = 0; j < keys; ++j) {
      Vector<T> s{};
      if (f.is_tied)
        for (int64_t c = 0; c < d; ++c) {
          const Vector<T> e = load(q.at(c, i)) - *k.at(c, j);
          s += e * e;
        }
      else
        for (int64_t c = 0; c < d; ++c) s += load(q.at(c, i)) * *k.at(c, j);
      s = factor * s + load(by_lag + i - strict - j);
      most = s > most ? s : most;
      store(p.at(j, i), s);
    }
    if (strict) sums = exponential<T>(load(by_lag + i) - most);
    for (int64_t j = 0; j < keys; ++j) {
      const Vector<T> e = exponential<T>(load(p.at(j, i)) - most);
      store(p.at(j, i), e);
      sums += e;
    }
    sums = T(1) / sums;
    for (int64_t j = 0; j < keys; ++j) store(p.at(j, i), load(p.at(j, i)) * sums);
    for (int64_t j = keys; j < end; ++j) store(p.at(j, i), Vector<T>{});
  }
}

}  // namespace
