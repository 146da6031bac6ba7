// The row of attention's Jacobian at one token. Its vectors are channels by tokens: for each token j
// the gradient of its input is a sum of few vectors for each head,
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
  const int64_t P = round_up(width, LANES<T>), L = round_up(H, LANES<T>);
  const int64_t keys_at = f.is_tied ? 0 : f.outer, values_at = 2 * keys_at;
  const T sign = f.is_tied ? -1 : 1;
  const bool in_ball = f.temperatures;
  const int64_t kinds = f.temperatures ? 2 : f.is_tied;  // vectors of each token's own for a head
  Matrix<T> w, x;          // w is Wᵀ, with γ of LN or D⁻¹
  T* own;                  // W_k k_j and W_v v_j, for each LANES tokens channels by heads
  Matrix<T> shared, sums;  // W_k q_i, then W_v a; Σ_j p_j x_j, channels by heads
  Matrix<T> terms, betas;  // of x in its vectors, heads by tokens; p_j, tokens by heads
  Matrix<T> p, near, s, along;  // P; k_j·q_i; x_j in the shared vectors, and in its own
  T *dz, *column;
  double* factors;

  // Room for all of this.
  static int64_t size(const Branch<T>& f, int64_t tokens, int64_t width, int64_t row) {
    const int64_t P = round_up(width, LANES<T>), L = round_up(f.heads, LANES<T>);
    return (f.inner + 2 * f.heads + 1) * P + (width + tokens) * L + f.outer + LANES<T> +
           ((2 * f.heads + 1) * width + 9 * f.heads + 2) * row;
  }

  Heads(const Branch<T>& f, const Point<T>& at, int64_t tokens, int64_t width, Room<T>& room)
      : f(f), at(at), tokens(tokens), width(width) {
    auto matrix = [&](int64_t rows, int64_t row) { return Matrix<T>{room.take(rows * row), row}; };
    w = matrix(f.inner, P), own = room.take(kinds * H * width * row), x = matrix(width, row);
    shared = matrix(2 * H, P), sums = matrix(width, L), betas = matrix(tokens, L);
    terms = matrix((2 + kinds) * H, row), along = matrix(kinds * H, row);
    p = matrix(H, row), near = matrix(H, row), s = matrix(H, row);
    dz = room.take(f.outer), column = room.take(P);
    factors = reinterpret_cast<double*>(room.take(2 * row));
    std::fill_n(w.data, f.inner * P, T(0));
    std::fill_n(betas.data, tokens * L, T(0));
    std::fill_n(column, P, T(0));
    for (int64_t c = 0; c < width; ++c)
      column[c] = f.epsilon > 0 ? f.scale[c] : f.log_scale ? std::exp(-f.log_scale[c]) : 1;
    for (int64_t k = 0; k < f.inner; k += LANES<T>)  // so many rows of either stay at hand
      for (int64_t c = 0; c < width; ++c)
        for (int64_t r = k; r < std::min(k + LANES<T>, f.inner); ++r)
          w.at(r)[c] = column[c] * *f.in().at(c, r);
    for (int64_t n = 0; n < kinds * H; ++n)
      for (int64_t j = 0; j < tokens; j += LANES<T>)
        multiply<T>(own_at(n, 0, j), w.from(keys_at + n * d).transposed(),
                    {at.z.at(keys_at + n * d, j), row}, width, d, LANES<T>, false);
  }

  // W_k k_j or W_v v_j of LANES tokens from j on, from a channel on.
  Matrix<T> own_at(int64_t n, int64_t c, int64_t j) const {
    return {own + (j * width + c * LANES<T>) * kinds * H + n * LANES<T>, kinds * H * LANES<T>};
  }

  // Eight at a time, and the rest one by one.
  template <typename Work>
  static void in_eights(int64_t count, Work work) {
    int64_t n = 0;
    for (; n + 8 <= count; n += 8) work(n, std::integral_constant<int, 8>());
    for (; n < count; ++n) work(n, std::integral_constant<int, 1>());
  }

  // LANES columns of x plus their own vectors from n on, times the terms.
  template <int SOME>
  void add_own(int64_t n, int64_t j) const {
    Vector<T> term[SOME];
    for (int m = 0; m < SOME; ++m) term[m] = load(terms.at(2 * H + n + m, j));
    for (int64_t c = 0; c < width; ++c) {
      const T* const own_c = own_at(n, c, j).data;
      Vector<T> sum = load(x.at(c, j));
      for (int m = 0; m < SOME; ++m) sum += term[m] * load(own_c + m * LANES<T>);
      store(x.at(c, j), sum);
    }
  }

  // Inner products of LANES columns of x with their own vectors from n on.
  template <int SOME>
  void look_along(int64_t n, int64_t j) const {
    Vector<T> sum[SOME]{};
    for (int64_t c = 0; c < width; ++c) {
      const T* const own_c = own_at(n, c, j).data;
      const Vector<T> x_c = load(x.at(c, j));
      for (int m = 0; m < SOME; ++m) sum[m] += load(own_c + m * LANES<T>) * x_c;
    }
    for (int m = 0; m < SOME; ++m) store(along.at(n + m, j), sum[m]);
  }

  // Columns of x by the derivative of ψ_R, or of LN without its γ; both are symmetric.
  void through_input(int64_t first, int64_t count) const {
    const T radius = f.epsilon > 0 ? std::sqrt(T(width)) : T(f.radius);
    const Matrix<T> dx{x.at(0, first), row};
    if (f.epsilon > 0) centre(dx, width, count, s.data);
    if (radius > 0)
      ball_derivative<T>(dx, {at.u.at(0, first), row}, at.u_rho + first, width, count, radius,
                         s.data);
  }

  // Columns of x at length one, or their signs.
  void normalise(int64_t first, int64_t count, bool entries, double shortest) const {
    std::fill_n(factors, count, 0.0);
    for (int64_t c = 0; c < width; ++c) {
      const T* const x_c = x.at(c, first);
      for (int64_t j = 0; j < count; ++j) factors[j] += double(x_c[j]) * x_c[j];
    }
    T* const inverse = s.data;
    for (int64_t j = 0; j < count; ++j) inverse[j] = 1 / std::max(std::sqrt(factors[j]), shortest);
    for (int64_t c = 0; c < width; ++c) {
      T* const x_c = x.at(c, first);
      for (int64_t j = 0; j < count; ++j)
        x_c[j] = entries ? (x_c[j] > 0) - (x_c[j] < 0) : x_c[j] * inverse[j];
    }
  }

  // a ← J_i v, where v are the vectors of length one of J_iᵀ a, or of token i alone.
  void improve(T* a, int64_t stride, int64_t i, bool diagonal, bool entries,
               double shortest) const {
    const int64_t first = diagonal ? i / LANES<T> * LANES<T> : 0, keys = i + 1 - f.strictly_causal;
    pull(a, stride, i, keys, first, diagonal);
    complete(i, first, entries, shortest);
    push(a, stride, i, keys, first);
  }

  // x_j = s_j W_k q_i + p_j W_v a of tokens j from the first on, and what token i gets as a query.
  void pull(const T* a, int64_t stride, int64_t i, int64_t keys, int64_t first,
            bool diagonal) const {
    std::fill_n(terms.data, (2 + kinds) * H * row, T(0));
    for (int64_t h = 0; h < H; ++h) {
      const Matrix<T> q = at.z.from(h * d), k = q.from(keys_at), v = q.from(values_at);
      T *const alpha = terms.at(h), *const beta = terms.at(H + h), *const p_h = p.at(h);
      const T* const a_h = a + h * d * stride;
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
        dz[h * d + c] = sign * total(alpha, k_c, origin, sign, keys);
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
      for (int64_t n = h; diagonal && n < (2 + kinds) * H; n += H) std::fill_n(terms.at(n), i, T(0));
      for (int64_t j = first; j <= i; ++j) *betas.at(j, h) = beta[j];
    }
    multiply<T>({x.at(0, first), row}, {shared.data, 1, P}, {terms.at(0, first), row}, width, 2 * H,
                round_up(i + 1 - first, LANES<T>), false);
    multiply<T>({column, P}, {dz, 0, 1}, w, 1, f.outer, P, false);
    for (int64_t c = 0; c < width; ++c) *x.at(c, i) += column[c];
  }

  // x plus the tokens' own vectors, at length one, and its inner products with these.
  void complete(int64_t i, int64_t first, bool entries, double shortest) const {
    for (int64_t begin = first; begin <= i; begin += 4 * LANES<T>) {  // whose own stay at hand
      const int64_t some = std::min(4 * LANES<T>, i + 1 - begin), end = begin + some;
      for (int64_t j = begin; j < end && kinds; j += LANES<T>)
        in_eights(kinds * H, [&](int64_t n, auto some) { add_own<some>(n, j); });
      through_input(begin, some);
      normalise(begin, some, entries, shortest);
      through_input(begin, some);
      for (int64_t j = begin; j < end; j += LANES<T>)
        in_eights(kinds * H, [&](int64_t n, auto some) { look_along<some>(n, j); });
    }
  }

  // a = J_i x.
  void push(T* a, int64_t stride, int64_t i, int64_t keys, int64_t first) const {
    const int64_t count = i + 1 - first;
    for (int64_t c = 0; c < width; ++c) column[c] = *x.at(c, i);
    for (int64_t c = 0; c < f.outer; ++c) dz[c] = dot<T>(w.at(c), column, P);
    multiply<T>(sums, {x.at(0, first), row}, betas.from(first), width, count, L, false);
    multiply<T>({s.at(0, first), row}, shared, {x.at(0, first), row}, H, width,
                round_up(count, LANES<T>), false);
    for (int64_t h = 0; h < H; ++h) {
      const Matrix<T> q = at.z.from(h * d), k = q.from(keys_at), v = q.from(values_at);
      const T* const k_rho = at.rho + (H + h) * row;
      T* const s_h = s.at(h);
      derive_query(h, i);
      std::fill_n(s_h, first, T(0));
      for (int64_t j = first; j < keys; ++j) {
        if (kinds) s_h[j] -= *near.at(h, j) * *along.at(h, j);
        if (in_ball) s_h[j] *= k_rho[j];
      }
      for (int64_t c = 0; c < d; ++c) {
        const T dq = sign * dz[h * d + c], origin = f.is_tied ? *q.at(c, i) : 0;
        for (int64_t j = 0; j < keys; ++j) s_h[j] += dq * (origin + sign * *k.at(c, j));
      }
      of_softmax(s_h, p.at(h), logit_scale(h), keys);
      std::fill(s_h + keys, s_h + round_up(keys, LANES<T>), T(0));
      for (int64_t j = first; in_ball && j < keys; ++j)
        s_h[j] -= *terms.at(H + h, j) * *along.at(H + h, j);
      for (int64_t c = 0; c < width; ++c) column[c] = *sums.at(c, h);
      for (int64_t c = 0; c < d; ++c) {
        const T origin = f.is_tied ? *q.at(c, i) : 0, *const v_c = v.at(c);
        a[(h * d + c) * stride] = total(s_h, v_c, origin, sign, keys) +
                                  dot<T>(w.at(values_at + h * d + c), column, P);
      }
    }
  }

  // Σ_j s_j (origin ± v_j), where s is zero beyond the keys.
  static T total(const T* s, const T* v, T origin, T sign, int64_t keys) {
    Vector<T> sums{};
    for (int64_t j = 0; j < keys; j += LANES<T>) sums += load(s + j) * (origin + sign * load(v + j));
    return sum<T>(sums);
  }

  // The derivative of ψ at q_i, of the query's part of dz.
  void derive_query(int64_t h, int64_t i) const {
    T along;
    if (f.temperatures)
      ball_derivative<T>({dz + h * d, 1}, {at.z.at(h * d, i), row}, at.rho + h * row + i, d, 1, 1,
                         &along);
  }

  T logit_scale(int64_t h) const { return f.logit_scale(h) * (f.is_tied ? 2 : 1); }
};

}  // namespace
