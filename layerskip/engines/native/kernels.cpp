// Decoder sublayers for x86-64 CPUs: what a decoded token waits for is reading each weight once.
//
// Every number of a row is computed by the same operations in the same order however many rows there are, so a
// verification, or a prompt, says of a token, to the bit, what decoding it alone says. Rows are float or bfloat16, sums
// are float.
// Compiled for the machine that it runs on by library.py, which also has the layout of the structs.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, VECTORS = 4;  // of 32 registers, 24 sum up six rows
constexpr long BLOCK_AHEAD = 0;         // how many bytes ahead a block is fetched, 0: not
constexpr auto SHARED_HINT = _MM_HINT_T1;  // which cache further inputs are fetched to, see `Share`
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int LANES = 8, VECTORS = 2;  // of 16 registers, 12
constexpr long BLOCK_AHEAD = 2048;
constexpr auto SHARED_HINT = _MM_HINT_T0;
#else
#error "this CPU lacks AVX2, FMA and F16C"
#endif
constexpr int BLOCK = LANES * VECTORS;  // outputs that lie together, input by input
constexpr int MOST_ROWS = 6;            // that one reading of a block serves
constexpr int OUTPUTS = 4, ROWS_IN_PLACE = LANES / 4;  // at once where weights are read as they lie
constexpr long BYTES_AHEAD = 8192;      // that are fetched there
constexpr int INPUTS_AT_ONCE = 1024;    // of a block that further rows read again, so that it stays in the cache
constexpr int MOST_SHARING = 24, INPUTS_SHARED = 512;  // rows that wait for weights, and what they read again, see `Share`
constexpr int ROWS_AT_ONCE = 256;       // of a prompt, so that room for its numbers stays small
constexpr int KEYS_AT_ONCE = 64, MOST_QUERIES = 30;
constexpr long KEYS_AHEAD = 4096;       // bytes that are fetched of keys and values
constexpr long KEYS_OF_PART = 512;      // summed up by themselves, so that threads may share a long text
constexpr float MOST_INTEGER = 32000;   // of 16 bits
constexpr long PAIRS_AT_ONCE = 256;     // whose products with 8-bit weights 32 bits hold
constexpr int GROUP = 32;               // inputs whose 4-bit weights share a scale and a zero, see `Group`

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
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
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define IN_QUADS  // four inputs of an 8-bit weight lie together, else two
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
inline Floats load(const int8_t* p) {
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Floats load(const uint8_t* p) {
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Floats load(const bfloat16* p) {
  __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (Floats)_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
inline Floats load(const float16* p) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
#else
inline Floats load(const int8_t* p) {
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Floats load(const uint8_t* p) {
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Floats load(const bfloat16* p) {
  __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return (Floats)_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
inline Floats load(const float16* p) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
#endif

inline float sum(Floats x) {
  float parts[LANES];
  memcpy(parts, &x, sizeof parts);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; i++) parts[i] += parts[i + n];
  return parts[0];
}

// Of four vectors, LANES / 4 parts of four sums each, one for each vector.
#ifdef __AVX512F__
inline __m512 fours(const Floats* x) {
  __m512 a = x[0], b = x[1], c = x[2], d = x[3];
  __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
  __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
  return _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)) + _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
}
inline void sums_of_four(const Floats* x, float* out) {
  __m512 parts = fours(x);
  __m256 halves = _mm512_castps512_ps256(parts) + _mm512_castps512_ps256(_mm512_shuffle_f32x4(parts, parts, 0xee));
  _mm_storeu_ps(out, _mm256_castps256_ps128(halves) + _mm256_extractf128_ps(halves, 1));
}
#else
inline __m256 fours(const Floats* x) {
  return _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
}
inline void sums_of_four(const Floats* x, float* out) {
  __m256 parts = fours(x);
  _mm_storeu_ps(out, _mm256_castps256_ps128(parts) + _mm256_extractf128_ps(parts, 1));
}
#endif

// Of LANES vectors, rows of a square of 32-bit numbers, its columns.
#ifdef __AVX512F__
inline void transpose(const Floats* rows, Floats* columns) {
  __m512 pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i++) {  // in each quarter the numbers of four rows in one column
    __m512d a = _mm512_castps_pd(pairs[i / 4 * 4 + i % 4 / 2]), b = _mm512_castps_pd(pairs[i / 4 * 4 + i % 4 / 2 + 2]);
    fours[i] = _mm512_castpd_ps(i % 2 ? _mm512_unpackhi_pd(a, b) : _mm512_unpacklo_pd(a, b));
  }
  for (int i = 0; i < 4; i++) {
    __m512 a = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0x44);
    __m512 b = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0xee);
    __m512 c = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0x44);
    __m512 d = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0xee);
    columns[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    columns[i + 4] = _mm512_shuffle_f32x4(a, c, 0xdd);
    columns[i + 8] = _mm512_shuffle_f32x4(b, d, 0x88);
    columns[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}
#else
inline void transpose(const Floats* rows, Floats* columns) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i++) {  // in each half the numbers of four rows in one column
    __m256d a = _mm256_castps_pd(pairs[i / 4 * 4 + i % 4 / 2]), b = _mm256_castps_pd(pairs[i / 4 * 4 + i % 4 / 2 + 2]);
    fours[i] = _mm256_castpd_ps(i % 2 ? _mm256_unpackhi_pd(a, b) : _mm256_unpacklo_pd(a, b));
  }
  for (int i = 0; i < 4; i++) {
    columns[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    columns[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}
#endif

// e^x, off by at most two units in the last place. Ref: Cephes.
inline Floats exp(Floats x) {
#ifdef __AVX512F__
  x = _mm512_min_ps(all(88.0f), _mm512_max_ps(all(-87.0f), x));  // of a number and none they give the second
  Floats n = _mm512_roundscale_ps(x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = _mm256_min_ps(all(88.0f), _mm256_max_ps(all(-87.0f), x));
  Floats n = _mm256_round_ps(x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
  Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
  return _mm512_scalef_ps(p, n);
#else
  Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats scale;
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
#endif
}

// BFLOAT16: by activations rounded to it where the processor multiplies pairs; INT8, INT4: rounded to 16 bits;
// *_BY_FLOATS: by activations as they are.
enum Kind {
  FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT8_BY_FLOATS = 3, INT4 = 4, INT4_BY_FLOATS = 5, BFLOAT16_BY_FLOATS = 6,
  FLOAT16_BY_FLOATS = 7
};

}  // namespace

// See library.py: the structs are declared there once more.
struct Matrix {
  const void* weight;  // blocks of BLOCK outputs, in each input by input, or pair by pair: layerskip_inputs_together;
  const void* const* rows;  // or, where this is not null, (outputs,): where each output's weights lie, input by input
  const float* scale;  // (outputs,) of 8-bit weights
  const float* bias;   // (outputs,) or null
  long outputs, inputs;
  long kind;
};
struct Norm {
  const float* weight;  // null: none
  float eps;
};
struct Ending {  // of a sublayer: a product that is normed and multiplied before it is added to the residual
  Matrix out;
  Norm norm;
  float scale, total;  // total: what the sum is multiplied with
};
struct Attention {
  Norm norm, query_norm, key_norm, value_norm;
  Matrix qkv;  // queries, keys, values, and where it is gated a gate for every number that `out` takes
  Ending out;
  long num_queries, num_keys, head_dim;
  float scaling;
  int is_gated, reads;  // reads: keys and values are another layer's, and qkv gives none
};
struct LinearAttention {  // by the gated delta rule, or as Mamba 2 has it
  Norm norm, out_norm;
  Matrix in;  // queries, keys, values; how much each value head writes, then what it keeps; gates
  Ending out;
  const float *conv, *conv_bias;  // (taps, channels) over rows of queries, keys and values; (channels,) or null
  const float *rates, *biases;    // (num_values,): a head keeps exp(rate * softplus(x + bias))
  const float* skips;             // (num_values,): the share of its value that a row's output has besides, or null
  long num_keys, num_values, key_dim, value_dim, taps;
  long num_groups;  // of a row's outputs that are normed after their gates; 0: each head's, before
  int corrects;     // whether only what the state does not say already is written, by keys of length one
};
struct ShortConv {  // a gated convolution over the last rows
  Norm norm;
  Matrix in;          // gates before it, gates after it, and what it is over
  Ending out;
  const float* conv;  // (taps, channels)
  const float* bias;  // (channels,) or null
  long taps;
};
struct Memory {  // what a layer with a state keeps of a text
  float *live, *kept, *older;       // linear attention's (num_values, key_dim, value_dim); taps - 1 rows before it
  long live_at, kept_at, older_at;  // the positions that they stand at, -1: none
  long at;                          // of the next row; an earlier state and the rows since tell what stands there
  void* log;                        // the latest rows' part in it, that of position p at p % num_logged
  long num_logged, log_from;        // the first position that is there
  long several;                     // whether the latest forward was over several rows
};
struct Mlp {
  Norm norm;
  Matrix gate_up;
  Ending down;
  int activation;  // 0: SiLU, 1: GELU by tanh
  const struct TokenGate* gate;  // what follows it, or null
};
struct Experts {  // in an MLP's place: of each row a few, chosen by scores, and perhaps one for all rows
  Norm norm;
  Matrix router, shared_router;  // scores of all; of the shared one, which are its weights' logits: no outputs, weight 1
  Matrix shared_gate_up;         // no outputs: there is none
  Ending shared_down;            // what is done at the end is told here in any case
  const Matrix *gate_up, *down;  // (num_experts,)
  const float* preferences;      // (num_experts,): added to scores where experts are chosen, not to their weights; or null
  long num_experts, num_chosen;
  long num_groups, groups_chosen;  // of experts, as many in each: only those of the best groups are chosen
  float least, scale;              // what weights' sum is more than, and they are multiplied with
  int by_sigmoid, sums_to_one, rounds;  // rounds: whether scores are rounded as the model's numbers are
  int activation;
};
struct TokenGate {  // what comes in is projected, activated and gated by what the token's id says to the layer
  Matrix in;
  Ending out;
  long first;  // of a row's numbers that are this layer's
};
struct Rows {  // `count` rows of one text after the other; all but float32 is bfloat16
  const void* x;
  long stride;           // numbers from one row of x to the next
  const void* residual;  // what the sublayer's output is added to; null: nothing
  long residual_stride;
  void* out;             // (count, outputs)
  const void* gates;     // what token ids say to all layers, see TokenGate
  long gates_stride;
  int count, is_float32, num_threads;
};
struct Look {  // the positions that an attention of a text's rows reads and writes
  const void *cos, *sin;  // (count, head_dim)
  void* states;           // keys, then values: (2 * num_keys, positions, head_dim)
  long positions, place, first;
  const uint8_t* visible;  // (count, place + count - first); null: each row sees those up to its own
  long visible_stride, count;
};
struct Text {  // a text's share of some rows
  const Look* looks;    // for each of a layer's
  void* const* states;  // of every layer keys and values, or its Memory
  long place, count;    // the position of its first row, and how many it has
};
struct Layer {
  const Attention* attention;               // at most one of these three; without it is skipped
  const LinearAttention* linear_attention;
  const ShortConv* short_conv;
  const Mlp* mlp;                           // at most one of these two
  const Experts* experts;
  int look;       // which one its attention has
  int keys_only;  // whether of attention only keys and values are wanted, which later layers read
};

namespace {

// What comes so far after these bytes of a block. With little to do for each the processor is as fast by itself.
template <long BYTES> inline void fetch(const void* p) {
  if constexpr (BLOCK_AHEAD > 0)
    for (long i = 0; i < BYTES; i += 64) _mm_prefetch((const char*)p + i + BLOCK_AHEAD, _MM_HINT_T0);
}

// What comes BLOCK_AHEAD bytes after what is read.
struct Nearest {
  template <long BYTES> void fetch(const void* p, long) const { ::fetch<BYTES>(p); }
};

// A share of what comes after inputs that are read several times, each time by other rows: so the memory is always busy.
struct Share {
  const char* from;
  long step;  // bytes for each input

  // For rows from `row` of `count`, at most `most` of them at once; `length` inputs come next, each of so many bytes.
  Share(const void* next, long bytes, long length, int row, int count, int most) {
    long pieces = (count + most - 1) / most;
    step = (bytes + pieces - 1) / pieces;
    from = (const char*)next + row * pieces / count * step * length;
  }
  template <long BYTES> void fetch(const void*, long k) const {
#pragma GCC unroll 8
    for (long i = 0; i < (BYTES + 127) / 128; i++) _mm_prefetch(from + k * step + i * 64, SHARED_HINT);
  }
};

// How many of so many inputs are read at once, at most `most`: all pieces alike, as one fetches what the next one reads.
inline long piece(long inputs, long most) {
  long pieces = (inputs + most - 1) / most;
  return (inputs + pieces - 1) / pieces;
}

// Adds to R rows' outputs of one block what further inputs say: x (R, stride), out (R, BLOCK).
template <class W, int R, class Ahead = Nearest>
inline void block(const W* weight, long inputs, const float* x, long stride, float* out, Ahead ahead = {}) {
  Floats sums[VECTORS][R];
  for (int v = 0; v < VECTORS; v++)
    for (int r = 0; r < R; r++) sums[v][r] = load(out + r * BLOCK + v * LANES);
  for (long k = 0; k < inputs; k++) {
    Floats w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) w[v] = load(weight + k * BLOCK + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      Floats one = all(x[r * stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[v][r] += w[v] * one;
    }
    if (R > 1 || sizeof(W) < 4) ahead.template fetch<BLOCK * sizeof(W)>(weight + k * BLOCK, k);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) store(out + r * BLOCK + v * LANES, sums[v][r]);
}

#ifdef __AVX512BF16__
// The same of pairs of inputs: the processor multiplies and adds two at once.
template <class W, int R, class Ahead = Nearest>
inline void block(const W* weight, long inputs, const Pair* x, long stride, float* out, Ahead ahead = {}) {
  __m512 sums[VECTORS][R];
  for (int v = 0; v < VECTORS; v++)
    for (int r = 0; r < R; r++) sums[v][r] = _mm512_loadu_ps(out + r * BLOCK + v * LANES);
  for (long k = 0; k < inputs; k++) {
    __m512bh w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) w[v] = (__m512bh)_mm512_loadu_si512(weight + k * BLOCK + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int bits;
      memcpy(&bits, x + r * stride + k, 4);
      __m512bh one = (__m512bh)_mm512_set1_epi32(bits);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[v][r] = _mm512_dpbf16_ps(sums[v][r], w[v], one);
    }
    ahead.template fetch<BLOCK * sizeof(W)>(weight + k * BLOCK, k);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(out + r * BLOCK + v * LANES, sums[v][r]);
}

inline void round_pairs(const float* from, long count, Pair* to) {
  long whole = count - count % 32;
  for (long i = 0; i < whole; i += 32) {
    __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
    memcpy(to + i / 2, &pairs, sizeof pairs);
  }
  for (long i = whole; i < count; i += 2)
    to[i / 2] = {rounded<bfloat16>(from[i]), i + 1 < count ? rounded<bfloat16>(from[i + 1]) : bfloat16{0}};
}
#endif

// Calls some(R, first of R rows) for pieces of `count` rows, R a constant up to MOST.
template <int MOST = MOST_ROWS, class Some> inline void for_rows(int count, Some some) {
  for (int row = 0, n; row < count; row += n) {
    int left = count - row;
    n = left <= MOST ? left : left < 2 * MOST ? (left + 1) / 2 : MOST;
    if (n == 1) some(std::integral_constant<int, 1>(), row);
    if (n == 2) some(std::integral_constant<int, 2>(), row);
    if constexpr (MOST >= 3)
      if (n == 3) some(std::integral_constant<int, 3>(), row);
    if constexpr (MOST >= 4)
      if (n == 4) some(std::integral_constant<int, 4>(), row);
    if constexpr (MOST >= 6) {
      if (n == 5) some(std::integral_constant<int, 5>(), row);
      if (n == 6) some(std::integral_constant<int, 6>(), row);
    }
  }
}

// Of `count` rows x (count, inputs) the outputs of one block.
template <class W, class X> inline void rows_of_block(const W* weight, long inputs, const X* x, int count, float* out) {
  memset(out, 0, size_t(count) * BLOCK * sizeof(float));
  bool share = count > MOST_ROWS && count <= MOST_SHARING;
  long step = share ? piece(inputs, INPUTS_SHARED) : count > MOST_ROWS ? INPUTS_AT_ONCE : inputs;
  for (long first = 0; first < inputs; first += step) {
    long length = inputs - first < step ? inputs - first : step;
    const W *from = weight + first * BLOCK, *next = from + length * BLOCK;
    for_rows(count, [&](auto rows, int row) {
      constexpr int R = rows.value;
      const X* some = x + row * inputs + first;
      if constexpr (R > 1)
        if (share) {
          Share ahead(next, BLOCK * sizeof(W), length, row, count, MOST_ROWS);
          return block<W, R>(from, length, some, inputs, out + row * BLOCK, ahead);
        }
      block<W, R>(from, length, some, inputs, out + row * BLOCK);
    });
  }
}

// How a weight's row is multiplied, as it lies, with a row of inputs: STEP of both at once.
template <class W> struct InPlace {
  typedef float Input;
  static constexpr int STEP = LANES;
  static Floats read(const W* p) { return load(p); }
  static Floats read_input(const float* p) { return load(p); }
  static Floats plus(Floats sums, Floats w, Floats x) { return sums + w * x; }
};
#ifdef __AVX512BF16__
template <> struct InPlace<bfloat16> {
  typedef bfloat16 Input;
  static constexpr int STEP = 2 * LANES;
  static __m512bh read(const bfloat16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static __m512bh read_input(const bfloat16* p) { return read(p); }
  static Floats plus(Floats sums, __m512bh w, __m512bh x) { return (Floats)_mm512_dpbf16_ps((__m512)sums, w, x); }
};
#endif

// Rows of inputs for it, (count, stride): zeros up to a whole step.
template <class W> struct InputsInPlace {
  typedef typename InPlace<W>::Input Input;
  std::vector<Input> own;
  const Input* rows;
  long stride;

  InputsInPlace(const float* x, long inputs, int count) {
    stride = (inputs + InPlace<W>::STEP - 1) / InPlace<W>::STEP * InPlace<W>::STEP;
    if constexpr (std::is_same<Input, float>::value) {
      rows = x;
      if (stride == inputs) return;
    }
    own.resize(count * stride);
    rows = own.data();
    for (int r = 0; r < count; r++) {
#ifdef __AVX512BF16__
      if constexpr (std::is_same<Input, bfloat16>::value)
        round_pairs(x + r * inputs, inputs, (Pair*)(own.data() + r * stride));
#endif
      if constexpr (std::is_same<Input, float>::value)
        memcpy(own.data() + r * stride, x + r * inputs, inputs * sizeof(float));
    }
  }
};

// Of R rows x (R, stride) the products with OUTPUTS rows of a weight: out (R, BLOCK). Meanwhile rows further on are
// fetched: the processor by itself does not foresee where they lie.
template <class W, int R>
inline void dots(
    const W* const* w, const W* const* ahead, long inputs, const typename InPlace<W>::Input* x, long stride, float* out
) {
  constexpr int STEP = InPlace<W>::STEP;
  Floats sums[R][OUTPUTS] = {};
  auto add = [&](const W* const* from, long at, long k) {
    decltype(InPlace<W>::read(nullptr)) own[OUTPUTS];
#pragma GCC unroll 4
    for (int o = 0; o < OUTPUTS; o++) own[o] = InPlace<W>::read(from[o] + at);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      auto one = InPlace<W>::read_input(x + r * stride + k);
#pragma GCC unroll 4
      for (int o = 0; o < OUTPUTS; o++) sums[r][o] = InPlace<W>::plus(sums[r][o], own[o], one);
    }
  };
  long whole = inputs - inputs % STEP;
  for (long k = 0; k < whole; k += STEP) {
#pragma GCC unroll 4
    for (int o = 0; o < OUTPUTS; o++) _mm_prefetch((const char*)(ahead[o] + k), _MM_HINT_T1);
    add(w, k, k);
  }
  if (whole < inputs) {
    W rest[OUTPUTS][STEP] = {};
    const W* from[OUTPUTS];
    for (int o = 0; o < OUTPUTS; o++) memcpy(rest[o], w[o] + whole, (inputs - whole) * sizeof(W)), from[o] = rest[o];
    add(from, 0, whole);
  }
  for (int r = 0; r < R; r++) sums_of_four(sums[r], out + r * BLOCK);
}

// Of rows x the `n` outputs from `first` on, of weights that are read as they lie: out (count, BLOCK).
template <class W>
inline void rows_in_place(const Matrix& m, long first, int n, const InputsInPlace<W>& x, int count, float* out) {
  const W* const* rows = (const W* const*)m.rows;
  long lead = BYTES_AHEAD / (OUTPUTS * m.inputs * long(sizeof(W))) * OUTPUTS + OUTPUTS, last = m.outputs - 1;
  for (long o = 0; o < n; o += OUTPUTS) {
    const W *w[OUTPUTS], *ahead[OUTPUTS];
    for (long i = 0, at = first + o; i < OUTPUTS; i++, at++)
      w[i] = rows[at < last ? at : last], ahead[i] = rows[at + lead < last ? at + lead : last];
    for_rows<ROWS_IN_PLACE>(count, [&](auto several, int row) {
      dots<W, several.value>(w, ahead, m.inputs, x.rows + row * x.stride, x.stride, out + row * BLOCK + o);
    });
  }
}

// A row as integers of 16 bits, and how much one of them is: its products with 8-bit weights are exact.
inline float to_integers(const float* row, long inputs, int16_t* out) {
  Floats highest = {};
  long whole = inputs - inputs % LANES;
  for (long i = 0; i < whole; i += LANES) {
    Floats one = load(row + i), size = one < 0.0f ? -one : one;
    highest = size > highest ? size : highest;
  }
  float most = 0;
  for (int i = 0; i < LANES; i++) most = highest[i] > most ? highest[i] : most;
  for (long i = whole; i < inputs; i++) most = std::fabs(row[i]) > most ? std::fabs(row[i]) : most;
  float inverse = most > 0 ? MOST_INTEGER / most : 0.0f, shift = 12582912.0f;  // adding it rounds to an integer
  for (long i = 0; i < inputs; i++) out[i] = int16_t(row[i] * inverse + shift - shift);
  return most / MOST_INTEGER;
}

// Rows as such integers, in pairs, and what one of them is.
struct Integers {
  long num_pairs;
  std::vector<int16_t> numbers;  // (count, 2 * num_pairs)
  std::vector<float> scales;     // (count,)

  Integers(const float* x, long inputs, int count)
      : num_pairs((inputs + 1) / 2), numbers(count * num_pairs * 2), scales(count) {
    for (int r = 0; r < count; r++) scales[r] = to_integers(x + r * inputs, inputs, numbers.data() + r * num_pairs * 2);
  }
  int32_t pair(int r, long k) const {
    int32_t both;
    memcpy(&both, numbers.data() + (r * num_pairs + k) * 2, 4);
    return both;
  }
};

#ifdef __AVX512F__
inline Ints widened(const int8_t* p) { return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline Ints plus_products(Ints sums, Ints w, Ints pair) {
#ifdef __AVX512VNNI__
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)w, (__m512i)pair);
#else
  return sums + (Ints)_mm512_madd_epi16((__m512i)w, (__m512i)pair);
#endif
}
#else
inline Ints widened(const int8_t* p) { return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline Ints plus_products(Ints sums, Ints w, Ints pair) {
  return sums + (Ints)_mm256_madd_epi16((__m256i)w, (__m256i)pair);
}
#endif

#ifdef IN_QUADS

#ifdef __AVX512VNNI__
inline Ints plus_products(Ints sums, Ints quads, int32_t digits) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)quads, _mm512_set1_epi32(digits));
}
#else
inline Ints plus_products(Ints sums, Ints quads, int32_t digits) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)quads, _mm256_set1_epi32(digits));
}
#endif

