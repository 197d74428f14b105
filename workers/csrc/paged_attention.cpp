// Attention of a flattened batch over a paged KV cache, for CPUs.
//
// One task is one sequence, some of its key heads and a tile of its queries. Keys are read where they
// lie in the cache, a chunk at a time, converted to float once for all query heads and queries that
// share them, and folded into a running softmax. No context is gathered or padded as a whole, and a
// query's result depends on its own sequence only, not on the batch.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

namespace {

constexpr int kLanes = 16;
constexpr int kChunk = 32;      // keys folded in at a time
constexpr float kHidden = -1e30f;  // the score of a key that a query does not see
constexpr int kTasksPerThread = 2;
constexpr int kTileQueries = 16;  // queries of one task, times the query heads per key head

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

inline Floats splat(float value) { return Floats{} + value; }

inline Floats load(const float* source) {
  Floats value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

inline Floats load(const at::BFloat16* source) {
  Halves bits;
  std::memcpy(&bits, source, sizeof(bits));
  return reinterpret_cast<Floats>(__builtin_convertvector(bits, Words) << 16);
}

inline void store(float* target, Floats value) { std::memcpy(target, &value, sizeof(value)); }

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

// Floats of a row in a buffer: whole vectors, of a number that has its own code.
inline int padded(int dim) {
  const int num_vectors = (dim + kLanes - 1) / kLanes;
  return (num_vectors <= 8 ? num_vectors : 16) * kLanes;
}

// A row of the cache as floats, padded with zeros to whole vectors.
template <typename T>
inline void convert_row(const T* source, int dim, float* target) {
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) store(target + i, load(source + i));
  for (; i < dim; ++i) target[i] = static_cast<float>(source[i]);
  std::fill(target + dim, target + padded(dim), 0.0f);
}

// Rows are treated in pairs, which share what is loaded of keys and values.

// scores[row][j] = queries[row] . keys[j], for a chunk of keys of kVectors * 16 floats.
template <int kVectors>
void score_pair(const float* queries, const float* keys, int num_keys, float* scores) {
  constexpr int kDim = kVectors * kLanes;
  for (int first = 0; first < num_keys; first += kLanes) {
    Floats products[2][kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const float* key = keys + (first + j) * kDim;
      Floats sums[2] = {};
      for (int i = 0; i < kVectors; ++i) {
        const Floats part = load(key + i * kLanes);
        sums[0] += load(queries + i * kLanes) * part;
        sums[1] += load(queries + kDim + i * kLanes) * part;
      }
      products[0][j] = sums[0];
      products[1][j] = sums[1];
    }
    store(scores + first, sum_rows(products[0]));
    store(scores + kChunk + first, sum_rows(products[1]));
  }
}

// outputs[row] = outputs[row] * corrections[row] + weights[row] . values, likewise.
template <int kVectors>
void add_pair(const float* weights, const float* values, int num_keys, const float* corrections,
              float* outputs) {
  constexpr int kDim = kVectors * kLanes;
  constexpr int kStep = std::min(kVectors, 8);  // accumulators that fit the registers
  for (int part = 0; part < kVectors; part += kStep) {
    Floats sums[2][kStep];
    for (int i = 0; i < kStep; ++i) {
      sums[0][i] = load(outputs + (part + i) * kLanes) * corrections[0];
      sums[1][i] = load(outputs + kDim + (part + i) * kLanes) * corrections[1];
    }
    for (int j = 0; j < num_keys; ++j) {
      for (int i = 0; i < kStep; ++i) {
        const Floats value = load(values + j * kDim + (part + i) * kLanes);
        sums[0][i] += value * weights[j];
        sums[1][i] += value * weights[kChunk + j];
      }
    }
    for (int i = 0; i < kStep; ++i) {
      store(outputs + (part + i) * kLanes, sums[0][i]);
      store(outputs + kDim + (part + i) * kLanes, sums[1][i]);
    }
  }
}

using ScorePair = void (*)(const float*, const float*, int, float*);
using AddPair = void (*)(const float*, const float*, int, const float*, float*);

// By the number of vectors in a row; `padded` allows no others.
constexpr ScorePair kScorePairs[] = {score_pair<1>, score_pair<2>, score_pair<3>, score_pair<4>,
                                     score_pair<5>, score_pair<6>, score_pair<7>, score_pair<8>};
constexpr AddPair kAddPairs[] = {add_pair<1>, add_pair<2>, add_pair<3>, add_pair<4>,
                                 add_pair<5>, add_pair<6>, add_pair<7>, add_pair<8>};

inline ScorePair score_pair_for(int dim) {
  return dim <= 8 * kLanes ? kScorePairs[padded(dim) / kLanes - 1] : score_pair<16>;
}

inline AddPair add_pair_for(int dim) {
  return dim <= 8 * kLanes ? kAddPairs[padded(dim) / kLanes - 1] : add_pair<16>;
}

inline float largest_of(const float* scores, int num_keys) {
  Floats largest = load(scores);
  for (int j = kLanes; j < num_keys; j += kLanes) {
    const Floats other = load(scores + j);
    largest = other > largest ? other : largest;
  }
  float result = largest[0];
  for (int lane = 1; lane < kLanes; ++lane) result = std::max(result, largest[lane]);
  return result;
}

struct Rule {
  float scale;
  int64_t window;  // 0: none
  float softcap;   // 0: none
  const float* sinks;  // of every query head, or none
};

struct Shape {
  int num_heads, num_kv_heads, key_dim, value_dim, block_size;
  int64_t query_stride, query_head_stride, block_table_stride;
  ScorePair score_pair;
  AddPair add_pair;
};

// One task's sequence: num_new queries whose last one stands at context_len - 1.
struct Sequence {
  int64_t first_query, num_new, context_len;
  const int32_t* block_table;
};

// What a thread works on: per key head of a task its queries and the running softmax, and one head's
// chunk of keys and values as floats, which stays in the first-level cache. Kept between calls.
struct Scratch {
  std::vector<float> queries, keys, values, outputs, maxima, sums;

