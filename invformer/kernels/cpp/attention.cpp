// Causal attention with a bias of the lag, and its gradients, on the vector units of a CPU.
//
//     Y = P V,   P = softmax_j S,   S_ij = s q_i·k_j + column_j + b(i − j),   j ≤ i
//
// with s = 1/√d and no column for dot products; for tied L2 attention k = v = q − q_0, s = 2/√d and
// column_j = −‖k_j‖²/√d, and Y gets q_0 back. Rows of P exist for a block of queries at a time and
// are computed again in the backward pass, from log Σ_j exp S_ij (Dao et al. 2022): memory is
// linear in N. With P and dP = dY Vᵀ,
//
//     dS = P∘(dP − rowsum(P∘dP)),  dq = s dS k,  dk = s dSᵀ q,  dv = Pᵀ dY,
//     db(lag) = Σ_i dS_{i, i−lag}
//
// and for L2 dq is the sum of all three, less s (Σ_i dS_ij) k_j of the column.
//
// In a ball, q, k and v are ψ(z) = z/√(1 + ‖z‖²) of rows z, and s is the head's temperature; if strictly
// causal, keys and values are those of the token before, of the first token zero. With u = ψ(z) and
// ρ = 1/√(1 + ‖z‖²)
//
//     dz = ρ (du − u (u·du)),  ds = Σ_i q_i·(dS k)_i
//
// A pair of sample and head is one thread's; every sum has one order, so that results depend
// neither on the number of threads, nor on the batch, nor on later tokens.

#include "vectors.h"

