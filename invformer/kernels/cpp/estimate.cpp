// Estimates of the Lipschitz constants of a stack's branches at a text, by one step of power
// iteration each (lipschitz/power_iteration.py):
//
//     x ← x + D⁻¹ f(u) of one layer after the other, and f(u) = Vᵀ h(Wᵀu + b), u = ψ_R(D x + b)
//     x ← x + f(x) in a baseline, where f(x) = Vᵀ h(Wᵀu + b) + c, u = LN(x)
//     w = J_iᵀ g,  v_j = w_j/‖w_j‖,  o = J_i v,  g ← o/‖o‖,  ‖o‖ the estimate,  J_i = ∂f_i/∂u
//     (∂f_i/∂x in a baseline)
//
// for K tokens i with left vectors g; in entry_max v = sign w, and of o only the largest entry
// counts. h is attention (attention.cpp has the equations) or an activation. Matrices are channels
// by tokens, so that weights are multiplied from either side as they lie. Of several rows the tokens
// that each of them sees stand one behind the other. Every sum has one order: results do not depend
// on the number of threads.

#include <optional>
#include <vector>

#include "heads.h"
#include "promise.h"

namespace {

struct Call {
  int64_t sequences, tokens, width, streams, branches, steps;  // width of a stream
  int64_t embedded;  // channels of the embedding; the others begin as zeros
  double factor;     // of the estimates
  bool diagonal, entries;
  int threads;
};

// Room for so many columns, an odd number of vectors: caches dislike rows a power of two apart.
template <typename T>
int64_t odd_vectors(int64_t columns) {
  return round_up(columns, LANES<T>) | LANES<T>;
}

// Rows of a matrix, some for each thread.
template <typename Work>
void by_rows(int64_t rows, int threads, Work work) {
  const int64_t each = round_up((rows + threads - 1) / threads, ROWS);
#pragma omp parallel for num_threads(threads)
  for (int64_t first = 0; first < rows; first += each) work(first, std::min(each, rows - first));
}

// The tokens whose rows a step advances.
template <typename T>
void choose(int64_t* chosen, const Branch<T>& f, const T* lengths, const T* promise, int64_t turn,
            int64_t tokens) {
  const bool some = f.at_once < tokens;  // not all
  for (int64_t r = 0; r < f.at_once; ++r) {
    chosen[r] = some ? (r + turn) % tokens : r;
    if (some && r < f.leaders + f.promising)
      chosen[r] = largest(r < f.leaders ? lengths : promise, tokens, chosen, r);
  }
}

// x through a layer; its Jacobian's point is kept. u and y are room for inputs and outputs of h.
// Nothing reads what the last layer writes, nor its units at tokens that are not chosen.
template <typename T>
void forward(const Branch<T>& f, Matrix<T> x, Matrix<T> u, Matrix<T> y, const Point<T>& at,
             const Call& call, const Rooms<T>& rooms, const Promise<T>* promise, bool is_last,
             const int64_t* chosen) {
  const int64_t tokens = call.tokens, width = call.width, row = x.row;
  const int64_t columns = round_up(at.is_packed ? f.at_once : tokens, LANES<T>);
  const Matrix<T> seen = f.epsilon > 0 ? at.u : x.from(f.reads), to = x.from(f.writes);
  if (f.epsilon > 0) {
    std::copy_n(x.at(f.reads), width * row, seen.data);
    standardise(seen, at.u_rho, width, tokens, T(f.epsilon));
  }
  std::fill_n(u.data, f.kernel * width * row, T(0));
  for (int64_t c = 0; c < width; ++c) {
    const T scale = f.scale ? f.scale[c] : 1, shift = f.shift ? f.shift[c] : 0;
    T *const u_c = u.at(c), *const seen_c = seen.at(c);
    for (int64_t j = 0; j < tokens; ++j) u_c[j] = seen_c[j] * scale + shift;
  }
  if (f.radius > 0) {
    into_ball(u, at.u_rho, width, tokens, T(f.radius));
    std::copy_n(u.data, width * row, at.u.data);
  }
  for (int64_t lag = 1; lag < std::min(f.kernel, tokens); ++lag)
    for (int64_t c = 0; c < width; ++c)
      std::copy_n(u.at(c), tokens - lag, u.at(lag * width + c, lag));
  for (int64_t c = 0; at.is_packed && c < f.kernel * width; ++c) {
    for (int64_t r = 0; r < f.at_once; ++r) y.data[r] = *u.at(c, chosen[r]);
    std::copy_n(y.data, f.at_once, u.at(c));
  }
  by_rows(f.inner, call.threads, [&](int64_t first, int64_t count) {
    multiply<T>(at.z.from(first), f.in().transposed().from(first), {u.data, row}, count,
                f.kernel * width, columns, false);
    for (int64_t c = first; c < first + count; ++c)
      for (int64_t j = 0; j < columns; j += LANES<T>) {
        const Vector<T> z = load(at.z.at(c, j)) + (f.b ? f.b[c] : 0);
        const auto [value, slope] = f.heads ? std::pair(z, z) : activate<T>(f.activation, z);
        if (!f.heads) store(y.at(c, j), value);
        store(at.z.at(c, j), slope);
      }
  });
  if (is_last && !f.heads) return;
  const int64_t d = f.heads ? f.head_channels() : 0;
#pragma omp parallel for num_threads(call.threads)
  for (int64_t h = 0; h < f.heads; ++h) {
    Room<T> room = rooms.of_this_thread();
    T *const biases = at.biases + h * row, *const by_lag = room.take(row + 2 * LANES<T>) + LANES<T>;
    const Matrix<T> p{room.take(tokens * row), row}, y_h = y.from(h * d);
    for (int64_t part = h; f.temperatures && part < f.inner / d; part += f.heads)
      into_ball(at.z.from(part * d), at.rho + part * row, d, tokens, T(1));
    std::fill_n(by_lag - LANES<T>, LANES<T>, -std::numeric_limits<T>::infinity());
    std::fill_n(by_lag, row, T(0));
    for (int64_t lag = 0; lag < tokens; ++lag)
      biases[tokens - 1 - lag] = by_lag[lag] =
          f.biases && lag ? f.biases[h * f.bias_stride + lag - 1] : T(0);
    softmax_of_all<T>(f, at.z, tokens, h, by_lag, p);
    by_panels(y_h, at.z.from(f.inner - f.outer + h * d), p, d, tokens);
    if (promise) promise->of_head(h, at, p, y_h, room);
  }
  if (promise) promise->join(at.promise);
  by_rows(width, call.threads, [&](int64_t first, int64_t count) {
    multiply<T>(u.from(first), f.out().transposed().from(first), {y.data, row}, count, f.outer,
                columns, false);
    for (int64_t c = first; c < first + count; ++c) {
      const T shift = f.c ? f.c[c] : 0, inverse = f.inverse ? f.inverse[c] : 1;
      T *const u_c = u.at(c), *const to_c = to.at(c);
      for (int64_t j = 0; j < tokens; ++j) to_c[j] += (u_c[j] + shift) * inverse;
      for (int64_t j = 0; f.norm_scale && j < tokens; ++j)
        to_c[j] = to_c[j] * f.norm_scale[c] + f.norm_shift[c];
    }
  });
}

// The rows J_i of K chosen tokens of one branch and sequence, with room for vectors on both sides.
template <typename T>
struct ChosenRows {
  const Branch<T>& f;
  const Point<T>& at;
  const Call& call;
  const int64_t width = call.width, row = at.z.row, K = f.at_once;
  const int64_t lags = call.diagonal ? 1 : f.kernel, stride = round_up(K, LANES<T>);
  const double shortest =
      1024 * std::sqrt(double(call.tokens * width) * std::numeric_limits<T>::min());
  int64_t* chosen;  // the token of each row
  // g: gradients of outputs, then J x; a = V g, then what V multiplies; z: of hidden units;
  // x: of inputs of hidden units, one lag after another
  // and the points that these have
  Matrix<T> g, a, z, x, u;
  T *s, *rho;  // numbers of each row
  double* factors;

