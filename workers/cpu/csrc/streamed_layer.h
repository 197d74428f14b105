// A linear layer as streamed_linear.cpp lays it out, and what one of its tiles is asked to do.
#pragma once

#include <cstdint>

namespace tandem {

constexpr int64_t kWidth = 16;  // outputs of a block
constexpr int64_t kLineBytes = 64;
constexpr int64_t kLinesAhead = 16;  // fetched to the first-level cache
constexpr int kMaxBlocks = 4;        // of a tile

// Number: of the weights. Step: what of a row's inputs is multiplied by a block's cache line.
template <typename OfWeights, typename Step>
struct Layer {
  using Number = OfWeights;
  static constexpr int64_t kLine = kLineBytes / sizeof(Number);
  static constexpr int64_t kInputsPerStep = kLine / kWidth;

  const Step* inputs;  // tile by tile: [num_steps, rows of the tile]
  const Number* weight;
  const float* bias;  // null where there is none
  Number* output;
  int64_t in_features;
  int64_t out_features;

  int64_t num_steps() const { return in_features / kInputsPerStep; }
  int64_t num_blocks() const { return (out_features + kWidth - 1) / kWidth; }
  const Number* line(int64_t block, int64_t step) const {
    return weight + (block * num_steps() + step) * kLine;
  }
};

// What a tile fetches meanwhile: lines from there on, as many in each of its steps.
class Fetch {
 public:
  Fetch(const void* lines, int64_t num_lines, int64_t num_steps)
      : lines_(static_cast<const char*>(lines)),
        lines_per_step_((num_lines << kFraction) / num_steps) {}

  // Inlined: a call is without effect to the compiler, which would drop it.
  [[gnu::always_inline]] void fetch(int64_t step) const {
    const int64_t end = (step + 1) * lines_per_step_ >> kFraction;
    for (int64_t line = step * lines_per_step_ >> kFraction; line < end; ++line) {
      __builtin_prefetch(lines_ + line * kLineBytes, 0, 2);
    }
  }

 private:
  static constexpr int kFraction = 20;  // bits after the point
  const char* lines_;
  int64_t lines_per_step_;
};

}  // namespace tandem
