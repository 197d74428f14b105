// A linear layer in bf16 of few tokens, for CPUs with AVX512-BF16, AVX-512 or AVX2.
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
#ifdef __AMX_BF16__
#elif defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TANDEM_STREAMS 1
#include "tile_bf16.h"
#elif defined(__AVX2__) && defined(__FMA__)
#define TANDEM_STREAMS 1
#include "tile_fp32.h"
#endif
#include "streamed_layer.h"

namespace {

using namespace tandem;
using at::BFloat16;
using OptionalTensors = c10::List<std::optional<at::Tensor>>;

constexpr int64_t kFetchedBytes = 384 << 10;  // a larger group is not fetched to the second level
constexpr int64_t kWorkPerThread = 1 << 15;  // products, of one row
constexpr int64_t kInputsPerThread = 1 << 16;  // to lay out

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

using Tile = void (*)(const Layer<Pair>&, int64_t, int64_t, Fetch);
using TilesOfRows = std::array<Tile, kMaxBlocks>;

template <int Rows, int... Blocks>
constexpr TilesOfRows tiles_of_rows(std::integer_sequence<int, Blocks...>) {
  return {(Blocks < blocks_of(Rows) ? multiply_tile<Rows, Blocks + 1> : nullptr)...};
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

  int64_t blocks_each() const { return blocks_of(rows_of(0)); }

 private:
  const int64_t rows_each_;
  const int64_t num_higher_;
};

// input [rows, in_features] -> tile by tile, what Layer wants
at::Tensor lay_out(const at::Tensor& input, const Tiling& tiling, int64_t num_pairs) {
  if (kRowsLieAsTheyAre && input.numel() == 2 * num_pairs) return input;
  at::Tensor tiles = at::empty({input.numel() / 2 * static_cast<int64_t>(sizeof(Pair))}, at::kByte);
  const auto* rows = reinterpret_cast<const int32_t*>(input.const_data_ptr<BFloat16>());
  auto* target = static_cast<Pair*>(tiles.mutable_data_ptr());
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
void multiply_blocks(const Layer<Pair>& layer, const Tiling& tiling, int64_t begin, int64_t end) {
  const int64_t blocks_each = tiling.blocks_each();
  for (int64_t block = begin; block < end; block += blocks_each) {
    const int64_t num_blocks = std::min(blocks_each, end - block);
    const int64_t next = block + num_blocks;
    const int64_t size = std::min(blocks_each, end - next) * layer.block_size();
    const int64_t num_lines = size * sizeof(BFloat16) > kFetchedBytes ? 0 : size / kLine;
    for (int64_t tile = 0; tile < tiling.num_tiles; ++tile) {
      const int64_t first_line = num_lines * tile / tiling.num_tiles;
      const int64_t last_line = num_lines * (tile + 1) / tiling.num_tiles;
      const Fetch meanwhile(layer.weight + next * layer.block_size() + first_line * kLine,
                            last_line - first_line, layer.num_pairs());
      kTiles[tiling.rows_of(tile) - 1][num_blocks - 1](layer, tiling.first_row_of(tile), block, meanwhile);
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
  std::vector<Layer<Pair>> layers;
  int64_t num_blocks = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    TORCH_CHECK(weights[i].is_contiguous() && weights[i].size(1) * 2 == in_features,
                "the input does not fit the weight");
    shape.back() = out_features[i];
    outputs.push_back(at::empty(shape, input.options()));
    const std::optional<at::Tensor> bias = biases[i];
    layers.push_back({static_cast<const Pair*>(tiles.const_data_ptr()),
                      weights[i].const_data_ptr<BFloat16>(),
                      bias ? bias->const_data_ptr<float>() : nullptr,
                      outputs.back().mutable_data_ptr<BFloat16>(), in_features, out_features[i]});
    num_blocks += layers.back().num_blocks();
  }
  if (tiling.num_tiles == 0) return outputs;
  const int64_t blocks_per_thread = std::max<int64_t>(1, kWorkPerThread / (in_features * kWidth));
  at::parallel_for(0, num_blocks, blocks_per_thread, [&](int64_t begin, int64_t end) {
    for (const Layer<Pair>& layer : layers) {
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
