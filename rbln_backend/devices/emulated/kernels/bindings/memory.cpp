// An allocator for large tensors, whose mappings are kept when their tensor is gone.
//
// malloc maps a buffer of more than 32 MiB anew each time and unmaps it when it is freed, so that a
// step with such a buffer (float32 logits of 128 rows over a large vocabulary) pays for every page
// of it again: 70 ms for 64 MiB. Kept mappings cost nothing. Mappings begin on a huge page and can
// lie on such pages: reading gigabytes of weights at every step looks up fewer addresses then.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "bindings/exports.h"
#include "core/team.h"

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = size_t{4} << 10;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

std::atomic<bool> uses_huge_pages{false};

// Asks for huge pages under [data, data + size), if they are in use; both are multiples of a page.
void advise(void* data, size_t size) {
  // A kernel without huge pages refuses, and nothing is lost.
  if (uses_huge_pages.load() && size >= kHugePage) madvise(data, size, MADV_HUGEPAGE);
}

// Has the system lend every page now, by all threads at once. The first use of a page is a call into
// the kernel, and on a virtual machine often one into its host: 2.4 s a GiB on one thread (measured).
void lend(char* data, size_t size) {
  const auto pieces = int64_t((size + kHugePage - 1) / kHugePage);
  rbln::parallel_for(pieces, 1, rbln::team_threads(), [&](int64_t piece) {
    const size_t begin = size_t(piece) * kHugePage, end = std::min(begin + kHugePage, size);
    for (size_t at = begin; at < end; at += kPage) *static_cast<volatile char*>(data + at) = 0;
  });
}

// `size` bytes of zeros that begin on a huge page, or null.
void* map(size_t size) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(mapped), data = round_up(begin, kHugePage);
  if (data > begin) munmap(mapped, data - begin);
  munmap(reinterpret_cast<void*>(data + size), begin + kHugePage - data);
  void* block = reinterpret_cast<void*>(data);
  advise(block, size);
  lend(static_cast<char*>(block), size);
  return block;
}

struct Mapping {
  void* data;
  size_t size;
};

class LargeTensors final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes < kHugePage ? nullptr : take(round_up(bytes, kPage));
    if (data == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }

  void keep(size_t bytes) {
    const std::lock_guard guard(mutex_);
    limit_ = bytes;
    evict();
  }

 private:
  // The smallest kept mapping that wastes at most a quarter, else a new one.
  void* take(size_t size) {
    const std::lock_guard guard(mutex_);
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      if (it->size < size || it->size - size > size / 4) continue;
      if (best == kept_.end() || it->size < best->size) best = it;
    }
    Mapping mapping{nullptr, size};
    if (best != kept_.end()) {
      mapping = *best;
      kept_.erase(best);
      kept_bytes_ -= mapping.size;
    } else {
      mapping.data = map(size);
    }
    if (mapping.data != nullptr) live_.emplace(mapping.data, mapping.size);
    return mapping.data;
  }

  // Also called for memory of torch's allocator, by those who free what raw_allocate gave them.
  static void release(void* data);

  bool give_back(void* data) {
    // Most foreign pointers are recognized without the lock.
    if (reinterpret_cast<uintptr_t>(data) % kHugePage != 0) return false;
    const std::lock_guard guard(mutex_);
    const auto found = live_.find(data);
    if (found == live_.end()) return false;
    const size_t size = found->second;
    live_.erase(found);
    if (size > limit_) {
      // It would only displace what is kept.
      munmap(data, size);
    } else {
      kept_.push_back({data, size});
      kept_bytes_ += size;
      evict();
    }
    return true;
  }

  // Unmaps the longest unused mappings above the limit.
  void evict() {
    auto it = kept_.begin();
    for (; kept_bytes_ > limit_; ++it) {
      munmap(it->data, it->size);
      kept_bytes_ -= it->size;
    }
    kept_.erase(kept_.begin(), it);
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> live_;
  std::vector<Mapping> kept_;  // longest unused first
  size_t kept_bytes_ = 0, limit_ = 0;
};

// Never destroyed: tensors outlive every static object.
LargeTensors* const large_tensors = new LargeTensors;

void LargeTensors::release(void* data) {
  if (!large_tensors->give_back(data)) c10::free_cpu(data);
}

}  // namespace

RBLN_EXPORT void rbln_emulator_use_huge_pages(int use) { uses_huge_pages.store(use != 0); }

RBLN_EXPORT void rbln_emulator_advise_huge_pages(void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data), first = round_up(begin, kPage);
  const uintptr_t end = (begin + bytes) / kPage * kPage;
  if (end > first) advise(reinterpret_cast<void*>(first), end - first);
}

// From here on tensors of at least one huge page get mappings of their own, or torch's memory
// again. Tensors made before stay where they are.
RBLN_EXPORT void rbln_emulator_map_large_tensors(int map) {
  c10::SetCPUAllocator(map != 0 ? large_tensors : c10::GetDefaultCPUAllocator());
  if (map == 0) large_tensors->keep(0);
}

// Of the mappings whose tensors are gone, keep up to `bytes` for tensors to come.
RBLN_EXPORT void rbln_emulator_keep_freed_mappings(size_t bytes) { large_tensors->keep(bytes); }
