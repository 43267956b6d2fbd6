// The update of TD3 and DDPG in C++. It computes the same as td3.py and networks.py. compiled.py calls it.
//
// Arrays inside a pass have the shape [features, B], where B is the number of rows. So every inner loop runs along the
// batch. T is the number type of the matrix products in hidden layers: float or bfloat16. All other arithmetic is in
// float. torch computes the products.

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

// -- the interface; compiled.py has the same structures ------------------------------------------------------------

extern "C" {

struct Network {         // see networks.Network
  int64_t heads, layers;
  const int64_t* sizes;  // of the input, the hidden layers and the output: [layers + 1]
  const int64_t* slots;  // where each parameter begins in `flat` and `low`: [heads, layers, KINDS]
  float* flat;
  void* low;             // the weights and biases of hidden layers as T; for float, this is `flat`
  int64_t layer_norm;
};

struct Adam {
  float *mean, *square;
  float rate, root;      // learning rate / (1 - β1^t); sqrt(1 - β2^t)
  float limit;           // the largest norm of a head's gradient; 0 for no limit
  float norm;            // result: the norm of the gradient of all heads
};

struct Settings {
  Network actor, actor_target, critics, critics_target;
  int64_t bf16, huber;
  float noise, noise_clip;
};

struct Batch {
  int64_t rows;
  const float *s, *a, *r, *s2, *discount;
  const float* noise;    // standard normal numbers: [rows, actions]
};

struct CriticsResult {
  float* errors;         // [heads, rows]
  float* y;              // [rows]
  float* means;          // of loss, Q1 and y: [3]
};

struct ActorResult {
  float* pi;             // [rows, actions]
  float* loss;           // [1]
};
}

namespace {

enum Kind { WEIGHT, BIAS, SCALE, SHIFT, KINDS };
constexpr int64_t MOST_LAYERS = 64;  // the configuration allows at most 9

// -- two threads ---------------------------------------------------------------------------------------------------

// The caller's thread and a second thread. Each work has two shares. The caller computes share 0. The thread that is
// free first computes share 1. A store that may have to wake a sleeping thread must be sequentially consistent. With a
// weaker order, notify_one of libstdc++ could find no sleeping thread while the other thread still sees the old number.
// The other thread could then fall asleep, and nothing would wake it.
struct Team {
  const void* work = nullptr;
  void (*call)(const void*, int64_t) = nullptr;
  // Every work has a number. asked: the number of the newest work. taken: the newest number for which a thread has
  // taken share 1. done: the newest number for which share 1 is done.
  std::atomic<uint32_t> asked{0}, taken{0}, done{0};
  std::atomic<bool> ended{false};
  std::atomic<int64_t> helped{0};  // number of shares that the second thread has computed

