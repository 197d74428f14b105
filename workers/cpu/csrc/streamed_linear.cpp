// A linear layer of few tokens, in bf16 or fp32, for CPUs with AVX2 or AVX-512.
//
// A verification multiplies few tokens by all weights, so their way from memory is what it costs. They
// are laid out in the order in which they are needed, and while the products of one group of outputs
// are made, the weights of the next are on their way to the second-level cache. The rows of a tile are
// laid out beside each other first: the addresses of twelve do not fit the general registers. A row's
// result does not depend on how many rows there are.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "products.h"

#if defined(__AVX2__) && defined(__FMA__)
#define TANDEM_FP32_TILES 1
#include "tile_fp32.h"
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TANDEM_BF16_TILES 1
#include "tile_bf16.h"
#endif

namespace {

using namespace tandem;
using OptionalTensors = c10::List<std::optional<at::Tensor>>;

// void: this machine has none, or none that it gains by.
#ifdef TANDEM_FP32_TILES
using TileOfFp32 = Fp32Tile<float>;
#else
using TileOfFp32 = void;
#endif
#ifdef __AMX_BF16__  // oneDNN's products of many rows are several times faster than these could be
using TileOfBf16 = void;
#elif defined(TANDEM_BF16_TILES)
using TileOfBf16 = Bf16Tile;
#elif defined(TANDEM_FP32_TILES)
using TileOfBf16 = Fp32Tile<at::BFloat16>;
#else
using TileOfBf16 = void;
#endif

bool streams_linear(at::ScalarType type) {
  if (type == at::kFloat) return !std::is_void_v<TileOfFp32>;
  return type == at::kBFloat16 && !std::is_void_v<TileOfBf16>;
}

// [out_features, in_features] -> [ceil(out_features / 16), in_features / n, 16, n], with as many inputs
// of sixteen outputs as a cache line holds: two in bf16, one in fp32, four in int8
at::Tensor stream_weight(const at::Tensor& weight) {
  const int64_t num_inputs = kLineBytes / kWidth / weight.element_size();
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) % num_inputs == 0, "a matrix of whole lines");
  const int64_t num_blocks = (weight.size(0) + kWidth - 1) / kWidth;
  at::Tensor padded = at::zeros({num_blocks * kWidth, weight.size(1)}, weight.options());
  padded.narrow(0, 0, weight.size(0)).copy_(weight);
  const auto lines = padded.view({num_blocks, kWidth, weight.size(1) / num_inputs, num_inputs});
  return lines.permute({0, 2, 1, 3}).contiguous();
}

// output [..., out_features]
template <typename OfLayer>
OfLayer layer_of(const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                 at::Tensor& output) {
  using Number = typename OfLayer::Number;
  TORCH_CHECK(weight.is_contiguous(), "weights of stream_weight");
  OfLayer layer{};
  layer.weight = weight.const_data_ptr<Number>();
  layer.bias = bias ? bias->const_data_ptr<float>() : nullptr;
  layer.output = output.mutable_data_ptr<Number>();
  layer.in_features = weight.size(1) * weight.size(3);
  layer.out_features = output.size(-1);
  return layer;
}

template <typename Tile>
std::vector<at::Tensor> multiply(const at::Tensor& input, at::TensorList weights,
                                 const OptionalTensors& biases, at::IntArrayRef out_features) {
  if constexpr (std::is_void_v<Tile>) {
    TORCH_CHECK(false, "this machine does not stream such weights");
  } else {
    Products<Tile> products(input);
    auto shape = input.sizes().vec();
    std::vector<at::Tensor> outputs;
    for (size_t i = 0; i < weights.size(); ++i) {
      shape.back() = out_features[i];
      outputs.push_back(at::empty(shape, input.options()));
      products.add(layer_of<typename Tile::OfLayer>(weights[i], biases[i], outputs.back()));
    }
    products.make();
    return outputs;
  }
}

// input [..., in_features], weights of stream_weight, biases fp32 -> of each [..., out_features]
std::vector<at::Tensor> streamed_linears(const at::Tensor& any_input, at::TensorList weights,
                                         const OptionalTensors& biases, at::IntArrayRef out_features) {
  const at::Tensor input = any_input.contiguous();
  if (input.scalar_type() == at::kBFloat16) {
    return multiply<TileOfBf16>(input, weights, biases, out_features);
  }
  TORCH_CHECK(input.scalar_type() == at::kFloat, "only float32 and bfloat16");
  return multiply<TileOfFp32>(input, weights, biases, out_features);
}

at::Tensor streamed_linear(const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias, int64_t out_features) {
  return streamed_linears(input, weight, OptionalTensors({bias}), out_features)[0];
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("streams_linear(ScalarType dtype) -> bool", streams_linear);
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
