// A linear layer over a weight that oneDNN has laid out, as one operator with plain tensors.
//
// The laid-out weight is an opaque tensor, which no compiler can take as an input or a constant. It
// is kept here, and known by a handle.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>

namespace {

using LinearPointwise = at::Tensor(const at::Tensor&, const at::Tensor&,
                                   const std::optional<at::Tensor>&, c10::string_view,
                                   c10::List<std::optional<at::Scalar>>,
                                   std::optional<c10::string_view>);

class Weights {
 public:
  int64_t keep(at::Tensor weight) {
    const std::unique_lock lock(mutex_);
    weights_.emplace(++last_handle_, std::move(weight));
    return last_handle_;
  }

  void drop(int64_t handle) {
    const std::unique_lock lock(mutex_);
    weights_.erase(handle);
  }

  at::Tensor get(int64_t handle) const {
    const std::shared_lock lock(mutex_);
    const auto found = weights_.find(handle);
    TORCH_CHECK(found != weights_.end(), "there is no packed weight ", handle);
    return found->second;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<int64_t, at::Tensor> weights_;
  int64_t last_handle_ = 0;
};

Weights& weights() {
  static Weights all;
  return all;
}

int64_t keep_packed(const at::Tensor& weight) { return weights().keep(weight); }

void drop_packed(int64_t handle) { weights().drop(handle); }

// input [..., in_features], handle [1, 1] -> [..., out_features], which tracing asks for
at::Tensor packed_linear(const at::Tensor& input, const at::Tensor& handle,
                         const std::optional<at::Tensor>& bias, int64_t /*out_features*/) {
  static const auto linear = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                                 .typed<LinearPointwise>();
  const at::Tensor weight = weights().get(*handle.const_data_ptr<int64_t>());
  return linear.call(input, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("keep_packed(Tensor weight) -> int");
  m.def("drop_packed(int handle) -> ()");
  m.def("packed_linear(Tensor input, Tensor handle, Tensor? bias, int out_features) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CompositeExplicitAutograd, m) {
  m.impl("keep_packed", keep_packed);
  m.impl("drop_packed", drop_packed);
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("packed_linear", packed_linear); }
