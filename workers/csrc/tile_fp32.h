// A tile of a streamed layer for CPUs that multiply only fp32, with AVX2 or AVX-512: weights come from
// memory in bf16 and are widened in registers.
#pragma once

#include <algorithm>
#include <cstring>

#include "streamed_layer.h"
#include "vectors.h"

namespace tandem {

struct Pair {
  float numbers[2];
};

// Blocks of a tile, whose sums fill most of the 32 or 16 registers. Of three rows with AVX2 the inputs
// of two blocks no longer fit beside them.
#ifdef __AVX512F__
constexpr int kMaxRows = 12;
constexpr int64_t blocks_of(int64_t rows) { return std::min<int64_t>(kMaxBlocks, 24 / rows); }
#else
constexpr int kMaxRows = 6;
constexpr int64_t blocks_of(int64_t rows) { return rows < 3 ? kMaxBlocks - rows : 1; }
#endif
constexpr bool kRowsLieAsTheyAre = false;  // they are widened in any case

constexpr int kParts = kWidth / kLanes;  // registers of a block's outputs

// Products with the first or the second number of every pair. Inlined: all is in registers.
template <int Number, int Rows, int Blocks>
[[gnu::always_inline]] inline void add_products(const Words (&weights)[Blocks][kParts],
                                                const Pair* inputs,
                                                Floats (&sums)[Rows][Blocks][kParts]) {
  for (int row = 0; row < Rows; ++row) {
    for (int block = 0; block < Blocks; ++block) {
      for (int part = 0; part < kParts; ++part) {
        const Words pairs = weights[block][part];
        const Words widened = Number == 0 ? pairs << 16 : pairs & 0xffff0000u;
        sums[row][block][part] += reinterpret_cast<Floats>(widened) * inputs[row].numbers[Number];
      }
    }
  }
}

inline void store_block(const Floats* sums, const float* bias, int64_t width, c10::BFloat16* output) {
  float products[kWidth];
  for (int part = 0; part < kParts; ++part) store(products + part * kLanes, sums[part]);
  uint16_t rounded[kWidth];
  for (int i = 0; i < kWidth; ++i) rounded[i] = c10::BFloat16(products[i] + bias[i]).x;
  std::copy_n(rounded, width, &output->x);
}

template <int Rows, int Blocks>
void multiply_tile(const Layer<Pair>& layer, int64_t first_row, int64_t first_block, Fetch next) {
  const Pair* inputs = layer.pairs + first_row * layer.num_pairs();
  const c10::BFloat16* weight = layer.weight + first_block * layer.block_size();
  Floats sums[Rows][Blocks][kParts];
  for (auto& row : sums) {
    for (auto& block : row) std::fill_n(block, kParts, Floats{});
  }
  for (int64_t pair = 0; pair < layer.num_pairs(); ++pair) {
    next.fetch(pair);
    Words weights[Blocks][kParts];
    for (int block = 0; block < Blocks; ++block) {
      const c10::BFloat16* line = weight + block * layer.block_size() + pair * kLine;
      __builtin_prefetch(line + kLinesAhead * kLine);
      for (int part = 0; part < kParts; ++part) {
        weights[block][part] = load_as<Words>(line + part * 2 * kLanes);
      }
    }
    add_products<0>(weights, inputs + pair * Rows, sums);
    add_products<1>(weights, inputs + pair * Rows, sums);
  }
  for (int block = 0; block < Blocks; ++block) {
    const int64_t column = (first_block + block) * kWidth;
    const int64_t width = std::min(kWidth, layer.out_features - column);
    float bias[kWidth] = {};
    if (layer.bias != nullptr) std::copy_n(layer.bias + column, width, bias);
    for (int row = 0; row < Rows; ++row) {
      c10::BFloat16* output = layer.output + (first_row + row) * layer.out_features + column;
      store_block(sums[row][block], bias, width, output);
    }
  }
}

// rows [num_rows, num_pairs] -> [num_pairs, num_rows], in fp32
inline void lay_out_tile(const int32_t* rows, int64_t num_rows, int64_t num_pairs, Pair* tile) {
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
      const auto two = static_cast<uint32_t>(rows[row * num_pairs + pair]);
      const uint32_t numbers[] = {two << 16, two & 0xffff0000u};
      std::memcpy(tile + pair * num_rows + row, numbers, sizeof(numbers));
    }
  }
}

}  // namespace tandem