  bool take(uint32_t number) {
    uint32_t before = number - 1;
    return taken.compare_exchange_strong(before, number, std::memory_order_acq_rel);
  }
};

// Waits until `value` differs from `old`. It spins first: most waits are short, and waking a thread takes long.
uint32_t changed(const std::atomic<uint32_t>& value, uint32_t old) {
  auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  while (std::chrono::steady_clock::now() < end)
    if (uint32_t now = value.load(std::memory_order_acquire); now != old) return now;
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

// Calls work(0) and, with two shares, work(1).
template <class Work>
void each(Team* team, int64_t shares, const Work& work) {
  if (!team || shares < 2) {
    for (int64_t share = 0; share < shares; share++) work(share);
    return;
  }
  team->work = &work;
  team->call = [](const void* it, int64_t share) { (*static_cast<const Work*>(it))(share); };
  uint32_t number = team->asked.load(std::memory_order_relaxed) + 1;
  team->asked.store(number);
  team->asked.notify_one();
  work(0);
  if (team->take(number)) {
    work(1);
    team->done.store(number, std::memory_order_relaxed);
  } else {
    changed(team->done, number - 1);
  }
}

// Calls work(), and returns whether it threw an exception. An exception must never leave a thread or the C++ code.
template <class Work>
bool fails(const Work& work) {
  try {
    work();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

float sum(const float* values, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; i++) sum += values[i];
  return sum;
}

// -- matrices ------------------------------------------------------------------------------------------------------

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  // Rounds to nearest, ties to even. A NaN from arithmetic stays NaN. A NaN with an unusual payload can become a
  // number. The code does not test for such a NaN: g++ does not vectorise loops with the test, and an update would take
  // at least 1.3 times as long.
  bfloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    bits = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
};

void check(AOTITorchError error) {
  if (error) throw std::runtime_error("torch");
}

// A torch tensor that is a view of a matrix in existing memory. The memory holds the matrix row by row.
template <class T>
struct Matrix {
  AtenTensorHandle handle;
  Matrix(const T* data, int64_t rows, int64_t columns, int64_t stride, bool transposed = false) {
    const int64_t sizes[] = {transposed ? columns : rows, transposed ? rows : columns};
    const int64_t strides[] = {transposed ? 1 : stride, transposed ? stride : 1};
    int32_t type = sizeof(T) == sizeof(float) ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16();
    check(aoti_torch_create_tensor_from_blob(
        const_cast<T*>(data), 2, sizes, strides, 0, type, aoti_torch_device_type_cpu(), 0, &handle));
  }
  Matrix(const Matrix&) = delete;
  ~Matrix() { aoti_torch_delete_tensor_object(handle); }
};

template <class T>
void multiply(const Matrix<T>& out, const Matrix<T>& a, const Matrix<T>& b) {
  check(aoti_torch_cpu_mm_out(out.handle, a.handle, b.handle));
}

// -- networks ------------------------------------------------------------------------------------------------------

// Memory that begins on a cache line. The order in which torch adds the terms of a matrix product can depend on the
// addresses of the matrices. So all matrices have the same alignment.
struct alignas(64) Line {
  char bytes[64];
};

// Enlarges `memory` to `count` values or more, and returns its address.
template <class T>
T* grown(std::vector<Line>& memory, int64_t count) {
  memory.resize(std::max(memory.size(), (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line)));
  return reinterpret_cast<T*>(memory.data());
}

// A gradient. Its `flat` and `low` have the same layout as `flat` and `low` of a network.
template <class T>
struct Gradient {
  std::vector<Line> memory, low_memory;
  float* flat;
  T* low;  // of the weights of hidden layers; null if T is float
  Gradient(int64_t size, int64_t low_size)
      : flat(grown<float>(memory, size)), low(sizeof(T) == 4 ? nullptr : grown<T>(low_memory, low_size)) {}
};

// A forward pass of a batch through one head, and then a backward pass. Later batches use the same memory.
template <class T>
struct Pass {
  const Network& network;
  std::vector<Line> memory;
  const int64_t* slots = nullptr;
  int64_t B = 0, last;
  T* inputs[MOST_LAYERS];          // of each layer: [in, B]
  float* normalised[MOST_LAYERS];  // with LayerNorm: the normalised values, before scale and shift: [out, B]
  float* factors[MOST_LAYERS];     // with LayerNorm: 1 / standard deviation: [B]
  T *d, *d_input;                  // gradients with respect to a layer's linear output, and to its input: [size, B]
  float* d_norm;                   // gradient with respect to the output of LayerNorm: [out, B]
  float *sums, *outputs, *d_outputs;

  explicit Pass(const Network& network) : network(network), last(network.layers - 1) {
    if (network.layers > MOST_LAYERS) throw std::runtime_error("too many layers");
  }

  void begin(int64_t head, int64_t rows) {
    slots = network.slots + head * network.layers * KINDS;
    if (B == rows) return;
    B = 0;  // if `grown` fails for lack of memory, the next call places the arrays again
    place(grown<char>(memory, place(nullptr, rows)), rows);
    B = rows;
  }

  // Places the arrays one after another, beginning at `first`. Each array has space for `rows` rows. Returns the size
  // of all arrays in bytes.
  int64_t place(char* first, int64_t rows) {
    int64_t size = 0;
    auto take = [&]<class U>(U*& array, int64_t count) {
      if (first) array = reinterpret_cast<U*>(first + size);
      size += (count * sizeof(U) + sizeof(Line) - 1) / sizeof(Line) * sizeof(Line);
    };
    int64_t widest = *std::max_element(network.sizes, network.sizes + network.layers);
    for (int64_t i = 0; i < network.layers; i++) {
      take(inputs[i], network.sizes[i] * rows);
      if (i == last || !network.layer_norm) continue;
      take(normalised[i], network.sizes[i + 1] * rows);
      take(factors[i], rows);
    }
    take(d, widest * rows);
    take(d_input, widest * rows);
    take(d_norm, network.layer_norm ? widest * rows : 0);
    take(sums, 2 * rows);
    take(outputs, network.sizes[last + 1] * rows);
    take(d_outputs, network.sizes[last + 1] * rows);
    return size;
  }

  const float* high(int64_t layer, Kind kind) const { return network.flat + slots[KINDS * layer + kind]; }
  const T* low(int64_t layer, Kind kind) const {
    return static_cast<const T*>(network.low) + slots[KINDS * layer + kind];
  }
  void keep(Gradient<T>* gradient, int64_t layer, Kind kind, int64_t index, float value) const {
    if (gradient) gradient->flat[slots[KINDS * layer + kind] + index] = value;
  }

  // x: [B, in]. The result is in `outputs`: [out, B].
  void forward(const float* x) {
    const int64_t* sizes = network.sizes;
    for (int64_t f = 0; f < sizes[0]; f++)
      for (int64_t b = 0; b < B; b++) inputs[0][f * B + b] = x[b * sizes[0] + f];
    for (int64_t i = 0; i < last; i++) {
      int64_t in = sizes[i], out = sizes[i + 1];
      T* y = inputs[i + 1];
      multiply<T>({y, out, B, B}, {low(i, WEIGHT), out, in, in}, {inputs[i], in, B, B});
      if (network.layer_norm)
        normalise(i, y);
      else
        for (int64_t f = 0; f < out; f++) relu(y + f * B, y + f * B, 1, low(i, BIAS)[f]);
    }
    int64_t in = sizes[last], out = sizes[last + 1];
    for (int64_t o = 0; o < out; o++) std::fill_n(outputs + o * B, B, high(last, BIAS)[o]);
    for (int64_t f = 0; f < in; f++)
      for (int64_t o = 0; o < out; o++) {
        float weight = high(last, WEIGHT)[o * in + f];
        for (int64_t b = 0; b < B; b++) outputs[o * B + b] += weight * inputs[last][f * B + b];
      }
  }

  // y = relu(scale * x + shift) for one neuron. A NaN in x gives a NaN in y.
  template <class U>
  void relu(T* y, const U* x, float scale, float shift) const {
    for (int64_t b = 0; b < B; b++) {
      float value = scale * float(x[b]) + shift;
      y[b] = value < 0 ? 0 : value;
    }
  }

  void normalise(int64_t i, T* y) {
    int64_t size = network.sizes[i + 1];
    float *z = normalised[i], *factor = factors[i], *mean = sums;
    std::fill_n(mean, B, 0);
    std::fill_n(factor, B, 0);
    for (int64_t f = 0; f < size; f++) {
      float bias = low(i, BIAS)[f];
      for (int64_t b = 0; b < B; b++) mean[b] += z[f * B + b] = y[f * B + b] + bias;
    }
    for (int64_t b = 0; b < B; b++) mean[b] /= size;
    for (int64_t f = 0; f < size; f++)
      for (int64_t b = 0; b < B; b++) {
        z[f * B + b] -= mean[b];
        factor[b] += z[f * B + b] * z[f * B + b];
      }
    for (int64_t b = 0; b < B; b++) factor[b] = 1 / std::sqrt(factor[b] / size + 1e-5f);  // NORM_EPSILON
    for (int64_t f = 0; f < size; f++) {
      for (int64_t b = 0; b < B; b++) z[f * B + b] *= factor[b];
      relu(y + f * B, z + f * B, high(i, SCALE)[f], high(i, SHIFT)[f]);
    }
  }

  // Begins with `d_outputs`: [out, B]. Writes the gradient of the head's parameters to `gradient` unless it is null.
  // If `d_x` is not null, `d_x` receives the gradient with respect to `columns` inputs of the head: [columns, B]. The
  // first of these inputs is input `first`.
  void backward(Gradient<T>* gradient, float* d_x = nullptr, int64_t first = 0, int64_t columns = 0) {
    int64_t in = network.sizes[last], out = network.sizes[last + 1];
    for (int64_t o = 0; o < out; o++) keep(gradient, last, BIAS, o, sum(d_outputs + o * B, B));
    for (int64_t f = 0; f < in; f++) {
      std::fill_n(sums, B, 0);
      for (int64_t o = 0; o < out; o++) {
        const float *d_output = d_outputs + o * B, weight = high(last, WEIGHT)[o * in + f];
        for (int64_t b = 0; b < B; b++) sums[b] += weight * d_output[b];
        if (gradient) keep(gradient, last, WEIGHT, o * in + f, dot(d_output, inputs[last] + f * B));
      }
      relu_backward(gradient, last - 1, f, sums);
    }
    for (int64_t i = last - 1; i >= 0; i--) {
      int64_t in = network.sizes[i], out = network.sizes[i + 1];
      if (network.layer_norm) normalise_backward(gradient, i);
      const Matrix<T> d_z(d, out, B, B);
      if (gradient) {
        T* vector = gradient->low ? gradient->low : reinterpret_cast<T*>(gradient->flat);
        multiply<T>({vector + slots[KINDS * i + WEIGHT], out, in, in}, d_z, {inputs[i], in, B, B, true});
      }
      if (i) {
        multiply<T>({d_input, in, B, B}, {low(i, WEIGHT), out, in, in, true}, d_z);
        for (int64_t f = 0; f < in; f++) relu_backward(gradient, i - 1, f, d_input + f * B);
      } else if (d_x) {
        multiply<T>({d_input, columns, B, B}, {low(0, WEIGHT) + first, out, columns, in, true}, d_z);
        for (int64_t j = 0; j < columns * B; j++) d_x[j] = d_input[j];
      }
    }
  }

  float dot(const float* x, const T* y) const {
    float sum = 0;
    for (int64_t b = 0; b < B; b++) sum += x[b] * float(y[b]);
    return sum;
  }

  // The backward pass through the ReLU of one neuron. Writes to `d_norm` with LayerNorm, and else to `d`.
  template <class U>
  void relu_backward(Gradient<T>* gradient, int64_t i, int64_t f, const U* d_output) {
    const T* output = inputs[i + 1] + f * B;
    if (network.layer_norm) {
      for (int64_t b = 0; b < B; b++) d_norm[f * B + b] = output[b] <= 0 ? 0 : float(d_output[b]);
      return;
    }
    float sum = 0;
    for (int64_t b = 0; b < B; b++) {
      float value = output[b] <= 0 ? 0 : float(d_output[b]);
      sum += value;
      d[f * B + b] = value;
    }
    keep(gradient, i, BIAS, f, sum);
  }

  void normalise_backward(Gradient<T>* gradient, int64_t i) {
    int64_t size = network.sizes[i + 1];
    const float *n = normalised[i], *factor = factors[i];
    float *mean = sums, *mean_n = sums + B;
    std::fill_n(sums, 2 * B, 0);
    for (int64_t f = 0; f < size; f++) {
      float scale = high(i, SCALE)[f], d_scale = 0, d_shift = 0;
      for (int64_t b = 0, at = f * B; b < B; b++, at++) {
        d_scale += d_norm[at] * n[at];
        d_shift += d_norm[at];
        mean[b] += scale * d_norm[at];
        mean_n[b] += scale * d_norm[at] * n[at];
      }
      keep(gradient, i, SCALE, f, d_scale);
      keep(gradient, i, SHIFT, f, d_shift);
    }
    for (int64_t b = 0; b < 2 * B; b++) sums[b] /= size;
    for (int64_t f = 0; f < size; f++) {
      float scale = high(i, SCALE)[f], sum = 0;
      for (int64_t b = 0, at = f * B; b < B; b++, at++) {
        float value = factor[b] * (scale * d_norm[at] - mean[b] - n[at] * mean_n[b]);
        sum += value;
        d[at] = value;
      }
      keep(gradient, i, BIAS, f, sum);
    }
  }
};

// -- Adam ----------------------------------------------------------------------------------------------------------

// Element j of g + other; element j of g if `other` is null.
template <class G>
float added(const G* g, const G* other, int64_t j) {
  return other ? float(g[j]) + float(other[j]) : float(g[j]);
}

template <class G>
float sum_of_squares(int64_t count, const G* g, const G* other) {
  float sum = 0;
  for (int64_t j = 0; j < count; j++) sum += added(g, other, j) * added(g, other, j);
  return sum;
}

// `low` may be null. The scalars are arguments, not fields of a structure. So the compiler knows that the loop does not
// change them.
template <class T, class G>
void adam_loop(int64_t count, float* p, float* mean, float* square, T* low, const G* g, const G* other, float shrink,
               float rate, float root) {
  for (int64_t j = 0; j < count; j++) {
    float d = shrink * added(g, other, j);
    mean[j] += 0.1f * (d - mean[j]);
    square[j] = 0.999f * square[j] + 0.001f * d * d;
    p[j] -= rate * mean[j] / (std::sqrt(square[j]) / root + 1e-8f);
    if (low) low[j] = p[j];
  }
}

// Calls visit(slot, count, copies, g, other) for each parameter of a head. copies: whether `low` of the network has a
// copy of the parameter. The gradient of the parameter is g, or g + other if `other` is not null.
template <class T, class Visit>
void each_parameter(const Network& network, int64_t head, const Gradient<T>& g, const Gradient<T>* other,
                    const Visit& visit) {
  for (int64_t i = 0; i < network.layers; i++) {
    bool hidden = i < network.layers - 1, low = hidden && g.low;
    int64_t in = network.sizes[i], out = network.sizes[i + 1];
    for (int64_t kind = 0; kind < (hidden && network.layer_norm ? KINDS : SCALE); kind++) {
      int64_t slot = network.slots[(head * network.layers + i) * KINDS + kind], count = kind == WEIGHT ? in * out : out;
      if (low && kind == WEIGHT)
        visit(slot, count, true, g.low + slot, other ? other->low + slot : nullptr);
      else
        visit(slot, count, low && kind == BIAS, g.flat + slot, other ? other->flat + slot : nullptr);
    }
  }
}

// A step for one head. The gradient is g, or g + other if `other` is not null. Returns the gradient's norm.
template <class T>
float adam_step(const Network& network, const Adam& adam, int64_t head, const Gradient<T>& g,
                const Gradient<T>* other) {
  double squares = 0;
  each_parameter(network, head, g, other, [&](int64_t, int64_t count, bool, auto* g, decltype(g) other) {
    squares += sum_of_squares(count, g, other);
  });
  float norm = std::sqrt(squares), ratio = adam.limit / norm, shrink = adam.limit > 0 && !(ratio >= 1) ? ratio : 1;
  each_parameter(network, head, g, other, [&](int64_t slot, int64_t count, bool copies, auto* g, decltype(g) other) {
    T* low = copies ? static_cast<T*>(network.low) + slot : nullptr;
    adam_loop(count, network.flat + slot, adam.mean + slot, adam.square + slot, low, g, other, shrink, adam.rate,
              adam.root);
  });
  return norm;
}

// -- TD3 -----------------------------------------------------------------------------------------------------------

float clamp(float value, float limit) { return std::clamp(value, -limit, limit); }

struct Engine {
  virtual ~Engine() = default;
  virtual void update_critics(const Batch&, Adam&, CriticsResult&) = 0;
  virtual void update_actor(const Batch&, Adam&, ActorResult&) = 0;
};

template <class T>
struct TD3 : Engine {
  const Settings set;
  Team* const team;
  const int64_t O = set.actor.sizes[0], A = set.actor.sizes[set.actor.layers], heads = set.critics.heads;
  // What each of two shares needs.
  std::vector<Pass<T>> actor, actor_target, critics, critics_target;
  std::vector<Gradient<T>> gradients;
  std::vector<float> d_pi[2];
  // For the whole batch.
  std::vector<float> sa, s2a2, next_q, q;
  std::atomic<bool> failed{false};

  TD3(const Settings& settings, Team* team, int64_t size, int64_t low_size) : set(settings), team(team) {
    for (auto* passes : {&actor, &actor_target, &critics, &critics_target}) passes->reserve(2);
    gradients.reserve(2);
    for (int share = 0; share < 2; share++) {
      actor.emplace_back(set.actor);
      actor_target.emplace_back(set.actor_target);
      critics.emplace_back(set.critics);
      critics_target.emplace_back(set.critics_target);
      gradients.emplace_back(size, low_size);
    }
  }

  // Whether the work for one head has two shares.
  bool splits(int64_t rows) const { return team && rows > 1; }

  // Calls work(share, head, begin, end). Two heads: one share for each head, with all rows. One head: with a team, one
  // share for each half of the rows; without a team, one share.
  template <class Work>
  void each_share(int64_t of_heads, int64_t rows, const Work& work) {
    bool halves = of_heads == 1 && splits(rows);
    int64_t half = (rows + 1) / 2;
    each(team, halves ? 2 : of_heads, [&](int64_t share) {
      bool failed_here = fails([&] {
        if (halves)
          work(share, 0, share ? half : 0, share ? rows : half);
        else
          work(share, share, 0, rows);
      });
      if (failed_here) failed = true;
    });
    if (failed.exchange(false)) throw std::runtime_error("a share failed");
  }

  void update_critics(const Batch& batch, Adam& adam, CriticsResult& result) override {
    const int64_t B = batch.rows, inputs = O + A;
    sa.resize(B * inputs);
    s2a2.resize(B * inputs);
    next_q.resize(heads * B);
    q.resize(heads * B);
    each_share(1, B, [&](int64_t share, int64_t, int64_t begin, int64_t end) {
      Pass<T>& pass = actor_target[share];
      pass.begin(0, end - begin);
      pass.forward(batch.s2 + begin * O);
      for (int64_t b = begin; b < end; b++) {
        std::copy_n(batch.s + b * O, O, &sa[b * inputs]);
        std::copy_n(batch.a + b * A, A, &sa[b * inputs + O]);
        std::copy_n(batch.s2 + b * O, O, &s2a2[b * inputs]);
        for (int64_t i = 0; i < A; i++) {
          float pi = std::tanh(pass.outputs[i * pass.B + b - begin]);
          float noise = set.noise > 0 ? clamp(set.noise * batch.noise[b * A + i], set.noise_clip) : 0;
          s2a2[b * inputs + O + i] = clamp(pi + noise, 1);
        }
      }
    });
    each_share(heads, B, [&](int64_t share, int64_t head, int64_t begin, int64_t end) {
      Pass<T>& pass = critics_target[share];
      pass.begin(head, end - begin);
      pass.forward(&s2a2[begin * inputs]);
      std::copy_n(pass.outputs, pass.B, &next_q[head * B + begin]);
    });
    for (int64_t b = 0; b < B; b++) result.y[b] = batch.r[b] + batch.discount[b] * least(next_q.data() + b, B);
    float norms[2] = {0, 0};
    each_share(heads, B, [&](int64_t share, int64_t head, int64_t begin, int64_t end) {
      Pass<T>& pass = critics[share];
      pass.begin(head, end - begin);
      pass.forward(&sa[begin * inputs]);
      for (int64_t b = 0; b < pass.B; b++) {
        float error = pass.outputs[b] - result.y[begin + b];
        q[head * B + begin + b] = pass.outputs[b];
        result.errors[head * B + begin + b] = error;
        pass.d_outputs[b] = (set.huber ? clamp(error, 1) : 2 * error) / B;
      }
      pass.backward(&gradients[share]);
      if (heads == 2) norms[head] = adam_step(set.critics, adam, head, gradients[share], (Gradient<T>*)nullptr);
    });
    if (heads == 1) norms[0] = adam_step(set.critics, adam, 0, gradients[0], splits(B) ? &gradients[1] : nullptr);
    adam.norm = std::hypot(norms[0], norms[1]);
    float loss = 0;
    for (int64_t i = 0; i < heads * B; i++) {
      float size = std::abs(result.errors[i]), quadratic = size > 1 ? 1 : size;
      loss += set.huber ? quadratic * (size - quadratic / 2) : size * size;
    }
    result.means[0] = loss / B;
    result.means[1] = sum(q.data(), B) / B;
    result.means[2] = sum(result.y, B) / B;
  }

  void update_actor(const Batch& batch, Adam& adam, ActorResult& result) override {
    const int64_t B = batch.rows, inputs = O + A;
    sa.resize(B * inputs);
    q.resize(heads * B);
    each_share(1, B, [&](int64_t share, int64_t, int64_t begin, int64_t end) {
      Pass<T>&policy = actor[share], &critic = critics[share];
      const int64_t rows = end - begin;
      policy.begin(0, rows);
      policy.forward(batch.s + begin * O);
      for (int64_t b = 0; b < rows; b++) {
        float* row = &sa[(begin + b) * inputs];
        std::copy_n(batch.s + (begin + b) * O, O, row);
        for (int64_t i = 0; i < A; i++)
          row[O + i] = result.pi[(begin + b) * A + i] = std::tanh(policy.outputs[i * rows + b]);
      }
      critic.begin(0, rows);
      critic.forward(&sa[begin * inputs]);
      std::copy_n(critic.outputs, rows, &q[begin]);
      std::fill_n(critic.d_outputs, rows, -1.0f / B);
      d_pi[share].resize(A * rows);
      critic.backward(nullptr, d_pi[share].data(), O, A);
      for (int64_t i = 0; i < A; i++)
        for (int64_t b = 0; b < rows; b++) {
          float pi = result.pi[(begin + b) * A + i];
          policy.d_outputs[i * rows + b] = d_pi[share][i * rows + b] * (1 - pi * pi);  // the derivative of tanh
        }
      policy.backward(&gradients[share]);
    });
    adam.norm = adam_step(set.actor, adam, 0, gradients[0], splits(B) ? &gradients[1] : nullptr);
    *result.loss = -sum(q.data(), B) / B;
  }

  // The smallest Q'(s', a') of the critics; NaN if a critic's value is NaN.
  float least(const float* next_q, int64_t B) const {
    float one = next_q[0], other = heads == 2 ? next_q[B] : one;
    return one < other || one != one ? one : other;
  }
};

}  // namespace

extern "C" {

Team* team_new() { return new Team; }

// Runs in the second thread, until team_end.
void team_work(Team* team) {
  for (uint32_t seen = 0;;) {
    seen = changed(team->asked, seen);
    if (team->ended.load(std::memory_order_acquire)) break;
    if (!team->take(seen)) continue;
    team->call(team->work, 1);
    team->helped++;
    team->done.store(seen);
    team->done.notify_one();
  }
}

void team_end(Team* team) {
  team->ended = true;
  team->asked.fetch_add(1);
  team->asked.notify_one();
}

int64_t team_helped(Team* team) { return team->helped; }

// Must be called after team_work has returned.
void team_delete(Team* team) { delete team; }

// Actor and critics each have a `flat` and a `low` vector. size: the number of elements of the longer `flat` vector.
// low_size: the number of elements of the longer `low` vector. `team` may be null.
// Returns null after an error.
Engine* engine_new(const Settings* settings, Team* team, int64_t size, int64_t low_size) {
  Engine* made = nullptr;
  fails([&] {
    if (settings->bf16)
      made = new TD3<bfloat16>(*settings, team, size, low_size);
    else
      made = new TD3<float>(*settings, team, size, low_size);
  });
  return made;
}

void engine_delete(Engine* engine) { delete engine; }

// Both update functions return 0, or 1 after an error.
int update_critics(Engine* engine, const Batch* batch, Adam* adam, CriticsResult* result) {
  return fails([&] { engine->update_critics(*batch, *adam, *result); });
}

int update_actor(Engine* engine, const Batch* batch, Adam* adam, ActorResult* result) {
  return fails([&] { engine->update_actor(*batch, *adam, *result); });
}
}
