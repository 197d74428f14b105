// A linear layer of few tokens whose weights are codes: int8, or indices of 4 bits as nf4 has them.
//
// As streamed_linear.cpp, for CPUs with AVX2 or AVX-512. The sums are fp32, so a row's result is that of
// the dequantized weights, and does not depend on how many rows there are.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

#include "products.h"

#if defined(__AVX2__) && defined(__FMA__)
#define TANDEM_CODES_TILES 1
#include "tile_codes.h"
#endif

namespace {

using namespace tandem;

#ifdef TANDEM_CODES_TILES
template <typename Codes, typename Number>
at::Tensor multiply_codes(const at::Tensor& input, const at::Tensor& codes, const at::Tensor& scales,
                          const std::optional<at::Tensor>& table,
                          const std::optional<at::Tensor>& bias, int64_t out_features) {
  using Tile = CodesTile<Codes, Number>;
  auto shape = input.sizes().vec();
  shape.back() = out_features;
  at::Tensor output = at::empty(shape, input.options());
  typename Tile::OfLayer layer{};
  layer.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  layer.scales = scales.const_data_ptr<float>();
  layer.table = table ? table->const_data_ptr<float>() : nullptr;
  layer.bias = bias ? bias->const_data_ptr<float>() : nullptr;
  layer.output = output.mutable_data_ptr<Number>();
  layer.in_features = codes.size(1) * Codes::kInputs;
  layer.out_features = out_features;
  layer.steps_per_scale = codes.size(1) / scales.size(1);
  Products<Tile> products(input);
  products.add(layer);
  products.make();
  return output;
}

template <typename Codes>
at::Tensor multiply_by_codes(const at::Tensor& input, const at::Tensor& codes,
                             const at::Tensor& scales, const std::optional<at::Tensor>& table,
                             const std::optional<at::Tensor>& bias, int64_t out_features) {
  if (input.scalar_type() == at::kBFloat16) {
    return multiply_codes<Codes, at::BFloat16>(input, codes, scales, table, bias, out_features);
  }
  TORCH_CHECK(input.scalar_type() == at::kFloat, "only float32 and bfloat16");
  return multiply_codes<Codes, float>(input, codes, scales, table, bias, out_features);
}
#endif

// input [..., in_features], codes of stream_weight, of int8 or, where there is a table of 16 numbers, of
// two indices a byte; scales fp32 [blocks of 16 outputs, groups of inputs, 16] -> [..., out_features]
at::Tensor coded_linear(const at::Tensor& any_input, const at::Tensor& codes, const at::Tensor& scales,
                        const std::optional<at::Tensor>& table,
                        const std::optional<at::Tensor>& bias, int64_t out_features) {
#ifdef TANDEM_CODES_TILES
  const at::Tensor input = any_input.contiguous();
  TORCH_CHECK(codes.is_contiguous() && scales.is_contiguous() && codes.size(0) == scales.size(0) &&
                  codes.size(1) % scales.size(1) == 0,
              "codes and scales that belong together");
  if (table) return multiply_by_codes<Int4Codes>(input, codes, scales, table, bias, out_features);
  return multiply_by_codes<Int8Codes>(input, codes, scales, table, bias, out_features);
#else
  TORCH_CHECK(false, "this machine does not multiply by codes");
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "coded_linear(Tensor input, Tensor codes, Tensor scales, Tensor? table, Tensor? bias, int "
      "out_features) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("coded_linear", coded_linear); }
