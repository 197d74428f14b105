// Vectors of as many numbers as a register has, in the compiler's own terms.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace tandem {

// Vectors wider than a register would be kept in memory.
#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// Memory where vectors lie within cache lines: one that lies across two takes the time of both.
template <typename T>
struct LineAllocator {
  using value_type = T;

  LineAllocator() = default;
  template <typename Other>
  LineAllocator(const LineAllocator<Other>&) {}

  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{sizeof(Floats)}));
  }
  void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t{sizeof(Floats)}); }

  bool operator==(const LineAllocator&) const { return true; }
};

template <typename T>
using Buffer = std::vector<T, LineAllocator<T>>;

inline Floats splat(float value) { return Floats{} + value; }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// From memory of any type, wherever it starts: what is copied by memcpy may go through memory again.
template <typename Vector>
inline Vector load_as(const void* source) {
  typedef Vector Loose __attribute__((aligned(1), may_alias));
  return *static_cast<const Loose*>(source);
}

inline Floats load(const float* source) { return load_as<Floats>(source); }

inline Floats load(const c10::BFloat16* source) {
  return reinterpret_cast<Floats>(__builtin_convertvector(load_as<Halves>(source), Words) << 16);
}

template <typename Vector>
inline void store_as(void* target, Vector value) {
  typedef Vector Loose __attribute__((aligned(1), may_alias));
  *static_cast<Loose*>(target) = value;
}

inline void store(float* target, Floats value) { store_as(target, value); }

// e^x for x <= 0, to about 2 units in the last place (Cephes' expf).
inline Floats exponential(Floats x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  const Floats scaled = x * 1.44269504088896341f - 0.5f;  // truncation then rounds: x <= 0
  const Ints whole = __builtin_convertvector(scaled, Ints);
  const Floats n = __builtin_convertvector(whole, Floats);
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  return y * reinterpret_cast<Floats>((whole + 127) << 23);
}

// Half of the lanes of `low` and of `high`, each added to the other half of the same vector: lanes
// with bit kWidth clear hold sums of `low`, the others sums of `high`.
template <int kWidth, size_t... kLane>
inline Floats add_halves(Floats low, Floats high, std::index_sequence<kLane...>) {
  constexpr Ints kStraight = {(kLane & kWidth ? kLanes + kLane : kLane)...};
  constexpr Ints kCrossed = {(kLane & kWidth ? kLanes + (kLane ^ kWidth) : kLane ^ kWidth)...};
  return __builtin_shuffle(low, high, kStraight) + __builtin_shuffle(low, high, kCrossed);
}

// Lane i of the result is the sum of the lanes of rows[i].
template <int kWidth = kLanes / 2>
inline Floats sum_rows(Floats* rows) {
  for (int i = 0; i < kWidth; ++i) {
    rows[i] = add_halves<kWidth>(rows[i], rows[i + kWidth], std::make_index_sequence<kLanes>());
  }
  if constexpr (kWidth == 1) {
    return rows[0];
  } else {
    return sum_rows<kWidth / 2>(rows);
  }
}

// All lanes combined, in every lane.
template <int kWidth, typename Combine, size_t... kLane>
inline Floats combine_halves(Floats value, Combine combine, std::index_sequence<kLane...>) {
  constexpr Ints kOther = {(kLane ^ kWidth)...};
  return combine(value, __builtin_shuffle(value, kOther));
}

template <int kWidth = kLanes / 2, typename Combine>
inline Floats across(Floats value, Combine combine) {
  value = combine_halves<kWidth>(value, combine, std::make_index_sequence<kLanes>());
  if constexpr (kWidth == 1) {
    return value;
  } else {
    return across<kWidth / 2>(value, combine);
  }
}

}  // namespace tandem
