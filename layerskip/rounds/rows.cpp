// Rows of many logits, and the random numbers for them, gone over once: what torch does in an operation after the other.
// Compiled for the machine that it runs on by rows.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr long TOGETHER = 64, LANES = 16;  // logits whose highest is kept, and those gone over at once
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// torch's random numbers on a CPU. Ref: Matsumoto and Nishimura 1998; the layout is that of `Generator.get_state`.
constexpr int SIZE = 624, SHIFT = 397;
struct Stored {
  uint64_t seed;
  int32_t left, is_seeded;
  uint64_t next, state[SIZE];
};

inline uint32_t twisted(uint32_t u, uint32_t v) {
  return (((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1) ^ ((0u - (v & 1u)) & 0x9908b0dfu);
}

struct Words {
  uint32_t state[SIZE + 1];
  long next, left;  // of those in `state`

  explicit Words(const Stored& stored) : next(long(stored.next)), left(stored.left - 1) {
    for (int i = 0; i < SIZE; i++) state[i] = uint32_t(stored.state[i]);
  }

  void refill() {
    state[SIZE] = 0;
    for (int i = 0; i < SIZE - SHIFT; i++) state[i] = state[i + SHIFT] ^ twisted(state[i], state[i + 1]);
#pragma GCC ivdep
    for (int i = SIZE - SHIFT; i < SIZE - 1; i++) state[i] = state[i + SHIFT - SIZE] ^ twisted(state[i], state[i + 1]);
    state[SIZE - 1] = state[SHIFT - 1] ^ twisted(state[SIZE - 1], state[0]);
    next = 0, left = SIZE;
  }

  void skip(long count) {
    while (count > left) count -= left, refill();
    next += count, left -= count;
  }

  void store(Stored& stored) const {
    stored.left = int32_t(left + 1), stored.next = uint64_t(next);
    for (int i = 0; i < SIZE; i++) stored.state[i] = state[i];
  }

  uint32_t word() {
    if (!left) refill();
    left--;
    return tempered(state[next++]);
  }

  static uint32_t tempered(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
  }
};

// In [0, 1), of 53 bits.
inline double uniform(uint32_t high, uint32_t low) {
  return double(int64_t(uint64_t(high & 0x1fffffu) << 32 | low)) * 0x1p-53;
}

}  // namespace

extern "C" {

// Advances a generator's state as drawing `count` numbers does.
void layerskip_skip(void* state, long count) {
  Words words(*(Stored*)state);
  words.skip(2 * count);
  words.store(*(Stored*)state);
}

// Of the numbers that come next those at these places, ascending.
void layerskip_uniform_at(const void* state, const int64_t* places, long count, double* out) {
  Words words(*(const Stored*)state);
  long at = 0;
  for (long i = 0; i < count; i++) {
    if (2 * places[i] < at) words = Words(*(const Stored*)state), at = 0;
    words.skip(2 * places[i] - at);
    uint32_t high = words.word();
    out[i] = uniform(high, words.word());
    at = 2 * places[i] + 2;
  }
}

// The numbers that come next.
void layerskip_uniform(const void* state, long count, double* out) {
  Words words(*(const Stored*)state);
  uint32_t room[SIZE + 1];
  long kept = 0;  // of a number whose other half is not there yet
  for (long done = 0; done < count;) {
    if (!words.left) words.refill();
    long taken = std::min(words.left, 2 * (count - done) - kept);
    for (long i = 0; i < taken; i++) room[kept + i] = Words::tempered(words.state[words.next + i]);
    words.next += taken, words.left -= taken;
    long whole = (kept + taken) / 2;
    for (long i = 0; i < whole; i++) out[done + i] = uniform(room[2 * i], room[2 * i + 1]);
    done += whole, kept = (kept + taken) % 2;
    if (kept) room[0] = room[2 * whole];
  }
}

// Of a row (count,) divided by `divisor`, written to `divided` unless that is null, the ids, ascending, whose numbers are
// more than -inf, no smaller than `least`, and no smaller than what at least `most` of them reach; how many. None where
// a number is none.
long layerskip_likeliest(const float* row, long count, float divisor, long most, float least, float* divided, int64_t* ids) {
  static thread_local std::vector<float> highest, sorted;
  long num_blocks = (count + TOGETHER - 1) / TOGETHER;
  highest.resize(num_blocks);
  Ints wrong = {};  // where a number is none
  for (long b = 0; b < num_blocks; b++) {
    long first = b * TOGETHER, n = std::min(TOGETHER, count - first);
    Floats own[TOGETHER / LANES], top = LOWEST - Floats{};
    if (n == TOGETHER) {
      memcpy(own, row + first, sizeof own);
    } else {
      std::fill_n((float*)own, TOGETHER, LOWEST);
      memcpy(own, row + first, n * sizeof(float));
    }
    for (Floats& some : own) {
      some /= divisor;
      top = some > top ? some : top;
      wrong |= some != some;
    }
    if (divided) memcpy(divided + first, own, n * sizeof(float));
    float found[LANES];
    memcpy(found, &top, sizeof top);
    for (long half = LANES / 2; half; half /= 2)
      for (long k = 0; k < half; k++) found[k] = found[k + half] > found[k] ? found[k + half] : found[k];
    highest[b] = found[0];
  }
  for (int i = 0; i < LANES; i++)
    if (wrong[i]) return 0;
  if (most < num_blocks) {
    sorted = highest;
    std::nth_element(sorted.begin(), sorted.begin() + most - 1, sorted.end(), std::greater<float>());
    least = std::max(least, sorted[most - 1]);
  }
  long found = 0;
  for (long b = 0; b < num_blocks; b++) {
    if (!(highest[b] >= least)) continue;
    for (long i = b * TOGETHER, end = std::min(count, i + TOGETHER); i < end; i++) {
      float one = divided ? divided[i] : row[i] / divisor;
      if (one >= least && one > LOWEST) ids[found++] = i;
    }
  }
  return found;
}

// Leaves of a row (count,) only these ids, ascending, possible.
void layerskip_only(float* row, long count, const int64_t* ids, long num_ids) {
  static thread_local std::vector<float> kept;
  kept.resize(num_ids);
  for (long i = 0; i < num_ids; i++) kept[i] = row[ids[i]];
  std::fill_n(row, count, LOWEST);
  for (long i = 0; i < num_ids; i++) row[ids[i]] = kept[i];
}
}
