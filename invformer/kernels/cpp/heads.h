// The row of attention's Jacobian at one token. Its vectors are tokens by channels, padded to whole
// vectors: for each token j the gradient of its input is a sum of few vectors for each head,
//
//     x_j = s_j W_k q_i + p_j W_v a        of dot products; a is the gradient of the output
//     x_j = s_j W (q_i − q_j) + p_j W a    of distances, where queries are keys and values
//
// so that a row costs as many products with W as it has heads, not channels. In the ball keys and
// values have derivatives ρ (1 − k kᵀ), which add multiples of W_k k_j and W_v v_j.
#pragma once

#include "branch.h"

namespace {

template <typename T>
struct Heads {
  const Branch<T>& f;
  const Point<T>& at;
  const int64_t tokens, width, row = at.z.row, H = f.heads, d = f.head_channels();
  const int64_t P = round_up(width, LANES<T>);
  const int64_t keys_at = f.is_tied ? 0 : f.outer, values_at = 2 * keys_at;
  const int64_t kinds = f.temperatures ? 2 : f.is_tied;  // vectors of each token's own for a head
  Matrix<T> w, own, u, x, shared, sums;  // w is Wᵀ, with γ of LN or D⁻¹; own: W_k k_j and W_v v_j
  Matrix<T> terms, p, near;              // for heads by tokens: of x in its vectors; P; k_j·q_i
  T *dz, *s;

  // Room for all of this.
  static int64_t size(const Branch<T>& f, int64_t tokens, int64_t width, int64_t row) {
    const int64_t P = round_up(width, LANES<T>);
    return (f.inner + (2 * f.heads + 2) * tokens + 3 * f.heads) * P + (6 * f.heads + 1) * row +
           f.outer + LANES<T>;
  }

  Heads(const Branch<T>& f, const Point<T>& at, int64_t tokens, int64_t width, Room<T>& room)
      : f(f), at(at), tokens(tokens), width(width) {
    auto matrix = [&](int64_t rows, int64_t row) { return Matrix<T>{room.take(rows * row), row}; };
    w = matrix(f.inner, P), own = matrix(tokens, kinds * H * P), u = matrix(tokens, P);
    x = matrix(tokens, P), shared = matrix(2 * H, P), sums = matrix(H, P);
    terms = matrix((2 + kinds) * H, row), p = matrix(H, row), near = matrix(H, row);
    dz = room.take(f.outer), s = room.take(row);
    std::fill_n(w.data, f.inner * P, T(0));
    for (int64_t c = 0; c < width; ++c) {
      const T gain = f.epsilon > 0 ? f.scale[c] : f.log_scale ? std::exp(-f.log_scale[c]) : 1;
      for (int64_t k = 0; k < f.inner; ++k) *w.at(k, c) = gain * *f.in().at(c, k);
      for (int64_t j = 0; j < tokens && (f.epsilon > 0 || f.radius > 0); ++j)
        *u.at(j, c) = *at.u.at(c, j);
    }
    for (int64_t n = 0; n < kinds * H; ++n)
      multiply<T>({own.at(0, n * P), own.row}, at.z.from(keys_at + n * d).transposed(),
                  w.from(keys_at + n * d), tokens, d, P, false);
  }

  // x_j by the derivative of ψ_R, or of LN without its γ; both are symmetric.
  void through_input(int64_t j) const {
    const T square = f.epsilon > 0 ? T(width) : T(f.radius * f.radius), rho = at.u_rho[j];
    if (square == 0) return;
    T *const v = x.at(j), *const y = u.at(j), mean = 0;
#pragma omp simd reduction(+ : mean)
    for (int64_t c = 0; c < width; ++c) mean += v[c];
    mean = f.epsilon > 0 ? mean / width : T(0);
    for (int64_t c = 0; c < width; ++c) v[c] -= mean;
    const T along = dot<T>(v, y, width) / square;
    for (int64_t c = 0; c < width; ++c) v[c] = rho * (v[c] - along * y[c]);
  }

  // x_j at length one, or its signs.
  void normalise(int64_t j, bool entries, double shortest) const {
    T* const v = x.at(j);
    const T factor = 1 / std::max(std::sqrt(dot<double>(v, v, width)), shortest);
    for (int64_t c = 0; c < width; ++c) v[c] = entries ? (v[c] > 0) - (v[c] < 0) : v[c] * factor;
  }

