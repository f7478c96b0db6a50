// What the stand-in tells a Python function: each wait of the host for the device, each copy between the two. And the copies to the
// host that nobody has waited for: their target holds NaN until somebody does.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

namespace standin {

inline PyObject*& observer() {
  static PyObject* function = nullptr;
  return function;
}

inline void tell(const std::string& what, const std::string& detail) {
  if (!observer()) return;
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::function>(observer())(what, detail);
}

class PendingCopies {
 public:
  static PendingCopies& get() {
    static auto* copies = new PendingCopies;
    return *copies;
  }
  void add(at::Tensor target, at::Tensor value) {
    at::AutoDispatchBelowADInplaceOrView below;
    if (target.is_floating_point() || target.is_complex()) target.fill_(std::numeric_limits<double>::quiet_NaN());
    else target.fill_(target.scalar_type() == at::kBool ? 1 : target.scalar_type() == at::kByte ? 255 : -1);
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.emplace_back(++last_, std::move(target), std::move(value));
  }
  uint64_t last() {
    std::lock_guard<std::mutex> lock(mutex_);
    return last_;
  }
  void arrive(uint64_t until = UINT64_MAX) {
    decltype(waiting_) done;  // destroyed after the lock is released: a tensor's Python object asks for the GIL, whose holder may want the lock
    std::lock_guard<std::mutex> lock(mutex_);
    at::AutoDispatchBelowADInplaceOrView below;
    while (!waiting_.empty() && std::get<0>(waiting_.front()) <= until) {
      auto& [number, target, value] = waiting_.front();
      target.copy_(value);
      done.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
  }

 private:
  std::mutex mutex_;
  uint64_t last_ = 0;
  std::deque<std::tuple<uint64_t, at::Tensor, at::Tensor>> waiting_;
};

// The host waits for all that the device was given.
inline void wait_for_device(const std::string& why) {
  PendingCopies::get().arrive();
  tell("wait", why);
}

}  // namespace standin
