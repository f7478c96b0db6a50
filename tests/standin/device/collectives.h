// The process group "nccl": gloo's collectives on the bytes of device tensors. A tensor of the host is refused.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include "operators.h"

namespace standin {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What a collective gives back. It keeps its tensors alive until gloo has done with their bytes.
struct DeviceWork final : c10d::Work {
  DeviceWork(std::vector<WorkPtr> parts, Tensors outputs, Tensors inputs)
      : parts_(std::move(parts)), outputs_(std::move(outputs)), inputs_(std::move(inputs)) {}
  bool isCompleted() override {
    return std::all_of(parts_.begin(), parts_.end(), [](auto& part) { return part->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(parts_.begin(), parts_.end(), [](auto& part) { return part->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds limit) override {
    for (auto& part : parts_) part->wait(limit);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  int sourceRank() const override { return parts_.back()->sourceRank(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  std::vector<WorkPtr> parts_;
  Tensors outputs_, inputs_;
};

class DeviceBackend final : public c10d::Backend {
 public:
  DeviceBackend(c10::intrusive_ptr<c10d::Backend> gloo, std::string name)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds limit) override { gloo_->setTimeout(limit); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    coalescing_ = true;
    coalesced_.clear();
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    TORCH_CHECK(!coalesced_.empty(), "stand-in: nothing was coalesced");
    return c10::make_intrusive<DeviceWork>(std::exchange(coalesced_, {}), Tensors{}, Tensors{});
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto bytes = over(tensors);
    return finished(gloo_->broadcast(bytes, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& asked) override {
    auto bytes = over(tensors);
    auto options = asked;
    const bool mean = sum_for_mean(options.reduceOp);
    auto work = gloo_->allreduce(bytes, options);
    return finished(work, tensors, mean ? bytes : Tensors{});
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, options);
    }
    return done(tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& asked) override {
    auto bytes = over(tensors);
    auto options = asked;
    const bool mean = sum_for_mean(options.reduceOp) && options.rootRank == getRank();
    return finished(gloo_->reduce(bytes, options), tensors, mean ? bytes : Tensors{});
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = over(outputs);
    auto from = over(inputs);
    return finished(gloo_->allgather(to, from, options), flat(outputs));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = over(output), from = over(input);
    return finished(gloo_->_allgather_base(to, from, options), {output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) _allgather_base(outputs[i], inputs[i], options);
    return done(outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& asked) override {
    auto to = over(output), from = over(input).clone();  // gloo may write into its input
    auto options = asked;
    const bool mean = sum_for_mean(options.reduceOp);
    return finished(gloo_->_reduce_scatter_base(to, from, options), {output}, mean ? Tensors{to} : Tensors{});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) _reduce_scatter_base(outputs[i], inputs[i], options);
    return done(outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    Tensors pieces;
    for (auto& piece : inputs[0]) pieces.push_back(piece.reshape(-1));
    auto joined = at::cat(pieces);
    return _reduce_scatter_base(outputs[0], joined, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    auto to = over(output), from = over(input);
    return finished(gloo_->alltoall_base(to, from, output_sizes, input_sizes, options), {output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    auto to = over(outputs), from = over(inputs);
    to[getRank()].copy_(from[getRank()]);
    std::vector<WorkPtr> parts;
    for (int peer = 0; peer < getSize(); peer++) {
      if (peer == getRank()) continue;
      Tensors sent{from[peer]}, received{to[peer]};
      parts.push_back(gloo_->send(sent, peer, kAllToAllTag));
      parts.push_back(gloo_->recv(received, peer, kAllToAllTag));
    }
    for (auto& part : parts) part->wait();
    return done(outputs);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = over(outputs);
    auto from = over(inputs);
    return finished(gloo_->gather(to, from, options), flat(outputs));
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto to = over(outputs);
    auto from = over(inputs);
    return finished(gloo_->scatter(to, from, options), outputs);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto bytes = over(tensors);
    return under_way(gloo_->send(bytes, to, tag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto bytes = over(tensors);
    return under_way(gloo_->recv(bytes, from, tag), tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto bytes = over(tensors);
    return under_way(gloo_->recvAnysource(bytes, tag), tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    wait_for_device("barrier");
    return gloo_->barrier(options);
  }

 private:
  static constexpr int kAllToAllTag = 77;

  // NCCL has a mean, gloo a sum.
  static bool sum_for_mean(c10d::ReduceOp& operation) {
    const bool mean = operation == c10d::ReduceOp::AVG;
    if (mean) operation = c10d::ReduceOp::SUM;
    return mean;
  }

  at::Tensor over(const at::Tensor& tensor) const {
    TORCH_CHECK(on_device(tensor), "stand-in: ", name_, " takes tensors of the device alone, not one of ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "stand-in: ", name_, ": tensors must be contiguous");
    return Shadows()(tensor);
  }
  Tensors over(const Tensors& tensors) const {
    Tensors made;
    for (const auto& tensor : tensors) made.push_back(over(tensor));
    return made;
  }
  std::vector<Tensors> over(const std::vector<Tensors>& lists) const {
    std::vector<Tensors> made;
    for (const auto& tensors : lists) made.push_back(over(tensors));
    return made;
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors made;
    for (const auto& tensors : lists) made.insert(made.end(), tensors.begin(), tensors.end());
    return made;
  }

  // Collectives end before they return: the device's order is kept, and nobody has to say which stream waits for which.
  WorkPtr finished(const WorkPtr& work, Tensors outputs, const Tensors& sums = {}) {
    work->wait();
    for (const auto& sum : sums) {
      at::AutoDispatchBelowADInplaceOrView below;
      sum.div_(getSize());
    }
    return done(std::move(outputs));  // without the work: gloo's reduce_scatter copies its sum again in each wait
  }
  WorkPtr done(Tensors outputs) { return noted(c10::make_intrusive<DeviceWork>(std::vector<WorkPtr>{}, std::move(outputs), Tensors{})); }
  // A send and a receive may each wait for the other.
  WorkPtr under_way(const WorkPtr& work, Tensors tensors) {
    return noted(c10::make_intrusive<DeviceWork>(std::vector<WorkPtr>{work}, std::move(tensors), Tensors{}));
  }
  WorkPtr noted(WorkPtr work) {
    if (coalescing_) coalesced_.push_back(work);
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::string name_;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

// DistributedDataParallel's logger asks for one per type of device.
struct DeviceTimer final : c10d::Timer {
  explicit DeviceTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event from, Event to) override { return getTimeRef(to) - getTimeRef(from); }
};

}  // namespace standin
