// A strict stand-in for a GPU: this extension gives a CPU build of torch devices named "cuda". See ../__init__.py.
#include "collectives.h"

namespace standin {
namespace {
Guard guard;

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("record_stream", &record_stream);
  // Composite operators that would choose another algorithm for a device without kernels: the CPU's own instead.
  for (const char* name : {"convolution", "convolution_backward", "native_layer_norm", "native_layer_norm_backward", "nonzero"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
}  // namespace
}  // namespace standin

namespace c10d {
using StandinTimer = standin::DeviceTimer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::CUDA, StandinTimer)
}  // namespace c10d

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace standin;
  c10::SetAllocator(kDevice, &device_allocator(), 99);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kDevice)].store(&guard);
  // `import torch` has made an object without a device already, and keeps it. It gets the stand-in's methods: both classes have
  // no members. This depends most on torch's version, which ../__init__.py checks.
  static Hooks hooks;
  auto* made = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(made) = *reinterpret_cast<void**>(static_cast<at::CUDAHooksInterface*>(&hooks));

  m.def("device_count", &device_count);
  m.def("set_device_count", &set_device_count);
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int index) {
    check_device(index);
    current_device = static_cast<c10::DeviceIndex>(index);
  });
  m.def("synchronize", [] { wait_for_device("device"); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("observe", [](py::object function) { observer() = function.is_none() ? nullptr : function.release().ptr(); });
  m.def("usage", [](int device) {
    const auto use = Memory::get().usage(device);
    return std::make_tuple(use.live, use.peak, use.allocations);
  });
  m.def("reset_peak", [](int device) { Memory::get().reset_peak(device); });
  m.def("set_limit", [](int device, size_t bytes) { Memory::get().set_limit(device, bytes); });
  m.def("resize_storage", [](const at::Tensor& tensor, size_t bytes) { resize_storage(tensor.storage(), bytes); });
  m.def("set_timeout", [](c10::intrusive_ptr<c10d::Backend> backend, double seconds) {
    backend->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
  });
  m.def("over_gloo", [](c10::intrusive_ptr<c10d::Backend> gloo, std::string name) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<DeviceBackend>(std::move(gloo), std::move(name));
  });
}
