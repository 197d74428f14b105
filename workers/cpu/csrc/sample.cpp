// The token that each row of scores decides, and how sure that is, as workers/sampling.py defines both:
// one operator, where torch needs a dozen, whose code and results would all have to come from memory
// after a target's step.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "gumbel.h"
#include "shares.h"
#include "vectors.h"

namespace {

using namespace tandem;

constexpr int64_t kStretch = 256;  // scores whose highest is known before it is known where it is
constexpr int64_t kScoresPerThread = 1 << 14;  // of greedy rows
constexpr int64_t kWorkOfNoise = 3;  // of a sampled row, beside what a greedy one takes

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
  return 0;  // no score is above -inf
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

// What decides a row besides its scores.
struct Row {
  float temperature;  // 0: greedy
  NoiseKeys noise;
  const uint8_t* allowed;  // one bit for each token, the lowest first; null: all are
};

// The scores of what is allowed, and -inf.
template <typename T>
void write_allowed(const T* scores, int64_t count, const uint8_t* allowed, float* written) {
  constexpr float kForbidden = -std::numeric_limits<float>::infinity();
  for (int64_t first = 0; first < count; first += 8) {
    const uint8_t bits = allowed[first / 8];
    const int64_t end = std::min(first + 8, count);
    if (bits == 0) {
      std::fill(written + first, written + end, kForbidden);
      continue;
    }
    for (int64_t i = first; i < end; ++i) {
      written[i] = bits >> (i - first) & 1 ? static_cast<float>(scores[i]) : kForbidden;
    }
  }
}

struct Choice {
  int64_t token;  // -1: the highest score is no finite number
  float confidence;
};

constexpr Choice kNoChoice = {-1, 0.0f};

// weight_of_probability: of a confidence; none where nobody asks how sure a choice is.
template <typename T>
Choice choose_greedily(const T* scores, int64_t count, std::optional<double> weight_of_probability) {
  const int64_t token = find_highest(scores, count);
  if (!std::isfinite(static_cast<float>(scores[token]))) return kNoChoice;
  const bool is_asked = weight_of_probability.has_value();
  return {token, is_asked ? share_of(static_cast<float>(scores[token]), scores, count) : 0.0f};
}

// law, perturbed: room for `count` numbers each.
template <typename T>
Choice choose_sampled(const T* scores, int64_t count, const Row& row,
                      std::optional<double> weight_of_probability, float* law, float* perturbed) {
  write_gumbel(row.noise, count, perturbed);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats scaled = load(scores + i) / row.temperature;
    store(law + i, scaled);
    store(perturbed + i, scaled + load(perturbed + i));
  }
  for (; i < count; ++i) {
    law[i] = static_cast<float>(scores[i]) / row.temperature;
    perturbed[i] += law[i];
  }
  const int64_t token = find_highest(perturbed, count);
  if (!std::isfinite(perturbed[token])) return kNoChoice;
  if (!weight_of_probability) return {token, 0.0f};
  const float highest = highest_of(law, count);
  const double probability = std::exp(law[token] - highest) * share_of(highest, law, count);
  const double share = share_of(perturbed[token], perturbed, count);
  const double confidence =
      std::pow(share, 1.0 - *weight_of_probability) * std::pow(probability, *weight_of_probability);
  return {token, static_cast<float>(confidence)};
}

// Room for the numbers of one row each.
struct Rooms {
  Buffer<float> allowed, law, perturbed;
};

template <typename T>
Choice choose(const T* scores, int64_t count, const Row& row,
              std::optional<double> weight_of_probability, Rooms& rooms) {
  if (row.temperature <= 0.0f) return choose_greedily(scores, count, weight_of_probability);
  rooms.law.resize(count), rooms.perturbed.resize(count);
  return choose_sampled(scores, count, row, weight_of_probability, rooms.law.data(),
                        rooms.perturbed.data());
}