// Rows for 8-bit weights: of their integers two digits.
struct Digits {
  long num_quads;
  std::vector<int8_t> bytes;   // (count, 2, 4 * num_quads): high digits, low digits
  std::vector<float> scales;   // (count,)
  std::vector<int32_t> sums;   // (count, 2): of a row's digits

  Digits(const float* x, long inputs, int count)
      : num_quads((inputs + 3) / 4), bytes(count * num_quads * 8), scales(count), sums(count * 2) {
    std::vector<int16_t> numbers(inputs);
    for (int r = 0; r < count; r++) {
      scales[r] = to_integers(x + r * inputs, inputs, numbers.data());
      int8_t *high = bytes.data() + r * num_quads * 8, *low = high + num_quads * 4;
      int32_t high_sum = 0, low_sum = 0;
      for (long i = 0; i < inputs; i++) {
        int32_t digit = (numbers[i] + 128) >> 8, rest = numbers[i] - digit * 256;
        high_sum += digit, low_sum += rest;
        high[i] = int8_t(digit), low[i] = int8_t(rest);
      }
      sums[2 * r] = high_sum, sums[2 * r + 1] = low_sum;
    }
  }
};

typedef Digits InputsOf8Bits;

inline void add(Ints more, int32_t* sums) {
  Ints found;
  memcpy(&found, sums, sizeof found);
  found += more;
  memcpy(sums, &found, sizeof found);
}

