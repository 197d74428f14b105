// A chunk of one head's keys and values, as a thread works on it: for many queries copied from the cache
// once, into a form that the processor multiplies fast, which stays in the first-level cache. A row is
// one query of one of the query heads that share the key head; what comes of it does not depend on the
// other rows.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TANDEM_PAIRS 1
#include <immintrin.h>

#include "transpose.h"
#endif

namespace tandem {

constexpr int kChunk = 64;  // keys

// Where the cache has the keys and values of one head: key j in row rows[j] + head. After the last, up
// to whole vectors, the last again: they are hidden, but must be finite.
struct Rows {
  const int64_t* rows;
  int64_t head;
  int count;

  int64_t operator[](int j) const { return rows[j] + head; }
};

template <typename T>
struct Cache {
  const T* keys;
  const T* values;
  int key_dim, value_dim;

  const T* key(int64_t row) const { return keys + row * key_dim; }
  const T* value(int64_t row) const { return values + row * value_dim; }

  [[gnu::always_inline]] void prefetch_key(int64_t row) const { prefetch(key(row), key_dim); }
  [[gnu::always_inline]] void prefetch_value(int64_t row) const { prefetch(value(row), value_dim); }

 private:
  // Inlined: calls are without effect to the compiler, which would drop them.
  [[gnu::always_inline]] static void prefetch(const T* row, int dim) {
    constexpr int kPerLine = 64 / sizeof(T);
    for (int i = 0; i < dim; i += kPerLine) __builtin_prefetch(row + i, 0, 2);
  }
};

inline int whole(int number, int of) { return (number + of - 1) / of * of; }

// In fp32. For few rows the cache is read where it is; for more, a copy in fp32 is made first.
template <typename T>
class FloatChunk {
 public:
  using Number = float;  // of a query
  static constexpr int kMostRows = 2;  // treated together, they share what is loaded

  // Numbers of a row in a buffer: whole vectors, of a number that has its own code.
  static int padded(int dim) {
    const int num_vectors = (dim + kLanes - 1) / kLanes;
    return (num_vectors <= 8 ? num_vectors : num_vectors <= 16 ? 16 : 32) * kLanes;
  }
  static int query_size(int key_dim) { return padded(key_dim); }
  static int output_size(int value_dim) { return padded(value_dim); }

  static void load_query(const T* source, int dim, float* target) {
    convert_row(source, dim, target);
  }

  void start(const Cache<T>& cache, float scale, int num_rows) {
    cache_ = cache;
    scale_ = scale;
    key_size_ = padded(cache.key_dim);
    value_size_ = padded(cache.value_dim);
    const bool is_padded = key_size_ > cache.key_dim || value_size_ > cache.value_dim;
    has_copy_ = num_rows > kMostInPlace || is_padded;
    keys_.resize(std::max<size_t>(keys_.size(), kChunk * key_size_));
    values_.resize(std::max<size_t>(values_.size(), kChunk * value_size_));
  }

  // What is treated next is on its way from memory meanwhile.
  void load(Rows rows, Rows next) {
    rows_ = rows;
    next_ = next;
    num_keys_ = whole(rows.count, kLanes);
    if (!has_copy_) return;
    for (int j = 0; j < num_keys_; ++j) {
      convert_row(cache_.key(rows[j]), cache_.key_dim, &keys_[j * key_size_]);
      convert_row(cache_.value(rows[j]), cache_.value_dim, &values_[j * value_size_]);
      if (j < next.count) {
        cache_.prefetch_key(next[j]);
        cache_.prefetch_value(next[j]);
      }
    }
  }

  // scores[row][j] = scale * queries[row] . keys[j]
  template <int kRows>
  void score(const float* queries, float* scores) const {
    static_assert(kRows == 2);
    (this->*of_size(kScorePairs, key_size_))(queries, scores);
  }

  // outputs[row] = outputs[row] * corrections[row] + weights[row] . values
  template <int kRows>
  void add(const float* weights, const float* corrections, float* outputs) const {
    static_assert(kRows == 2);
    (this->*of_size(kAddPairs, value_size_))(weights, corrections, outputs);
  }

 private:
  static constexpr int kPart = kLanes / 2;  // vectors of an output that are in registers at a time
  static constexpr int kMostInPlace = 4;  // rows for which a copy would cost more than it saves

