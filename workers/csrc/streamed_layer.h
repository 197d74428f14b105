// A linear layer as streamed_linear.cpp lays it out, and what one of its tiles is asked to do.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace tandem {

constexpr int64_t kWidth = 16;         // outputs of a block
constexpr int64_t kLine = 2 * kWidth;  // numbers of a cache line: a pair of inputs for a block
constexpr int64_t kLinesAhead = 16;    // fetched to the first-level cache
constexpr int kMaxBlocks = 4;          // of a tile

// Pair: two inputs of a row, as they are multiplied.
template <typename Pair>
struct Layer {
  const Pair* pairs;  // inputs, tile by tile: [num_pairs, rows of the tile]
  const c10::BFloat16* weight;
  const float* bias;  // null where there is none
  c10::BFloat16* output;
  int64_t in_features;
  int64_t out_features;

  int64_t num_pairs() const { return in_features / 2; }
  int64_t num_blocks() const { return (out_features + kWidth - 1) / kWidth; }
  int64_t block_size() const { return in_features * kWidth; }
};

// What a tile fetches meanwhile: lines from there on, as many for each of its pairs of inputs.
class Fetch {
 public:
  Fetch(const c10::BFloat16* lines, int64_t num_lines, int64_t num_pairs)
      : lines_(lines), lines_per_pair_((num_lines << kFraction) / num_pairs) {}

  // Inlined: a call is without effect to the compiler, which would drop it.
  [[gnu::always_inline]] void fetch(int64_t pair) const {
    const int64_t end = (pair + 1) * lines_per_pair_ >> kFraction;
    for (int64_t line = pair * lines_per_pair_ >> kFraction; line < end; ++line) {
      __builtin_prefetch(lines_ + line * kLine, 0, 2);
    }
  }

 private:
  static constexpr int kFraction = 20;  // bits after the point
  const c10::BFloat16* lines_;
  int64_t lines_per_pair_;
};

}  // namespace tandem
