// Attention of a flattened batch over a paged KV cache, for CPUs.
//
// One task is one sequence, some of its key heads and a tile of its queries. Keys are read where they
// lie in the cache, a chunk at a time (attention_chunk.h), once for all query heads and queries that
// share them, and folded into a running softmax. No context is gathered or padded as a whole, and a
// query's result depends on its own sequence only, not on the batch.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "attention_chunk.h"
#include "shares.h"

namespace {

using namespace tandem;

constexpr float kHidden = -1e30f;  // the score of a key that a query does not see
constexpr int kTasksPerThread = 2;
constexpr int kTileQueries = 16;  // queries of one task, times the query heads per key head

struct Rule {
  float scale;
  int64_t window;  // 0: none
  float softcap;   // 0: none
  const float* sinks;  // of every query head, or none
};

struct Shape {
  int num_heads, num_kv_heads, key_dim, value_dim, block_size;
  int64_t query_stride, query_head_stride, block_table_stride;
};

// One task's sequence: num_new queries whose last one stands at context_len - 1.
struct Sequence {
  int64_t first_query, num_new, context_len;
  const int32_t* block_table;
};

// What a thread works on: per key head of a task its queries and the running softmax, and one head's
// chunk. Kept between calls.
template <typename Chunk>
struct Scratch {
  Chunk chunk;
  Buffer<typename Chunk::Number> queries;
  Buffer<float> outputs, maxima, sums;

  void grow(const Shape& shape, int num_rows) {
    grow(queries, num_rows * Chunk::query_size(shape.key_dim));
    grow(outputs, num_rows * Chunk::output_size(shape.value_dim));
    grow(maxima, num_rows);
    grow(sums, num_rows);
  }

 private:
  template <typename Number>
  static void grow(Buffer<Number>& buffer, size_t size) {
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

// In a softmax whose highest score is that.
inline Floats weight_of(Floats score, Floats highest) {
  return score <= splat(kHidden) ? splat(0.0f) : exponential(score - highest);
}

// Turns rows' scores into weights of their running softmaxes; says by how much what was summed before
// has to shrink.
template <int kRows>
inline void weigh_rows(float* scores, int num_keys, float* maxima, float* sums,
                       float* corrections) {
  Floats highest[kRows];
  for (int row = 0; row < kRows; ++row) {
    highest[row] = load(scores + row * kChunk);
    for (int j = kLanes; j < num_keys; j += kLanes) {
      highest[row] = larger(highest[row], load(scores + row * kChunk + j));
    }
    highest[row] = larger(across(highest[row], larger), splat(maxima[row]));
  }
  for (int row = 0; row < kRows; ++row) {
    Floats total = {};
    for (int j = 0; j < num_keys; j += kLanes) {
      float* score = scores + row * kChunk + j;
      const Floats weight = weight_of(load(score), highest[row]);
      store(score, weight);
      total += weight;
    }
    const Floats correction = weight_of(splat(maxima[row]), highest[row]);
    corrections[row] = correction[0];
    sums[row] = (splat(sums[row]) * correction + across(total, std::plus<>()))[0];
    maxima[row] = highest[row][0];
  }
}

template <typename T>
class Attention {
 public:
  using Chunk = typename ChunkOf<T>::Type;

  Attention(const T* query, const Cache<T>& cache, T* output, const Shape& shape, const Rule& rule,
            const Task& task, Scratch<Chunk>& scratch)
      : query_(query), cache_(cache), output_(output), shape_(shape), rule_(rule), task_(task),
        scratch_(scratch), heads_per_kv_(shape.num_heads / shape.num_kv_heads),
        num_rows_(heads_per_kv_ * static_cast<int>(task.tile_len)),
        row_stride_(whole(num_rows_, Chunk::kMostRows)),
        query_size_(Chunk::query_size(shape.key_dim)),
        output_size_(Chunk::output_size(shape.value_dim)),
        first_position_(task.sequence.context_len - task.sequence.num_new + task.tile_start) {}

  void run() {
    scratch_.grow(shape_, task_.num_kv_heads * row_stride_);
    scratch_.chunk.start(cache_, rule_.scale, num_rows_);
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
        const bool is_last = head + 1 == task_.num_kv_heads;
        const Rows next = is_last ? Rows{rows_.data() + kChunk, 0, num_next}
                                  : Rows{rows_.data(), head + 1, num_keys};
        scratch_.chunk.load(Rows{rows_.data(), head, num_keys}, next);
        fold_chunk(head, first_key, whole(num_keys, kLanes));
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
        const T* query = query_ + query_index(row) * shape_.query_stride;
        Chunk::load_query(query + of_query * shape_.query_head_stride, shape_.key_dim,
                          &scratch_.queries[slot * query_size_]);
        scratch_.maxima[slot] = rule_.sinks ? rule_.sinks[of_query] : kHidden;
        scratch_.sums[slot] = rule_.sinks ? 1.0f : 0.0f;
        std::fill_n(scratch_.outputs.begin() + slot * output_size_, output_size_, 0.0f);
      }
    }
  }

