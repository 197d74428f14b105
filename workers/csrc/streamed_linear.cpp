// A linear layer in bf16 of few tokens, for CPUs with AVX512-BF16.
//
// A verification multiplies few tokens by all weights, so their way from memory is what it costs. They
// are laid out in the order in which they are needed, and while the products of one group of outputs
// are made, the weights of the next are on their way to the second-level cache. The rows of a tile are
// laid out beside each other first: the addresses of twelve do not fit the general registers. A row's
// result does not depend on how many rows there are.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

// With AMX, oneDNN's products of many rows are several times faster than these could be.
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(__AMX_BF16__)
#define TANDEM_STREAMS 1
#include <immintrin.h>

#include "transpose.h"
#endif

namespace {

using at::BFloat16;
using OptionalTensors = c10::List<std::optional<at::Tensor>>;

constexpr int64_t kWidth = 16;               // outputs of a block, the lanes of a register
constexpr int64_t kLine = 2 * kWidth;        // numbers of a cache line: a pair of inputs for a block
constexpr int64_t kLinesAhead = 16;          // fetched to the first-level cache
constexpr int64_t kFetchedBytes = 384 << 10;  // a larger group is not fetched to the second level
constexpr int64_t kWorkPerThread = 1 << 15;  // products, of one row
constexpr int64_t kInputsPerThread = 1 << 16;  // to lay out
constexpr int kMaxRows = 12;                 // of a tile
constexpr int kMaxBlocks = 4;
constexpr int kMaxSums = 24;                 // registers of a tile; the others hold what is multiplied

// [out_features, in_features] -> [ceil(out_features / 16), in_features / 2, 16, 2]
at::Tensor stream_weight(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) % 2 == 0, "a matrix with pairs of inputs");
  const int64_t num_blocks = (weight.size(0) + kWidth - 1) / kWidth;
  at::Tensor padded = at::zeros({num_blocks * kWidth, weight.size(1)}, weight.options());
  padded.narrow(0, 0, weight.size(0)).copy_(weight);
  const auto pairs = padded.view({num_blocks, kWidth, weight.size(1) / 2, 2});
  return pairs.permute({0, 2, 1, 3}).contiguous();
}

#ifdef TANDEM_STREAMS

struct Layer {
  const int32_t* pairs;  // inputs, tile by tile: [num_pairs, rows of the tile]
  const BFloat16* weight;
  const float* bias;  // null where there is none
  BFloat16* output;
  int64_t in_features;
  int64_t out_features;

  int64_t num_pairs() const { return in_features / 2; }
  int64_t num_blocks() const { return (out_features + kWidth - 1) / kWidth; }
  int64_t block_size() const { return in_features * kWidth; }
};

// What a tile fetches meanwhile: that many lines for every pair of inputs, from there on.
struct Fetch {
  const BFloat16* lines;
  int64_t lines_per_pair;
};

template <int Rows, int Blocks>
void multiply_tile(const Layer& layer, int64_t first_row, int64_t first_block, Fetch fetch) {
  const int32_t* inputs = layer.pairs + first_row * layer.num_pairs();
  const BFloat16* weight = layer.weight + first_block * layer.block_size();
  __m512 sums[Rows][Blocks];
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm512_setzero_ps();
  }
  for (int64_t pair = 0; pair < layer.num_pairs(); ++pair) {
    __m512bh weights[Blocks];
    for (int block = 0; block < Blocks; ++block) {
      const BFloat16* line = weight + block * layer.block_size() + pair * kLine;
      weights[block] = (__m512bh)_mm512_loadu_si512(line);
      _mm_prefetch(line + kLinesAhead * kLine, _MM_HINT_T0);
    }
    for (int64_t line = 0; line < fetch.lines_per_pair; ++line) {
      _mm_prefetch(fetch.lines + (pair * fetch.lines_per_pair + line) * kLine, _MM_HINT_T1);
    }
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
      BFloat16* output = layer.output + (first_row + row) * layer.out_features + column;
      const auto rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sums[row][block], bias));
      _mm256_mask_storeu_epi16(output, mask, rounded);
    }
  }
}

using Tile = void (*)(const Layer&, int64_t, int64_t, Fetch);
using TilesOfRows = std::array<Tile, kMaxBlocks>;

template <int Rows, int... Blocks>
constexpr TilesOfRows tiles_of_rows(std::integer_sequence<int, Blocks...>) {
  return {(Rows * (Blocks + 1) <= kMaxSums ? multiply_tile<Rows, Blocks + 1> : nullptr)...};
}

template <int... Rows>
constexpr std::array<TilesOfRows, kMaxRows> all_tiles(std::integer_sequence<int, Rows...>) {
  return {tiles_of_rows<Rows + 1>(std::make_integer_sequence<int, kMaxBlocks>())...};
}

constexpr auto kTiles = all_tiles(std::make_integer_sequence<int, kMaxRows>());

// Rows in tiles that are as even as can be: a nearly empty one would read the weights for nothing.
class Tiling {
 public:
  explicit Tiling(int64_t num_rows)
      : num_tiles((num_rows + kMaxRows - 1) / kMaxRows),
        rows_each_(num_tiles > 0 ? num_rows / num_tiles : 0),
        num_higher_(num_tiles > 0 ? num_rows % num_tiles : 0) {}

  const int64_t num_tiles;

  int64_t rows_of(int64_t tile) const { return rows_each_ + (tile < num_higher_ ? 1 : 0); }

  int64_t first_row_of(int64_t tile) const {
    return tile * rows_each_ + std::min(tile, num_higher_);
  }

  int64_t blocks_each() const { return std::min<int64_t>(kMaxBlocks, kMaxSums / rows_of(0)); }

