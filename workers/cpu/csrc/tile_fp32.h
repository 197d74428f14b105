// A tile of a streamed layer for CPUs with AVX2 or AVX-512, which multiplies fp32 numbers. Weights in
// bf16 come from memory as they are, and are widened in registers.
#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "streamed_layer.h"
#include "vectors.h"

namespace tandem {

template <typename OfWeights>
struct Fp32Tile {
  using Number = OfWeights;
  static constexpr bool kIsBf16 = std::is_same_v<Number, c10::BFloat16>;
  static constexpr int kInputs = kIsBf16 ? 2 : 1;
  using Step = std::array<float, kInputs>;
  using OfLayer = Layer<Number, Step>;

  static constexpr bool kRowsLieAsTheyAre = !kIsBf16;  // a single one of bf16 is widened
  // Its sums fill most of the 32 or 16 registers. Of three rows with AVX2 the inputs of two blocks no
  // longer fit beside them.
#ifdef __AVX512F__
  static constexpr int kMaxRows = 12;
  static constexpr int64_t blocks_of(int64_t rows) { return std::min<int64_t>(kMaxBlocks, 24 / rows); }
#else
  static constexpr int kMaxRows = 6;
  static constexpr int64_t blocks_of(int64_t rows) { return rows < 3 ? kMaxBlocks - rows : 1; }
#endif

  template <int Rows, int Blocks>
  static void multiply(const OfLayer& layer, int64_t first_row, int64_t first_block, Fetch next) {
    const Step* inputs = layer.inputs + first_row * layer.num_steps();
    Floats sums[Rows][Blocks][kParts];
    for (auto& row : sums) {
      for (auto& block : row) std::fill_n(block, kParts, Floats{});
    }
    for (int64_t step = 0; step < layer.num_steps(); ++step) {
      next.fetch(step);
      const Number* lines[Blocks];
      for (int block = 0; block < Blocks; ++block) {
        lines[block] = layer.line(first_block + block, step);
        __builtin_prefetch(lines[block] + kLinesAhead * OfLayer::kLine);
      }
      add_products<0>(lines, inputs + step * Rows, sums);
      if constexpr (kInputs > 1) {
        // To the compiler these are others now, so it reads them again: if it kept what it read, some
        // of the sums of six rows would be kept in memory.
        for (const Number*& line : lines) asm("" : "+r"(line));
        add_products<1>(lines, inputs + step * Rows, sums);
      }
    }
    for (int block = 0; block < Blocks; ++block) {
      const int64_t column = (first_block + block) * kWidth;
      const int64_t width = std::min(kWidth, layer.out_features - column);
      float bias[kWidth] = {};
      if (layer.bias != nullptr) std::copy_n(layer.bias + column, width, bias);
      for (int row = 0; row < Rows; ++row) {
        Number* output = layer.output + (first_row + row) * layer.out_features + column;
        store_block(sums[row][block], bias, width, output);
      }
    }
  }

  // rows [num_rows, num_steps] of `kInputs` each -> [num_steps, num_rows]
  static void lay_out(const Number* rows, int64_t num_rows, int64_t num_steps, Step* tile) {
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int64_t step = 0; step < num_steps; ++step) {
        for (int i = 0; i < kInputs; ++i) {
          tile[step * num_rows + row][i] = rows[(row * num_steps + step) * kInputs + i];
        }
      }
    }
  }

 private:
  static constexpr int kParts = kWidth / kLanes;  // registers of a line

  // Products with one input of each row. Inlined: all is in registers.
  template <int Input, int Rows, int Blocks>
  [[gnu::always_inline]] static void add_products(const Number* const (&lines)[Blocks],
                                                  const Step* inputs,
                                                  Floats (&sums)[Rows][Blocks][kParts]) {
    Floats weights[Blocks][kParts];
    for (int block = 0; block < Blocks; ++block) {
      for (int part = 0; part < kParts; ++part) {
        weights[block][part] = weights_of<Input>(lines[block] + part * kInputs * kLanes);
      }
    }
    for (int row = 0; row < Rows; ++row) {
      for (int block = 0; block < Blocks; ++block) {
        for (int part = 0; part < kParts; ++part) {
          sums[row][block][part] += weights[block][part] * inputs[row][Input];
        }
      }
    }
  }

  template <int Input>
  static Floats weights_of(const Number* line) {
    const auto words = load_as<Words>(line);
    if constexpr (!kIsBf16) return reinterpret_cast<Floats>(words);
    return reinterpret_cast<Floats>(Input == 0 ? words << 16 : words & 0xffff0000u);
  }

  static void store_block(const Floats* sums, const float* bias, int64_t width, Number* output) {
    float products[kWidth];
    for (int part = 0; part < kParts; ++part) store(products + part * kLanes, sums[part]);
    Number rounded[kWidth];
    for (int i = 0; i < kWidth; ++i) rounded[i] = products[i] + bias[i];
    std::copy_n(rounded, width, output);
  }
};

}  // namespace tandem