// Adds to R rows' sums (R, 2, BLOCK) of products with high and low digits what some quads of inputs of one block of 8-bit
// weights, each 128 too large, say.
template <int R, class Ahead>
inline void block(const uint8_t* weight, long quads, const int8_t* digits, long stride, int32_t* sums, Ahead ahead) {
  Ints high[VECTORS][R], low[VECTORS][R];
  for (int v = 0; v < VECTORS; v++)
    for (int r = 0; r < R; r++) high[v][r] = low[v][r] = Ints{};
  for (long k = 0; k < quads; k++) {
    Ints w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) memcpy(&w[v], weight + (k * BLOCK + v * LANES) * 4, sizeof w[v]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t first, second;
      memcpy(&first, digits + 2 * r * stride + k * 4, 4);
      memcpy(&second, digits + (2 * r + 1) * stride + k * 4, 4);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        high[v][r] = plus_products(high[v][r], w[v], first);
        low[v][r] = plus_products(low[v][r], w[v], second);
      }
    }
    ahead.template fetch<BLOCK * 4>(weight + k * BLOCK * 4, k);
  }
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      add(high[v][r], sums + 2 * r * BLOCK + v * LANES);
      add(low[v][r], sums + (2 * r + 1) * BLOCK + v * LANES);
    }
}

// Of `count` rows the outputs of block b of 8-bit weights.
inline void rows_of_block(const void* weights, long b, const Digits& x, int count, float* out) {
  constexpr int MOST = MOST_ROWS / 2;  // each has two sums
  const uint8_t* weight = (const uint8_t*)weights + b * BLOCK * x.num_quads * 4;
  std::vector<int32_t> sums(size_t(count) * 2 * BLOCK);
  long step = count > MOST ? piece(x.num_quads, INPUTS_SHARED / 4) : x.num_quads, stride = x.num_quads * 4;
  for (long first = 0; first < x.num_quads; first += step) {
    long length = x.num_quads - first < step ? x.num_quads - first : step;
    const uint8_t *from = weight + first * BLOCK * 4, *next = from + length * BLOCK * 4;
    for_rows<MOST>(count, [&](auto rows, int row) {
      constexpr int R = rows.value;
      const int8_t* digits = x.bytes.data() + row * 2 * stride + first * 4;
      int32_t* own = sums.data() + size_t(row) * 2 * BLOCK;
      if (count > MOST && count <= MOST_SHARING)
        block<R>(from, length, digits, stride, own, Share(next, BLOCK * 4, length, row, count, MOST));
      else
        block<R>(from, length, digits, stride, own, Nearest());
    });
  }
  for (int r = 0; r < count; r++)
    for (int v = 0; v < VECTORS; v++) {
      const int32_t *own = sums.data() + size_t(r) * 2 * BLOCK + v * LANES, *digits = x.sums.data() + 2 * r;
      Ints high, low;
      memcpy(&high, own, sizeof high), memcpy(&low, own + BLOCK, sizeof low);
      Floats found = __builtin_convertvector(high - 128 * digits[0], Floats) * 256.0f +
                     __builtin_convertvector(low - 128 * digits[1], Floats);
      store(out + r * BLOCK + v * LANES, found * x.scales[r]);
    }
}

#else

typedef Integers InputsOf8Bits;

// Of R rows the outputs of one block of 8-bit weights, in pairs.
template <int R> inline void block(const int8_t* weight, const Integers& x, int row, float* out) {
  Floats found[VECTORS][R] = {};
  for (long first = 0; first < x.num_pairs; first += PAIRS_AT_ONCE) {
    long last = first + PAIRS_AT_ONCE < x.num_pairs ? first + PAIRS_AT_ONCE : x.num_pairs;
    Ints sums[VECTORS][R] = {};
    for (long k = first; k < last; k++) {
      fetch<BLOCK * 2>(weight + k * BLOCK * 2);
      Ints w[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) w[v] = widened(weight + (k * BLOCK + v * LANES) * 2);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        Ints pair = x.pair(row + r, k) - Ints{};
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[v][r] = plus_products(sums[v][r], w[v], pair);
      }
    }
    for (int v = 0; v < VECTORS; v++)
      for (int r = 0; r < R; r++) found[v][r] += __builtin_convertvector(sums[v][r], Floats);
  }
  for (int v = 0; v < VECTORS; v++)
    for (int r = 0; r < R; r++) store(out + (row + r) * BLOCK + v * LANES, found[v][r] * x.scales[row + r]);
}

// Of `count` rows the outputs of block b of 8-bit weights.
inline void rows_of_block(const void* weights, long b, const Integers& x, int count, float* out) {
  const int8_t* weight = (const int8_t*)weights + b * BLOCK * x.num_pairs * 2;
  for_rows(count, [&](auto rows, int row) { block<rows.value>(weight, x, row, out); });
}

#endif

// What a block has of GROUP inputs, whose weights are (number - zero) * scale. Of each output 32 bits hold the numbers
// of eight inputs, the first of each two in their lower half, so that shifts leave pairs of 16 bits.
template <class Scale> struct Group {
  uint32_t eights[GROUP / 8][BLOCK];
  Scale scales[BLOCK];
  uint8_t zeros[BLOCK];
};

// Rows for 4-bit weights.
struct GroupedIntegers : Integers {
  long num_groups;
  std::vector<float> sums;  // (count, num_groups): of a row's integers

  GroupedIntegers(const float* x, long inputs, int count)
      : Integers(x, inputs, count), num_groups(inputs / GROUP), sums(count * num_groups) {
    for (long g = 0; g < count * num_groups; g++) {
      int32_t sum = 0;
      for (int i = 0; i < GROUP; i++) sum += numbers[g * GROUP + i];
      sums[g] = float(sum);
    }
  }
};

// Of R rows the outputs of one block of 4-bit weights.
template <int R>
inline void block(const Group<bfloat16>* weight, const GroupedIntegers& x, int row, float* out) {
  Floats found[VECTORS][R] = {};
  for (long g = 0; g < x.num_groups; g++, weight++) {
    fetch<sizeof *weight>(weight);
    Ints sums[VECTORS][R] = {};
#pragma GCC unroll 1
    for (int e = 0; e < GROUP / 8; e++) {
      Ints eights[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) memcpy(&eights[v], weight->eights[e] + v * LANES, sizeof eights[v]);
#pragma GCC unroll 1
      for (int k = 0; k < 4; k++) {
        Ints w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) w[v] = eights[v] & 0x000f000f, eights[v] >>= 4;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          Ints pair = x.pair(row + r, g * (GROUP / 2) + e * 4 + k) - Ints{};
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; v++) sums[v][r] = plus_products(sums[v][r], w[v], pair);
        }
      }
    }
    for (int v = 0; v < VECTORS; v++) {
      Floats scale = load(weight->scales + v * LANES), zero = load(weight->zeros + v * LANES);
      for (int r = 0; r < R; r++) {  // up to the scale these are integers that floats hold
        Floats number = __builtin_convertvector(sums[v][r], Floats);
        found[v][r] += (number - zero * x.sums[(row + r) * x.num_groups + g]) * scale;
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) store(out + (row + r) * BLOCK + v * LANES, found[v][r] * x.scales[row + r]);
}