namespace {

// Queries whose logits exist at a time: two matrices of such rows are to stay in a second-level
// cache. Anything from 12 to 60 was as fast.
constexpr int64_t BLOCK = 24;

// ---- one pair of sample and head ---------------------------------------------------------------

template <typename T>
struct Sizes {
  int64_t tokens, channels;
  int64_t width = round_up(channels, LANES<T>);  // of a row of channels, zeros at its end
  int64_t keys = round_up(tokens, PANEL<T>);     // of a row of logits
  int64_t row = keys + LANES<T>;  // from one to the next: no power of two, which caches dislike
  int64_t rows() const { return tokens * width; }     // of channels, all together
  int64_t panels() const { return keys * channels; }  // of their transpose
  int64_t logits() const { return BLOCK * row; }
  T scale(bool l2) const { return (l2 ? 2 : 1) / std::sqrt(T(channels)); }
};

// How rows of memory are seen.
struct View {
  bool in_ball = false, strictly_causal = false;
};

// Rows of channels as they are seen, and 1/√(1 + ‖x‖²) of each in a ball.
template <typename T>
struct Rows {
  T *data, *shrinkage;
  Rows(Sizes<T> size, Room<T>& room)
      : data(room.take(size.rows())), shrinkage(room.take(size.keys)) {}
  static int64_t room(Sizes<T> size) { return size.rows() + size.keys; }
};

// The rows of x, less `centre` if there is one, times `scale`.
template <typename T>
void copy_rows(Rows<T> to, Matrix<const T> x, const T* centre, T scale, Sizes<T> size,
               View view) {
  T* out = to.data;
  std::fill_n(out, size.rows(), T(0));
  for (int64_t i = view.strictly_causal; i < size.tokens; ++i)
    std::copy_n(x.at(i - view.strictly_causal), size.channels, out + i * size.width);
  for (int64_t i = 0; i < size.tokens; ++i, out += size.width) {
    if (centre)
      for (int64_t c = 0; c < size.channels; ++c) out[c] -= centre[c];
    T factor = scale;
    if (view.in_ball) {
      to.shrinkage[i] = 1 / std::sqrt(1 + product(out, out, size.width));
      factor *= to.shrinkage[i];
    }
    for (int64_t c = 0; c < size.width; c += LANES<T>) store(out + c, factor * load(out + c));
  }
}

// The way back: gradients g of what is seen, u times `scale`, become those of x.
template <typename T>
void write_rows(Matrix<T> dx, T* g, Rows<T> u, T scale, Sizes<T> size, View view) {
  for (int64_t i = 0; i < size.tokens; ++i) {
    T *const g_i = g + i * size.width, factor = scale;
    if (view.in_ball) {
      const T* const u_i = u.data + i * size.width;
      const T along = product<T>(u_i, g_i, size.width) / (scale * scale);
      for (int64_t c = 0; c < size.width; c += LANES<T>)
        store(g_i + c, load(g_i + c) - along * load(u_i + c));
      factor *= u.shrinkage[i];
    }
    for (int64_t c = 0; c < size.width; c += LANES<T>) store(g_i + c, factor * load(g_i + c));
  }
  for (int64_t i = view.strictly_causal; i < size.tokens; ++i)
    std::copy_n(g + i * size.width, size.channels, dx.at(i - view.strictly_causal));
  if (view.strictly_causal && size.tokens > 0) std::fill_n(dx.at(size.tokens - 1), size.channels, T(0));
}

// The transpose of rows of channels, in panels of PANEL tokens that lie together; zeros at the end.
template <typename T>
void copy_panels(T* out, const T* rows, Sizes<T> size) {
  for (int64_t first = 0; first < size.keys; first += LANES<T>)
    for (int64_t from = 0; from < size.channels; from += LANES<T>) {
      Vector<T> block[LANES<T>];
      for (int64_t j = 0; j < LANES<T>; ++j)
        block[j] = first + j < size.tokens ? load(rows + (first + j) * size.width + from)
                                           : Vector<T>{};
      transpose<T>(block);
      T* const to = out + first / PANEL<T> * PANEL<T> * size.channels + first % PANEL<T>;
      for (int64_t c = from; c < std::min(from + LANES<T>, size.channels); ++c)
        store(to + c * PANEL<T>, block[c - from]);
    }
}

// x_i·y_j for some rows i and the first `keys` tokens j.
template <typename T>
void multiply_panels(Matrix<T> s, const T* x, const T* panels, int64_t rows, int64_t keys,
                     Sizes<T> size) {
  for (int64_t j = 0; j < keys; j += PANEL<T>)
    multiply<T>({s.at(0, j), s.row}, {x, size.width}, {panels + j * size.channels, PANEL<T>}, rows,
                size.channels, PANEL<T>, false);
}

// s_j += column_j + b(i − j) for all j ≤ i, with b(lag) at by_lag[−lag], and −∞ for those that
// follow in the same vector; the largest of them.
template <typename T>
inline T complete(T* s, const T* column, const T* by_lag, int64_t i) {
  using Integer = typename Format<T>::Integer;
  constexpr T INFINITE = std::numeric_limits<T>::infinity();
  const T* bias = by_lag - i;
  typename Format<T>::Integers lanes{};  // 0, 1, 2, …
  for (int lane = 0; lane < LANES<T>; ++lane) lanes[lane] = lane;
  Vector<T> most = Vector<T>{} - INFINITE;
  for (int64_t j = 0; j <= i; j += LANES<T>) {
    Vector<T> x = load(s + j) + load(bias + j);
    if (column) x += load(column + j);
    x = lanes <= Integer(i - j) ? x : Vector<T>{} - INFINITE;
    store(s + j, x);
    most = most > x ? most : x;
  }
  return maximum<T>(most);
}

// s_j ← exp(s_j − shift) for j ≤ i, zero from there to `keys`; their sum.
template <typename T>
inline T exponentials(T* s, T shift, int64_t i, int64_t keys) {
  Vector<T> total{};
  int64_t j = 0;
  for (; j <= i; j += LANES<T>) {
    Vector<T> p = exponential<T>(load(s + j) - shift);
    store(s + j, p);
    total += p;
  }
  for (; j < keys; j += LANES<T>) store(s + j, Vector<T>{});
  return sum<T>(total);
}

// What logits are made of, rows of channels and panels of their transpose.
template <typename T>
struct Logits {
  Sizes<T> size;
  Rows<T> keys, queries;
  T *panels, *columns, *lags;
  const T* column = nullptr;
  const T* by_lag;  // b(lag) lies at by_lag[−lag]

  static int64_t room(Sizes<T> size) {
    return 2 * Rows<T>::room(size) + size.panels() + 2 * size.keys;
  }
  Logits(Sizes<T> size, Room<T>& room)
      : size(size),
        keys(size, room),
        queries(size, room),
        panels(room.take(size.panels())),
        columns(room.take(size.keys)),
        lags(room.take(size.keys)),
        by_lag(lags + size.tokens - 1) {}

  void set(Matrix<const T> q, Matrix<const T> k, const T* bias, bool l2, T scale, View of_keys) {
    copy_rows(keys, k, l2 ? k.data : nullptr, T(1), size, of_keys);
    copy_rows(queries, q, l2 ? q.data : nullptr, scale, size, {of_keys.in_ball, false});
    copy_panels(panels, keys.data, size);
    for (int64_t lag = 0; lag < size.tokens; ++lag) lags[size.tokens - 1 - lag] = bias[lag];
    if (!l2) return;
    column = columns;
    for (int64_t j = 0; j < size.tokens; ++j) {
      const T* k_j = keys.data + j * size.width;
      T square = 0;
      for (int64_t c = 0; c < size.channels; ++c) square += k_j[c] * k_j[c];
      columns[j] = -scale / 2 * square;
    }
  }

