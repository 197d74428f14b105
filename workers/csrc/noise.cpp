// The sampler's random bits, for CPUs: 32-bit words, where torch would need 64-bit ones and a pass
// over memory for every operation.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstdint>

namespace {

// Wellons' lowbias32.
inline uint32_t mix(uint32_t bits) {
  bits ^= bits >> 16;
  bits *= 0x7FEB352Du;
  bits ^= bits >> 15;
  bits *= 0x846CA68Bu;
  return bits ^ (bits >> 16);
}

// keys [num_rows, 2], each below 2**32 -> numbers inside (0, 1) [num_rows, vocab_size] fp64
at::Tensor uniform_noise(const at::Tensor& keys, int64_t vocab_size) {
  TORCH_CHECK(keys.dim() == 2 && keys.size(1) == 2 && keys.is_contiguous(), "keys are two a row");
  at::Tensor noise = at::empty({keys.size(0), vocab_size}, keys.options().dtype(at::kDouble));
  const int64_t* of_rows = keys.const_data_ptr<int64_t>();
  double* output = noise.data_ptr<double>();
  at::parallel_for(0, keys.size(0), 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto first = static_cast<uint32_t>(of_rows[2 * row]);
      const auto second = static_cast<uint32_t>(of_rows[2 * row + 1]);
      double* of_row = output + row * vocab_size;
      for (int64_t token = 0; token < vocab_size; ++token) {
        const uint32_t bits = mix(mix(static_cast<uint32_t>(token) ^ first) ^ second);
        of_row[token] = (static_cast<double>(bits) + 0.5) * 0x1p-32;
      }
    }
  });
  return noise;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) { m.def("uniform_noise(Tensor keys, int vocab_size) -> Tensor"); }

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("uniform_noise", uniform_noise); }
