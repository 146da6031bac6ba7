// What the rows of a branch's Jacobian are made of: derivatives of ψ, of activations, and of one
// head of attention at one token. Matrices are channels by tokens.
#pragma once

#include "vectors.h"

namespace {

enum Activation { SILU, GELU, RELU, TANH };

// ρ = 1/√(1 + ‖x‖²/R²) of every column, and x ← ψ_R(x) = ρ x.
template <typename T>
void into_ball(Matrix<T> x, T* rho, int64_t channels, int64_t columns, T radius) {
  std::fill_n(rho, columns, T(0));
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) rho[j] += *x.at(c, j) * *x.at(c, j);
  for (int64_t j = 0; j < columns; ++j) rho[j] = 1 / std::sqrt(1 + rho[j] / (radius * radius));
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) *x.at(c, j) *= rho[j];
}

// dz ← ρ (dz − u (u·dz)/R²) of every column, for points u of the ball.
template <typename T>
void ball_derivative(Matrix<T> dz, Matrix<const T> u, const T* rho, int64_t channels,
                     int64_t columns, T radius, T* along) {
  std::fill_n(along, columns, T(0));
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) along[j] += *u.at(c, j) * *dz.at(c, j);
  for (int64_t j = 0; j < columns; ++j) along[j] /= radius * radius;
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j)
      *dz.at(c, j) = rho[j] * (*dz.at(c, j) - along[j] * *u.at(c, j));
}

// Every column less its mean; ``mean`` is room for one row.
template <typename T>
void centre(Matrix<T> x, int64_t channels, int64_t columns, T* mean) {
  std::fill_n(mean, columns, T(0));
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) mean[j] += *x.at(c, j);
  for (int64_t j = 0; j < columns; ++j) mean[j] /= channels;
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) *x.at(c, j) -= mean[j];
}

// x ← x̂ = ρ (x − mean), ρ = 1/√(variance + ε), of every column. Its derivative is that of ψ in a
// ball of radius √channels, of a column less its mean.
template <typename T>
void standardise(Matrix<T> x, T* rho, int64_t channels, int64_t columns, T epsilon) {
  centre(x, channels, columns, rho);
  std::fill_n(rho, columns, T(0));
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) rho[j] += *x.at(c, j) * *x.at(c, j);
  for (int64_t j = 0; j < columns; ++j) rho[j] = 1 / std::sqrt(rho[j] / channels + epsilon);
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) *x.at(c, j) *= rho[j];
}

// φ(h) and φ′(h) of a vector.
template <typename T>
std::pair<Vector<T>, Vector<T>> activate(int64_t kind, Vector<T> h) {
  const Vector<T> zero{}, one = zero + T(1), size = h < zero ? -h : h;
  if (kind == RELU) return {h < zero ? zero : h, h > zero ? one : zero};
  if (kind == GELU) {
    Vector<T> mass{}, density{};
    for (int lane = 0; lane < LANES<T>; ++lane) {
      mass[lane] = std::erfc(-h[lane] * T(0.7071067811865476)) / 2;
      density[lane] = std::exp(-h[lane] * h[lane] / 2) * T(0.3989422804014327);
    }
    return {h * mass, mass + h * density};
  }
  const Vector<T> e = exponential<T>(kind == TANH ? -2 * size : -size);
  if (kind == TANH) {
    const Vector<T> t = (one - e) / (one + e);
    return {h < zero ? -t : t, 4 * e / ((one + e) * (one + e))};
  }
  const Vector<T> sigmoid = (h < zero ? e : one) / (one + e);
  return {h * sigmoid, sigmoid * (one + h * (one - sigmoid))};
}

// s ← τ (diag P − P Pᵀ) s.
template <typename T>
void of_softmax(T* s, const T* p, T tau, int64_t keys) {
  T mean = 0;
#pragma omp simd reduction(+ : mean)
  for (int64_t j = 0; j < keys; ++j) mean += p[j] * s[j];
  for (int64_t j = 0; j < keys; ++j) s[j] = tau * p[j] * (s[j] - mean);
}

