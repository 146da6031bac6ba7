// What the compiled code shares: vectors, matrices in memory, products of small matrices.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>
#include <utility>

namespace {

// Vectors of the compiler's own kind: GCC and Clang make of them what the processor has. ROWS rows
// of two vectors each are the sums that a product keeps in registers.
#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, ROWS = 8;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, ROWS = 4;
#else
constexpr int VECTOR_BYTES = 16, ROWS = 8;
#endif
template <typename T>
struct Format;
template <>
struct Format<float> {
  using Integer = int32_t;
  typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
  typedef float InMemory __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
  typedef Integer Integers __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int FRACTION = 23, BIAS = 127, TERMS = 8;
  static constexpr float LN2_HIGH = 0x1.63p-1f, LN2_LOW = -0x1.bd0106p-13f;
};
template <>
struct Format<double> {
  using Integer = int64_t;
  typedef double Vector __attribute__((vector_size(VECTOR_BYTES)));
  typedef double InMemory __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
  typedef Integer Integers __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int FRACTION = 52, BIAS = 1023, TERMS = 14;
  static constexpr double LN2_HIGH = 0x1.62e42feep-1, LN2_LOW = 0x1.a39ef35793c76p-33;
};

template <typename T>
using Vector = typename Format<T>::Vector;
template <typename T>
constexpr int64_t LANES = VECTOR_BYTES / sizeof(T);
template <typename T>
constexpr int64_t PANEL = 2 * LANES<T>;

template <typename T>
inline Vector<T> load(const T* at) {
  return *reinterpret_cast<const typename Format<T>::InMemory*>(at);
}
template <typename T>
inline void store(T* at, Vector<T> x) {
  *reinterpret_cast<typename Format<T>::InMemory*>(at) = x;
}
// Every lane and the one that lies DISTANCE, a power of two, from it change places.
template <typename T, int DISTANCE, size_t... LANE>
inline Vector<T> swapped(Vector<T> x, std::index_sequence<LANE...>) {
#if defined(__clang__)
  return __builtin_shufflevector(x, x, (LANE ^ DISTANCE)...);
#else
  return __builtin_shuffle(x, typename Format<T>::Integers{(LANE ^ DISTANCE)...});
#endif
}
// All lanes joined by an operation, in every lane.
template <typename T, int DISTANCE = LANES<T> / 2, typename Join>
inline Vector<T> joined(Vector<T> x, Join join) {
  x = join(x, swapped<T, DISTANCE>(x, std::make_index_sequence<LANES<T>>()));
  if constexpr (DISTANCE > 1) x = joined<T, DISTANCE / 2>(x, join);
  return x;
}
template <typename T>
inline T sum(Vector<T> x) {
  return joined<T>(x, [](Vector<T> a, Vector<T> b) { return a + b; })[0];
}
template <typename T>
inline T maximum(Vector<T> x) {
  return joined<T>(x, [](Vector<T> a, Vector<T> b) { return a > b ? a : b; })[0];
}
// The lanes of x whose number has the bit DISTANCE, and the other lanes of y.
template <typename T, int DISTANCE, size_t... LANE>
inline Vector<T> merged(Vector<T> x, Vector<T> y, std::index_sequence<LANE...>) {
  const typename Format<T>::Integers has_bit{(LANE & DISTANCE ? -1 : 0)...};
  return has_bit ? x : y;
}
// LANES rows of a square become its columns.
template <typename T, int DISTANCE = LANES<T> / 2>
inline void transpose(Vector<T>* rows) {
  constexpr auto lanes = std::make_index_sequence<LANES<T>>();
  for (int r = 0; r < LANES<T>; ++r) {
    if (r & DISTANCE) continue;
    const Vector<T> upper = rows[r], lower = rows[r + DISTANCE];
    rows[r] = merged<T, DISTANCE>(swapped<T, DISTANCE>(lower, lanes), upper, lanes);
    rows[r + DISTANCE] = merged<T, DISTANCE>(lower, swapped<T, DISTANCE>(upper, lanes), lanes);
  }
  if constexpr (DISTANCE > 1) transpose<T, DISTANCE / 2>(rows);
}
// Σ_i x_i y_i of whole vectors.
template <typename T>
inline T product(const T* x, const T* y, int64_t n) {
  Vector<T> total{};
  for (int64_t i = 0; i < n; i += LANES<T>) total += load(x + i) * load(y + i);
  return sum<T>(total);
}
// The same of any n, summed in another format perhaps.
template <typename Total, typename T>
Total dot(const T* x, const T* y, int64_t n) {
  Total total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) total += Total(x[i]) * y[i];
  return total;
}

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// exp x for x ≤ 0, to about one unit in the last place: x = n log 2 + r, |r| ≤ log(2)/2, and the
// Taylor polynomial of r. Zero where it is below the root of the smallest normal number: products
// with such weights leave the normal numbers, which costs a hundred times as much.
template <typename T>
inline Vector<T> exponential(Vector<T> x) {
  using F = Format<T>;
  const T least = T(-0.5 * 0.6931471805599453 * (F::BIAS - 1));
  const T shift = T(1.5) * T(int64_t(1) << F::FRACTION);  // its last bits count units
  Vector<T> bounded = x < least ? Vector<T>{} + least : x;
  Vector<T> shifted = bounded * T(1.4426950408889634) + shift, n = shifted - shift;
  Vector<T> r = (bounded - n * F::LN2_HIGH) - n * F::LN2_LOW;
  Vector<T> y{};
  T factorial = 1;
  T inverse[F::TERMS];
  for (int k = 0; k < F::TERMS; factorial *= ++k) inverse[k] = 1 / factorial;
  for (int k = F::TERMS - 1; k > 1; --k) y = y * r + inverse[k];
  y = y * (r * r) + r + T(1);
  auto power = ((typename F::Integers)shifted << F::FRACTION) +
               (typename F::Integer(F::BIAS) << F::FRACTION);
  return x < least ? Vector<T>{} : y * (Vector<T>)power;
}