  // A row of the cache as floats, padded with zeros to whole vectors.
  static void convert_row(const T* source, int dim, float* target) {
    int i = 0;
    for (; i + kLanes <= dim; i += kLanes) store(target + i, tandem::load(source + i));
    for (; i < dim; ++i) target[i] = static_cast<float>(source[i]);
    std::fill(target + dim, target + padded(dim), 0.0f);
  }

  template <int kVectors>
  void score_pair(const float* queries, float* scores) const {
    constexpr int kDim = kVectors * kLanes;
    if (has_copy_) {
      const float* keys = keys_.data();
      return score_keys<kVectors>(queries, scores, [keys](int j) { return keys + j * kDim; });
    }
    score_keys<kVectors>(queries, scores, [&](int j) {
      if (j < next_.count) cache_.prefetch_key(next_[j]);
      return cache_.key(rows_[j]);
    });
  }

  template <int kVectors, typename FindKey>
  void score_keys(const float* queries, float* scores, FindKey find_key) const {
    constexpr int kDim = kVectors * kLanes;
    const int num_keys = num_keys_;
    const float scale = scale_;  // not a member to the compiler, which a store might change
    for (int first = 0; first < num_keys; first += kLanes) {
      Floats products[2][kLanes];
      for (int j = 0; j < kLanes; ++j) {
        const auto* key = find_key(first + j);
        Floats sums[2] = {};
        for (int i = 0; i < kVectors; ++i) {
          const Floats part = tandem::load(key + i * kLanes);
          sums[0] += tandem::load(queries + i * kLanes) * part;
          sums[1] += tandem::load(queries + kDim + i * kLanes) * part;
        }
        products[0][j] = sums[0];
        products[1][j] = sums[1];
      }
      store(scores + first, sum_rows(products[0]) * scale);
      store(scores + kChunk + first, sum_rows(products[1]) * scale);
    }
  }

  template <int kVectors>
  void add_pair(const float* weights, const float* corrections, float* outputs) const {
    constexpr int kDim = kVectors * kLanes;
    constexpr int kStep = kVectors % kPart == 0 ? kPart : kVectors;
    for (int first = 0; first < kVectors; first += kStep) {
      const int column = first * kLanes;
      if (has_copy_) {
        const float* values = values_.data() + column;
        add_values<kDim, kStep>(weights, corrections, outputs + column,
                                [values](int j) { return values + j * kDim; });
      } else {
        add_values<kDim, kStep>(weights, corrections, outputs + column, [&](int j) {
          if (column == 0 && j < next_.count) cache_.prefetch_value(next_[j]);
          return cache_.value(rows_[j]) + column;
        });
      }
    }
  }

  template <int kDim, int kStep, typename FindValue>
  void add_values(const float* weights, const float* corrections, float* outputs,
                  FindValue find_value) const {
    Floats sums[2][kStep];
    for (int i = 0; i < kStep; ++i) {
      sums[0][i] = tandem::load(outputs + i * kLanes) * corrections[0];
      sums[1][i] = tandem::load(outputs + kDim + i * kLanes) * corrections[1];
    }
    const int num_keys = num_keys_;
    for (int j = 0; j < num_keys; ++j) {
      const auto* value = find_value(j);
      for (int i = 0; i < kStep; ++i) {
        const Floats part = tandem::load(value + i * kLanes);
        sums[0][i] += part * weights[j];
        sums[1][i] += part * weights[kChunk + j];
      }
    }
    for (int i = 0; i < kStep; ++i) {
      store(outputs + i * kLanes, sums[0][i]);
      store(outputs + kDim + i * kLanes, sums[1][i]);
    }
  }

  // By the number of vectors in a row; `padded` allows no others.
  using ScorePair = void (FloatChunk::*)(const float*, float*) const;
  using AddPair = void (FloatChunk::*)(const float*, const float*, float*) const;
  static constexpr ScorePair kScorePairs[] = {
      &FloatChunk::score_pair<1>, &FloatChunk::score_pair<2>,  &FloatChunk::score_pair<3>,
      &FloatChunk::score_pair<4>, &FloatChunk::score_pair<5>,  &FloatChunk::score_pair<6>,
      &FloatChunk::score_pair<7>, &FloatChunk::score_pair<8>,  &FloatChunk::score_pair<16>,
      &FloatChunk::score_pair<32>};
  static constexpr AddPair kAddPairs[] = {
      &FloatChunk::add_pair<1>, &FloatChunk::add_pair<2>,  &FloatChunk::add_pair<3>,
      &FloatChunk::add_pair<4>, &FloatChunk::add_pair<5>,  &FloatChunk::add_pair<6>,
      &FloatChunk::add_pair<7>, &FloatChunk::add_pair<8>,  &FloatChunk::add_pair<16>,
      &FloatChunk::add_pair<32>};