// One head of a row of attention: token i, its P and keys, and its channels of z.
template <typename T>
struct Head {
  const T *p, *rho;
  T tau;
  int64_t token, keys, channels, outer, row;
  Matrix<const T> q, k, v;
  bool is_tied;  // queries are keys and values

  // The derivative of ψ at q_i, k and v, of columns from token 0 on.
  void derive(Matrix<T> dz, T* along) const {
    const Matrix<T> dk = dz.from(outer), dv = dk.from(outer);
    const int64_t heads = outer / channels, i = token;
    ball_derivative<T>({dz.at(0, i), dz.row}, {q.at(0, i), row}, rho + i, channels, 1, T(1), along);
    ball_derivative<T>(dk, k, rho + heads * row, channels, keys, T(1), along);
    ball_derivative<T>(dv, v, rho + 2 * heads * row, channels, keys, T(1), along);
  }

  // dz ← (∂y_i/∂z)ᵀ a, with a_c = a[c * stride]; s is room for the keys.
  void pull(Matrix<T> dz, const T* a, int64_t stride, T* s) const {
    const int64_t i = token;
    std::fill_n(s, keys, T(0));
    for (int64_t c = 0; c < channels; ++c) {
      const T a_c = a[c * stride], q_i = *q.at(c, i);
      const T* const v_c = v.at(c);
      if (is_tied)
        for (int64_t j = 0; j < keys; ++j) s[j] += a_c * (q_i - v_c[j]);
      else
        for (int64_t j = 0; j < keys; ++j) s[j] += a_c * v_c[j];
    }
    of_softmax(s, p, tau, keys);
    for (int64_t c = 0; c < channels; ++c) {
      const T a_c = a[c * stride], q_i = *q.at(c, i);
      T* const dq = dz.at(c);
      if (is_tied) {
        T own = 0;
#pragma omp simd reduction(+ : own)
        for (int64_t j = 0; j < keys; ++j) own += s[j] * (q_i - k.at(c)[j]);
        for (int64_t j = 0; j < keys; ++j) dq[j] = s[j] * (q_i - k.at(c)[j]) + p[j] * a_c;
        dq[i] -= own;
      } else {
        T *const dk = dz.at(outer + c), *const dv = dz.at(2 * outer + c);
        dq[i] = dot<T>(s, k.at(c), keys);
        for (int64_t j = 0; j < keys; ++j) {
          dk[j] = s[j] * q_i;
          dv[j] = p[j] * a_c;
        }
      }
    }
  }

  // a ← (∂y_i/∂z) dz.
  void push(T* a, int64_t stride, Matrix<const T> dz, T* s) const {
    const int64_t i = token;
    std::fill_n(s, keys, T(0));
    for (int64_t c = 0; c < channels; ++c) {
      const T *const dq = dz.at(c), *const k_c = k.at(c), q_i = *q.at(c, i), dq_i = dq[i];
      if (is_tied) {
        for (int64_t j = 0; j < keys; ++j) s[j] += (dq[j] - dq_i) * (q_i - k_c[j]);
      } else {
        const T* const dk = dz.at(outer + c);
        for (int64_t j = 0; j < keys; ++j) s[j] += dq_i * k_c[j] + q_i * dk[j];
      }
    }
    of_softmax(s, p, tau, keys);
    for (int64_t c = 0; c < channels; ++c) {
      const T *const dv = dz.at(is_tied ? c : 2 * outer + c), *const v_c = v.at(c);
      const T origin = is_tied ? *q.at(c, i) : 0, sign = is_tied ? -1 : 1;
      T total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < keys; ++j) total += p[j] * dv[j] + s[j] * (origin + sign * v_c[j]);
      a[c * stride] = total;
    }
  }
};

}  // namespace