 private:
  const int64_t rows_each_;
  const int64_t num_higher_;
};

// rows [num_rows, num_pairs] -> [num_pairs, num_rows], of at most sixteen rows
void lay_out_tile(const int32_t* rows, int64_t num_rows, int64_t num_pairs, int32_t* tile) {
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
    tandem::transpose(pairs);
    for (int64_t i = 0; i < num_left; ++i) {
      _mm512_mask_storeu_epi32(tile + (first + i) * num_rows, of_rows, pairs[i]);
    }
  }
}

// input [rows, in_features] -> tile by tile, what Layer wants
at::Tensor lay_out(const at::Tensor& input, const Tiling& tiling, int64_t num_pairs) {
  if (input.numel() == 2 * num_pairs) return input;  // a row lies as it should
  at::Tensor tiles = at::empty({input.numel() / 2}, at::kInt);
  const auto* rows = reinterpret_cast<const int32_t*>(input.const_data_ptr<BFloat16>());
  auto* target = tiles.mutable_data_ptr<int32_t>();
  const int64_t tiles_per_thread = 1 + kInputsPerThread / (2 * num_pairs * kMaxRows);
  at::parallel_for(0, tiling.num_tiles, tiles_per_thread, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t start = tiling.first_row_of(tile) * num_pairs;
      lay_out_tile(rows + start, tiling.rows_of(tile), num_pairs, target + start);
    }
  });
  return tiles;
}

// The blocks [begin, end) of outputs, for all rows: one thread's share.
void multiply_blocks(const Layer& layer, const Tiling& tiling, int64_t begin, int64_t end) {
  const int64_t blocks_each = tiling.blocks_each();
  for (int64_t block = begin; block < end; block += blocks_each) {
    const int64_t num_blocks = std::min(blocks_each, end - block);
    const int64_t next = block + num_blocks;
    int64_t num_to_fetch = std::min(blocks_each, end - next);
    if (num_to_fetch * layer.block_size() * sizeof(BFloat16) > kFetchedBytes) num_to_fetch = 0;
    const int64_t fetched_per_tile = (num_to_fetch + tiling.num_tiles - 1) / tiling.num_tiles;
    for (int64_t tile = 0; tile < tiling.num_tiles; ++tile) {
      const int64_t fetched = std::min(tile * fetched_per_tile, num_to_fetch);
      const Fetch fetch{layer.weight + (next + fetched) * layer.block_size(),
                        std::min(fetched_per_tile, num_to_fetch - fetched)};
      kTiles[tiling.rows_of(tile) - 1][num_blocks - 1](layer, tiling.first_row_of(tile), block, fetch);
    }
  }
}

// input [..., in_features], weights of stream_weight, biases fp32 -> of each [..., out_features]
std::vector<at::Tensor> streamed_linears(const at::Tensor& any_input, at::TensorList weights,
                                         const OptionalTensors& biases, at::IntArrayRef out_features) {
  const at::Tensor input = any_input.contiguous();
  const int64_t in_features = input.size(-1);
  TORCH_CHECK(input.scalar_type() == at::kBFloat16, "only bfloat16");
  const Tiling tiling(input.numel() / in_features);
  const at::Tensor tiles = lay_out(input, tiling, in_features / 2);
  auto shape = input.sizes().vec();
  std::vector<at::Tensor> outputs;
  std::vector<Layer> layers;
  int64_t num_blocks = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    TORCH_CHECK(weights[i].is_contiguous() && weights[i].size(1) * 2 == in_features,
                "the input does not fit the weight");
    shape.back() = out_features[i];
    outputs.push_back(at::empty(shape, input.options()));
    const std::optional<at::Tensor> bias = biases[i];
    layers.push_back({static_cast<const int32_t*>(tiles.const_data_ptr()),
                      weights[i].const_data_ptr<BFloat16>(),
                      bias ? bias->const_data_ptr<float>() : nullptr,
                      outputs.back().mutable_data_ptr<BFloat16>(), in_features, out_features[i]});
    num_blocks += layers.back().num_blocks();
  }
  if (tiling.num_tiles == 0) return outputs;
  const int64_t blocks_per_thread = std::max<int64_t>(1, kWorkPerThread / (in_features * kWidth));
  at::parallel_for(0, num_blocks, blocks_per_thread, [&](int64_t begin, int64_t end) {
    for (const Layer& layer : layers) {
      const int64_t last = std::min(end, layer.num_blocks());
      if (begin < last) multiply_blocks(layer, tiling, begin, last);
      begin = std::max<int64_t>(0, begin - layer.num_blocks());
      end -= layer.num_blocks();
    }
  });
  return outputs;
}

bool streams_linear() { return true; }

#else

std::vector<at::Tensor> streamed_linears(const at::Tensor&, at::TensorList, const OptionalTensors&,
                                         at::IntArrayRef) {
  TORCH_CHECK(false, "this machine does not stream weights");
}

bool streams_linear() { return false; }

#endif

at::Tensor streamed_linear(const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias, int64_t out_features) {
  return streamed_linears(input, weight, OptionalTensors({bias}), out_features)[0];
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("streams_linear() -> bool", streams_linear);
  m.def("stream_weight(Tensor weight) -> Tensor");
  m.def("streamed_linear(Tensor input, Tensor weight, Tensor? bias, int out_features) -> Tensor");
  m.def(
      "streamed_linears(Tensor input, Tensor[] weights, Tensor?[] biases, int[] out_features) -> "
      "Tensor[]");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("stream_weight", stream_weight);
  m.impl("streamed_linear", streamed_linear);
  m.impl("streamed_linears", streamed_linears);
}
