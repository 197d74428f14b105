// The highest score of each row, and its share of the row's softmax: one or two passes over what torch
// reads in several, and number by number where they are in bf16.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>

#include "shares.h"
#include "vectors.h"

namespace {

using namespace tandem;

constexpr int64_t kStretch = 256;  // scores whose highest is known before it is known where it is
constexpr int64_t kScoresPerThread = 1 << 14;

template <typename T>
float highest_of(const T* scores, int64_t count) {
  Floats lanes = splat(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) lanes = larger(load(scores + i), lanes);
  float highest = across(lanes, larger)[0];
  for (; i < count; ++i) highest = std::max(highest, static_cast<float>(scores[i]));
  return highest;
}

// The first of equals.
template <typename T>
int64_t find_highest(const T* scores, int64_t count) {
  float highest = -std::numeric_limits<float>::infinity();
  int64_t from = 0;
  for (int64_t first = 0; first < count; first += kStretch) {
    const float of_stretch = highest_of(scores + first, std::min(kStretch, count - first));
    if (of_stretch > highest) highest = of_stretch, from = first;
  }
  for (int64_t i = from; i < count; ++i) {
    if (static_cast<float>(scores[i]) == highest) return i;
  }
  return 0;  // no score is a number
}

template <typename T>
float share_of(float highest, const T* scores, int64_t count) {
  Floats lanes = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) lanes += exponential(load(scores + i) - highest);
  float sum = across(lanes, std::plus<>())[0];
  for (; i < count; ++i) sum += std::exp(static_cast<float>(scores[i]) - highest);
  return 1.0f / sum;
}

template <typename T>
void find_all(const at::Tensor& scores, at::Tensor& indices, float* shares) {
  const int64_t num_rows = scores.size(0), count = scores.size(1);
  int64_t* of_rows = indices.mutable_data_ptr<int64_t>();
  const int64_t max_takers = std::max<int64_t>(1, scores.numel() / kScoresPerThread);
  share_out_each(num_rows, max_takers, [&](int64_t row) {
    const T* of_row = scores.const_data_ptr<T>() + row * count;
    const int64_t index = find_highest(of_row, count);
    of_rows[row] = index;
    if (shares != nullptr) shares[row] = share_of(static_cast<float>(of_row[index]), of_row, count);
  });
}

at::Tensor find_rows(const at::Tensor& any_scores, float* shares) {
  TORCH_CHECK(any_scores.dim() == 2 && any_scores.size(1) > 0, "rows of scores");
  const at::Tensor scores = any_scores.contiguous();
  at::Tensor indices = at::empty({scores.size(0)}, scores.options().dtype(at::kLong));
  if (scores.scalar_type() == at::kBFloat16) {
    find_all<at::BFloat16>(scores, indices, shares);
  } else {
    TORCH_CHECK(scores.scalar_type() == at::kFloat, "only float32 and bfloat16");
    find_all<float>(scores, indices, shares);
  }
  return indices;
}

// scores [num_rows, count] -> indices [num_rows]
at::Tensor highest(const at::Tensor& scores) { return find_rows(scores, nullptr); }

// scores [num_rows, count] -> indices [num_rows], shares [num_rows] fp32
std::tuple<at::Tensor, at::Tensor> highest_and_share(const at::Tensor& scores) {
  at::Tensor shares = at::empty({scores.size(0)}, scores.options().dtype(at::kFloat));
  at::Tensor indices = find_rows(scores, shares.mutable_data_ptr<float>());
  return {std::move(indices), std::move(shares)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("highest(Tensor scores) -> Tensor");
  m.def("highest_and_share(Tensor scores) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("highest", highest);
  m.impl("highest_and_share", highest_and_share);
}
