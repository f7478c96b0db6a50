// Operators: one boxed fallback runs the CPU's kernel on tensors over the device's bytes, and gives device tensors back.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>
#include <set>
#include "runtime.h"

namespace standin {

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

inline at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

// CPU tensors over the bytes of device tensors. Within one object two device tensors that share a storage share one here too.
class Shadows {
 public:
  at::Tensor operator()(const at::Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto& shadow = shadows_[storage];
    if (!shadow) {
      c10::DataPtr bytes(Memory::get().bytes_of(storage->data()), c10::Device(c10::kCPU));
      shadow = c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage->nbytes(), std::move(bytes),
                                                                  c10::GetAllocator(c10::kCPU), true));
    }
    auto made = tensor_over(shadow, c10::DispatchKey::CPU, tensor);
    if (tensor.is_conj()) made._set_conj(true);
    if (tensor.is_neg()) made._set_neg(true);
    return made;
  }
  // The device's storage of which `shadow` is the shadow, or none.
  c10::Storage device_storage(const c10::StorageImpl* shadow) const {
    for (const auto& [device, host] : shadows_)
      if (host.unsafeGetStorageImpl() == shadow) return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(device));
    return {};
  }

 private:
  std::map<c10::StorageImpl*, c10::Storage> shadows_;
};

inline c10::Storage copy_to_device(const c10::Storage& host, c10::DeviceIndex device) {
  auto block = allocate_on(device, host.nbytes());
  if (host.nbytes()) std::memcpy(Memory::get().bytes_of(block.get()), host.data(), host.nbytes());
  return c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), host.nbytes(), std::move(block), &device_allocator(), true));
}

inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto block = allocate_on(storage.device().index(), bytes);
  const auto kept = std::min(bytes, storage.nbytes());
  if (kept) std::memcpy(Memory::get().bytes_of(block.get()), Memory::get().bytes_of(storage.data()), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(block));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

using Values = std::vector<c10::IValue>;