  template <typename Function, size_t kCount>
  static Function of_size(const Function (&functions)[kCount], int size) {
    const int num_vectors = size / kLanes;
    return functions[num_vectors <= 8 ? num_vectors - 1 : num_vectors == 16 ? 8 : 9];
  }

  Cache<T> cache_;
  Rows rows_, next_;
  float scale_;
  int num_keys_, key_size_, value_size_;
  bool has_copy_;
  Buffer<float> keys_, values_;  // the copy: [kChunk, size]
};

#ifdef TANDEM_PAIRS

// Numbers of two registers by turns: of their lower halves, then of their upper halves.
constexpr std::array<std::array<uint16_t, 2 * kLanes>, 2> turns() {
  std::array<std::array<uint16_t, 2 * kLanes>, 2> result{};
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 2 * kLanes; ++i) result[half][i] = half * kLanes + i / 2 + i % 2 * 2 * kLanes;
  }
  return result;
}

// In bf16, two numbers of a row multiplied at a time and added in fp32: keys lie across, so that one
// register holds the same two numbers of sixteen keys, and values as pairs of keys. Weights are
// rounded to bf16.
class PairChunk {
 public:
  using Number = uint32_t;  // two of a query
  static constexpr int kMostRows = 4;

  static int query_size(int key_dim) { return whole((key_dim + 1) / 2, kLanes); }
  static int output_size(int value_dim) { return whole(value_dim, kPart * kLanes); }

  static void load_query(const c10::BFloat16* source, int dim, uint32_t* target) {
    for (int pair = 0; pair < query_size(dim); pair += kLanes) {
      _mm512_storeu_si512(target + pair,
                          _mm512_maskz_loadu_epi16(numbers_from(2 * pair, dim), source + 2 * pair));
    }
  }

  void start(const Cache<c10::BFloat16>& cache, float scale, int /*num_rows*/) {
    cache_ = cache;
    scale_ = scale;
    num_pairs_ = query_size(cache.key_dim);
    value_size_ = output_size(cache.value_dim);
    keys_.resize(std::max<size_t>(keys_.size(), num_pairs_ * kChunk));
    values_.resize(std::max<size_t>(values_.size(), kChunk / 2 * value_size_));
  }

  void load(Rows rows, Rows next) {
    num_groups_ = whole(rows.count, kLanes) / kLanes;
    for (int group = 0; group < num_groups_; ++group) {
      load_keys(rows, group * kLanes);
      load_values(rows, group * kLanes);
      if (group * kLanes < next.count) {
        for (int j = 0; j < kLanes; ++j) {
          cache_.prefetch_key(next[group * kLanes + j]);
          cache_.prefetch_value(next[group * kLanes + j]);
        }
      }
    }
  }

  template <int kRows>
  void score(const uint32_t* queries, float* scores) const {
    static_assert(kChunk == 4 * kLanes);
    switch (num_groups_) {
      case 1: return score_groups<kRows, 1>(queries, scores);
      case 2: return score_groups<kRows, 2>(queries, scores);
      case 3: return score_groups<kRows, 3>(queries, scores);
      case 4: return score_groups<kRows, 4>(queries, scores);
    }
  }