  void grow(const Shape& shape, int num_heads, int num_rows) {
    grow(queries, num_heads * num_rows * padded(shape.key_dim));
    grow(keys, kChunk * padded(shape.key_dim));
    grow(values, kChunk * padded(shape.value_dim));
    grow(outputs, num_heads * num_rows * padded(shape.value_dim));
    grow(maxima, num_heads * num_rows);
    grow(sums, num_heads * num_rows);
  }

 private:
  static void grow(std::vector<float>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  }
};

// A sequence, some of its key heads, and a tile of its queries.
struct Task {
  Sequence sequence;
  int kv_head, num_kv_heads;
  int64_t tile_start, tile_len;
};

// Scores of the keys the query may see, very low elsewhere; `first_key` is the chunk's position.
inline void apply_rule(float* scores, int num_keys, int64_t first_key, int64_t position,
                       const Rule& rule) {
  if (rule.softcap > 0) {
    for (int j = 0; j < num_keys; ++j) scores[j] = std::tanh(scores[j] / rule.softcap) * rule.softcap;
  }
  const int64_t low = rule.window > 0 ? position - rule.window + 1 - first_key : 0;
  const int64_t high = position + 1 - first_key;
  for (int64_t j = 0; j < std::min<int64_t>(low, num_keys); ++j) scores[j] = kHidden;
  for (int64_t j = std::max<int64_t>(high, 0); j < num_keys; ++j) scores[j] = kHidden;
}

// Turns one row's scores into weights of its running softmax; returns by how much what was summed
// before has to shrink.
inline float weigh_row(float* scores, int num_keys, float& maximum, float& sum) {
  const float largest = std::max(maximum, largest_of(scores, num_keys));
  const float correction = maximum <= kHidden ? 0.0f : std::exp(maximum - largest);
  Floats total = {};
  for (int j = 0; j < num_keys; j += kLanes) {
    const Floats score = load(scores + j);
    const Floats weight = score <= splat(kHidden) ? splat(0.0f) : exponential(score - largest);
    store(scores + j, weight);
    total += weight;
  }
  float chunk_sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) chunk_sum += total[lane];
  maximum = largest;
  sum = sum * correction + chunk_sum;
  return correction;
}