  // a ← J_i v, where v are the vectors of length one of J_iᵀ a, or of token i alone.
  void improve(T* a, int64_t stride, int64_t i, bool diagonal, bool entries,
               double shortest) const {
    const int64_t keys = i + 1 - f.strictly_causal, first = diagonal ? i : 0, count = i + 1 - first;
    const T sign = f.is_tied ? -1 : 1;
    const bool in_ball = f.temperatures;
    std::fill_n(terms.data, (2 + kinds) * H * row, T(0));
    for (int64_t h = 0; h < H; ++h) {
      const Matrix<T> q = at.z.from(h * d), k = q.from(keys_at), v = q.from(values_at);
      T *const alpha = terms.at(h), *const beta = terms.at(H + h), *const p_h = p.at(h);
      T* const a_h = a + h * d * stride;
      softmax<T>(f, at, tokens, h, i, p_h);
      for (int64_t c = 0; c < d; ++c) {
        const T a_c = a_h[c * stride], origin = f.is_tied ? *q.at(c, i) : 0, *const v_c = v.at(c);
        for (int64_t j = 0; j < keys; ++j) alpha[j] += a_c * (origin + sign * v_c[j]);
      }
      const T *const k_rho = at.rho + (H + h) * row, *const v_rho = k_rho + H * row;
      for (int64_t j = 0; in_ball && j < keys; ++j)
        *terms.at(3 * H + h, j) = -v_rho[j] * p_h[j] * alpha[j];
      of_softmax(alpha, p_h, logit_scale(h), keys);
      std::fill_n(near.at(h), keys, T(!in_ball));
      for (int64_t c = 0; c < d; ++c) {
        const T q_i = *q.at(c, i), origin = f.is_tied ? q_i : 0, *const k_c = k.at(c);
        T total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < keys; ++j) total += alpha[j] * (origin + sign * k_c[j]);
        dz[h * d + c] = sign * total;
        for (int64_t j = 0; in_ball && j < keys; ++j) *near.at(h, j) += q_i * k_c[j];
      }
      derive_query(h, i);
      for (int64_t j = 0; j < keys; ++j) {
        beta[j] = p_h[j] * (in_ball ? v_rho[j] : 1);
        alpha[j] *= in_ball ? k_rho[j] : 1;
        if (kinds) *terms.at(2 * H + h, j) = -alpha[j] * *near.at(h, j);
      }
      multiply<T>(shared.from(h), {q.at(0, i), 0, row}, w.from(keys_at + h * d), 1, d, P, false);
      multiply<T>(shared.from(H + h), {a_h, 0, stride}, w.from(values_at + h * d), 1, d, P, false);
    }
    multiply<T>(x.from(first), {terms.at(0, first), 1, row}, shared, count, 2 * H, P, false);
    multiply<T>(x.from(i), {dz, 0, 1}, w, 1, f.outer, P, true);
    for (int64_t j = first; j <= i; ++j) {
      if (kinds)
        multiply<T>(x.from(j), {terms.at(2 * H, j), 0, row}, {own.at(j), P}, 1, kinds * H, P, true);
      through_input(j);
      normalise(j, entries, shortest);
      through_input(j);
    }
    for (int64_t c = 0; c < f.outer; ++c) dz[c] = dot<T>(w.at(c), x.at(i), P);
    multiply<T>(sums, {terms.at(H, first), row}, x.from(first), H, count, P, false);
    for (int64_t h = 0; h < H; ++h) {
      const Matrix<T> q = at.z.from(h * d), k = q.from(keys_at), v = q.from(values_at);
      const T* const k_rho = at.rho + (H + h) * row;
      derive_query(h, i);
      std::fill_n(s, keys, T(0));
      for (int64_t c = 0; c < d; ++c) {
        const T dq = sign * dz[h * d + c], origin = f.is_tied ? *q.at(c, i) : 0;
        for (int64_t j = 0; j < keys; ++j) s[j] += dq * (origin + sign * *k.at(c, j));
      }
      for (int64_t j = first; j < keys; ++j) {
        const T along = kinds ? *near.at(h, j) * dot<T>(own.at(j, h * P), x.at(j), P) : 0;
        s[j] += (in_ball ? k_rho[j] : 1) * (dot<T>(shared.at(h), x.at(j), P) - along);
      }
      of_softmax(s, p.at(h), logit_scale(h), keys);
      for (int64_t j = first; in_ball && j < keys; ++j)
        s[j] -= *terms.at(H + h, j) * dot<T>(own.at(j, (H + h) * P), x.at(j), P);
      for (int64_t c = 0; c < d; ++c) {
        const T origin = f.is_tied ? *q.at(c, i) : 0, *const v_c = v.at(c);
        T total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < keys; ++j) total += s[j] * (origin + sign * v_c[j]);
        a[(h * d + c) * stride] = total + dot<T>(w.at(values_at + h * d + c), sums.at(h), P);
      }
    }
  }

  // The derivative of ψ at q_i, of the query's part of dz.
  void derive_query(int64_t h, int64_t i) const {
    if (f.temperatures)
      ball_derivative<T>({dz + h * d, 1}, {at.z.at(h * d, i), row}, at.rho + h * row + i, d, 1, 1,
                         s);
  }

  T logit_scale(int64_t h) const { return f.logit_scale(h) * (f.is_tied ? 2 : 1); }
};

}  // namespace