  // s q_i·k_j of a block of queries.
  void products(Matrix<T> s, int64_t first, int64_t rows, int64_t visible) const {
    multiply_panels(s, queries.data + first * size.width, panels, rows, visible, size);
  }
};

// ---- forward and backward ----------------------------------------------------------------------

// (B, H, N, d) by its strides; channels lie together.
template <typename T>
struct Heads {
  T* data;
  int64_t sample, head, token;
  Matrix<T> of(int64_t b, int64_t h) const { return {data + b * sample + h * head, token}; }
};

template <typename T>
struct Call {
  int64_t samples, heads;
  Sizes<T> size;
  bool l2;
  int threads;
  const T* temperature = nullptr;  // of every head, in a ball
  View keys = {};

  T scale(int64_t head) const { return temperature ? temperature[head] : size.scale(l2); }
};

template <typename T>
void forward(Heads<const T> q, Heads<const T> k, Heads<const T> v, const T* bias, Heads<T> y,
             T* log_mass, Call<T> call) {
  const auto size = call.size;
  const bool l2 = call.l2;
  const int64_t tokens = size.tokens, width = size.width;
  const Rooms<T> rooms(call.threads, Logits<T>::room(size) + size.logits() + 2 * BLOCK * width +
                                         (l2 ? 0 : Rows<T>::room(size)));
#pragma omp parallel num_threads(call.threads)
  {
    auto room = rooms.of_this_thread();
    Logits<T> logits(size, room);
    const Matrix<T> p{room.take(size.logits()), size.row}, mean{room.take(BLOCK * width), width};
    T* const mass = room.take(BLOCK);
    const Rows<T> values = l2 ? logits.keys : Rows<T>(size, room);
#pragma omp for schedule(dynamic)
    for (int64_t pair = 0; pair < call.samples * call.heads; ++pair) {
      const int64_t b = pair / call.heads, h = pair % call.heads;
      const Matrix<T> of_y = y.of(b, h);
      const T* centre = l2 ? q.of(b, h).data : nullptr;
      logits.set(q.of(b, h), k.of(b, h), bias + h * tokens, l2, call.scale(h), call.keys);
      if (!l2) copy_rows<T>(values, v.of(b, h), nullptr, T(1), size, call.keys);
      for (int64_t first = 0; first < tokens; first += BLOCK) {
        const int64_t end = std::min(first + BLOCK, tokens), visible = round_up(end, PANEL<T>);
        logits.products(p, first, end - first, visible);
        for (int64_t i = first; i < end; ++i) {
          T* const p_i = p.at(i - first);
          const T largest = complete(p_i, logits.column, logits.by_lag, i);
          mass[i - first] = exponentials(p_i, largest, i, visible);
          log_mass[pair * tokens + i] = largest + std::log(mass[i - first]);
        }
        multiply<T>(mean, {p.data, p.row}, {values.data, width}, end - first, end, width, false);
        for (int64_t i = first; i < end; ++i) {
          T *const y_i = of_y.at(i), *const mean_i = mean.at(i - first);
          const T share = 1 / mass[i - first];
          for (int64_t c = 0; c < size.channels; ++c)
            y_i[c] = share * mean_i[c] + (l2 ? centre[c] : T(0));
        }
      }
    }
  }
}

template <typename T>
void backward(Heads<const T> dy, Heads<const T> q, Heads<const T> k, Heads<const T> v,
              const T* bias, const T* log_mass, Heads<T> dq, Heads<T> dk, Heads<T> dv, T* dbias,
              T* dtemperature, Call<T> call) {
  const auto size = call.size;
  const bool l2 = call.l2;
  const int64_t tokens = size.tokens, width = size.width, all = size.rows();
  const Rooms<T> rooms(call.threads, Logits<T>::room(size) + 2 * size.logits() + 2 * all +
                                         4 * size.keys +
                                         (l2 ? 0 : 2 * all + Rows<T>::room(size) + size.panels()));
#pragma omp parallel num_threads(call.threads)
  {
    auto room = rooms.of_this_thread();
    Logits<T> logits(size, room);
    const Matrix<T> p{room.take(size.logits()), size.row}, ds{room.take(size.logits()), size.row};
    T* const received = room.take(size.keys);    // Σ_i dS_ij
    T* const by_lag = room.take(2 * size.keys);  // the gradient of b(lag) at [tokens − 1 − lag]
    const Rows<T> g(size, room);                 // dY
    // Tied, all three gradients are one sum, and s k is at hand as the queries.
    T* const to_q = room.take(all);
    T* const to_k = l2 ? to_q : room.take(all);
    T* const to_v = l2 ? to_q : room.take(all);
    const Rows<T> values = l2 ? logits.keys : Rows<T>(size, room);
    T* const panels = l2 ? logits.panels : room.take(size.panels());
    const T* const keys = (l2 ? logits.queries : logits.keys).data;
#pragma omp for schedule(dynamic)
    for (int64_t pair = 0; pair < call.samples * call.heads; ++pair) {
      const int64_t b = pair / call.heads, h = pair % call.heads;
      logits.set(q.of(b, h), k.of(b, h), bias + h * tokens, l2, call.scale(h), call.keys);
      copy_rows<T>(g, dy.of(b, h), nullptr, T(1), size, {});
      if (!l2) {
        copy_rows<T>(values, v.of(b, h), nullptr, T(1), size, call.keys);
        copy_panels(panels, values.data, size);
      }
      for (T* total : {to_q, to_k, to_v}) std::fill_n(total, all, T(0));
      std::fill_n(received, size.keys, T(0));
      std::fill_n(by_lag, 2 * size.keys, T(0));
      for (int64_t first = 0; first < tokens; first += BLOCK) {
        const int64_t end = std::min(first + BLOCK, tokens), visible = round_up(end, PANEL<T>);
        const int64_t rows = end - first, at = first * width;
        logits.products(p, first, rows, visible);
        multiply_panels(ds, g.data + at, panels, rows, visible, size);
        for (int64_t i = first; i < end; ++i) {
          T *p_i = p.at(i - first), *ds_i = ds.at(i - first), *of_lag = by_lag + tokens - 1 - i;
          complete(p_i, logits.column, logits.by_lag, i);
          exponentials(p_i, log_mass[pair * tokens + i], i, visible);
          const T mean = product<T>(p_i, ds_i, visible);
          for (int64_t j = 0; j < visible; j += LANES<T>) {
            const Vector<T> x = load(p_i + j) * (load(ds_i + j) - mean);
            store(ds_i + j, x);
            store(of_lag + j, load(of_lag + j) + x);
            if (l2) store(received + j, load(received + j) + x);
          }
        }
        const Matrix<const T> p_t{p.data, 1, p.row}, ds_t{ds.data, 1, ds.row};
        multiply<T>({to_q + at, width}, {ds.data, ds.row}, {keys, width}, rows, end, width, true);
        multiply<T>({to_k, width}, ds_t, {logits.queries.data + at, width}, end, rows, width, true);
        multiply<T>({to_v, width}, p_t, {g.data + at, width}, end, rows, width, true);
      }
      if (l2) {
        for (int64_t i = 0; i < tokens; ++i)
          for (int64_t c = 0; c < size.channels; ++c)
            to_q[i * width + c] -= received[i] * logits.queries.data[i * width + c];
      } else {
        write_rows(dk.of(b, h), to_k, logits.keys, T(1), size, call.keys);
        write_rows(dv.of(b, h), to_v, values, T(1), size, call.keys);
      }
      const T scale = l2 ? T(1) : call.scale(h);
      if (dtemperature)  // queries hold s q
        dtemperature[pair] = product<T>(logits.queries.data, to_q, all) / scale;
      write_rows(dq.of(b, h), to_q, logits.queries, scale, size, {call.keys.in_ball, false});
      for (int64_t lag = 0; lag < tokens; ++lag)
        dbias[pair * tokens + lag] = by_lag[tokens - 1 - lag];
    }
  }
}

}  // namespace

