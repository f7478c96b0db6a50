// The stand-in's memory. A tensor's address lies in a range that nobody may touch (PROT_NONE); its bytes lie in a second range, at a
// constant distance. The host that reads a device pointer ends with a segmentation fault, from C++ too.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace standin {

constexpr auto kDevice = c10::DeviceType::CUDA;
constexpr int kMostDevices = 8;
constexpr size_t kRegionBytes = size_t{1} << 34;  // of addresses, for each device
constexpr size_t kGrain = 512;                    // blocks of CUDA's allocator are multiples of it

inline int devices = 2;

inline int device_count() { return devices; }

inline void set_device_count(int count) {
  TORCH_CHECK(count > 0 && count <= kMostDevices, "stand-in: 1 to ", kMostDevices, " devices, not ", count);
  devices = count;
}

inline thread_local c10::DeviceIndex current_device = 0;

inline void check_device(int index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "stand-in: invalid device ordinal ", index, ": there are ", device_count(), " devices");
}

struct Usage {
  size_t live = 0, peak = 0, limit = SIZE_MAX, allocations = 0;
};

class Memory {
 public:
  static Memory& get() {
    static auto* memory = new Memory;  // never destroyed: tensors outlive static objects
    return *memory;
  }

  char* take(size_t bytes, c10::DeviceIndex device) {
    check_device(device);
    bytes = (bytes + kGrain - 1) / kGrain * kGrain;
    std::lock_guard<std::mutex> lock(mutex_);
    auto& use = usage_[device];
    TORCH_CHECK_WITH(OutOfMemoryError, use.live + bytes <= use.limit, "stand-in: out of memory on device ", int(device), ": ", use.live,
                     " bytes in use, ", bytes, " more asked for, limit ", use.limit);
    auto& unused = unused_[{device, bytes}];
    char* block;
    if (unused.empty()) {
      TORCH_CHECK(tops_[device] + bytes <= kRegionBytes, "stand-in: no addresses left on device ", int(device));
      block = device_ + device * kRegionBytes + tops_[device];
      tops_[device] += bytes;
    } else {
      block = unused.back();
      unused.pop_back();
    }
    std::memset(block + distance_, 0xff, bytes);  // NaN: a read before the first write shows
    sizes_[block] = bytes;
    use.live += bytes;
    use.peak = std::max(use.peak, use.live);
    use.allocations++;
    return block;
  }

  void give_back(char* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = sizes_.find(block);
    if (found == sizes_.end()) return;
    const auto bytes = found->second;
    const auto device = static_cast<c10::DeviceIndex>((block - device_) / kRegionBytes);
    sizes_.erase(found);
    usage_[device].live -= bytes;
    unused_[{device, bytes}].push_back(block);
    if (bytes >= (size_t{1} << 20)) madvise(block + distance_, bytes, MADV_DONTNEED);  // zeros; the next owner gets NaN
    else std::memset(block + distance_, 0xff, bytes);
  }

  void* bytes_of(const void* block) const { return block ? static_cast<char*>(const_cast<void*>(block)) + distance_ : nullptr; }

  Usage usage(int device) {
    check_device(device);
    std::lock_guard<std::mutex> lock(mutex_);
    return usage_[device];
  }
  void reset_peak(int device) {
    check_device(device);
    std::lock_guard<std::mutex> lock(mutex_);
    usage_[device].peak = usage_[device].live;
  }
  void set_limit(int device, size_t bytes) {
    check_device(device);
    std::lock_guard<std::mutex> lock(mutex_);
    usage_[device].limit = bytes;
  }

 private:
  Memory() : usage_(kMostDevices), tops_(kMostDevices) {
    const size_t bytes = kRegionBytes * kMostDevices;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* untouchable = mmap(nullptr, bytes, PROT_NONE, flags, -1, 0);
    void* shadow = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(untouchable != MAP_FAILED && shadow != MAP_FAILED, "stand-in: no address space");
    device_ = static_cast<char*>(untouchable);
    distance_ = static_cast<char*>(shadow) - device_;
  }

  char* device_;
  ptrdiff_t distance_;
  std::mutex mutex_;
  std::vector<Usage> usage_;
  std::vector<size_t> tops_;
  std::map<char*, size_t> sizes_;
  std::map<std::pair<int, size_t>, std::vector<char*>> unused_;  // blocks are not split: one is used again for its own size
};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDevice, current_device);
    if (!bytes) return {nullptr, nullptr, &drop, device};
    void* block = Memory::get().take(bytes, current_device);
    return {block, block, &drop, device};
  }
  static void drop(void* block) {
    if (block) Memory::get().give_back(static_cast<char*>(block));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(Memory::get().bytes_of(to), Memory::get().bytes_of(from), bytes);
  }
};

inline DeviceAllocator& device_allocator() {
  static DeviceAllocator allocator;
  return allocator;
}

// A new block on `device`, whatever the current one is.
inline c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes) {
  const auto before = current_device;
  current_device = device;
  auto block = device_allocator().allocate(bytes);
  current_device = before;
  return block;
}

// Pinned memory of the host: ordinary memory whose addresses are known.
struct PinnedAllocator final : c10::Allocator {
  static PinnedAllocator& get() {
    static auto* allocator = new PinnedAllocator;
    return *allocator;
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = static_cast<char*>(std::aligned_alloc(64, (bytes / 64 + 1) * 64));
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[block] = bytes + 1;  // an empty tensor is pinned too
    return {block, block, &drop, c10::Device(c10::kCPU)};
  }
  static void drop(void* block) {
    {
      std::lock_guard<std::mutex> lock(get().mutex_);
      get().sizes_.erase(static_cast<char*>(block));
    }
    std::free(block);
  }
  bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = sizes_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (next == sizes_.begin()) return false;
    auto [start, bytes] = *std::prev(next);
    return static_cast<const char*>(address) < start + bytes;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  std::mutex mutex_;
  std::map<char*, size_t> sizes_;
};

}  // namespace standin
