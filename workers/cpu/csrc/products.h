// Products of few tokens with layers of one input, shared out among threads, by any kind of tile.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "shares.h"
#include "streamed_layer.h"

namespace tandem {

constexpr int64_t kFetchedBytes = 384 << 10;  // a larger group is not fetched to the second level
constexpr int64_t kWorkPerThread = 1 << 15;  // products, of one row
constexpr int64_t kInputsPerThread = 1 << 16;  // to lay out

// Rows in tiles that are as even as can be: a nearly empty one would read the weights for nothing.
class Tiling {
 public:
  Tiling(int64_t num_rows, int64_t max_rows)
      : num_tiles((num_rows + max_rows - 1) / max_rows),
        rows_each_(num_tiles > 0 ? num_rows / num_tiles : 0),
        num_higher_(num_tiles > 0 ? num_rows % num_tiles : 0) {}

  const int64_t num_tiles;

  int64_t rows_of(int64_t tile) const { return rows_each_ + (tile < num_higher_ ? 1 : 0); }

  int64_t first_row_of(int64_t tile) const {
    return tile * rows_each_ + std::min(tile, num_higher_);
  }

 private:
  const int64_t rows_each_;
  const int64_t num_higher_;
};

// Layers of one input.
template <typename Tile>
class Products {
 public:
  using Number = typename Tile::Number;
  using Step = typename Tile::Step;
  using OfLayer = typename Tile::OfLayer;

  // input [..., in_features]
  explicit Products(const at::Tensor& input)
      : tiling_(input.numel() / input.size(-1), Tile::kMaxRows),
        in_features_(input.size(-1)),
        inputs_(lay_out(input)) {}

  // Its inputs need not be set; those of its weights are as many as the input has.
  void add(OfLayer layer) {
    TORCH_CHECK(layer.in_features == in_features_, "the input does not fit the weight");
    layer.inputs = static_cast<const Step*>(inputs_.const_data_ptr());
    layers_.push_back(layer);
  }

  void make() const {
    if (tiling_.num_tiles == 0) return;
    int64_t num_blocks = 0, num_groups = 0;
    for (const OfLayer& layer : layers_) {
      num_blocks += layer.num_blocks();
      num_groups += num_groups_of(layer);
    }
    const int64_t work = num_blocks * kWidth * in_features_;
    share_out(num_groups, std::max<int64_t>(1, work / kWorkPerThread), [&](Shares& shares) {
      for (Share left = shares.take(); !left.is_empty();) {
        const Group group = find_group(left.begin++);
        if (left.is_empty()) left = shares.take();  // now, for its weights to be fetched meanwhile
        multiply_group(group, left.is_empty() ? Group{} : find_group(left.begin));
      }
    });
  }

 private:
  using Multiply = void (*)(const OfLayer&, int64_t, int64_t, Fetch);
  using OfRows = std::array<Multiply, kMaxBlocks>;

  template <int Rows, int... Blocks>
  static constexpr OfRows of_rows(std::integer_sequence<int, Blocks...>) {
    return {(Blocks < Tile::blocks_of(Rows) ? Tile::template multiply<Rows, Blocks + 1> : nullptr)...};
  }

  template <int... Rows>
  static constexpr auto of_all_rows(std::integer_sequence<int, Rows...>) {
    return std::array<OfRows, sizeof...(Rows)>{
        of_rows<Rows + 1>(std::make_integer_sequence<int, kMaxBlocks>())...};
  }

  // -> tile by tile, what Layer wants
  at::Tensor lay_out(const at::Tensor& input) const {
    if (Tile::kRowsLieAsTheyAre && input.numel() == in_features_) return input;
    const int64_t num_steps = in_features_ / OfLayer::kInputsPerStep;
    const int64_t num_all = input.numel() / OfLayer::kInputsPerStep;
    at::Tensor tiles = at::empty({num_all * static_cast<int64_t>(sizeof(Step))}, at::kByte);
    const Number* rows = input.const_data_ptr<Number>();
    auto* target = static_cast<Step*>(tiles.mutable_data_ptr());
    const int64_t tiles_per_thread = 1 + kInputsPerThread / (in_features_ * Tile::kMaxRows);
    at::parallel_for(0, tiling_.num_tiles, tiles_per_thread, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t first = tiling_.first_row_of(tile);
        Tile::lay_out(rows + first * in_features_, tiling_.rows_of(tile), num_steps,
                      target + first * num_steps);
      }
    });
    return tiles;
  }

  // Blocks of outputs that a tile has at a time.
  struct Group {
    const OfLayer* layer = nullptr;
    int64_t first_block = 0;
    int64_t num_blocks = 0;

    int64_t num_lines() const { return num_blocks == 0 ? 0 : num_blocks * layer->num_steps(); }
  };

  int64_t blocks_each() const { return Tile::blocks_of(tiling_.rows_of(0)); }

  int64_t num_groups_of(const OfLayer& layer) const {
    return (layer.num_blocks() + blocks_each() - 1) / blocks_each();
  }

  // Groups are counted through all layers.
  Group find_group(int64_t index) const {
    const OfLayer* layer = layers_.data();
    for (; index >= num_groups_of(*layer); ++layer) index -= num_groups_of(*layer);
    const int64_t first = index * blocks_each();
    return {layer, first, std::min(blocks_each(), layer->num_blocks() - first)};
  }

  // For all rows, fetching the next group's weights.
  void multiply_group(const Group& group, const Group& next) const {
    static constexpr auto kOfRows = of_all_rows(std::make_integer_sequence<int, Tile::kMaxRows>());
    const int64_t num_lines = next.num_lines() * kLineBytes > kFetchedBytes ? 0 : next.num_lines();
    for (int64_t tile = 0; tile < tiling_.num_tiles; ++tile) {
      const int64_t first_line = num_lines * tile / tiling_.num_tiles;
      const int64_t last_line = num_lines * (tile + 1) / tiling_.num_tiles;
      const auto* lines = num_lines == 0 ? nullptr : next.layer->line(next.first_block, first_line);
      const Fetch meanwhile(lines, last_line - first_line, group.layer->num_steps());
      kOfRows[tiling_.rows_of(tile) - 1][group.num_blocks - 1](
          *group.layer, tiling_.first_row_of(tile), group.first_block, meanwhile);
    }
  }

  const Tiling tiling_;
  const int64_t in_features_;
  const at::Tensor inputs_;
  std::vector<OfLayer> layers_;
};

}  // namespace tandem
