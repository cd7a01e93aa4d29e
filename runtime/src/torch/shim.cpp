// What tch does not offer: hooks that run when a parameter's gradient has been accumulated, and a device's stream.

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>

#include <ATen/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace {

using Call = void (*)(const void *context, uint32_t index);

class Accumulated final : public torch::autograd::PostAccumulateGradHook {
 public:
  Accumulated(Call call, const void *context, uint32_t index)
      : call_(call), context_(context), index_(index) {}

  void operator()(const torch::autograd::Variable &) override { call_(context_, index_); }

 private:
  Call call_;
  const void *context_;
  uint32_t index_;
};

// Runs `f`; what it throws is said in `why`. 0: done.
template <typename F>
int guarded(char *why, size_t room, F f) noexcept {
  const char *what = "an exception that is none of std::exception";
  try {
    f();
    return 0;
  } catch (const std::exception &error) {
    std::strncpy(why, error.what(), room - 1);
  } catch (...) {
    std::strncpy(why, what, room - 1);
  }
  why[room - 1] = '\0';
  return 1;
}

}  // namespace

// `tensor` is the at::Tensor* that tch holds. `call` may come from any thread, and must not throw.
extern "C" int muster_torch_hook(void *tensor, Call call, const void *context, uint32_t index,
                                 char *why, size_t room) noexcept {
  return guarded(why, room, [&] {
    torch::autograd::impl::set_post_acc_grad_hooks(
        *static_cast<at::Tensor *>(tensor),
        std::make_unique<Accumulated>(call, context, index));
  });
}

// The current stream of the tensor's device, as its driver has it.
extern "C" int muster_torch_stream(void *tensor, void **stream, char *why, size_t room) noexcept {
  return guarded(why, room, [&] {
    const c10::Device device = static_cast<at::Tensor *>(tensor)->device();
    const c10::impl::VirtualGuardImpl guard(device.type());
    *stream = guard.getStream(device).native_handle();
  });
}

extern "C" int muster_torch_unhook(void *tensor, char *why, size_t room) noexcept {
  return guarded(why, room, [&] {
    torch::autograd::impl::set_post_acc_grad_hooks(*static_cast<at::Tensor *>(tensor), nullptr);
  });
}
