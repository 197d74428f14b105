// A tile of a streamed layer for CPUs with AVX2 or AVX-512, which multiplies fp32 numbers. Weights in
// bf16 come from memory as they are, and are widened in registers.
#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "fp32_sums.h"
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
    store_sums(sums, layer, first_row, first_block);
  }

  static void lay_out(const Number* rows, int64_t num_rows, int64_t num_steps, Step* tile) {
    lay_out_inputs(rows, num_rows, num_steps, tile);
  }

 private:
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
};

}  // namespace tandem