  // Where the cache has the keys from `first_key` on: rows of the task's first head, as Rows says.
  void find_rows(int64_t first_key, int num_keys) {
    int64_t block = first_key / shape_.block_size, offset = first_key % shape_.block_size;
    for (int j = 0; j < num_keys; ++j) {
      const int64_t slot = int64_t{task_.sequence.block_table[block]} * shape_.block_size + offset;
      rows_[j] = slot * shape_.num_kv_heads + task_.kv_head;
      if (++offset == shape_.block_size) ++block, offset = 0;
    }
    for (int j = num_keys; j % kLanes > 0; ++j) rows_[j] = rows_[num_keys - 1];
  }

  void fold_chunk(int head, int64_t first_key, int num_keys) {
    int row = 0;
    while (Chunk::kMostRows > 2 && row + 2 < num_rows_) {
      fold_rows<Chunk::kMostRows>(head, row, first_key, num_keys);
      row += Chunk::kMostRows;
    }
    for (; row < num_rows_; row += 2) fold_rows<2>(head, row, first_key, num_keys);
  }

  // There is room for rows past the last; nobody reads what comes of them.
  template <int kRows>
  void fold_rows(int head, int row, int64_t first_key, int num_keys) {
    const int slot = head * row_stride_ + row;
    alignas(sizeof(Floats)) float scores[kRows * kChunk];
    float corrections[kRows];
    scratch_.chunk.template score<kRows>(&scratch_.queries[slot * query_size_], scores);
    for (int i = 0; i < kRows; ++i) {
      const int64_t position = first_position_ + (row + i) / heads_per_kv_;
      apply_rule(scores + i * kChunk, num_keys, first_key, position, rule_);
    }
    weigh_rows<kRows>(scores, num_keys, &scratch_.maxima[slot], &scratch_.sums[slot], corrections);
    scratch_.chunk.template add<kRows>(scores, corrections, &scratch_.outputs[slot * output_size_]);
  }

  void store_outputs() {
    for (int head = 0; head < task_.num_kv_heads; ++head) {
      for (int row = 0; row < num_rows_; ++row) {
        const int slot = head * row_stride_ + row;
        T* target = output_ + (query_index(row) * shape_.num_heads + query_head(head, row)) *
                                  shape_.value_dim;
        for (int d = 0; d < shape_.value_dim; ++d) {
          const float value = scratch_.outputs[slot * output_size_ + d] / scratch_.sums[slot];
          target[d] = static_cast<T>(value);
        }
      }
    }
  }

  const T* query_;
  const Cache<T> cache_;
  T* output_;
  const Shape& shape_;
  const Rule& rule_;
  const Task& task_;
  Scratch<Chunk>& scratch_;
  const int heads_per_kv_, num_rows_;
  const int row_stride_;  // rows of a head, and those past the last
  const int query_size_, output_size_;
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

// A thread's own, looked up once per task: inlined, it would be looked up in the inner loops.
template <typename Chunk>
__attribute__((noinline)) Scratch<Chunk>& scratch_of_thread() {
  thread_local Scratch<Chunk> scratch;
  return scratch;
}

template <typename T>
void attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
            at::Tensor& output, const std::vector<Task>& tasks, const Shape& shape,
            const Rule& rule) {
  const Cache<T> cache{keys.const_data_ptr<T>(), values.const_data_ptr<T>(), shape.key_dim,
                       shape.value_dim};
  const auto num_tasks = static_cast<int64_t>(tasks.size());
  share_out_each(num_tasks, num_tasks, [&](int64_t index) {
    auto& scratch = scratch_of_thread<typename Attention<T>::Chunk>();
    Attention<T>(query.const_data_ptr<T>(), cache, output.data_ptr<T>(), shape, rule, tasks[index],
                 scratch)
        .run();
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
                    query.stride(1),                 block_table.stride(0)};
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
