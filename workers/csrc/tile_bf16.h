// A tile of a streamed layer for CPUs with AVX512-BF16, which multiply pairs of bf16 numbers.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "streamed_layer.h"
#include "transpose.h"

namespace tandem {

using Pair = int32_t;  // two inputs in bf16

constexpr int kMaxRows = 12;
constexpr bool kRowsLieAsTheyAre = true;  // of pairs: a single one need not be laid out

// Blocks of a tile: its sums fill 24 registers, and the others hold what is multiplied.
constexpr int64_t blocks_of(int64_t rows) { return std::min<int64_t>(kMaxBlocks, 24 / rows); }

template <int Rows, int Blocks>
void multiply_tile(const Layer<Pair>& layer, int64_t first_row, int64_t first_block, Fetch next) {
  const Pair* inputs = layer.pairs + first_row * layer.num_pairs();
  const c10::BFloat16* weight = layer.weight + first_block * layer.block_size();
  __m512 sums[Rows][Blocks];
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm512_setzero_ps();
  }
  for (int64_t pair = 0; pair < layer.num_pairs(); ++pair) {
    __m512bh weights[Blocks];
    for (int block = 0; block < Blocks; ++block) {
      const c10::BFloat16* line = weight + block * layer.block_size() + pair * kLine;
      weights[block] = (__m512bh)_mm512_loadu_si512(line);
      __builtin_prefetch(line + kLinesAhead * kLine);
    }
    next.fetch(pair);
    for (int row = 0; row < Rows; ++row) {
      const auto two = (__m512bh)_mm512_set1_epi32(inputs[pair * Rows + row]);
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
      c10::BFloat16* output = layer.output + (first_row + row) * layer.out_features + column;
      const auto rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sums[row][block], bias));
      _mm256_mask_storeu_epi16(output, mask, rounded);
    }
  }
}

// rows [num_rows, num_pairs] -> [num_pairs, num_rows], of at most sixteen rows
inline void lay_out_tile(const int32_t* rows, int64_t num_rows, int64_t num_pairs, Pair* tile) {
  const auto of_rows = static_cast<__mmask16>((1u << num_rows) - 1);
  for (int64_t first = 0; first < num_pairs; first += kWidth) {
    const int64_t num_left = std::min(kWidth, num_pairs - first);
    const auto of_pairs = static_cast<__mmask16>((1u << num_left) - 1);
    __m512i pairs[kWidth];
    for (int64_t row = 0; row < kWidth; ++row) {
      pairs[row] = row < num_rows
                       ? _mm512_maskz_loadu_epi32(of_pairs, rows + row * num_pairs + first)
                       : _mm512_setzero_si512();
    }
    transpose(pairs);
    for (int64_t i = 0; i < num_left; ++i) {
      _mm512_mask_storeu_epi32(tile + (first + i) * num_rows, of_rows, pairs[i]);
    }
  }
}

}  // namespace tandem
