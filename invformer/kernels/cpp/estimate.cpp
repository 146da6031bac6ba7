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

#include "branch.h"

namespace {

struct Call {
  int64_t sequences, tokens, width, streams, branches, steps;  // width of a stream
  bool diagonal, entries;
  int threads;
};

// Whether a < b, where what is no number is the largest: it is found and not lost.
template <typename T>
bool is_less(T a, T b) {
  return a == a && !(b <= a);
}

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

// x through a layer; its Jacobian's point is kept. u and y are room for inputs and outputs of h.
template <typename T>
void forward(const Branch<T>& f, Matrix<T> x, Matrix<T> u, Matrix<T> y, const Point<T>& at,
             const Call& call, const Rooms<T>& rooms) {
  const int64_t tokens = call.tokens, width = call.width, row = x.row;
  const int64_t columns = round_up(tokens, LANES<T>);
  const Matrix<T> seen = f.epsilon > 0 ? at.u : x.from(f.reads), to = x.from(f.writes);
  if (f.epsilon > 0) {
    std::copy_n(x.at(f.reads), width * row, seen.data);
    standardise(seen, at.u_rho, width, tokens, T(f.epsilon));
  }
  std::fill_n(u.data, f.kernel * width * row, T(0));
  for (int64_t c = 0; c < width; ++c)
    for (int64_t j = 0; j < tokens; ++j)
      *u.at(c, j) = *seen.at(c, j) * (f.scale ? f.scale[c] : 1) + (f.shift ? f.shift[c] : 0);
  if (f.radius > 0) {
    into_ball(u, at.u_rho, width, tokens, T(f.radius));
    std::copy_n(u.data, width * row, at.u.data);
  }
  for (int64_t lag = 1; lag < std::min(f.kernel, tokens); ++lag)
    for (int64_t c = 0; c < width; ++c)
      std::copy_n(u.at(c), tokens - lag, u.at(lag * width + c, lag));
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
  const int64_t d = f.heads ? f.head_channels() : 0;
#pragma omp parallel for num_threads(call.threads)
  for (int64_t h = 0; h < f.heads; ++h) {
    Room<T> room = rooms.of_this_thread();
    T *const p = room.take(row), *const biases = at.biases + h * row;
    const Matrix<T> transposed{room.take(tokens * row), row};
    std::fill_n(transposed.data, tokens * row, T(0));
    for (int64_t part = h; f.temperatures && part < f.inner / d; part += f.heads)
      into_ball(at.z.from(part * d), at.rho + part * row, d, tokens, T(1));
    for (int64_t lag = 0; lag < tokens; ++lag)
      biases[tokens - 1 - lag] = f.biases && lag ? f.biases[h * f.bias_stride + lag - 1] : T(0);
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t keys = softmax<T>(f, at, tokens, h, i, p);
      for (int64_t j = 0; j < keys; ++j) *transposed.at(j, i) = p[j];
    }
    const Matrix<T> v = at.z.from(f.inner - f.outer + h * d);
    multiply<T>(y.from(h * d), {v.data, row}, {transposed.data, row}, d, tokens, columns, false);
  }
  by_rows(width, call.threads, [&](int64_t first, int64_t count) {
    multiply<T>(u.from(first), f.out().transposed().from(first), {y.data, row}, count, f.outer,
                columns, false);
    for (int64_t c = first; c < first + count; ++c)
      for (int64_t j = 0; j < tokens; ++j) {
        T& sum = *to.at(c, j);
        sum += (*u.at(c, j) + (f.c ? f.c[c] : 0)) * (f.inverse ? f.inverse[c] : 1);
        if (f.norm_scale) sum = sum * f.norm_scale[c] + f.norm_shift[c];
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
  const bool some = K < call.tokens;  // not all
  const double shortest =
      1024 * std::sqrt(double(call.tokens * width) * std::numeric_limits<T>::min());
  int64_t *chosen, *first;  // the token of each row, and its first column of z and x
  int64_t wide;             // columns of z and x
  // g: gradients of outputs, then J x; a = V g; z: of hidden units, or of all heads' channels;
  // x: of inputs, one lag after another
  Matrix<T> g, a, z, x;
  T *p, *s;                 // P of every row and head, and room for one row
  double* factors;

  ChosenRows(const Branch<T>& f, const Point<T>& at, const Call& call, const T* lengths,
             int64_t turn, Room<T>& room)
      : f(f), at(at), call(call) {
    chosen = reinterpret_cast<int64_t*>(room.take(4 * K));
    first = chosen + K;
    int64_t columns = 0;
    for (int64_t r = 0; r < K; ++r) {
      chosen[r] = some ? (r + turn) % call.tokens : r;
      if (some && r == 0)
        chosen[r] = std::max_element(lengths, lengths + call.tokens, is_less<T>) - lengths;
      first[r] = columns;
      columns += f.heads ? chosen[r] + 1 : 1;
    }
    wide = odd_vectors<T>(columns);
    g = {room.take(width * stride), stride};
    a = {room.take(f.outer * stride), stride};
    z = {room.take(f.inner * wide), wide};
    x = {room.take(lags * width * wide), wide};
    p = room.take(K * f.heads * row);
    s = room.take(row);
    factors = reinterpret_cast<double*>(room.take(2 * wide));
  }

  // Channels times D or D⁻¹, if D is folded into the weights.
  void scale(Matrix<T> m, int64_t count, T sign) const {
    for (int64_t c = 0; f.log_scale && c < width; ++c) {
      const T factor = std::exp(sign * f.log_scale[c]);
      for (int64_t j = 0; j < count; ++j) *m.at(c, j) *= factor;
    }
  }

  // By the derivative of ψ_R, or of LN without its γ; both are symmetric.
  void through_input(Matrix<T> m, int64_t lag) const {
    const bool has_norm = f.epsilon > 0;
    const T radius = has_norm ? std::sqrt(T(width)) : T(f.radius);
    for (int64_t r = 0; radius > 0 && r < K; ++r) {
      const int64_t token = f.heads ? 0 : chosen[r] - lag, count = f.heads ? chosen[r] + 1 : 1;
      const Matrix<T> dx{m.at(0, first[r]), wide};
      if (token < 0) continue;
      if (has_norm) centre(dx, width, count, s);
      ball_derivative<T>(dx, {at.u.at(0, token), row}, at.u_rho + token, width, count, radius, s);
    }
  }

  // Channels times γ of LN.
  void by_gain(Matrix<T> m) const {
    for (int64_t c = 0; f.epsilon > 0 && c < width; ++c)
      for (int64_t j = 0; j < wide; ++j) *m.at(c, j) *= f.scale[c];
  }

  Head<T> head_of(int64_t r, int64_t h) const {
    const int64_t d = f.head_channels(), keys = chosen[r] + 1 - f.strictly_causal;
    const Matrix<const T> q{at.z.at(h * d), row}, k = f.is_tied ? q : q.from(f.outer);
    const T tau = f.logit_scale(h) * (f.is_tied ? 2 : 1);
    return {p + (r * f.heads + h) * row, at.rho + h * row, tau, chosen[r], keys, d, f.outer, row,
            q, k, f.is_tied ? q : k.from(f.outer), f.is_tied != 0};
  }

  // x = Jᵀ g.
  void pull() {
    scale(g, K, 1);
    multiply<T>(a, f.out(), {g.data, stride}, f.outer, width, stride, false);
    std::fill_n(z.data, f.inner * wide, T(0));
    for (int64_t r = 0; r < K; ++r) {
      for (int64_t h = 0; h < f.heads; ++h) {
        const Head<T> head = head_of(r, h);
        const Matrix<T> dz{z.at(h * head.channels, first[r]), wide};
        softmax<T>(f, at, call.tokens, h, chosen[r], p + (r * f.heads + h) * row);
        head.pull(dz, a.at(h * head.channels, r), stride, s);
        if (f.temperatures) head.derive(dz, s);
      }
      for (int64_t c = 0; !f.heads && c < f.inner; ++c)
        *z.at(c, r) = *a.at(c, r) * *at.z.at(c, chosen[r]);
    }
    multiply<T>(x, f.in(), {z.data, wide}, lags * width, f.inner, wide, false);
    for (int64_t lag = 0; lag < lags; ++lag) {
      const Matrix<T> dx = x.from(lag * width);
      scale(dx, wide, -1);
      by_gain(dx);
      through_input(dx, lag);
    }
  }

  // Every token of x at length one, or its signs in entry_max.
  void normalise() {
    for (int64_t lag = 0; lag < lags; ++lag) {
      const Matrix<T> m = x.from(lag * width);
      std::fill_n(factors, wide, 0.0);
      for (int64_t c = 0; c < width; ++c)
        for (int64_t j = 0; j < wide; ++j) factors[j] += double(*m.at(c, j)) * *m.at(c, j);
      for (int64_t j = 0; j < wide; ++j) factors[j] = 1 / std::max(std::sqrt(factors[j]), shortest);
      for (int64_t r = 0; r < K; ++r) {
        if (!f.heads && chosen[r] < lag) factors[r] = 0;
        for (int64_t j = 0; f.heads && call.diagonal && j < chosen[r]; ++j)
          factors[first[r] + j] = 0;
      }
      for (int64_t c = 0; c < width; ++c)
        for (int64_t j = 0; j < wide; ++j) {
          T& w = *m.at(c, j);
          w = call.entries ? T((factors[j] > 0) * ((w > 0) - (w < 0))) : w * T(factors[j]);
        }
    }
  }

  // g = J x, with the P of the pull before.
  void push() {
    for (int64_t lag = 0; lag < lags; ++lag) {
      const Matrix<T> dx = x.from(lag * width);
      through_input(dx, lag);
      by_gain(dx);
      scale(dx, wide, -1);
    }
    multiply<T>(z, f.in().transposed(), {x.data, wide}, f.inner, lags * width, wide, false);
    for (int64_t r = 0; r < K; ++r) {
      for (int64_t h = 0; h < f.heads; ++h) {
        const Head<T> head = head_of(r, h);
        const Matrix<T> dz{z.at(h * head.channels, first[r]), wide};
        if (f.temperatures) head.derive(dz, s);
        head.push(a.at(h * head.channels, r), stride, {dz.data, wide}, s);
      }
      for (int64_t c = 0; !f.heads && c < f.inner; ++c)
        *a.at(c, r) = *z.at(c, r) * *at.z.at(c, chosen[r]);
    }
    multiply<T>(g, f.out().transposed(), {a.data, stride}, width, f.outer, stride, false);
    scale(g, K, 1);
  }
};

// One step for K rows of one branch and sequence; the largest gain.
template <typename T>
T step(const Branch<T>& f, const Point<T>& at, T* left, T* lengths, int64_t turn, const Call& call,
       Room<T> room) {
  ChosenRows<T> rows(f, at, call, lengths, turn, room);
  const Matrix<T> g = rows.g;
  std::fill_n(g.data, rows.width * rows.stride, T(0));
  for (int64_t r = 0; r < rows.K; ++r)
    for (int64_t c = 0; c < rows.width; ++c) *g.at(c, r) = left[rows.chosen[r] * rows.width + c];
  rows.pull();
  rows.normalise();
  rows.push();
  // The gain ‖g‖ of every token, and g/‖g‖ for the next step.
  T largest = 0;
  for (int64_t r = 0; r < rows.K; ++r) {
    double square = 0;
    int64_t most = 0;
    for (int64_t c = 0; c < rows.width; ++c) {
      square += double(*g.at(c, r)) * *g.at(c, r);
      if (is_less(std::abs(*g.at(most, r)), std::abs(*g.at(c, r)))) most = c;
    }
    const double gain = call.entries ? std::abs(*g.at(most, r)) : std::sqrt(square);
    if (is_less<T>(largest, gain)) largest = gain;
    if (rows.some) lengths[rows.chosen[r]] = gain;
    for (int64_t c = 0; gain > rows.shortest && c < rows.width; ++c)
      left[rows.chosen[r] * rows.width + c] =
          call.entries && c != most ? 0 : *g.at(c, r) / gain;
  }
  return largest;
}

// All branches, sequence by sequence: x (sequences, tokens, streams · width) enters the first layer.
template <typename T>
void advance(const Branch<T>* branches, const T* x, const Call& call) {
  const int64_t tokens = call.tokens, width = call.width, row = odd_vectors<T>(tokens);
  const int64_t channels = call.streams * width;
  int64_t inner = 0, outer = 0, rows = 0, heads = 0, kernel = 1;
  for (int64_t i = 0; i < call.branches; ++i) {
    inner = std::max(inner, branches[i].inner);
    outer = std::max(outer, branches[i].outer);
    rows = std::max(rows, branches[i].at_once);
    heads = std::max(heads, branches[i].heads);
    kernel = std::max(kernel, branches[i].kernel);
  }
  const int64_t stride = round_up(rows, LANES<T>), wide = odd_vectors<T>(rows * tokens);
  const int64_t of_point = (inner + width + 1 + 4 * heads) * row;
  const int64_t of_step = (width + outer) * stride + (inner + kernel * width + 2) * wide +
                          (rows * heads + 1) * row + 4 * rows + 8 * 16 + 64;
  const int64_t of_head = (tokens + 1) * row, of_layer = (channels + kernel * width + outer) * row;
  const Rooms<T> points(1, call.branches * of_point + of_layer);
  const Rooms<T> rooms(call.threads, std::max(of_step, of_head) + 16 * LANES<T>);
  Room<T> all{points.data};
  const Matrix<T> state{all.take(channels * row), row}, u{all.take(kernel * width * row), row};
  const Matrix<T> y{all.take(outer * row), row};
  auto point = [&](int64_t i) {
    Room<T> own{all.next + i * of_point};
    return Point<T>{{own.take(width * row), row}, {own.take(inner * row), row}, own.take(row),
                    own.take(3 * heads * row), own.take(heads * row)};
  };
  for (int64_t i = 0; i < call.branches; ++i) *branches[i].estimate = 0;
  for (int64_t sequence = 0; sequence < call.sequences; ++sequence) {
    std::fill_n(state.data, channels * row, T(0));
    for (int64_t j = 0; j < tokens; ++j)
      for (int64_t c = 0; c < channels; ++c)
        *state.at(c, j) = x[(sequence * tokens + j) * channels + c];
    for (int64_t i = 0; i < call.branches; ++i)
      forward<T>(branches[i], state, u, y, point(i), call, rooms);
#pragma omp parallel for num_threads(call.threads) schedule(dynamic)
    for (int64_t i = 0; i < call.branches; ++i) {
      const Branch<T>& f = branches[i];
      const int64_t at = sequence * tokens;
      T gain = 0;
      for (int64_t n = 0; n < call.steps; ++n)
        gain = step<T>(f, point(i), f.left + at * width, f.lengths + at,
                       *f.turn + n * (f.at_once - 1), call, rooms.of_this_thread());
      if (is_less(*f.estimate, gain)) *f.estimate = gain;
    }
  }
}

}  // namespace

// Each returns whether there was enough memory.
#define EXPORT(T, NAME)                                                                     \
  bool NAME##_advance(const Branch<T>* branches, const T* x, Call call) {                  \
    return had_memory_for([&] { advance<T>(branches, x, call); });                         \
  }

extern "C" {
EXPORT(float, float32)
EXPORT(double, float64)
}