// Of `count` rows the outputs of block b of 4-bit weights.
inline void rows_of_block(const void* weights, long b, const GroupedIntegers& x, int count, float* out) {
  const Group<bfloat16>* weight = (const Group<bfloat16>*)weights + b * x.num_groups;
  for_rows(count, [&](auto rows, int row) { block<rows.value>(weight, x, row, out); });
}

// Of R rows x (R, inputs) the outputs of one block of 4-bit weights, by activations as they are.
template <int R> inline void block(const Group<float>* weight, long inputs, const float* x, float* out) {
  Floats found[VECTORS][R] = {};
  for (long g = 0; g < inputs / GROUP; g++, weight++) {
    fetch<sizeof *weight>(weight);
    Floats sums[VECTORS][R] = {}, zeros[VECTORS];
    for (int v = 0; v < VECTORS; v++) zeros[v] = load(weight->zeros + v * LANES);
#pragma GCC unroll 1
    for (int e = 0; e < GROUP / 8; e++) {
#pragma GCC unroll 8
      for (int k = 0; k < 8; k++) {
        Floats w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
          Ints eights;
          memcpy(&eights, weight->eights[e] + v * LANES, sizeof eights);
          w[v] = __builtin_convertvector((eights >> (k / 2 * 4 + k % 2 * 16)) & 15, Floats) - zeros[v];
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          Floats one = all(x[r * inputs + g * GROUP + e * 8 + k]);
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; v++) sums[v][r] += w[v] * one;
        }
      }
    }
    for (int v = 0; v < VECTORS; v++)
      for (int r = 0; r < R; r++) found[v][r] += sums[v][r] * load(weight->scales + v * LANES);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) store(out + r * BLOCK + v * LANES, found[v][r]);
}

inline void rows_of_block(const Group<float>* weight, long inputs, const float* x, int count, float* out) {
  for_rows(count, [&](auto rows, int row) {
    block<rows.value>(weight, inputs, x + row * inputs, out + row * BLOCK);
  });
}

