// The sampler's noise, for CPUs: in one pass, where torch needs one for every operation.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace tandem {

constexpr int kHalf = kLanes / 2;  // numbers of 64 bits in a register
constexpr int kAtATime = 256;  // numbers of a row that are made at a time

typedef double Doubles __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Longs __attribute__((vector_size(kLanes * 4)));
typedef uint32_t HalfWords __attribute__((vector_size(kLanes * 2)));
typedef float HalfFloats __attribute__((vector_size(kLanes * 2)));

// What the noise of a row is made of.
struct NoiseKeys {
  uint32_t first;
  uint32_t second;
};

inline uint64_t split_mix_64(uint64_t state) {
  state += 0x9E3779B97F4A7C15;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
  return state ^ (state >> 31);
}

inline NoiseKeys noise_keys(int64_t seed, int64_t position) {
  const uint64_t state =
      split_mix_64(split_mix_64(static_cast<uint64_t>(seed)) ^ static_cast<uint64_t>(position));
  return {static_cast<uint32_t>(state), static_cast<uint32_t>(state >> 32)};
}

// Wellons' lowbias32.
inline Words mix(Words bits) {
  bits ^= bits >> 16;
  bits *= 0x7FEB352Du;
  bits ^= bits >> 15;
  bits *= 0x846CA68Bu;
  return bits ^ (bits >> 16);
}

// The numbers as doubles; they must be integers below 2^52.
inline Doubles as_doubles(Longs integers) {
  constexpr uint64_t kTwoTo52 = 0x4330000000000000;  // as a double, whose last bit is worth one
  return reinterpret_cast<Doubles>(integers | kTwoTo52) - 0x1p52;
}

// The logarithms of positive normal numbers, to a unit in the last place (FreeBSD's e_log.c).
inline Doubles logarithm(Doubles x) {
  constexpr uint64_t kRootOfHalf = 0x3FE6A09E, kOne = 0x3FF00000;  // upper words of doubles
  const auto bits = reinterpret_cast<Longs>(x);
  const Longs upper = (bits >> 32) + (kOne - kRootOfHalf);
  const Doubles exponent = as_doubles(upper >> 20) - 1023.0;
  const Longs mantissa = (upper & 0x000FFFFF) + kRootOfHalf;
  const Doubles f = reinterpret_cast<Doubles>((mantissa << 32) | (bits & 0xFFFFFFFF)) - 1.0;
  const Doubles s = f / (2.0 + f), z = s * s, w = z * z, half_square = 0.5 * f * f;
  const Doubles odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 +
                                                           w * 1.531383769920937332e-01));
  const Doubles even =
      z * (6.666666666666735130e-01 +
           w * (2.857142874366239149e-01 +
                w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  return exponent * 6.93147180369123816490e-01 -
         ((half_square - (s * (half_square + (odd + even)) + exponent * 1.90821492927058770002e-10)) - f);
}

// Numbers inside (0, 1) of tokens [first_token, first_token + kAtATime).
inline void write_uniform(uint32_t first_token, const NoiseKeys& keys, double* output) {
  Words tokens;
  for (int i = 0; i < kLanes; ++i) tokens[i] = first_token + i;
  for (int i = 0; i < kAtATime; i += kLanes) {
    const Words bits = mix(mix(tokens ^ keys.first) ^ keys.second);
    for (int half = 0; half < 2; ++half) {
      const auto of_half = load_as<HalfWords>(reinterpret_cast<const char*>(&bits) + half * sizeof(HalfWords));
      const Doubles numbers = as_doubles(__builtin_convertvector(of_half, Longs));
      store_as(output + i + half * kHalf, (numbers + 0.5) * 0x1p-32);
    }
    tokens += kLanes;
  }
}

// Standard Gumbel numbers, a stretch at a time and in loops of their own: a logarithm is a long chain of
// operations, of which the processor does several at a time only if little else is between them.
inline void write_gumbel(const NoiseKeys& keys, int64_t count, float* output) {
  alignas(sizeof(Doubles)) double numbers[kAtATime];
  alignas(sizeof(Doubles)) float gumbel[kAtATime];
  for (int64_t first = 0; first < count; first += kAtATime) {
    write_uniform(static_cast<uint32_t>(first), keys, numbers);
    for (int i = 0; i < kAtATime; i += kHalf) {
      store_as(numbers + i, -logarithm(load_as<Doubles>(numbers + i)));
    }
    for (int i = 0; i < kAtATime; i += kHalf) {
      const Doubles number = -logarithm(load_as<Doubles>(numbers + i));
      store_as(gumbel + i, __builtin_convertvector(number, HalfFloats));
    }
    std::copy_n(gumbel, std::min<int64_t>(kAtATime, count - first), output + first);
  }
}

}  // namespace tandem
