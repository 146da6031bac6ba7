// What the rows of a branch's Jacobian are made of: derivatives of ψ, of activations, and of softmax.
// Matrices are channels by tokens.
#pragma once

#include "vectors.h"

namespace {

enum Activation { SILU, GELU, RELU, TANH };

// ρ = 1/√(1 + ‖x‖²/R²) of every column, and x ← ψ_R(x) = ρ x.
template <typename T>
void into_ball(Matrix<T> x, T* rho, int64_t channels, int64_t columns, T radius) {
  std::fill_n(rho, columns, T(0));
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) rho[j] += x.at(c)[j] * x.at(c)[j];
  for (int64_t j = 0; j < columns; ++j) rho[j] = 1 / std::sqrt(1 + rho[j] / (radius * radius));
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) x.at(c)[j] *= rho[j];
}

// dz ← ρ (dz − u (u·dz)/R²) of every column, for points u of the ball.
template <typename T>
void ball_derivative(Matrix<T> dz, Matrix<const T> u, const T* rho, int64_t channels,
                     int64_t columns, T radius, T* along) {
  std::fill_n(along, columns, T(0));
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) along[j] += u.at(c)[j] * dz.at(c)[j];
  for (int64_t j = 0; j < columns; ++j) along[j] /= radius * radius;
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j)
      dz.at(c)[j] = rho[j] * (dz.at(c)[j] - along[j] * u.at(c)[j]);
}

// Every column less its mean; ``mean`` is room for one row.
template <typename T>
void centre(Matrix<T> x, int64_t channels, int64_t columns, T* mean) {
  std::fill_n(mean, columns, T(0));
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) mean[j] += x.at(c)[j];
  for (int64_t j = 0; j < columns; ++j) mean[j] /= channels;
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) x.at(c)[j] -= mean[j];
}

// x ← x̂ = ρ (x − mean), ρ = 1/√(variance + ε), of every column. Its derivative is that of ψ in a
// ball of radius √channels, of a column less its mean.
template <typename T>
void standardise(Matrix<T> x, T* rho, int64_t channels, int64_t columns, T epsilon) {
  centre(x, channels, columns, rho);
  std::fill_n(rho, columns, T(0));
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) rho[j] += x.at(c)[j] * x.at(c)[j];
  for (int64_t j = 0; j < columns; ++j) rho[j] = 1 / std::sqrt(rho[j] / channels + epsilon);
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < columns; ++j) x.at(c)[j] *= rho[j];
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

}  // namespace