  template <int kRows>
  void add(const float* weights, const float* corrections, float* outputs) const {
    uint32_t pairs[kRows][kChunk / 2];
    for (int row = 0; row < kRows; ++row) {
      for (int first = 0; first < num_groups_ * kLanes; first += kLanes) {
        const __m512 of_row = _mm512_loadu_ps(weights + row * kChunk + first);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs[row] + first / 2),
                            (__m256i)_mm512_cvtneps_pbh(of_row));
      }
    }
    for (int part = 0; part < value_size_; part += kPart * kLanes) {
      __m512 sums[kRows][kPart];
      for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < kPart; ++i) {
          const float* output = outputs + row * value_size_ + part + i * kLanes;
          sums[row][i] = _mm512_mul_ps(_mm512_loadu_ps(output), _mm512_set1_ps(corrections[row]));
        }
      }
      for (int j = 0; j < num_groups_ * kLanes / 2; ++j) {
        const uint32_t* value = values_.data() + j * value_size_ + part;
        for (int row = 0; row < kRows; ++row) {
          const auto weight = (__m512bh)_mm512_set1_epi32(static_cast<int>(pairs[row][j]));
          for (int i = 0; i < kPart; ++i) {
            const auto of_keys = (__m512bh)_mm512_loadu_si512(value + i * kLanes);
            sums[row][i] = _mm512_dpbf16_ps(sums[row][i], of_keys, weight);
          }
        }
      }
      for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < kPart; ++i) {
          _mm512_storeu_ps(outputs + row * value_size_ + part + i * kLanes, sums[row][i]);
        }
      }
    }
  }

 private:
  static constexpr int kPart = 4;  // vectors of an output that are in registers at a time

  // Which of the next 32 numbers of a row there are.
  static __mmask32 numbers_from(int first, int dim) {
    const int num_left = std::clamp(dim - first, 0, 2 * kLanes);
    return static_cast<__mmask32>((uint64_t{1} << num_left) - 1);
  }

  void load_keys(Rows rows, int first) {
    for (int pair = 0; pair < num_pairs_; pair += kLanes) {
      const __mmask32 numbers = numbers_from(2 * pair, cache_.key_dim);
      __m512i of_keys[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        of_keys[j] = _mm512_maskz_loadu_epi16(numbers, cache_.key(rows[first + j]) + 2 * pair);
      }
      transpose(of_keys);
      for (int i = 0; i < kLanes; ++i) {
        _mm512_storeu_si512(&keys_[(pair + i) * kChunk + first], of_keys[i]);
      }
    }
  }

  void load_values(Rows rows, int first) {
    static constexpr auto kTurns = turns();
    const __m512i lower = _mm512_loadu_si512(kTurns[0].data());
    const __m512i upper = _mm512_loadu_si512(kTurns[1].data());
    for (int i = 0; i < value_size_; i += 2 * kLanes) {
      const __mmask32 numbers = numbers_from(i, cache_.value_dim);
      for (int j = first; j < first + kLanes; j += 2) {
        const __m512i even = _mm512_maskz_loadu_epi16(numbers, cache_.value(rows[j]) + i);
        const __m512i odd = _mm512_maskz_loadu_epi16(numbers, cache_.value(rows[j + 1]) + i);
        uint32_t* target = &values_[j / 2 * value_size_ + i];
        _mm512_storeu_si512(target, _mm512_permutex2var_epi16(even, lower, odd));
        _mm512_storeu_si512(target + kLanes, _mm512_permutex2var_epi16(even, upper, odd));
      }
    }
  }

  template <int kRows, int kGroups>
  void score_groups(const uint32_t* queries, float* scores) const {
    __m512 sums[kRows][kGroups];
    for (auto& row : sums) {
      for (auto& sum : row) sum = _mm512_setzero_ps();
    }
    for (int pair = 0; pair < num_pairs_; ++pair) {
      const uint32_t* of_keys = keys_.data() + pair * kChunk;
      for (int row = 0; row < kRows; ++row) {
        const auto of_query =
            (__m512bh)_mm512_set1_epi32(static_cast<int>(queries[row * num_pairs_ + pair]));
        for (int group = 0; group < kGroups; ++group) {
          const auto key = (__m512bh)_mm512_loadu_si512(of_keys + group * kLanes);
          sums[row][group] = _mm512_dpbf16_ps(sums[row][group], key, of_query);
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int group = 0; group < kGroups; ++group) {
        const __m512 scaled = _mm512_mul_ps(sums[row][group], _mm512_set1_ps(scale_));
        _mm512_storeu_ps(scores + row * kChunk + group * kLanes, scaled);
      }
    }
  }

  Cache<c10::BFloat16> cache_;
  float scale_;
  int num_groups_, num_pairs_, value_size_;
  Buffer<uint32_t> keys_;    // [pairs of numbers, kChunk]
  Buffer<uint32_t> values_;  // [pairs of keys, value_size]
};

template <typename T>
struct ChunkOf {
  using Type = FloatChunk<T>;
};
template <>
struct ChunkOf<c10::BFloat16> {
  using Type = PairChunk;
};

#else

template <typename T>
struct ChunkOf {
  using Type = FloatChunk<T>;
};

#endif

}  // namespace tandem