template <typename T>
class Attention {
 public:
  Attention(const T* query, const T* keys, const T* values, T* output, const Shape& shape,
            const Rule& rule, const Task& task, Scratch& scratch)
      : query_(query), keys_(keys), values_(values), output_(output), shape_(shape), rule_(rule),
        task_(task), scratch_(scratch), heads_per_kv_(shape.num_heads / shape.num_kv_heads),
        num_rows_(heads_per_kv_ * static_cast<int>(task.tile_len)),
        row_stride_(num_rows_ + num_rows_ % 2), key_dim_(padded(shape.key_dim)),
        value_dim_(padded(shape.value_dim)),
        first_position_(task.sequence.context_len - task.sequence.num_new + task.tile_start) {}

  void run() {
    scratch_.grow(shape_, task_.num_kv_heads, row_stride_);
    load_queries();
    const int64_t end = first_position_ + task_.tile_len;  // what the tile's last query sees
    int64_t start = 0;
    if (rule_.window > 0) start = std::max<int64_t>(0, first_position_ - rule_.window + 1);
    start = start / kChunk * kChunk;  // chunks begin where they do for every query
    for (int64_t first_key = start; first_key < end; first_key += kChunk) {
      const int num_keys = static_cast<int>(std::min<int64_t>(kChunk, end - first_key));
      const int num_next = static_cast<int>(std::clamp<int64_t>(end - first_key - kChunk, 0, kChunk));
      find_rows(first_key, num_keys + num_next);
      for (int head = 0; head < task_.num_kv_heads; ++head) {
        load_chunk(head, num_keys, num_next);
        fold_chunk(head, first_key, num_keys);
      }
    }
    store_outputs();
  }

 private:
  int query_head(int head, int row) const {
    return (task_.kv_head + head) * heads_per_kv_ + row % heads_per_kv_;
  }

  int64_t query_index(int row) const {
    return task_.sequence.first_query + task_.tile_start + row / heads_per_kv_;
  }

  void load_queries() {
    for (int head = 0; head < task_.num_kv_heads; ++head) {
      for (int row = 0; row < num_rows_; ++row) {
        const int slot = head * row_stride_ + row;
        const int of_query = query_head(head, row);
        float* target = &scratch_.queries[slot * key_dim_];
        convert_row(query_ + query_index(row) * shape_.query_stride +
                        of_query * shape_.query_head_stride,
                    shape_.key_dim, target);
        for (int d = 0; d < key_dim_; ++d) target[d] *= rule_.scale;
        scratch_.maxima[slot] = rule_.sinks ? rule_.sinks[of_query] : kHidden;
        scratch_.sums[slot] = rule_.sinks ? 1.0f : 0.0f;
        std::fill_n(scratch_.outputs.begin() + slot * value_dim_, value_dim_, 0.0f);
      }
    }
  }

  // Where the cache has the keys from `first_key` on: rows of the task's first head.
  void find_rows(int64_t first_key, int num_keys) {
    int64_t block = first_key / shape_.block_size, offset = first_key % shape_.block_size;
    for (int j = 0; j < num_keys; ++j) {
      const int64_t slot = int64_t{task_.sequence.block_table[block]} * shape_.block_size + offset;
      rows_[j] = slot * shape_.num_kv_heads + task_.kv_head;
      if (++offset == shape_.block_size) ++block, offset = 0;
    }
  }

