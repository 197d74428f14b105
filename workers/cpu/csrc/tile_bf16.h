// A tile of a streamed bf16 layer for CPUs with AVX512-BF16, which multiply pairs of bf16 numbers.
#pragma once

#include <c10/util/BFloat16.h>
#include <immintrin.h>

#include <algorithm>

#include "streamed_layer.h"
#include "transpose.h"

namespace tandem {

struct Bf16Tile {
  using Number = c10::BFloat16;
  using Step = int32_t;  // two inputs
  using OfLayer = Layer<Number, Step>;

  static constexpr int kMaxRows = 12;
  static constexpr bool kRowsLieAsTheyAre = true;  // of steps: a single one need not be laid out

  // Its sums fill 24 registers, and the others hold what is multiplied.
  static constexpr int64_t blocks_of(int64_t rows) { return std::min<int64_t>(kMaxBlocks, 24 / rows); }

  template <int Rows, int Blocks>
  static void multiply(const OfLayer& layer, int64_t first_row, int64_t first_block, Fetch next) {
    const Step* inputs = layer.inputs + first_row * layer.num_steps();
    __m512 sums[Rows][Blocks];
    for (auto& row : sums) {
      for (auto& sum : row) sum = _mm512_setzero_ps();
    }
    for (int64_t step = 0; step < layer.num_steps(); ++step) {
      __m512bh weights[Blocks];
      for (int block = 0; block < Blocks; ++block) {
        const Number* line = layer.line(first_block + block, step);
        weights[block] = (__m512bh)_mm512_loadu_si512(line);
        __builtin_prefetch(line + kLinesAhead * OfLayer::kLine);
      }
      next.fetch(step);
      for (int row = 0; row < Rows; ++row) {
        const auto two = (__m512bh)_mm512_set1_epi32(inputs[step * Rows + row]);
        for (int block = 0; block < Blocks; ++block) {
          sums[row][block] = _mm512_dpbf16_ps(sums[row][block], weights[block], two);
        }
      }
    }
    for (int block = 0; block < Blocks; ++block) {
      const int64_t column = (first_block + block) * kWidth;
      const int64_t width = std::min(kWidth, layer.out_features - column);
      const auto mask = static_cast<__mmask16>((1u << width) - 1);
      const __m512 bias = layer.bias == nullptr
                              ? _mm512_setzero_ps()
                              : _mm512_maskz_loadu_ps(mask, layer.bias + column);
      for (int row = 0; row < Rows; ++row) {
        Number* output = layer.output + (first_row + row) * layer.out_features + column;
        const auto rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sums[row][block], bias));
        _mm256_mask_storeu_epi16(output, mask, rounded);
      }
    }
  }

  // rows [num_rows, 2 * num_steps] -> [num_steps, num_rows], of at most sixteen rows
  static void lay_out(const Number* rows, int64_t num_rows, int64_t num_steps, Step* tile) {
    const auto of_rows = static_cast<__mmask16>((1u << num_rows) - 1);
    for (int64_t first = 0; first < num_steps; first += kWidth) {
      const int64_t num_left = std::min(kWidth, num_steps - first);
      const auto of_steps = static_cast<__mmask16>((1u << num_left) - 1);
      __m512i steps[kWidth];
      for (int64_t row = 0; row < kWidth; ++row) {
        steps[row] = row < num_rows
                         ? _mm512_maskz_loadu_epi32(of_steps, rows + 2 * (row * num_steps + first))
                         : _mm512_setzero_si512();
      }
      transpose(steps);
      for (int64_t i = 0; i < num_left; ++i) {
        _mm512_mask_storeu_epi32(tile + (first + i) * num_rows, of_rows, steps[i]);
      }
    }
  }
};

}  // namespace tandem