  ChosenRows(const Branch<T>& f, const Point<T>& at, const Call& call, const T* lengths,
             int64_t turn, Room<T>& room)
      : f(f), at(at), call(call) {
    chosen = reinterpret_cast<int64_t*>(room.take(2 * K));
    choose(chosen, f, lengths, at.promise, turn, call.tokens);
    g = {room.take(width * stride), stride};
    a = {room.take(f.outer * stride), stride};
    z = {room.take(f.inner * stride), stride};
    x = {room.take(lags * width * stride), stride};
    u = {room.take(width * stride), stride};
    s = room.take(stride), rho = room.take(stride);
    factors = reinterpret_cast<double*>(room.take(2 * stride));
  }

  // φ′ of a unit at the token of a row.
  T slope(int64_t unit, int64_t r) const {
    return *at.z.at(unit, at.is_packed ? r : chosen[r]);
  }

  // Channels times D or D⁻¹, if D is folded into the weights.
  void scale(Matrix<T> m, T sign) const {
    for (int64_t c = 0; f.log_scale && c < width; ++c) {
      const T factor = std::exp(sign * f.log_scale[c]);
      for (int64_t r = 0; r < K; ++r) m.at(c)[r] *= factor;
    }
  }

  // By the derivative of ψ_R, or of LN without its γ; both are symmetric. Zero before the text.
  void through_input(Matrix<T> m, int64_t lag) const {
    const bool has_norm = f.epsilon > 0;
    const T radius = has_norm ? std::sqrt(T(width)) : T(f.radius);
    if (!(radius > 0)) return;
    for (int64_t r = 0; r < K; ++r) rho[r] = chosen[r] < lag ? 0 : at.u_rho[chosen[r] - lag];
    for (int64_t c = 0; c < width; ++c)
      for (int64_t r = 0; r < K; ++r) u.at(c)[r] = at.u.at(c)[std::max<int64_t>(chosen[r] - lag, 0)];
    if (has_norm) centre(m, width, K, s);
    ball_derivative<T>(m, u, rho, width, K, radius, s);
  }

