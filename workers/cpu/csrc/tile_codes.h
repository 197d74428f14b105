// A tile of a layer whose weights are codes of 8 or 4 bits with scales, for CPUs with AVX2 or AVX-512.
// They come from memory as they are, and become fp32 numbers in registers, once for all rows.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "fp32_sums.h"
#include "streamed_layer.h"
#include "vectors.h"

namespace tandem {

// Codes that are signed numbers.
struct Int8Codes {
  static constexpr int kInputs = 4;  // of an output, in the 32 bits that it has of a line

  template <int Input>
  [[gnu::always_inline]] static Floats decode(Words words, const float*) {
    const auto codes = reinterpret_cast<Ints>(words << (24 - 8 * Input)) >> 24;
    return __builtin_convertvector(codes, Floats);
  }
};

// Codes that are indices of a table of sixteen numbers; of two in a byte, the first is the high one.
struct Int4Codes {
  static constexpr int kInputs = 8;

  template <int Input>
  [[gnu::always_inline]] static Floats decode(Words words, const float* table) {
    constexpr int kShift = 8 * (Input / 2) + (Input % 2 == 0 ? 4 : 0);
    const auto indices = reinterpret_cast<Ints>(words >> kShift & 15u);
    if constexpr (kLanes == 16) return __builtin_shuffle(load(table), indices);
    return __builtin_shuffle(load(table), load(table + 8), indices);
  }
};

template <typename OfOutputs, typename Step>
struct CodedLayer {
  using Number = OfOutputs;
  static constexpr int64_t kInputsPerStep = std::tuple_size_v<Step>;

  const Step* inputs;      // tile by tile: [num_steps, rows of the tile]
  const uint8_t* codes;    // of stream_weight
  const float* scales;     // [num_blocks, num_steps / steps_per_scale, 16]
  const float* table;      // null where codes are numbers
  const float* bias;       // null where there is none
  Number* output;
  int64_t in_features;
  int64_t out_features;
  int64_t steps_per_scale;

  int64_t num_steps() const { return in_features / kInputsPerStep; }
  int64_t num_blocks() const { return (out_features + kWidth - 1) / kWidth; }
  const uint8_t* line(int64_t block, int64_t step) const {
    return codes + (block * num_steps() + step) * kLineBytes;
  }
  const float* scales_of(int64_t block, int64_t step) const {
    return scales + (block * num_steps() + step) / steps_per_scale * kWidth;
  }
};

template <typename Codes, typename OfInputs>
struct CodesTile {
  using Number = OfInputs;
  static constexpr int kInputs = Codes::kInputs;
  using Step = std::array<float, kInputs>;
  using OfLayer = CodedLayer<Number, Step>;

  static constexpr bool kRowsLieAsTheyAre = std::is_same_v<Number, float>;
  // Its sums share the registers with scales and a table.
#ifdef __AVX512F__
  static constexpr int kMaxRows = 12;
  static constexpr int64_t blocks_of(int64_t rows) { return std::min<int64_t>(kMaxBlocks, 24 / rows); }
#else
  static constexpr int kMaxRows = 4;
  static constexpr int64_t blocks_of(int64_t rows) { return rows < 2 ? 2 : 1; }
#endif

  template <int Rows, int Blocks>
  static void multiply(const OfLayer& layer, int64_t first_row, int64_t first_block, Fetch next) {
    const Step* inputs = layer.inputs + first_row * layer.num_steps();
    Floats sums[Rows][Blocks][kParts];
    for (auto& row : sums) {
      for (auto& block : row) std::fill_n(block, kParts, Floats{});
    }
    for (int64_t begin = 0; begin < layer.num_steps(); begin += layer.steps_per_scale) {
      Floats scales[Blocks][kParts];
      for (int block = 0; block < Blocks; ++block) {
        const float* of_block = layer.scales_of(first_block + block, begin);
        for (int part = 0; part < kParts; ++part) scales[block][part] = load(of_block + part * kLanes);
      }
      for (int64_t step = begin; step < begin + layer.steps_per_scale; ++step) {
        next.fetch(step);
        const uint8_t* lines[Blocks];
        for (int block = 0; block < Blocks; ++block) {
          lines[block] = layer.line(first_block + block, step);
          __builtin_prefetch(lines[block] + kLinesAhead * kLineBytes);
        }
        add_step(lines, inputs + step * Rows, layer.table, scales, sums,
                 std::make_integer_sequence<int, kInputs>());
      }
    }
    store_sums(sums, layer, first_row, first_block);
  }

  static void lay_out(const Number* rows, int64_t num_rows, int64_t num_steps, Step* tile) {
    lay_out_inputs(rows, num_rows, num_steps, tile);
  }

 private:
  // Products with a step's inputs of each row. Inlined, as those of one input: all is in registers.
  template <int Rows, int Blocks, int... Inputs>
  [[gnu::always_inline]] static void add_step(const uint8_t* const (&lines)[Blocks],
                                              const Step* inputs, const float* table,
                                              const Floats (&scales)[Blocks][kParts],
                                              Floats (&sums)[Rows][Blocks][kParts],
                                              std::integer_sequence<int, Inputs...>) {
    (add_products<Inputs>(lines, inputs, table, scales, sums), ...);
  }

  template <int Input, int Rows, int Blocks>
  [[gnu::always_inline]] static void add_products(const uint8_t* const (&lines)[Blocks],
                                                  const Step* inputs, const float* table,
                                                  const Floats (&scales)[Blocks][kParts],
                                                  Floats (&sums)[Rows][Blocks][kParts]) {
    Floats weights[Blocks][kParts];
    for (int block = 0; block < Blocks; ++block) {
      for (int part = 0; part < kParts; ++part) {
        const auto words = load_as<Words>(lines[block] + part * kLanes * sizeof(float));
        weights[block][part] = Codes::template decode<Input>(words, table) * scales[block][part];
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
};

}  // namespace tandem