// A matrix in memory: entry (i, j) lies at data[i * row + j * column].
template <typename T>
struct Matrix {
  T* data;
  int64_t row, column = 1;
  T* at(int64_t i, int64_t j = 0) const { return data + i * row + j * column; }
  Matrix from(int64_t i) const { return {at(i), row, column}; }
  Matrix transposed() const { return {data, column, row}; }
  operator Matrix<const T>() const { return {data, row, column}; }
};

// Memory of one thread: everything that one pair needs, taken piece by piece.
template <typename T>
struct Room {
  T* next;
  T* take(int64_t n) {
    T* taken = next;
    next += round_up(n, LANES<T>);
    return taken;
  }
};

// The same for all threads, had before they start: a thread has nobody to tell that there is none.
template <typename T>
struct Rooms {
  int64_t each;
  T* data;
  Rooms(int64_t threads, int64_t each) : each(round_up(each, 64)) {
    data = static_cast<T*>(std::aligned_alloc(64, threads * this->each * sizeof(T)));
    if (!data) throw std::bad_alloc();
  }
  ~Rooms() { std::free(data); }
  Rooms(const Rooms&) = delete;
  Room<T> of_this_thread() const { return {data + omp_get_thread_num() * each}; }
};

// Whether there was enough memory for some work.
template <typename Work>
bool had_memory_for(Work work) try {
  work();
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

// C (R rows of V vectors) = or += A B, summed in registers. The rows of B and C lie in memory as
// they are, A may be transposed. Sums over the inner dimension are in order, whatever R and V are;
// what is added to C is summed before: errors of a long sum made of short ones stay small.
template <typename T, int R, int V>
inline void tile(Matrix<T> c, Matrix<const T> a, Matrix<const T> b, int64_t inner, bool add) {
  Vector<T> total[R][V]{};
  for (int64_t k = 0; k < inner; ++k) {
    Vector<T> row[V];
    for (int v = 0; v < V; ++v) row[v] = load(b.at(k, v * LANES<T>));
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) total[r][v] += *a.at(r, k) * row[v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      T* const to = c.at(r, v * LANES<T>);
      store(to, add ? load(to) + total[r][v] : total[r][v]);
    }
}

template <typename T, int V>
inline void strip(Matrix<T> c, Matrix<const T> a, Matrix<const T> b, int64_t rows, int64_t inner,
                  bool add) {
  constexpr int MANY = V == 1 ? 8 : ROWS;
  int64_t r = 0;
  for (; r + MANY <= rows; r += MANY) tile<T, MANY, V>(c.from(r), a.from(r), b, inner, add);
  for (; r + 4 <= rows; r += 4) tile<T, 4, V>(c.from(r), a.from(r), b, inner, add);
  for (; r < rows; ++r) tile<T, 1, V>(c.from(r), a.from(r), b, inner, add);
}

// C = or += A B for (rows, inner) and (inner, columns); columns is a multiple of LANES. Every panel
// of columns reads all of A: of a large transposed one, some rows at a time are brought together.
template <typename T>
void multiply(Matrix<T> c, Matrix<const T> a, Matrix<const T> b, int64_t rows, int64_t inner,
              int64_t columns, bool add) {
  constexpr int64_t ROOM = 4096;
  T room[ROOM];
  const int64_t most = inner < 64 ? 0 : ROOM / inner / 8 * 8;
  const bool together = a.row == 1 && columns >= 4 * PANEL<T> && most > 0;
  const int64_t each = together ? most : rows;
  for (int64_t r = 0; r < rows; r += each) {
    const int64_t count = std::min(each, rows - r);
    Matrix<const T> own = a.from(r);
    if (together) {
      for (int64_t k = 0; k < inner; ++k) std::copy_n(own.at(0, k), count, room + k * count);
      own = {room, 1, count};
    }
    int64_t j = 0;
    for (; count == 1 && j + 4 * PANEL<T> <= columns; j += 4 * PANEL<T>)  // sums side by side
      tile<T, 1, 8>({c.at(r, j), c.row}, own, {b.at(0, j), b.row}, inner, add);
    for (; j < columns; j += PANEL<T>) {
      const Matrix<T> to{c.at(r, j), c.row};
      const Matrix<const T> from{b.at(0, j), b.row};
      if (j + PANEL<T> <= columns)
        strip<T, 2>(to, own, from, count, inner, add);
      else
        strip<T, 1>(to, own, from, count, inner, add);
    }
  }
}

}  // namespace