template <typename T>
std::vector<Choice> choose_all(const at::Tensor& scores, const std::vector<Row>& rows,
                               std::optional<double> weight_of_probability) {
  const int64_t num_rows = scores.size(0), count = scores.size(1);
  const T* data = scores.const_data_ptr<T>();
  std::vector<Choice> choices(num_rows);
  const int64_t num_sampled =
      std::count_if(rows.begin(), rows.end(), [](const Row& row) { return row.temperature > 0.0f; });
  const int64_t work = count * (num_rows + kWorkOfNoise * num_sampled);
  share_out(num_rows, std::max<int64_t>(1, work / kScoresPerThread), [&](Shares& shares) {
    Rooms rooms;
    for (Share share = shares.take(); !share.is_empty(); share = shares.take()) {
      for (int64_t i = share.begin; i < share.end; ++i) {
        const T* of_row = data + i * count;
        if (rows[i].allowed == nullptr) {
          choices[i] = choose(of_row, count, rows[i], weight_of_probability, rooms);
          continue;
        }
        rooms.allowed.resize(count);
        write_allowed(of_row, count, rows[i].allowed, rooms.allowed.data());
        const float* allowed = rooms.allowed.data();
        choices[i] = choose(allowed, count, rows[i], weight_of_probability, rooms);
      }
    }
  });
  return choices;
}

// The bits of a mask; null without one.
const uint8_t* bits_of(const std::optional<at::Tensor>& mask, int64_t count) {
  if (!mask.has_value()) return nullptr;
  TORCH_CHECK(mask->scalar_type() == at::kByte && mask->is_contiguous() && mask->dim() == 1 &&
                  mask->numel() * 8 >= count,
              "a bit for each score");
  return mask->const_data_ptr<uint8_t>();
}

// scores [num_rows, count], masks [ceil(count / 8)] each -> tokens [num_rows], confidences [num_rows]
std::tuple<std::vector<int64_t>, std::vector<double>> sample(
    const at::Tensor& any_scores, at::ArrayRef<double> temperatures, at::IntArrayRef seeds,
    at::IntArrayRef positions, const c10::List<std::optional<at::Tensor>>& masks,
    std::optional<double> weight_of_probability) {
  TORCH_CHECK(any_scores.dim() == 2 && any_scores.size(1) > 0, "rows of scores");
  const size_t num_rows = any_scores.size(0);
  TORCH_CHECK(temperatures.size() == num_rows && seeds.size() == num_rows &&
                  positions.size() == num_rows && masks.size() == num_rows,
              "a temperature, a seed, a position and perhaps a mask for each row");
  std::vector<Row> rows;
  rows.reserve(num_rows);
  for (size_t i = 0; i < num_rows; ++i) {
    const std::optional<at::Tensor> mask = masks[i];
    rows.push_back({static_cast<float>(temperatures[i]), noise_keys(seeds[i], positions[i]),
                    bits_of(mask, any_scores.size(1))});
  }
  const at::Tensor scores = any_scores.contiguous();
  std::vector<Choice> choices;
  if (scores.scalar_type() == at::kBFloat16) {
    choices = choose_all<at::BFloat16>(scores, rows, weight_of_probability);
  } else {
    TORCH_CHECK(scores.scalar_type() == at::kFloat, "only float32 and bfloat16");
    choices = choose_all<float>(scores, rows, weight_of_probability);
  }
  std::vector<int64_t> tokens;
  std::vector<double> confidences;
  tokens.reserve(num_rows), confidences.reserve(num_rows);
  for (const Choice& choice : choices) {
    tokens.push_back(choice.token);
    confidences.push_back(choice.confidence);
  }
  return {std::move(tokens), std::move(confidences)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "sample(Tensor scores, float[] temperatures, int[] seeds, int[] positions, "
      "Tensor?[] masks, float? weight_of_probability) -> (int[], float[])");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("sample", sample); }