  // Channels times γ of LN.
  void by_gain(Matrix<T> m) const {
    for (int64_t c = 0; f.epsilon > 0 && c < width; ++c)
      for (int64_t r = 0; r < stride; ++r) m.at(c)[r] *= f.scale[c];
  }

  // a = V g.
  void pull_outputs() {
    scale(g, 1);
    multiply<T>(a, f.out(), {g.data, stride}, f.outer, width, stride, false);
  }

  // x = Jᵀ g of hidden units.
  void pull() {
    for (int64_t c = 0; c < f.inner; ++c)
      for (int64_t r = 0; r < K; ++r) z.at(c)[r] = a.at(c)[r] * slope(c, r);
    multiply<T>(x, f.in(), {z.data, stride}, lags * width, f.inner, stride, false);
    for (int64_t lag = 0; lag < lags; ++lag) {
      const Matrix<T> dx = x.from(lag * width);
      scale(dx, -1);
      by_gain(dx);
      through_input(dx, lag);
    }
  }

  // Every token of x at length one, or its signs in entry_max.
  void normalise() {
    for (int64_t lag = 0; lag < lags; ++lag) {
      const Matrix<T> m = x.from(lag * width);
      std::fill_n(factors, stride, 0.0);
      for (int64_t c = 0; c < width; ++c)
        for (int64_t r = 0; r < K; ++r) factors[r] += double(m.at(c)[r]) * m.at(c)[r];
      for (int64_t r = 0; r < K; ++r)
        factors[r] = chosen[r] < lag ? 0 : 1 / std::max(std::sqrt(factors[r]), shortest);
      for (int64_t c = 0; c < width; ++c)
        for (int64_t r = 0; r < stride; ++r) {
          T& w = m.at(c)[r];
          w = call.entries ? T((factors[r] > 0) * ((w > 0) - (w < 0))) : w * T(factors[r]);
        }
    }
  }