  // One head's chunk as floats; what is treated next is on its way from memory meanwhile.
  void load_chunk(int head, int num_keys, int num_next) {
    const bool is_last_head = head + 1 == task_.num_kv_heads;
    const int64_t* next_rows = rows_.data() + (is_last_head ? kChunk : 0);
    const int next_head = is_last_head ? 0 : head + 1;
    const int num_to_fetch = is_last_head ? num_next : num_keys;
    for (int j = 0; j < num_keys; ++j) {
      const int64_t row = rows_[j] + head;
      convert_row(keys_ + row * shape_.key_dim, shape_.key_dim, &scratch_.keys[j * key_dim_]);
      convert_row(values_ + row * shape_.value_dim, shape_.value_dim,
                  &scratch_.values[j * value_dim_]);
      if (j < num_to_fetch) {
        const int64_t next = next_rows[j] + next_head;
        prefetch(keys_ + next * shape_.key_dim, shape_.key_dim);
        prefetch(values_ + next * shape_.value_dim, shape_.value_dim);
      }
    }
    // whole vectors of keys are treated: those past the end are hidden, but must be finite
    const int num_past = whole(num_keys) - num_keys;
    std::fill_n(scratch_.keys.begin() + num_keys * key_dim_, num_past * key_dim_, 0.0f);
    std::fill_n(scratch_.values.begin() + num_keys * value_dim_, num_past * value_dim_, 0.0f);
  }

  static void prefetch(const T* row, int dim) {
    constexpr int kPerLine = 64 / sizeof(T);
    for (int i = 0; i < dim; i += kPerLine) __builtin_prefetch(row + i, 0, 2);
  }

  void fold_chunk(int head, int64_t first_key, int num_keys) {
    const int num_padded = whole(num_keys);
    const float* keys = scratch_.keys.data();
    const float* values = scratch_.values.data();
    for (int row = 0; row < num_rows_; row += 2) {
      const int slot = head * row_stride_ + row;
      float scores[2 * kChunk], corrections[2];
      shape_.score_pair(&scratch_.queries[slot * key_dim_], keys, num_padded, scores);
      for (int i = 0; i < 2; ++i) {
        float* of_row = scores + i * kChunk;
        const int64_t position = first_position_ + (row + i) / heads_per_kv_;
        apply_rule(of_row, num_padded, first_key, position, rule_);
        corrections[i] =
            weigh_row(of_row, num_padded, scratch_.maxima[slot + i], scratch_.sums[slot + i]);
      }
      shape_.add_pair(scores, values, num_padded, corrections,
                      &scratch_.outputs[slot * value_dim_]);
    }
  }

  void store_outputs() {
    for (int head = 0; head < task_.num_kv_heads; ++head) {
      for (int row = 0; row < num_rows_; ++row) {
        const int slot = head * row_stride_ + row;
        T* target = output_ + (query_index(row) * shape_.num_heads + query_head(head, row)) *
                                  shape_.value_dim;
        for (int d = 0; d < shape_.value_dim; ++d) {
          const float value = scratch_.outputs[slot * value_dim_ + d] / scratch_.sums[slot];
          target[d] = static_cast<T>(value);
        }
      }
    }
  }

  static int whole(int num_keys) { return (num_keys + kLanes - 1) / kLanes * kLanes; }

  const T *query_, *keys_, *values_;
  T* output_;
  const Shape& shape_;
  const Rule& rule_;
  const Task& task_;
  Scratch& scratch_;
  const int heads_per_kv_, num_rows_;
  const int row_stride_;  // rows of a head, made even: they are treated in pairs
  const int key_dim_, value_dim_;
  const int64_t first_position_;
  std::array<int64_t, 2 * kChunk> rows_;  // of a chunk and the next
};

