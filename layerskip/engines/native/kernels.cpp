// Decoder sublayers over a few rows, for x86-64 CPUs: what a decoded token waits for is reading each weight once.
//
// Every number of a row is computed by the same operations in the same order however many rows there are, so a
// verification says of a token, to the bit, what decoding it alone says. Rows are float or bfloat16, sums are float.
// Compiled for the machine that it runs on by library.py, which also has the layout of the structs.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, VECTORS = 4;  // of 32 registers, 24 sum up six rows
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, VECTORS = 2;  // of 16 registers, 12
#else
#error "this CPU lacks AVX2 and FMA"
#endif
constexpr int BLOCK = LANES * VECTORS;  // outputs that lie together, input by input
constexpr int MOST_ROWS = 6;            // that one reading of a block serves

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

struct bfloat16 {
  uint16_t bits;
};
struct Pair {
  bfloat16 first, second;
};
#ifdef __AVX512BF16__
constexpr bool IN_PAIRS = true;  // two inputs of a bfloat16 weight lie together
#else
constexpr bool IN_PAIRS = false;
#endif

inline float number(float x) { return x; }
inline float number(bfloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

template <class T> inline T rounded(float x);
template <> inline float rounded<float>(float x) { return x; }
template <> inline bfloat16 rounded<bfloat16>(float x) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return {uint16_t((bits >> 16) | 64)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline Floats all(float x) { return x - Floats{}; }

inline Floats load(const float* p) {
  Floats out;
  memcpy(&out, p, sizeof out);
  return out;
}

inline void store(float* p, Floats x) { memcpy(p, &x, sizeof x); }

#ifdef __AVX512F__
inline Floats load(const bfloat16* p) {
  __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (Floats)_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
inline Floats load(const int8_t* p) {
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
#else
inline Floats load(const bfloat16* p) {
  __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return (Floats)_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
inline Floats load(const int8_t* p) {
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
#endif

inline float sum(Floats x) {
  float parts[LANES];
  memcpy(parts, &x, sizeof parts);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; i++) parts[i] += parts[i + n];
  return parts[0];
}

// e^x, off by at most two units in the last place. Ref: Cephes.
inline Floats exp(Floats x) {
  Floats low = all(-87.0f), high = all(88.0f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  Floats shift = all(12582912.0f);  // adding it rounds to an integer
  Floats n = (x * 1.44269504f + shift) - shift;
  Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats scale;
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

}  // namespace

// See library.py: the structs are declared there once more.
struct Matrix {
  const void* weight;  // blocks of BLOCK outputs, in each input by input, or pair by pair: layerskip_inputs_together
  const float* scale;  // (outputs,) of 8-bit weights
  const float* bias;   // (outputs,) or null
  long outputs, inputs;
  long kind;
};
struct Norm {
  const float* weight;  // null: none
  float eps;
};
struct Attention {
  Norm norm, query_norm, key_norm;
  Matrix qkv, out;
  long num_queries, num_keys, head_dim;
  float scaling;
};
struct Mlp {
  Norm norm;
  Matrix gate_up, down;
};
struct Rows {  // `count` rows of one text; all but float32 is bfloat16
  const void* x;
  long stride;           // numbers from one row of x to the next
  const void* residual;  // what the sublayer's output is added to; null: nothing
  long residual_stride;
  void* out;  // (count, outputs)
  int count, is_float32, num_threads;
};
struct Look {  // the positions that an attention reads and writes
  const void *cos, *sin;  // (count, head_dim)
  void* states;           // keys, then values: (2 * num_keys, positions, head_dim)
  long positions, place, first;
  const uint8_t* visible;  // (count, place + count - first); null: each row sees those up to its own
};

namespace {

// Of R rows, the outputs of one block.
template <class W, int R> inline void block(const W* weight, long inputs, const float* x, float* out) {
  Floats sums[VECTORS][R];
  for (int v = 0; v < VECTORS; v++)
    for (int r = 0; r < R; r++) sums[v][r] = Floats{};
  for (long k = 0; k < inputs; k++) {
    Floats w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) w[v] = load(weight + k * BLOCK + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      Floats one = all(x[r * inputs + k]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[v][r] += w[v] * one;
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) store(out + r * BLOCK + v * LANES, sums[v][r]);
}

#ifdef __AVX512BF16__
// The same of pairs of inputs: the processor multiplies and adds two at once.
template <class W, int R> inline void block(const W* weight, long inputs, const Pair* x, float* out) {
  __m512 sums[VECTORS][R];
  for (int v = 0; v < VECTORS; v++)
    for (int r = 0; r < R; r++) sums[v][r] = _mm512_setzero_ps();
  for (long k = 0; k < inputs; k++) {
    __m512bh w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) w[v] = (__m512bh)_mm512_loadu_si512(weight + k * BLOCK + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int bits;
      memcpy(&bits, x + r * inputs + k, 4);
      __m512bh one = (__m512bh)_mm512_set1_epi32(bits);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[v][r] = _mm512_dpbf16_ps(sums[v][r], w[v], one);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(out + r * BLOCK + v * LANES, sums[v][r]);
}
#endif

template <class W, class X> inline void rows_of_block(const W* weight, long inputs, const X* x, int count, float* out) {
  while (count > 0) {
    int n = count > MOST_ROWS ? (count >= 2 * MOST_ROWS ? MOST_ROWS : (count + 1) / 2) : count;
    switch (n) {
      case 1: block<W, 1>(weight, inputs, x, out); break;
      case 2: block<W, 2>(weight, inputs, x, out); break;
      case 3: block<W, 3>(weight, inputs, x, out); break;
      case 4: block<W, 4>(weight, inputs, x, out); break;
      case 5: block<W, 5>(weight, inputs, x, out); break;
      default: block<W, 6>(weight, inputs, x, out);
    }
    count -= n, x += n * inputs, out += n * BLOCK;
  }
}

// Inside a parallel region: this thread's blocks of x (count, inputs), each handed on as
// done(first output, how many, (count, BLOCK) of them).
template <class Done> inline void product(const Matrix& m, const float* x, int count, Done done) {
  int thread = omp_get_thread_num(), threads = omp_get_num_threads();
  long num_blocks = (m.outputs + BLOCK - 1) / BLOCK, num_pairs = (m.inputs + 1) / 2;
  std::vector<float> own(size_t(count) * BLOCK);
  std::vector<Pair> pairs(IN_PAIRS && m.kind == BFLOAT16 ? count * num_pairs : 0);
  for (size_t i = 0; i < pairs.size(); i++) {
    const float* from = x + i / num_pairs * m.inputs + i % num_pairs * 2;
    bool alone = i % num_pairs * 2 + 1 == size_t(m.inputs);
    pairs[i] = {rounded<bfloat16>(from[0]), alone ? bfloat16{0} : rounded<bfloat16>(from[1])};
  }
  for (long b = num_blocks * thread / threads; b < num_blocks * (thread + 1) / threads; b++) {
    long first = b * BLOCK, at = first * m.inputs;
    int n = int(m.outputs - first < BLOCK ? m.outputs - first : BLOCK);
    if (m.kind == FLOAT32) rows_of_block((const float*)m.weight + at, m.inputs, x, count, own.data());
#ifdef __AVX512BF16__
    if (m.kind == BFLOAT16)
      rows_of_block((const Pair*)m.weight + b * BLOCK * num_pairs, num_pairs, pairs.data(), count, own.data());
#else
    if (m.kind == BFLOAT16) rows_of_block((const bfloat16*)m.weight + at, m.inputs, x, count, own.data());
#endif
    if (m.kind == INT8) rows_of_block((const int8_t*)m.weight + at, m.inputs, x, count, own.data());
    for (int r = 0; r < count; r++) {
      float* row = own.data() + size_t(r) * BLOCK;
      if (m.scale)
        for (int i = 0; i < n; i++) row[i] *= m.scale[first + i];
      if (m.bias)
        for (int i = 0; i < n; i++) row[i] += m.bias[first + i];
    }
    done(first, n, own.data());
  }
}

// x / sqrt(mean(x^2) + eps) * weight over rows of `width`.
template <class T> inline void normed(const Norm& norm, const T* x, float* out, long width) {
  if (!norm.weight) {
    for (long i = 0; i < width; i++) out[i] = number(x[i]);
    return;
  }
  Floats sums = {};
  float total = 0;
  long whole = width - width % LANES;
  for (long i = 0; i < whole; i += LANES) sums += load(x + i) * load(x + i);
  for (long i = whole; i < width; i++) total += number(x[i]) * number(x[i]);
  total += sum(sums);
  float scale = 1.0f / std::sqrt(total / width + norm.eps);
  for (long i = 0; i < width; i++) out[i] = number(x[i]) * scale * norm.weight[i];
}

template <class T> inline void read_rows(const Rows& rows, const Norm& norm, long width, float* out) {
  for (int r = 0; r < rows.count; r++) normed(norm, (const T*)rows.x + r * rows.stride, out + r * width, width);
}

// Where a product's outputs are added to the residual and rounded.
template <class T> inline void product_out(const Rows& rows, const Matrix& m, const float* x) {
  product(m, x, rows.count, [&](long first, int n, const float* found) {
    for (int r = 0; r < rows.count; r++) {
      const T* residual = rows.residual ? (const T*)rows.residual + r * rows.residual_stride + first : nullptr;
      T* out = (T*)rows.out + r * m.outputs + first;
      for (int i = 0; i < n; i++) out[i] = rounded<T>(found[r * BLOCK + i] + (residual ? number(residual[i]) : 0.0f));
    }
  });
}

// One head of one row: normed, rotated and, of a key, kept.
template <class T>
inline void rotate(const Norm& norm, float* head, const T* cos, const T* sin, long width, T* kept) {
  float before[1024];
  normed(norm, head, before, width);
  for (long i = 0; i < width; i++) {
    head[i] = before[i] * number(cos[i]) + before[(i + width / 2) % width] * number(sin[i]);
    if (kept) kept[i] = rounded<T>(head[i]);
  }
}

// One head of one row over `count` keys and values: those at `seen`, or the first where it is null.
template <class T>
inline void attend(
    const float* query, const T* keys, const T* values, const int* seen, long count, long width, float scaling,
    float* scores, float* out
) {
  float most = -INFINITY;
  for (long j = 0; j < count; j++) {
    const T* key = keys + (seen ? seen[j] : j) * width;
    Floats sums = {};
    float rest = 0;
    long i = 0;
    for (; i + LANES <= width; i += LANES) sums += load(query + i) * load(key + i);
    for (; i < width; i++) rest += query[i] * number(key[i]);
    scores[j] = (sum(sums) + rest) * scaling;
    most = scores[j] > most ? scores[j] : most;
  }
  for (long j = count; j % LANES; j++) scores[j] = -INFINITY;
  Floats totals = {};
  for (long j = 0; j < count; j += LANES) {
    Floats left = load(scores + j), weight = exp(left - most);
    weight = left == all(-INFINITY) ? Floats{} : weight;
    store(scores + j, weight);
    totals += weight;
  }
  float total = sum(totals);
  for (long i = 0; i < width; i++) out[i] = 0;
  for (long j = 0; j < count; j++) {
    const T* value = values + (seen ? seen[j] : j) * width;
    for (long i = 0; i < width; i++) out[i] += scores[j] * number(value[i]);
  }
  for (long i = 0; i < width; i++) out[i] /= total;
}

// Scratch of the calling thread, which all threads of its parallel regions share.
float* scratch(size_t count) {
  thread_local std::vector<float> numbers;
  if (numbers.size() < count) numbers.resize(count);
  return numbers.data();
}

template <class T> void attention_rows(const Attention& part, const Rows& rows, const Look& look) {
  long width = part.qkv.inputs, head = part.head_dim, num_rotated = part.num_queries + part.num_keys;
  long num_heads = num_rotated + part.num_keys, attended_width = part.num_queries * head;
  long stop = look.place + rows.count, num_seen = stop - look.first;
  float* x = scratch(rows.count * (width + num_heads * head + attended_width));
  float *heads = x + rows.count * width, *attended = heads + rows.count * num_heads * head;
  std::vector<std::vector<int>> seen(look.visible ? rows.count : 0);
  for (size_t r = 0; r < seen.size(); r++)
    for (long j = 0; j < num_seen; j++)
      if (look.visible[r * num_seen + j]) seen[r].push_back(int(j));
  T* states = (T*)look.states;
  long head_stride = look.positions * head;
  read_rows<T>(rows, part.norm, width, x);
#pragma omp parallel num_threads(rows.num_threads)
  {
    product(part.qkv, x, rows.count, [&](long first, int n, const float* found) {
      for (int r = 0; r < rows.count; r++)
        memcpy(heads + r * num_heads * head + first, found + r * BLOCK, n * sizeof(float));
    });
#pragma omp barrier
#pragma omp for
    for (long i = 0; i < rows.count * num_heads; i++) {
      long r = i / num_heads, h = i % num_heads, state = h - part.num_queries;
      float* own = heads + i * head;
      T* kept = state < 0 ? nullptr : states + state * head_stride + (look.place + r) * head;
      const T *cos = (const T*)look.cos + r * head, *sin = (const T*)look.sin + r * head;
      if (h < num_rotated)
        rotate(state < 0 ? part.query_norm : part.key_norm, own, cos, sin, head, kept);
      else
        for (long d = 0; d < head; d++) kept[d] = rounded<T>(own[d]);
    }
    std::vector<float> scores(num_seen + LANES);
    long group = part.num_queries / part.num_keys;
#pragma omp for
    for (long i = 0; i < rows.count * part.num_queries; i++) {
      long r = i / part.num_queries, h = i % part.num_queries;
      const T* keys = states + h / group * head_stride + look.first * head;
      attend(
          heads + (r * num_heads + h) * head, keys, keys + part.num_keys * head_stride,
          look.visible ? seen[r].data() : nullptr, look.visible ? long(seen[r].size()) : look.place + r + 1 - look.first,
          head, part.scaling, scores.data(), attended + i * head
      );
    }
    product_out<T>(rows, part.out, attended);
  }
}

template <class T> void mlp_rows(const Mlp& part, const Rows& rows) {
  long width = part.gate_up.inputs, inner = part.down.inputs;
  float* x = scratch(rows.count * (width + 3 * inner));
  float *both = x + rows.count * width, *inside = both + rows.count * 2 * inner;
  read_rows<T>(rows, part.norm, width, x);
#pragma omp parallel num_threads(rows.num_threads)
  {
    product(part.gate_up, x, rows.count, [&](long first, int n, const float* found) {
      for (int r = 0; r < rows.count; r++) memcpy(both + r * 2 * inner + first, found + r * BLOCK, n * sizeof(float));
    });
#pragma omp barrier
#pragma omp for
    for (long c = 0; c < rows.count * ((inner + LANES - 1) / LANES); c++) {
      long r = c % rows.count, i = c / rows.count * LANES;
      float *gate = both + r * 2 * inner + i, *up = gate + inner, *out = inside + r * inner + i;
      float own[2][LANES] = {};
      long n = inner - i < LANES ? inner - i : LANES;
      memcpy(own[0], gate, n * sizeof(float)), memcpy(own[1], up, n * sizeof(float));
      Floats g = load(own[0]), found = g / (1.0f + exp(-g)) * load(own[1]);
      memcpy(out, &found, n * sizeof(float));
    }
    product_out<T>(rows, part.down, inside);
  }
}

template <class T> void linear_rows(const Matrix& m, const Rows& rows) {
  float* x = scratch(rows.count * m.inputs);
  read_rows<T>(rows, Norm{nullptr, 0}, m.inputs, x);
#pragma omp parallel num_threads(rows.num_threads)
  product_out<T>(rows, m, x);
}

}  // namespace

extern "C" {

int layerskip_outputs_together() { return BLOCK; }

int layerskip_inputs_together(int kind) { return IN_PAIRS && kind == BFLOAT16 ? 2 : 1; }

void layerskip_attention(const Attention* part, const Rows* rows, const Look* look) {
  rows->is_float32 ? attention_rows<float>(*part, *rows, *look) : attention_rows<bfloat16>(*part, *rows, *look);
}

void layerskip_mlp(const Mlp* part, const Rows* rows) {
  rows->is_float32 ? mlp_rows<float>(*part, *rows) : mlp_rows<bfloat16>(*part, *rows);
}

void layerskip_linear(const Matrix* matrix, const Rows* rows) {
  rows->is_float32 ? linear_rows<float>(*matrix, *rows) : linear_rows<bfloat16>(*matrix, *rows);
}
}