  // a = what V multiplies of J x, of hidden units.
  void push() {
    for (int64_t lag = 0; lag < lags; ++lag) {
      const Matrix<T> dx = x.from(lag * width);
      through_input(dx, lag);
      by_gain(dx);
      scale(dx, -1);
    }
    multiply<T>(z, f.in().transposed(), {x.data, stride}, f.inner, lags * width, stride, false);
    for (int64_t c = 0; c < f.inner; ++c)
      for (int64_t r = 0; r < K; ++r) a.at(c)[r] = z.at(c)[r] * slope(c, r);
  }

  // a ← what V multiplies of J x, where x are the vectors of length one of Jᵀ g, of hidden units.
  void improve() {
    pull();
    normalise();
    push();
  }

  // g = J x.
  void push_outputs() {
    multiply<T>(g, f.out().transposed(), {a.data, stride}, width, f.outer, stride, false);
    scale(g, 1);
  }
};

// One step for K rows of one branch and sequence; the largest gain. Attention has ``heads``.
template <typename T>
T step(const Branch<T>& f, const Point<T>& at, T* left, T* lengths, int64_t turn, const Call& call,
       const Heads<T>* heads, Room<T> room) {
  ChosenRows<T> rows(f, at, call, lengths, turn, room);
  const Matrix<T> g = rows.g;
  std::fill_n(g.data, rows.width * rows.stride, T(0));
  for (int64_t r = 0; r < rows.K; ++r)
    for (int64_t c = 0; c < rows.width; ++c) g.at(c)[r] = left[rows.chosen[r] * rows.width + c];
  rows.pull_outputs();
  for (int64_t r = 0; heads && r < rows.K; ++r)
    heads->improve(rows.a.at(0, r), rows.stride, rows.chosen[r], call.diagonal, call.entries,
                   rows.shortest);
  if (!heads) rows.improve();
  rows.push_outputs();
  // The gain ‖g‖ of every token, and g/‖g‖ for the next step.
  T largest = 0;
  for (int64_t r = 0; r < rows.K; ++r) {
    double square = 0;
    int64_t most = 0;
    for (int64_t c = 0; c < rows.width; ++c) {
      square += double(g.at(c)[r]) * g.at(c)[r];
      if (is_less(std::abs(*g.at(most, r)), std::abs(g.at(c)[r]))) most = c;
    }
    const double gain = call.entries ? std::abs(*g.at(most, r)) : std::sqrt(square);
    if (is_less<T>(largest, gain)) largest = gain;
    lengths[rows.chosen[r]] = gain;
    for (int64_t c = 0; gain > rows.shortest && c < rows.width; ++c)
      left[rows.chosen[r] * rows.width + c] = call.entries && c != most ? 0 : g.at(c)[r] / gain;
  }
  return largest;
}

// All branches, sequence by sequence. The embeddings of symbols and positions enter the first layer.
template <typename T>
void advance(const Branch<T>* branches, const int64_t* text, const T* symbols, const T* positions,
             const Call& call) {
  const int64_t tokens = call.tokens, width = call.width, row = odd_vectors<T>(tokens);
  const int64_t channels = call.streams * width;
  int64_t inner = 0, outer = 0, heads = 0, kernel = 1, of_step = 0, of_promise = 0;
  for (int64_t i = 0; i < call.branches; ++i) {
    const Branch<T>& f = branches[i];
    inner = std::max(inner, f.inner);
    outer = std::max(outer, f.outer);
    heads = std::max(heads, f.heads);
    kernel = std::max(kernel, f.kernel);
    const int64_t stride = round_up(f.at_once, LANES<T>);
    const int64_t of_rows = (2 * width + f.outer + f.inner + f.kernel * width + 6) * stride;
    of_step = std::max(of_step, of_rows + Heads<T>::size(f, tokens, width, row));
    of_promise = std::max(of_promise, Promise<T>::size(f, width, row));
  }
  const int64_t of_point = (inner + width + 2 + 4 * heads) * row;
  const int64_t of_head = (tokens + 2) * row + Promise<T>::size_of_head(row);
  const int64_t of_layer = (channels + kernel * width + outer) * row + of_promise;
  const Rooms<T> points(1, call.branches * of_point + of_layer);
  const Rooms<T> rooms(call.threads, std::max(of_step, of_head) + 32 * LANES<T>);
  Room<T> all{points.data};
  const Matrix<T> state{all.take(channels * row), row}, u{all.take(kernel * width * row), row};
  const Matrix<T> y{all.take(outer * row), row};
  const Room<T> of_promises{all.take(of_promise)};
  auto point = [&](int64_t i) {
    Room<T> own{all.next + i * of_point};
    return Point<T>{{own.take(width * row), row}, {own.take(inner * row), row}, own.take(row),
                    own.take(3 * heads * row), own.take(heads * row), own.take(row),
                    i + 1 == call.branches && !branches[i].heads && call.steps == 1};
  };
  std::vector<int64_t> chosen(tokens);
  for (int64_t i = 0; i < call.branches; ++i) *branches[i].estimate = 0;
  for (int64_t sequence = 0; sequence < call.sequences; ++sequence) {
    std::fill_n(state.data, channels * row, T(0));
    for (int64_t j = 0; j < tokens; ++j) {
      const T *const symbol = symbols + text[sequence * tokens + j] * call.embedded,
              *const position = positions + j * call.embedded;
      for (int64_t c = 0; c < call.embedded; ++c) state.at(c)[j] = symbol[c] + position[c];
    }
    for (int64_t i = 0; i < call.branches; ++i) {
      const Branch<T>& f = branches[i];
      const int64_t at = sequence * tokens;
      std::optional<Promise<T>> promise;
      if (f.promising) promise.emplace(f, f.left + at * width, f.lengths + at, tokens, width, row,
                                       of_promises);
      if (point(i).is_packed) choose<T>(chosen.data(), f, f.lengths + at, nullptr, *f.turn, tokens);
      forward<T>(f, state, u, y, point(i), call, rooms, promise ? &*promise : nullptr,
                 i + 1 == call.branches, chosen.data());
    }
#pragma omp parallel for num_threads(call.threads) schedule(dynamic)
    for (int64_t i = 0; i < call.branches; ++i) {
      const Branch<T>& f = branches[i];
      const int64_t at = sequence * tokens;
      Room<T> room = rooms.of_this_thread();
      const Point<T> here = point(i);
      std::optional<Heads<T>> attention;
      if (f.heads) attention.emplace(f, here, tokens, width, room);
      T gain = 0;
      for (int64_t n = 0; n < call.steps; ++n)
        gain = step<T>(f, here, f.left + at * width, f.lengths + at,
                       *f.turn + n * f.in_turn, call, attention ? &*attention : nullptr,
                       room);
      gain *= T(call.factor);
      if (is_less(*f.estimate, gain)) *f.estimate = gain;
    }
  }
}

}  // namespace

// Each returns whether there was enough memory.
#define EXPORT(T, NAME)                                                                    \
  bool NAME##_advance(const Branch<T>* branches, const int64_t* text, const T* symbols,   \
                      const T* positions, Call call) {                                    \
    return had_memory_for([&] { advance<T>(branches, text, symbols, positions, call); }); \
  }

extern "C" {
EXPORT(float, float32)
EXPORT(double, float64)
}