// One operator's call.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), name_(schema_.name().substr(schema_.name().find("::") + 2)), stack_(stack),
        arguments_(torch::jit::last(*stack, schema_.arguments().size()).vec()), first_(stack->size() - arguments_.size()) {}

  void run() {
    for (size_t i = 0; i < arguments_.size(); i++) (*stack_)[first_ + i] = shadowed(arguments_[i]);
    TORCH_CHECK(host_.empty(), "stand-in: ", name_, ": all tensors must be on the device, but ", host_, " is the host's");
    if (device_ < 0) device_ = current_device;
    for (size_t i = 0; i < arguments_.size(); i++) draw_from_device(i);
    if (waits()) wait_for_device(name_);
    const Values shadows = torch::jit::last(*stack_, arguments_.size()).vec();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    for (size_t i = 0; i < arguments_.size(); i++)
      if (writes(i)) take_over(arguments_[i], shadows[i]);
    const size_t count = schema_.returns().size();
    for (size_t j = 0; j < count; j++) result(schema_.returns()[j], (*stack_)[stack_->size() - count + j]);
  }

 private:
  c10::IValue shadowed(const c10::IValue& value) {
    if (value.isTensor()) return shadowed(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> made;
      for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(shadowed(tensor));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const auto& tensor : value.toOptionalTensorVector()) made.push_back(tensor ? std::optional(shadowed(*tensor)) : tensor);
      return made;
    }
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      device_ = value.toDevice().has_index() ? value.toDevice().index() : current_device;
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  at::Tensor shadowed(const at::Tensor& tensor) {
    static const std::set<std::string> moves_indices = {"index", "index_put_", "_index_put_impl_", "_unsafe_index"};
    if (!tensor.defined()) return tensor;
    if (on_device(tensor)) {
      const auto index = tensor.device().index();
      TORCH_CHECK(device_ < 0 || device_ == index, "stand-in: ", name_, ": tensors of two devices, ", int(device_), " and ", int(index));
      device_ = index;
      return shadows_(tensor);
    }
    if (moves_indices.count(name_)) {
      if (tensor.numel()) tell("to device", c10::str(tensor.nbytes(), " bytes blocking pageable indices"));
    } else if (tensor.dim() > 0) {
      host_ = c10::str(tensor.toString(), tensor.sizes());
    }
    return tensor;
  }

  void draw_from_device(size_t i) {
    const auto& value = arguments_[i];
    if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().type() == kDevice, "stand-in: ", name_, ": the host's generator for a tensor of the device");
      (*stack_)[first_ + i] = numbers_of(value.toGenerator());
    } else if (value.isNone() && schema_.arguments()[i].type()->str() == "Generator?") {
      (*stack_)[first_ + i] = numbers_of(default_generator(device_));
    }
  }

  // True if CUDA's kernel waits, because the host needs a value or a result's size.
  bool waits() const {
    static const std::set<std::string> names = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
                                                "unique_consecutive", "bincount", "repeat_interleave"};
    if (names.count(name_)) return true;
    if (name_ != "index" && name_ != "index_put_" && name_ != "_index_put_impl_") return false;
    for (const auto& index : arguments_[1].toOptionalTensorVector())
      if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) return true;
    return false;
  }

  bool writes(size_t i) const {
    const auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  // The argument gets what the kernel made of its shadow, where that has another shape or lies elsewhere now.
  static void take_over(const c10::IValue& was, const c10::IValue& now) {
    if (was.isTensorList()) {
      const auto before = was.toTensorVector(), after = now.toTensorVector();
      for (size_t i = 0; i < before.size(); i++) take_over(before[i], after[i]);
    } else if (was.isTensor()) {
      take_over(was.toTensor(), now.toTensor());
    }
  }
  static void take_over(const at::Tensor& was, const at::Tensor& now) {
    if (!on_device(was)) return;
    auto* storage = was.storage().unsafeGetStorageImpl();
    if (now.storage().data() != Memory::get().bytes_of(storage->data()) || now.storage().nbytes() != storage->nbytes()) {
      auto fresh = copy_to_device(now.storage(), was.device().index());
      storage->swap_data_ptr(*fresh.unsafeGetStorageImpl());
      storage->set_nbytes(now.storage().nbytes());
    }
    if (now.sizes() != was.sizes() || now.strides() != was.strides())
      was.unsafeGetTensorImpl()->set_sizes_and_strides(now.sizes(), now.strides(), now.storage_offset());
  }

  // A result is the argument that was written, a view of an argument, or new.
  void result(const c10::Argument& declared, c10::IValue& value) {
    if (const auto* alias = declared.alias_info(); alias && alias->isWrite()) {
      for (size_t i = 0; i < arguments_.size(); i++) {
        const auto* own = schema_.arguments()[i].alias_info();
        if (own && *own == *alias) {
          value = arguments_[i];
          return;
        }
      }
    }
    if (value.isTensor()) {
      value = given(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> made;
      for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(given(tensor));
      value = made;
    }
  }
  at::Tensor given(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (auto device = shadows_.device_storage(storage)) return tensor_over(device, c10::DispatchKey::CUDA, tensor);
    auto& fresh = fresh_[storage];  // results that share a storage share one on the device
    if (!fresh) fresh = copy_to_device(tensor.storage(), device_);
    return tensor_over(fresh, c10::DispatchKey::CUDA, tensor);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  torch::jit::Stack* stack_;
  const Values arguments_;
  const size_t first_;
  c10::DeviceIndex device_ = -1;
  std::string host_;
  Shadows shadows_;
  std::map<c10::StorageImpl*, c10::Storage> fresh_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

inline at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device> device,
                        std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "stand-in: only memory of the host can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                                std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

inline void tell_copy(const char* where, const at::Tensor& host, bool non_blocking) {
  tell(where, c10::str(host.nbytes(), " bytes", non_blocking ? " non-blocking" : " blocking", host.is_pinned() ? " pinned" : " pageable",
                       host.is_contiguous() ? " contiguous" : " strided", current_streams[current_device] ? " side-stream" : ""));
}

inline at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool to_device = on_device(self), from_device = on_device(source);
  Shadows shadows;
  auto target = to_device ? shadows(self) : self, value = from_device ? shadows(source) : source;
  at::AutoDispatchBelowADInplaceOrView below;
  if (source.numel() && to_device && !from_device) {
    PendingCopies::get().arrive();  // the device's order: what it sends first arrives first
    tell_copy("to device", source, non_blocking);
  }
  if (source.numel() && !to_device && from_device) {
    tell_copy("to host", self, non_blocking);
    if (non_blocking && self.is_pinned()) {
      PendingCopies::get().add(self, value.clone());
      return self;
    }
    wait_for_device("copy to the host");
  }
  target.copy_(value);
  return self;
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(storage.device() == self.device(), "stand-in: set_: the storage is on ", storage.device(), ", the tensor on ", self.device());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {elements}, {1});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline at::Tensor& set_nothing(at::Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }
inline void record_stream(at::Tensor&, c10::Stream) {}

}  // namespace standin