// Each returns whether there was enough memory.
#define EXPORT(T, NAME)                                                                       \
  bool NAME##_attention_forward(Heads<const T> q, Heads<const T> k, Heads<const T> v,         \
                                const T* bias, const T* temperature, bool strictly_causal,    \
                                Heads<T> y, T* log_mass, int64_t samples, int64_t heads,      \
                                int64_t tokens, int64_t channels, bool l2, int threads) {     \
    const View keys{temperature != nullptr, strictly_causal};                                 \
    const Call<T> call{samples, heads, {tokens, channels}, l2, threads, temperature, keys};   \
    return had_memory_for([&] { forward<T>(q, k, v, bias, y, log_mass, call); });             \
  }                                                                                           \
  bool NAME##_attention_backward(                                                             \
      Heads<const T> dy, Heads<const T> q, Heads<const T> k, Heads<const T> v, const T* bias, \
      const T* temperature, bool strictly_causal, const T* log_mass, Heads<T> dq,             \
      Heads<T> dk, Heads<T> dv, T* dbias, T* dtemperature, int64_t samples, int64_t heads,    \
      int64_t tokens, int64_t channels, bool l2, int threads) {                               \
    const View keys{temperature != nullptr, strictly_causal};                                 \
    const Call<T> call{samples, heads, {tokens, channels}, l2, threads, temperature, keys};   \
    return had_memory_for([&] {                                                               \
      backward<T>(dy, q, k, v, bias, log_mass, dq, dk, dv, dbias, dtemperature, call);        \
    });                                                                                       \
  }

extern "C" {
EXPORT(float, float32)
EXPORT(double, float64)
}
