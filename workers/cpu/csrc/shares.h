// Work for threads that take the next share when they are done with theirs: one that starts late, or is
// held up by another process, holds up the others no longer than its last share takes.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace tandem {

// Parts of a whole, taken in order.
struct Share {
  int64_t begin;
  int64_t end;

  bool is_empty() const { return begin >= end; }
};

// Shares begin large, to be few and long, and end as single parts, for all to end together.
class Shares {
 public:
  Shares(int64_t num_parts, int64_t num_takers)
      : num_parts_(num_parts), divisor_(kSharesEach * num_takers) {}

  // Empty when all is taken.
  Share take() {
    int64_t begin = next_.load(std::memory_order_relaxed);
    int64_t end;
    do {
      end = begin + std::max<int64_t>(1, (num_parts_ - begin) / divisor_);
      if (begin >= num_parts_) return {num_parts_, num_parts_};
    } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return {begin, end};
  }

 private:
  static constexpr int64_t kSharesEach = 4;  // the first share is a quarter of an even split among the takers
  const int64_t num_parts_;
  const int64_t divisor_;
  std::atomic<int64_t> next_{0};
};

// Calls work(shares) in all threads, but in no more than are worth it: each call is to take until nothing
// is left.
template <typename Work>
void share_out(int64_t num_parts, int64_t max_takers, const Work& work) {
  const int64_t num_takers = std::min<int64_t>(max_takers, at::get_num_threads());
  Shares shares(num_parts, num_takers);
  at::parallel_for(0, num_takers, 1, [&](int64_t, int64_t) { work(shares); });
}

// Calls work(part) for each part.
template <typename Work>
void share_out_each(int64_t num_parts, int64_t max_takers, const Work& work) {
  share_out(num_parts, max_takers, [&](Shares& shares) {
    for (Share share = shares.take(); !share.is_empty(); share = shares.take()) {
      for (int64_t part = share.begin; part < share.end; ++part) work(part);
    }
  });
}

}  // namespace tandem