// Splits key heads only as far as the threads ask for: together, a slot's heads lie in one piece.
std::vector<Task> plan(const std::vector<Sequence>& sequences, int num_kv_heads) {
  int64_t num_tiles = 0;
  for (const Sequence& sequence : sequences) {
    num_tiles += (sequence.num_new + kTileQueries - 1) / kTileQueries;
  }
  const int64_t wanted = kTasksPerThread * at::get_num_threads();
  const int64_t num_groups =
      std::clamp<int64_t>((wanted + num_tiles - 1) / std::max<int64_t>(num_tiles, 1), 1, num_kv_heads);
  const int group_len = static_cast<int>((num_kv_heads + num_groups - 1) / num_groups);
  std::vector<Task> tasks;
  for (const Sequence& sequence : sequences) {
    for (int64_t tile = 0; tile < sequence.num_new; tile += kTileQueries) {
      const int64_t tile_len = std::min<int64_t>(kTileQueries, sequence.num_new - tile);
      for (int head = 0; head < num_kv_heads; head += group_len) {
        const int num_heads = std::min(group_len, num_kv_heads - head);
        tasks.push_back({sequence, head, num_heads, tile, tile_len});
      }
    }
  }
  return tasks;
}

template <typename T>
void attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
            at::Tensor& output, const std::vector<Task>& tasks, const Shape& shape,
            const Rule& rule) {
  at::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) {
      Attention<T>(query.const_data_ptr<T>(), keys.const_data_ptr<T>(), values.const_data_ptr<T>(),
                   output.data_ptr<T>(), shape, rule, tasks[i], scratch)
          .run();
    }
  });
}

// query [N, H, D], keys and values [num_slots, K, D] -> [N, H, D_value]
at::Tensor paged_attention(const at::Tensor& query_in, const at::Tensor& keys,
                           const at::Tensor& values, const at::Tensor& query_starts,
                           const at::Tensor& context_lens, const at::Tensor& block_table,
                           int64_t block_size, double scale, int64_t window, double softcap,
                           const std::optional<at::Tensor>& sinks) {
  const at::Tensor query = query_in.stride(2) == 1 ? query_in : query_in.contiguous();
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous(), "the cache must be contiguous");
  TORCH_CHECK(query.scalar_type() == keys.scalar_type(), "queries and keys differ in type");
  const Shape shape{static_cast<int>(query.size(1)), static_cast<int>(keys.size(1)),
                    static_cast<int>(keys.size(2)),  static_cast<int>(values.size(2)),
                    static_cast<int>(block_size),    query.stride(0),
                    query.stride(1),                 block_table.stride(0),
                    score_pair_for(keys.size(2)),    add_pair_for(values.size(2))};
  const int32_t* starts = query_starts.const_data_ptr<int32_t>();
  const int32_t* lens = context_lens.const_data_ptr<int32_t>();
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < context_lens.size(0); ++i) {
    sequences.push_back({starts[i], starts[i + 1] - starts[i], lens[i],
                         block_table.const_data_ptr<int32_t>() + i * shape.block_table_stride});
  }
  const at::Tensor sink_logits = sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor();
  const Rule rule{static_cast<float>(scale), window, static_cast<float>(softcap),
                  sinks ? sink_logits.const_data_ptr<float>() : nullptr};
  const std::vector<Task> tasks = plan(sequences, shape.num_kv_heads);
  at::Tensor output = at::empty({query.size(0), query.size(1), values.size(2)}, query.options());
  if (query.scalar_type() == at::kBFloat16) {
    attend<at::BFloat16>(query, keys, values, output, tasks, shape, rule);
  } else {
    TORCH_CHECK(query.scalar_type() == at::kFloat, "only float32 and bfloat16");
    attend<float>(query, keys, values, output, tasks, shape, rule);
  }
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor query_starts, "
      "Tensor context_lens, Tensor block_table, int block_size, float scale, int window, "
      "float softcap, Tensor? sinks) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("paged_attention", paged_attention); }