// Inside a parallel region: this thread's blocks of a product for `count` rows, computed by find(block, first output, how
// many, room) and each handed on as done(first output, how many, (count, BLOCK) of them).
template <class Find, class Done> inline void for_blocks(const Matrix& m, int count, Find find, Done done) {
  int thread = omp_get_thread_num(), threads = omp_get_num_threads();
  long num_blocks = (m.outputs + BLOCK - 1) / BLOCK;
  std::vector<float> own(size_t(count) * BLOCK);
  for (long b = num_blocks * thread / threads; b < num_blocks * (thread + 1) / threads; b++) {
    long first = b * BLOCK;
    int n = int(m.outputs - first < BLOCK ? m.outputs - first : BLOCK);
    find(b, first, n, own.data());
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

template <class W, class Done> inline void product_in_place(const Matrix& m, const float* x, int count, Done done) {
  InputsInPlace<W> in(x, m.inputs, count);
  for_blocks(m, count, [&](long, long first, int n, float* out) { rows_in_place(m, first, n, in, count, out); }, done);
}

// The same for x (count, inputs).
template <class Done> inline void product(const Matrix& m, const float* x, int count, Done done) {
  if (m.rows && m.kind == FLOAT32) return product_in_place<float>(m, x, count, done);
  if (m.rows && m.kind == BFLOAT16) return product_in_place<bfloat16>(m, x, count, done);
  long num_pairs = (m.inputs + 1) / 2;
  std::vector<Pair> pairs(IN_PAIRS && m.kind == BFLOAT16 ? count * num_pairs : 0);
#ifdef __AVX512BF16__
  for (int r = 0; r < count && !pairs.empty(); r++) round_pairs(x + r * m.inputs, m.inputs, pairs.data() + r * num_pairs);
#endif
  InputsOf8Bits integers(x, m.inputs, m.kind == INT8 ? count : 0);
  GroupedIntegers grouped(x, m.inputs, m.kind == INT4 ? count : 0);
  auto find = [&](long b, long first, int, float* out) {
    long at = first * m.inputs;
    if (m.kind == FLOAT32) rows_of_block((const float*)m.weight + at, m.inputs, x, count, out);
#ifdef __AVX512BF16__
    if (m.kind == BFLOAT16)
      rows_of_block((const Pair*)m.weight + b * BLOCK * num_pairs, num_pairs, pairs.data(), count, out);
#endif
    if (m.kind == BFLOAT16_BY_FLOATS || (!IN_PAIRS && m.kind == BFLOAT16))
      rows_of_block((const bfloat16*)m.weight + at, m.inputs, x, count, out);
    if (m.kind == FLOAT16_BY_FLOATS) rows_of_block((const float16*)m.weight + at, m.inputs, x, count, out);
    if (m.kind == INT8) rows_of_block(m.weight, b, integers, count, out);
    if (m.kind == INT8_BY_FLOATS) rows_of_block((const int8_t*)m.weight + at, m.inputs, x, count, out);
    if (m.kind == INT4) rows_of_block(m.weight, b, grouped, count, out);
    if (m.kind == INT4_BY_FLOATS)
      rows_of_block((const Group<float>*)m.weight + b * (m.inputs / GROUP), m.inputs, x, count, out);
  };
  for_blocks(m, count, find, done);
}

// Inside a parallel region: x (count, inputs) to out (count, outputs), there for every thread.
inline void product_into(const Matrix& m, const float* x, int count, float* out) {
  product(m, x, count, [&](long first, int n, const float* found) {
    for (int r = 0; r < count; r++) memcpy(out + r * m.outputs + first, found + r * BLOCK, n * sizeof(float));
  });
#pragma omp barrier
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

// Numbers of one row that are added to the residual and rounded.
template <class T>
inline void write_out(
    const Rows& rows, long r, long first, long count, const Ending& ending, const float* found
) {
  long outputs = ending.out.outputs;
  const T* residual = rows.residual ? (const T*)rows.residual + r * rows.residual_stride + first : nullptr;
  T* out = (T*)rows.out + r * outputs + first;
  for (long i = 0; i < count; i++)
    out[i] = rounded<T>((ending.scale * found[i] + (residual ? number(residual[i]) : 0.0f)) * ending.total);
}

// Inside a parallel region: the end of a sublayer. room: for as many numbers as come out.
template <class T> inline void product_out(const Rows& rows, const Ending& ending, const float* x, float* room) {
  long outputs = ending.out.outputs;
  product(ending.out, x, rows.count, [&](long first, int n, const float* found) {
    for (int r = 0; r < rows.count; r++)
      if (ending.norm.weight)
        memcpy(room + r * outputs + first, found + r * BLOCK, n * sizeof(float));
      else
        write_out<T>(rows, r, first, n, ending, found + r * BLOCK);
  });
  if (!ending.norm.weight) return;
#pragma omp barrier
#pragma omp for
  for (int r = 0; r < rows.count; r++) {
    float* row = room + r * outputs;
    normed(ending.norm, row, row, outputs);
    write_out<T>(rows, r, 0, outputs, ending, row);
  }
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

template <class T> inline void keep_value(const Norm& norm, const float* value, long width, T* kept) {
  float own[1024];
  normed(norm, value, own, width);
  for (long i = 0; i < width; i++) kept[i] = rounded<T>(own[i]);
}

struct Query {
  const float* x;     // (head_dim,)
  long count;         // keys that it sees, the first so many
  float* out;         // (head_dim,)
  const float* gate;  // (head_dim,) or null
};

// Those that there are of LANES numbers, and zeros.
inline Floats load_some(const float* p, long count) {
  if (count >= LANES) return load(p);
  float own[LANES] = {};
  memcpy(own, p, count * sizeof(float));
  return load(own);
}

inline void store_some(float* p, Floats x, long count) {
  memcpy(p, &x, (count < LANES ? count : LANES) * sizeof(float));
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

inline Floats activated(Floats x, int activation) {
  return x * sigmoid(activation ? 1.5957691216f * (x + 0.044715f * x * x * x) : x);
}

// What keys and values of T are multiplied as: pairs of bfloat16 where the processor takes them, else floats.
template <class T> constexpr bool IS_PAIRED = IN_PAIRS && std::is_same<T, bfloat16>::value;
template <class T> constexpr int TOGETHER = IS_PAIRED<T> ? 2 : 1;
template <class T> using Factor = std::conditional_t<IS_PAIRED<T>, Pair, float>;

// LANES factors, those that there are of them and zeros. Those of a later row are fetched meanwhile.
template <class T> inline Floats factors(const T* p, long count) {
  constexpr int ALL = LANES * TOGETHER<T>;
  __builtin_prefetch((const char*)p + KEYS_AHEAD);
  T own[ALL];
  if (__builtin_expect(count < ALL, 0)) {
    memset(own, 0, sizeof own);
    memcpy(own, p, count * sizeof(T)), p = own;
  }
  if constexpr (IS_PAIRED<T>) {
    Floats out;
    memcpy(&out, p, sizeof out);
    return out;
  } else {
    return load(p);
  }
}

// LANES numbers of 16 bits, those that there are of them, as integers.
#ifdef __AVX512F__
inline Ints halves(const bfloat16* p, long count) {
  __builtin_prefetch((const char*)p + KEYS_AHEAD);
  bfloat16 own[LANES];
  if (__builtin_expect(count < LANES, 0)) {
    memset(own, 0, sizeof own);
    memcpy(own, p, count * sizeof(bfloat16)), p = own;
  }
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
#endif

template <class T> inline void to_factors(const float* from, long count, Factor<T>* to) {
#ifdef __AVX512BF16__
  if constexpr (IS_PAIRED<T>) return round_pairs(from, count, to);
#endif
  if constexpr (!IS_PAIRED<T>) memcpy(to, from, count * sizeof(float));
}

template <class T> struct Head {
  const T *keys, *values;  // (positions, width)
  const int* seen;         // those of them that count; null: the first ones
  long width;
  float scaling;

  const T* row(const T* of, long j) const { return of + (seen ? seen[j] : j) * width; }
  long inputs() const { return (width + LANES * TOGETHER<T> - 1) / (LANES * TOGETHER<T>) * LANES; }
  long blocks() const { return (width + BLOCK - 1) / BLOCK; }
};

// Keys from `first` on, side by side: blocks of (inputs, BLOCK) factors.
template <class T> inline void read_keys(const Head<T>& head, long first, long count, Factor<T>* out) {
  long inputs = head.inputs(), width = head.width;
  for (long j = 0; j < count; j += LANES) {
    const T* from[LANES] = {};
    for (int k = 0; k < LANES && j + k < count; k++) from[k] = head.row(head.keys, first + j + k);
    Factor<T>* to = out + j / BLOCK * inputs * BLOCK + j % BLOCK;
    for (long i = 0; i < width; i += LANES * TOGETHER<T>, to += LANES * BLOCK) {
      Floats rows[LANES], columns[LANES];
#pragma GCC unroll 16
      for (int k = 0; k < LANES; k++) rows[k] = from[k] ? factors(from[k] + i, width - i) : Floats{};
      transpose(rows, columns);
#pragma GCC unroll 16
      for (int k = 0; k < LANES; k++) memcpy(to + k * BLOCK, &columns[k], sizeof columns[k]);
    }
  }
}

// Values from `first` on: blocks of (KEYS_AT_ONCE / TOGETHER, BLOCK) factors.
template <class T> inline void read_values(const Head<T>& head, long first, long count, Factor<T>* out) {
  constexpr long SIZE = KEYS_AT_ONCE / TOGETHER<T> * BLOCK;
  for (long j = 0; j < count; j += TOGETHER<T>, out += BLOCK) {
    const T *from = head.row(head.values, first + j), *after = nullptr;
    if (j + 1 < count) after = head.row(head.values, first + j + 1);
    for (long i = 0; i < head.width; i += LANES) {
      Factor<T>* to = out + i / BLOCK * SIZE + i % BLOCK;
      if constexpr (IS_PAIRED<T>) {
        Ints pairs = halves(from + i, head.width - i);
        if (after) pairs |= halves(after + i, head.width - i) << 16;
        memcpy(to, &pairs, sizeof pairs);
      } else {
        Floats row = factors(from + i, head.width - i);
        memcpy(to, &row, sizeof row);
      }
    }
  }
}

inline float exp(float x) { return exp(all(x))[0]; }

// A query's sums over some keys: the highest product, all weights, and (width,) weighted values, both relative to it.
struct Sums {
  float highest, total;
  float* values;

  // After others, in the order of the keys.
  void add(const Sums& next, long width) {
    if (next.highest == -INFINITY) return;  // of no keys, as others' keys are more than a query's own
    float most = next.highest > highest ? next.highest : highest;
    float own = exp(highest - most), others = exp(next.highest - most);
    total = total * own + next.total * others;
    for (long i = 0; i < width; i++) values[i] = values[i] * own + next.values[i] * others;
    highest = most;
  }
};

// Room for what `attend` makes of some queries.
template <class T> struct Room {
  Factor<T> *own, *part, *weights;
  float *scores, *outs, *highest, *totals;

  Room(const Head<T>& head, long count) {
    long inputs = head.inputs(), blocks = head.blocks(), most = inputs > blocks * BLOCK ? inputs : blocks * BLOCK;
    thread_local std::vector<float> numbers;
    size_t size = count * inputs + KEYS_AT_ONCE * most + count * (2 * KEYS_AT_ONCE + blocks * BLOCK + LANES + 1);
    if (numbers.size() < size) numbers.resize(size);
    own = (Factor<T>*)numbers.data(), part = own + count * inputs, weights = part + KEYS_AT_ONCE * most;
    scores = (float*)weights + count * KEYS_AT_ONCE, outs = scores + count * KEYS_AT_ONCE;
    totals = outs + count * blocks * BLOCK, highest = totals + count * LANES;
  }
};

// What some queries, whose factors are in `room.own`, make of the keys from `begin` to `end`.
template <class T>
inline void attend(const Head<T>& head, const std::vector<Query>& queries, long begin, long end, Room<T>& room, Sums* out) {
  long inputs = head.inputs(), blocks = head.blocks(), count = queries.size();
  memset(room.outs, 0, count * (blocks * BLOCK + LANES) * sizeof(float));  // and the totals behind them
  std::fill_n(room.highest, count, -INFINITY);
  Ints lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = i;
  for (long first = begin; first < end; first += KEYS_AT_ONCE) {
    long n = end - first < KEYS_AT_ONCE ? end - first : KEYS_AT_ONCE;
    read_keys(head, first, n, room.part);
    memset(room.scores, 0, count * KEYS_AT_ONCE * sizeof(float));
    for (long j = 0; j < n; j += BLOCK)
      for_rows(count, [&](auto rows, int q) {
        block<Factor<T>, rows.value>(
            room.part + j * inputs, inputs, room.own + q * inputs, inputs, room.scores + (j / BLOCK * count + q) * BLOCK
        );
      });
    for (long q = 0; q < count; q++) {
      long left = queries[q].count - first;
      auto at = [&](long j) { return room.scores + (j / BLOCK * count + q) * BLOCK + j % BLOCK; };
      Floats top = all(-INFINITY), total = load(room.totals + q * LANES);
      for (long j = 0; j < n; j += LANES) {
        Floats x = load(at(j)) * head.scaling;
        if (left < j + LANES) x = lanes < int(left - j) ? x : all(-INFINITY);
        store(at(j), x);
        top = x > top ? x : top;
      }
      float highest = room.highest[q];
      for (int i = 0; i < LANES; i++) highest = top[i] > highest ? top[i] : highest;
      if (highest > room.highest[q]) {
        float kept = exp(room.highest[q] - highest);
        for (long b = 0; b < blocks; b++)
          for (long i = 0; i < BLOCK; i += LANES) {
            float* place = room.outs + (b * count + q) * BLOCK + i;
            store(place, load(place) * kept);
          }
        total *= kept;
        room.highest[q] = highest;
      }
      for (long j = 0; j < n; j += LANES) {
        Floats weight = exp(load(at(j)) - highest);
        if (left < j + LANES) weight = lanes < int(left - j) ? weight : Floats{};
        store(at(j), weight);
        total += weight;
      }
      store(room.totals + q * LANES, total);
    }
    to_factors<T>(room.scores, count * KEYS_AT_ONCE, room.weights);
    read_values(head, first, n, room.part);
    for (long b = 0; b < blocks; b++)
      for (long j = 0; j < n; j += BLOCK) {
        long some = n - j < BLOCK ? n - j : BLOCK, stride = BLOCK / TOGETHER<T>;
        for_rows(count, [&](auto rows, int q) {
          block<Factor<T>, rows.value>(
              room.part + (b * KEYS_AT_ONCE + j) / TOGETHER<T> * BLOCK, (some + TOGETHER<T> - 1) / TOGETHER<T>,
              room.weights + (j / BLOCK * count + q) * stride, stride, room.outs + (b * count + q) * BLOCK
          );
        });
      }
  }
  for (long q = 0; q < count; q++) {
    out[q].highest = room.highest[q];
    out[q].total = sum(load(room.totals + q * LANES));
    for (long i = 0; i < head.width; i++) out[q].values[i] = room.outs[(i / BLOCK * count + q) * BLOCK + i % BLOCK];
  }
}

// The same of the keys of parts `from` to `to`, one after the other; from the queries themselves, with room for their
// values.
template <class T>
inline void attend_parts(const Head<T>& head, const std::vector<Query>& queries, long from, long to, Sums* out) {
  long count = queries.size(), most = 0;
  for (const Query& query : queries) most = query.count > most ? query.count : most;
  Room<T> room(head, count);
  memset(room.own, 0, count * head.inputs() * sizeof(Factor<T>));
  std::vector<float> numbers(count * head.width);
  std::vector<Sums> sums(count);
  for (long q = 0; q < count; q++) {
    to_factors<T>(queries[q].x, head.width, room.own + q * head.inputs());
    sums[q].values = numbers.data() + q * head.width;
    out[q].highest = -INFINITY, out[q].total = 0.0f;
    std::fill_n(out[q].values, head.width, 0.0f);
  }
  for (long begin = from * KEYS_OF_PART; begin < to * KEYS_OF_PART && begin < most; begin += KEYS_OF_PART) {
    attend(head, queries, begin, begin + KEYS_OF_PART < most ? begin + KEYS_OF_PART : most, room, sums.data());
    for (long q = 0; q < count; q++) out[q].add(sums[q], head.width);
  }
}

inline void write_attended(const Query& query, const Sums& sums, long width) {
  for (long i = 0; i < width; i += LANES) {
    Floats out = load_some(sums.values + i, width - i) / sums.total;
    if (query.gate) out *= sigmoid(load_some(query.gate + i, width - i));
    store_some(query.out + i, out, width - i);
  }
}

// Scratch of the calling thread, which all threads of its parallel regions share.
float* scratch(size_t count) {
  thread_local std::vector<float> numbers;
  if (numbers.size() < count) numbers.resize(count);
  return numbers.data();
}

// What one text's rows ask of its keys, and how that is shared among threads.
struct Asked {
  const Look& look;
  long row, num_seen, num_queries, parts, share, shares, first_sum;
  bool apart;  // whether a part of the keys is one task
  std::vector<std::vector<int>> seen;

  // group: queries of a key head, of each row. all_queries: of all texts and key heads. row and first_sum: of all texts',
  // where this one's begin.
  Asked(const Look& look, long group, long num_keys, long all_queries, int num_threads, long row, long first_sum)
      : look(look), row(row), num_seen(look.place + look.count - look.first), num_queries(look.count * group),
        parts((num_seen + KEYS_OF_PART - 1) / KEYS_OF_PART), first_sum(first_sum), seen(look.visible ? look.count : 0) {
    // Several queries of a key head share one reading of it, yet no thread waits for another.
    share = parts > 1 ? MOST_QUERIES : all_queries / (2 * num_threads);
    share = look.visible ? group : share < 1 ? 1 : share > MOST_QUERIES ? MOST_QUERIES : share;
    shares = (num_queries + share - 1) / share;
    apart = parts > 1 && num_keys * shares < 4 * num_threads;
    for (size_t r = 0; r < seen.size(); r++)
      for (long j = 0; j < num_seen; j++)
        if (look.visible[r * look.visible_stride + j]) seen[r].push_back(int(j));
  }
  long tasks_of_key() const { return shares * (apart ? parts : 1); }
  long sums_of_key() const { return num_queries * (apart ? parts : 1); }
};

template <class T>
void attention_rows(const Attention& part, const Rows& rows, const std::vector<Look>& looks, bool keys_only) {
  long width = part.qkv.inputs, head = part.head_dim, num_own = part.reads ? 0 : part.num_keys;
  long num_rotated = part.num_queries + num_own, first_gate = num_rotated + num_own;
  long num_heads = first_gate + (part.is_gated ? part.num_queries : 0);
  long attended_width = part.num_queries * head, group = part.num_queries / part.num_keys;
  // Kept, so that a small model's step need not ask for memory in every layer.
  thread_local std::vector<Asked> asked;
  thread_local std::vector<std::pair<int, long>> wanted;  // a text, and which of its own tasks
  thread_local std::vector<int> places;
  auto &texts = asked;
  auto &tasks = wanted;
  auto &text_of = places;
  texts.clear(), tasks.clear(), text_of.resize(rows.count);
  long num_rows = 0, num_sums = 0;
  for (const Look& look : looks) {
    int text = int(texts.size());
    texts.emplace_back(
        look, group, part.num_keys, rows.count * part.num_queries, rows.num_threads, num_rows, num_sums
    );
    for (long i = 0; i < part.num_keys * texts.back().tasks_of_key(); i++) tasks.emplace_back(text, i);
    std::fill_n(text_of.begin() + num_rows, look.count, text);
    num_rows += look.count, num_sums += part.num_keys * texts.back().sums_of_key();
  }
  float* x = scratch(rows.count * (width + num_heads * head + part.out.out.outputs + attended_width) + num_sums * head);
  float *heads = x + rows.count * width, *attended = heads + rows.count * num_heads * head;
  float *room_of_out = attended + rows.count * attended_width, *values = room_of_out + rows.count * part.out.out.outputs;
  std::vector<Sums> sums(num_sums);  // of each text (parts, key heads, queries)
  for (long i = 0; i < num_sums; i++) sums[i].values = values + i * head;
  auto query_of = [&](const Asked& text, long key, long q) {
    long r = q / group, h = key * group + q % group, row = text.row + r;
    long count = text.look.visible ? long(text.seen[r].size()) : text.look.place + r + 1 - text.look.first;
    const float *own = heads + (row * num_heads + h) * head, *gate = own + first_gate * head;
    return Query{own, count, attended + row * attended_width + h * head, part.is_gated ? gate : nullptr};
  };
  read_rows<T>(rows, part.norm, width, x);
#pragma omp parallel num_threads(rows.num_threads)
  {
    product_into(part.qkv, x, rows.count, heads);
#pragma omp for
    for (long i = 0; i < rows.count * num_heads; i++) {
      const Asked& text = texts[text_of[i / num_heads]];
      const Look& look = text.look;
      long r = i / num_heads - text.row, h = i % num_heads, state = h - part.num_queries;
      if (h >= first_gate) continue;
      float* own = heads + i * head;
      T* kept = state < 0 ? nullptr : (T*)look.states + (state * look.positions + look.place + r) * head;
      const T *cos = (const T*)look.cos + r * head, *sin = (const T*)look.sin + r * head;
      if (h < num_rotated)
        rotate(state < 0 ? part.query_norm : part.key_norm, own, cos, sin, head, kept);
      else
        keep_value(part.value_norm, own, head, kept);
    }
    if (!keys_only) {
#pragma omp for schedule(dynamic)
      for (size_t t = 0; t < tasks.size(); t++) {
        const Asked& text = texts[tasks[t].first];
        const Look& look = text.look;
        long i = tasks[t].second, which = text.apart ? i / text.parts : i, from = text.apart ? i % text.parts : 0;
        long first = which % text.shares * text.share, key = which / text.shares;
        const T* keys = (const T*)look.states + (key * look.positions + look.first) * head;
        const int* of_row = look.visible ? text.seen[first / group].data() : nullptr;
        std::vector<Query> queries;
        for (long q = first; q < first + text.share && q < text.num_queries; q++)
          queries.push_back(query_of(text, key, q));
        Sums* own = sums.data() + text.first_sum + (from * part.num_keys + key) * text.num_queries + first;
        Head<T> of = {keys, keys + part.num_keys * look.positions * head, of_row, head, part.scaling};
        attend_parts(of, queries, from, text.apart ? from + 1 : text.parts, own);
        for (size_t q = 0; q < queries.size() && !text.apart; q++) write_attended(queries[q], own[q], head);
      }
      for (const Asked& text : texts) {
        if (!text.apart) continue;
        Sums* own = sums.data() + text.first_sum;
        long count = part.num_keys * text.num_queries;
#pragma omp for
        for (long i = 0; i < count; i++) {
          Query query = query_of(text, i / text.num_queries, i % text.num_queries);
          for (long p = 1; p < text.parts; p++) own[i].add(own[p * count + i], head);
          write_attended(query, own[i], head);
        }
      }
      product_out<T>(rows, part.out, attended, room_of_out);
    }
  }
}

inline float dot(const float* a, const float* b, long count) {
  Floats sums = {};
  for (long i = 0; i < count; i += LANES) sums += load_some(a + i, count - i) * load_some(b + i, count - i);
  return sum(sums);
}

// Where a layer with a state stands when some rows come to it.
struct Entry {
  Memory& memory;
  const float* source;  // the state that the first of the pending rows comes to
  long num_pending;     // rows that have been answered and only change the state
  float* kept;          // where the state goes that the first new row comes to, or null
  long place;           // of the first new row
};

// What of the rows goes into the state, and before it what the convolution still sees: (tail + pending + new, width).
struct Parts {
  long tail, width, channels;  // the convolution sees the first so many of each row
  float* rows;

  float* at(long r) const { return rows + (tail + r) * width; }
};

// Inside a parallel region: reads them, those of new rows by `found`. state_size: numbers of a state before its tail.
template <class T, class Found>
inline void read_parts(const Parts& parts, const Entry& entry, long count, long state_size, Found found) {
#pragma omp for
  for (long r = -parts.tail; r < entry.num_pending + count; r++) {
    float* to = parts.at(r);
    if (r < 0) {
      memcpy(to, entry.source + state_size + (parts.tail + r) * parts.channels, parts.channels * sizeof(float));
    } else if (r < entry.num_pending) {
      long position = entry.place - entry.num_pending + r;
      const T* known = (const T*)entry.memory.log + position % entry.memory.num_logged * parts.width;
      for (long i = 0; i < parts.width; i++) to[i] = number(known[i]);
    } else {
      for (long i = 0; i < parts.width; i++) to[i] = number(rounded<T>(found(r - entry.num_pending, i)));
    }
  }
}

// Writes the states' tails and the log.
template <class T> inline void keep_parts(const Parts& parts, const Entry& entry, long count, long state_size) {
  Memory& memory = entry.memory;
  for (long r = 0; r < parts.tail; r++) {
    const float *before = parts.at(entry.num_pending - parts.tail + r), *last = before + count * parts.width;
    long at = state_size + r * parts.channels;
    if (entry.kept) memcpy(entry.kept + at, before, parts.channels * sizeof(float));
    memcpy(memory.live + at, last, parts.channels * sizeof(float));
  }
  for (long r = count < memory.num_logged ? 0 : count - memory.num_logged; r < count; r++) {
    const float* from = parts.at(entry.num_pending + r);
    T* to = (T*)memory.log + (entry.place + r) % memory.num_logged * parts.width;
    for (long i = 0; i < parts.width; i++) to[i] = rounded<T>(from[i]);
  }
}

// Of LANES channels from `i` on, or fewer, what a convolution makes of the rows that end with row `r`.
inline Floats convolved(const float* conv, const Parts& parts, long r, long i, long count) {
  Floats sums = {};
  for (long t = 0; t <= parts.tail; t++)
    sums += load_some(conv + t * parts.channels + i, count) * load_some(parts.at(r - parts.tail + t) + i, count);
  return sums;
}

inline void convolved(const LinearAttention& part, const Parts& parts, long r, long first, long count, float* out) {
  for (long i = 0; i < count; i += LANES) {
    Floats found = convolved(part.conv, parts, r, first + i, count - i);
    if (part.conv_bias) found += load_some(part.conv_bias + first + i, count - i);
    store_some(out + i, found * sigmoid(found), count - i);
  }
}

inline void normalized(float* x, long count, float length) {
  float scale = length / std::sqrt(dot(x, x, count) + 1e-6f);
  for (long i = 0; i < count; i++) x[i] *= scale;
}

// Some rows of one value head.
struct StateRows {
  long key_dim, value_dim;
  long num_pending, count;          // the first so many have been answered, they only change the state
  float *queries, *keys;            // (count, key_dim), and a row of zeros
  float *values, *outs;             // (count, value_dim)
  float *keeps, *writes, *touches;  // (count,): what each keeps and writes, and its query's product with its key
  bool corrects;
};

// V vectors of the columns of a head's state, from one row to the next: what stays of it, and what is written under the
// key. All states are (key_dim, value_dim).
template <int V>
inline void state_columns(
    const StateRows& head, long first, const float* source, float* kept, float* live, float* room
) {
  long width = head.value_dim - first;
  Floats written[V] = {};
  float keep = 1;
  const float *zeros = head.keys + head.count * head.key_dim, *before = zeros;
  for (long i = 0; i < head.key_dim; i++)
    for (int v = 0; v < V; v++)
      store(room + (i * V + v) * LANES, load_some(source + i * head.value_dim + first + v * LANES, width - v * LANES));
  for (long r = 0; r <= head.count; r++) {
    const float *key = head.keys + r * head.key_dim, *query = head.queries + r * head.key_dim;
    Floats known[V] = {}, read[V] = {};
    for (long i = 0; i < head.key_dim; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        float* place = room + (i * V + v) * LANES;
        Floats state = load(place) * keep + before[i] * written[v];
        store(place, state);
        known[v] += key[i] * state;
        read[v] += query[i] * state;
      }
    float* out = r == head.count ? live : r == head.num_pending ? kept : nullptr;
    for (long i = 0; i < head.key_dim && out; i++)
      for (int v = 0; v < V; v++)
        store_some(out + i * head.value_dim + first + v * LANES, load(room + (i * V + v) * LANES), width - v * LANES);
    if (r == head.count) break;
    keep = head.keeps[r], before = key;
    for (int v = 0; v < V; v++) {
      long at = r * head.value_dim + first + v * LANES, n = width - v * LANES;
      written[v] = load_some(head.values + at, n) * head.writes[r];
      if (head.corrects) written[v] -= keep * known[v] * head.writes[r];
      store_some(head.outs + at, keep * read[v] + head.touches[r] * written[v], n);
    }
  }
}

// Whether the kept state, and the rows since, tell what stands at the next row.
inline bool is_kept(const Memory& m) {
  return m.kept_at == m.at || (m.kept_at >= 0 && m.kept_at < m.at && m.kept_at >= m.log_from);
}

template <class T> void rows_of(const LinearAttention& part, const Rows& rows, const Entry& entry) {
  long key = part.key_dim, value = part.value_dim, group = part.num_values / part.num_keys;
  long first_value = 2 * part.num_keys * key, inner = part.num_values * value, channels = first_value + inner;
  long outputs = part.in.outputs, inputs = part.in.inputs, state_size = part.num_values * key * value;
  long count = entry.num_pending + rows.count;
  Parts parts{part.taps - 1, channels + 2 * part.num_values, channels};
  long ending = part.out.out.outputs;
  float* x = scratch(rows.count * (inputs + outputs + inner + ending) + (parts.tail + count) * parts.width);
  float *projected = x + rows.count * inputs, *attended = projected + rows.count * outputs;
  parts.rows = attended + rows.count * inner;
  read_rows<T>(rows, part.norm, inputs, x);
#pragma omp parallel num_threads(rows.num_threads)
  {
    product_into(part.in, x, rows.count, projected);
    read_parts<T>(parts, entry, rows.count, state_size, [&](long r, long i) { return projected[r * outputs + i]; });
    std::vector<float> room;
#pragma omp for schedule(dynamic)
    for (long h = 0; h < part.num_values; h++) {
      room.resize((count + 1) * 2 * key + count * (2 * value + 3) + key * 4 * LANES + value);
      StateRows head{key, value, entry.num_pending, count, room.data()};
      head.corrects = part.corrects;
      head.keys = head.queries + (count + 1) * key, head.values = head.keys + (count + 1) * key;
      head.outs = head.values + count * value, head.keeps = head.outs + count * value;
      head.writes = head.keeps + count, head.touches = head.writes + count;
      float *block = head.touches + count, *out = block + key * 4 * LANES;
      memset(head.queries + count * key, 0, key * sizeof(float));
      memset(head.keys + count * key, 0, key * sizeof(float));
      for (long r = 0; r < count; r++) {
        const float* numbers = parts.at(r) + channels;
        float *own_query = head.queries + r * key, *own_key = head.keys + r * key;
        convolved(part, parts, r, h / group * key, key, own_query);
        convolved(part, parts, r, (part.num_keys + h / group) * key, key, own_key);
        convolved(part, parts, r, first_value + h * value, value, head.values + r * value);
        if (part.corrects) normalized(own_query, key, 1 / std::sqrt(float(key))), normalized(own_key, key, 1);
        float x = numbers[part.num_values + h] + part.biases[h], step = x > 20 ? x : std::log1p(std::exp(x));
        head.keeps[r] = std::exp(part.rates[h] * step);
        head.writes[r] = part.corrects ? 1 / (1 + std::exp(-numbers[h])) : step;
        head.touches[r] = dot(own_query, own_key, key);
      }
      long at = h * key * value, i = 0;
      const float* source = entry.source + at;
      float *kept = entry.kept ? entry.kept + at : nullptr, *live = entry.memory.live + at;
      for (; i + 4 * LANES <= value; i += 4 * LANES) state_columns<4>(head, i, source, kept, live, block);
      for (; i + 2 * LANES <= value; i += 2 * LANES) state_columns<2>(head, i, source, kept, live, block);
      for (; i < value; i += LANES) state_columns<1>(head, i, source, kept, live, block);
      for (long r = 0; r < rows.count; r++) {
        long at = (entry.num_pending + r) * value;
        const float *found = head.outs + at, *own = head.values + at;
        if (part.num_groups)
          memcpy(out, found, value * sizeof(float));
        else
          normed(part.out_norm, found, out, value);
        const float* gates = projected + r * outputs + parts.width + h * value;
        for (long i = 0; i < value; i += LANES) {
          Floats gate = load_some(gates + i, value - i), gated = load_some(out + i, value - i);
          if (part.skips) gated += part.skips[h] * load_some(own + i, value - i);
          store_some(attended + r * inner + h * value + i, gated * gate * sigmoid(gate), value - i);
        }
      }
    }
    long size = part.num_groups ? inner / part.num_groups : 0;
#pragma omp for
    for (long i = 0; i < rows.count * part.num_groups; i++) {
      float* own = attended + i / part.num_groups * inner + i % part.num_groups * size;
      normed(Norm{part.out_norm.weight + i % part.num_groups * size, part.out_norm.eps}, own, own, size);
    }
    product_out<T>(rows, part.out, attended, parts.at(count));
  }
  keep_parts<T>(parts, entry, rows.count, state_size);
}

template <class T> void rows_of(const ShortConv& part, const Rows& rows, const Entry& entry) {
  long channels = part.out.out.inputs, ending = part.out.out.outputs, inputs = part.in.inputs, outputs = 3 * channels;
  Parts parts{part.taps - 1, channels, channels};
  long held = parts.tail + entry.num_pending + rows.count;
  float* x = scratch(rows.count * (inputs + outputs + channels + ending) + held * channels);
  float *projected = x + rows.count * inputs, *gated = projected + rows.count * outputs;
  parts.rows = gated + rows.count * channels;
  read_rows<T>(rows, part.norm, inputs, x);
#pragma omp parallel num_threads(rows.num_threads)
  {
    product_into(part.in, x, rows.count, projected);
    read_parts<T>(parts, entry, rows.count, 0, [&](long r, long i) {
      return projected[r * outputs + i] * projected[r * outputs + 2 * channels + i];
    });
#pragma omp for
    for (long c = 0; c < rows.count * ((channels + LANES - 1) / LANES); c++) {
      long r = c % rows.count, i = c / rows.count * LANES, n = channels - i;
      Floats found = convolved(part.conv, parts, entry.num_pending + r, i, n);
      if (part.bias) found += load_some(part.bias + i, n);
      store_some(gated + r * channels + i, found * load_some(projected + r * outputs + channels + i, n), n);
    }
    product_out<T>(rows, part.out, gated, parts.rows + held * channels);
  }
  keep_parts<T>(parts, entry, rows.count, 0);
}

template <class Part> void rows_of(const Part& part, const Rows& rows, int is_float32, const Entry& entry) {
  is_float32 ? rows_of<float>(part, rows, entry) : rows_of<bfloat16>(part, rows, entry);
}

// Gate and up, (count, 2 * inner), to what comes down: this thread's part of it.
inline void activate(const float* both, long count, long inner, int activation, float* out) {
#pragma omp for nowait
  for (long c = 0; c < count * ((inner + LANES - 1) / LANES); c++) {
    long r = c % count, i = c / count * LANES, n = inner - i;
    const float* gate = both + r * 2 * inner + i;
    store_some(out + r * inner + i, activated(load_some(gate, n), activation) * load_some(gate + inner, n), n);
  }
}

template <class T> void mlp_rows(const Mlp& part, const Rows& rows) {
  long width = part.gate_up.inputs, inner = part.down.out.inputs;
  float* x = scratch(rows.count * (width + 3 * inner + part.down.out.outputs));
  float *both = x + rows.count * width, *inside = both + rows.count * 2 * inner;
  read_rows<T>(rows, part.norm, width, x);
#pragma omp parallel num_threads(rows.num_threads)
  {
    product_into(part.gate_up, x, rows.count, both);
    activate(both, rows.count, inner, part.activation, inside);
#pragma omp barrier
    product_out<T>(rows, part.down, inside, inside + rows.count * inner);
  }
}

struct Choice {  // that a row is computed by an expert
  long expert, row;
  float weight;
};

// What one row's scores choose, num_chosen of them.
template <class T> inline void choose(const Experts& part, const float* scores, long row, Choice* out) {
  std::vector<float> weights(part.num_experts), wanted(part.num_experts);
  float most = -INFINITY, total = 0;
  for (long e = 0; e < part.num_experts; e++) {
    weights[e] = part.rounds ? number(rounded<T>(scores[e])) : scores[e];
    most = weights[e] > most ? weights[e] : most;
  }
  for (float& one : weights) {
    one = part.by_sigmoid ? 1 / (1 + std::exp(-one)) : std::exp(one - most);
    total += one;
  }
  for (long e = 0; e < part.num_experts; e++) {
    if (!part.by_sigmoid) weights[e] /= total;
    wanted[e] = weights[e] + (part.preferences ? part.preferences[e] : 0.0f);
  }
  if (part.groups_chosen < part.num_groups) {
    long size = part.num_experts / part.num_groups;
    std::vector<float> best(part.num_groups);
    for (long g = 0; g < part.num_groups; g++) {
      float first = -INFINITY, second = -INFINITY;
      for (long i = 0; i < size; i++) {
        float one = wanted[g * size + i];
        second = one > first ? first : one > second ? one : second, first = one > first ? one : first;
      }
      best[g] = first + second;
    }
    for (long left = part.num_groups - part.groups_chosen; left; left--) {
      long worst = -1;
      for (long g = 0; g < part.num_groups; g++)
        if (best[g] != INFINITY && (worst < 0 || best[g] <= best[worst])) worst = g;  // what is no number, too
      best[worst] = INFINITY;
      for (long i = 0; i < size; i++) wanted[worst * size + i] = -INFINITY;
    }
  }
  float sum = 0;
  for (long k = 0; k < part.num_chosen; k++) {
    long best = 0;
    for (long e = 1; e < part.num_experts; e++) best = wanted[e] > wanted[best] ? e : best;
    out[k] = {best, row, weights[best]};
    sum += weights[best];
    wanted[best] = -INFINITY;
  }
  for (long k = 0; k < part.num_chosen; k++)
    out[k].weight *= part.scale / (part.sums_to_one ? sum + part.least : 1.0f);
}

template <class T> void expert_rows(const Experts& part, const Rows& rows) {
  long width = part.router.inputs, outputs = part.shared_down.out.outputs, num_pairs = rows.count * part.num_chosen;
  long inner = part.down[0].inputs, shared = part.shared_gate_up.outputs / 2;
  long of_row = width + part.num_experts + 1 + outputs + 3 * shared, of_pair = width + 3 * inner;
  float* x = scratch(rows.count * of_row + num_pairs * of_pair);
  float *scores = x + rows.count * width, *shared_scores = scores + rows.count * part.num_experts;
  float *sums = shared_scores + rows.count, *shared_both = sums + rows.count * outputs;
  float *shared_inside = shared_both + rows.count * 2 * shared, *gathered = shared_inside + rows.count * shared;
  float *both = gathered + num_pairs * width, *inside = both + num_pairs * 2 * inner;
  std::vector<Choice> chosen(num_pairs);
  std::vector<long> starts;  // of each expert that was chosen, among the choices
  read_rows<T>(rows, part.norm, width, x);
#pragma omp parallel num_threads(rows.num_threads)
  {
    product_into(part.router, x, rows.count, scores);
    if (part.shared_router.outputs) product_into(part.shared_router, x, rows.count, shared_scores);
#pragma omp for
    for (long r = 0; r < rows.count; r++)
      choose<T>(part, scores + r * part.num_experts, r, chosen.data() + r * part.num_chosen);
#pragma omp single
    {
      std::sort(chosen.begin(), chosen.end(), [](const Choice& a, const Choice& b) {
        return a.expert != b.expert ? a.expert < b.expert : a.row < b.row;
      });
      for (long i = 0; i < num_pairs; i++)
        if (!i || chosen[i].expert != chosen[i - 1].expert) starts.push_back(i);
      starts.push_back(num_pairs);
      memset(sums, 0, rows.count * outputs * sizeof(float));
    }
#pragma omp for
    for (long i = 0; i < num_pairs; i++)
      memcpy(gathered + i * width, x + chosen[i].row * width, width * sizeof(float));
    auto by_expert = [&](const Matrix* matrices, const float* in, auto done) {
      for (size_t s = 0; s + 1 < starts.size(); s++) {
        const Matrix& m = matrices[chosen[starts[s]].expert];
        int count = int(starts[s + 1] - starts[s]);
        product(m, in + starts[s] * m.inputs, count, [&](long first, int n, const float* found) {
          for (int r = 0; r < count; r++) done(starts[s] + r, first, n, found + r * BLOCK);
        });
      }
    };
    by_expert(part.gate_up, gathered, [&](long pair, long first, int n, const float* found) {
      memcpy(both + pair * 2 * inner + first, found, n * sizeof(float));
    });
    if (shared) product_into(part.shared_gate_up, x, rows.count, shared_both);
#pragma omp barrier
    activate(both, num_pairs, inner, part.activation, inside);
    activate(shared_both, shared ? rows.count : 0, shared, part.activation, shared_inside);
#pragma omp barrier
    // A thread has the same outputs of every expert, so a row's sums come about in one order.
    auto add = [&](long row, float weight, long first, int n, const float* found) {
      float* to = sums + row * outputs + first;
      for (int i = 0; i < n; i++) to[i] += weight * found[i];
    };
    by_expert(part.down, inside, [&](long pair, long first, int n, const float* found) {
      add(chosen[pair].row, chosen[pair].weight, first, n, found);
    });
    if (shared)
      product(part.shared_down.out, shared_inside, rows.count, [&](long first, int n, const float* found) {
        for (int r = 0; r < rows.count; r++)
          add(r, part.shared_router.outputs ? 1 / (1 + std::exp(-shared_scores[r])) : 1.0f, first, n, found + r * BLOCK);
      });
#pragma omp barrier
#pragma omp for
    for (long r = 0; r < rows.count; r++) write_out<T>(rows, r, 0, outputs, part.shared_down, sums + r * outputs);
  }
}

template <class T> void token_gate_rows(const TokenGate& part, const Rows& rows, int activation) {
  long width = part.in.inputs, inner = part.in.outputs;
  float* x = scratch(rows.count * (width + inner + part.out.out.outputs));
  float* inside = x + rows.count * width;
  read_rows<T>(rows, Norm{nullptr, 0}, width, x);
#pragma omp parallel num_threads(rows.num_threads)
  {
    product(part.in, x, rows.count, [&](long first, int n, const float* found) {
      for (int r = 0; r < rows.count; r++) {
        const T* gates = (const T*)rows.gates + r * rows.gates_stride + part.first + first;
        for (long i = 0; i < n; i += LANES) {
          float own[LANES] = {};
          for (int j = 0; j < LANES && i + j < n; j++) own[j] = number(gates[i + j]);
          Floats gated = activated(load_some(found + r * BLOCK + i, n - i), activation) * load(own);
          store_some(inside + r * inner + first + i, gated, n - i);
        }
      }
    });
#pragma omp barrier
    product_out<T>(rows, part.out, inside, inside + rows.count * inner);
  }
}

template <class T> void linear_rows(const Matrix& m, const Rows& rows) {
  float* x = scratch(rows.count * m.inputs);
  read_rows<T>(rows, Norm{nullptr, 0}, m.inputs, x);
#pragma omp parallel num_threads(rows.num_threads)
  product_out<T>(rows, Ending{m, {nullptr, 0}, 1, 1}, x, nullptr);
}

// Some of the rows, in a sublayer of so many outputs.
inline Rows some_of(const Rows& rows, long first, long count, long outputs) {
  long bytes = rows.is_float32 ? 4 : 2;
  Rows some = rows;
  some.x = (const char*)rows.x + first * rows.stride * bytes;
  if (rows.residual) some.residual = (const char*)rows.residual + first * rows.residual_stride * bytes;
  some.out = (char*)rows.out + first * outputs * bytes;
  if (rows.gates) some.gates = (const char*)rows.gates + first * rows.gates_stride * bytes;
  some.count = int(count);
  return some;
}

// Calls what takes a few rows for each piece of many, given the first of them.
template <class Some> inline void in_pieces(const Rows& rows, long outputs, Some some) {
  for (int first = 0; first < rows.count; first += ROWS_AT_ONCE)
    some(some_of(rows, first, rows.count - first < ROWS_AT_ONCE ? rows.count - first : ROWS_AT_ONCE, outputs), first);
}

// A layer with a state over rows that come at `place`. False, with nothing done, where its state does not stand there.
template <class Part> bool advance(const Part& part, const Rows& rows, Memory& m, long place) {
  bool is_live = m.live_at == place;
  if (m.at != place || !(is_live || is_kept(m))) return false;
  Entry entry{m, is_live ? m.live : m.kept, is_live ? 0 : place - m.kept_at, nullptr, place};
  if (place != m.kept_at && (rows.count > 1 || m.several || place - m.kept_at >= m.num_logged / 2)) {
    std::swap(m.kept, m.older), m.older_at = m.kept_at, m.kept_at = place;
    entry.kept = m.kept;
  }
  m.live_at = -1;
  in_pieces(rows, part.out.out.outputs, [&](const Rows& piece, long first) {
    rows_of(part, piece, rows.is_float32, first ? Entry{m, m.live, 0, nullptr, place + first} : entry);
  });
  m.at = m.live_at = place + rows.count;
  m.several = rows.count > 1;
  if (m.log_from < m.at - m.num_logged) m.log_from = m.at - m.num_logged;
  return true;
}

// Brings the live state to where the next row comes.
template <class Part> void settle(const Part& part, Memory& m, int is_float32, int num_threads) {
  if (m.live_at == m.at) return;
  Rows none = {};
  none.num_threads = num_threads;
  rows_of(part, none, is_float32, Entry{m, m.kept, m.at - m.kept_at, nullptr, m.at});
  m.live_at = m.at;
}

}  // namespace

extern "C" {

int layerskip_outputs_together() { return BLOCK; }

int layerskip_inputs_together(int kind) {
#ifdef IN_QUADS
  if (kind == INT8) return 4;
#endif
  return kind == INT8 || (IN_PAIRS && kind == BFLOAT16) ? 2 : 1;
}

void layerskip_attention(const Attention* part, const Rows* rows, const Look* looks, int num_looks, int keys_only) {
  in_pieces(*rows, part->out.out.outputs, [&](const Rows& piece, long first) {
    thread_local std::vector<Look> own;
    own.clear();
    for (int t = 0; t < num_looks; first -= looks[t++].count) {
      Look look = looks[t];
      long from = first > 0 ? first : 0, stop = first + piece.count < look.count ? first + piece.count : look.count;
      if (from >= stop) continue;
      long bytes = from * part->head_dim * (rows->is_float32 ? 4 : 2);
      look.cos = (const char*)look.cos + bytes, look.sin = (const char*)look.sin + bytes;
      look.place += from, look.count = stop - from;
      if (look.visible) look.visible += from * look.visible_stride;
      own.push_back(look);
    }
    (rows->is_float32 ? attention_rows<float> : attention_rows<bfloat16>)(*part, piece, own, keys_only);
  });
}

void layerskip_settle(const Layer* layer, Memory* memory, int is_float32, int num_threads) {
  if (layer->linear_attention) settle(*layer->linear_attention, *memory, is_float32, num_threads);
  if (layer->short_conv) settle(*layer->short_conv, *memory, is_float32, num_threads);
}

// Makes the next row that of position `length`, if that is an earlier one. False where its state is not known any more.
bool layerskip_roll_back(Memory* memory, long length) {
  Memory& m = *memory;
  if (m.at <= length) return true;
  if (m.live_at > length) m.live_at = -1;
  if (m.kept_at > length) std::swap(m.kept, m.older), m.kept_at = m.older_at, m.older_at = -1;
  m.at = length;
  return m.live_at == length || is_kept(m);
}

void layerskip_mlp(const Mlp* part, const Rows* rows) {
  in_pieces(*rows, part->down.out.outputs, [&](const Rows& piece, long) {
    rows->is_float32 ? mlp_rows<float>(*part, piece) : mlp_rows<bfloat16>(*part, piece);
    if (!part->gate) return;
    Rows after = piece;
    after.x = after.residual = piece.out;
    after.stride = after.residual_stride = part->down.out.outputs;
    (rows->is_float32 ? token_gate_rows<float> : token_gate_rows<bfloat16>)(*part->gate, after, part->activation);
  });
}

void layerskip_experts(const Experts* part, const Rows* rows) {
  in_pieces(*rows, part->shared_down.out.outputs, [&](const Rows& piece, long) {
    rows->is_float32 ? expert_rows<float>(*part, piece) : expert_rows<bfloat16>(*part, piece);
  });
}

// The number of layers done: fewer than all of them where the next one's state does not stand where a text goes on. Where
// layers keep a state, each text's rows read their weights anew.
int layerskip_layers(const Layer* layers, int count, const Rows* rows, const Text* texts, int num_texts) {
  std::vector<Look> looks(num_texts);
  for (int i = 0; i < count; i++) {
    const Layer& layer = layers[i];
    for (int t = 0; t < num_texts && layer.attention; t++)
      looks[t] = texts[t].looks[layer.look], looks[t].states = texts[t].states[i];
    if (layer.attention) layerskip_attention(layer.attention, rows, looks.data(), num_texts, layer.keys_only);
    long first = 0;
    for (const Text* text = texts; text < texts + num_texts; first += (text++)->count) {
      auto go_on = [&](const auto* part) {
        if (!part) return true;
        Rows own = some_of(*rows, first, text->count, part->out.out.outputs);
        return advance(*part, own, *(Memory*)text->states[i], text->place);
      };
      if (!go_on(layer.linear_attention) || !go_on(layer.short_conv)) return i;
    }
    if (layer.mlp) layerskip_mlp(layer.mlp, rows);
    if (layer.experts) layerskip_experts(layer.experts, rows);
  }
  return count;
}

void layerskip_linear(const Matrix* matrix, const Rows* rows) {
  in_pieces(*rows, matrix->outputs, [&](const Rows& piece, long) {
    rows->is_float32 ? linear_rows<float>(*matrix, piece) : linear_rows<bfloat16>(*matrix, piece);
  });
}
}
