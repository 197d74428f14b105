// What tiles have in common that multiply fp32 numbers.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "streamed_layer.h"
#include "vectors.h"

namespace tandem {

constexpr int kParts = kWidth / kLanes;  // registers of a block's outputs

// rows [num_rows, num_steps] of `Inputs` each -> [num_steps, num_rows]
template <typename Number, size_t Inputs>
void lay_out_inputs(const Number* rows, int64_t num_rows, int64_t num_steps,
                    std::array<float, Inputs>* tile) {
  constexpr int64_t kInputs = Inputs;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t step = 0; step < num_steps; ++step) {
      for (int64_t i = 0; i < kInputs; ++i) {
        tile[step * num_rows + row][i] = rows[(row * num_steps + step) * kInputs + i];
      }
    }
  }
}

// The sums with the layer's bias become its outputs. Inlined: a call would keep the sums in memory.
template <typename OfLayer, int Rows, int Blocks>
[[gnu::always_inline]] inline void store_sums(const Floats (&sums)[Rows][Blocks][kParts],
                                              const OfLayer& layer, int64_t first_row,
                                              int64_t first_block) {
  using Number = typename OfLayer::Number;
  for (int block = 0; block < Blocks; ++block) {
    const int64_t column = (first_block + block) * kWidth;
    const int64_t width = std::min(kWidth, layer.out_features - column);
    float bias[kWidth] = {};
    if (layer.bias != nullptr) std::copy_n(layer.bias + column, width, bias);
    for (int row = 0; row < Rows; ++row) {
      float products[kWidth];
      for (int part = 0; part < kParts; ++part) {
        store(products + part * kLanes, sums[row][block][part]);
      }
      Number rounded[kWidth];
      for (int i = 0; i < kWidth; ++i) rounded[i] = products[i] + bias[i];
      Number* output = layer.output + (first_row + row) * layer.out_features + column;
      std::copy_n(rounded, width, output);
    }
  }
}

}  // namespace tandem
