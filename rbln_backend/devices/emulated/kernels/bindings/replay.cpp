// Keeps recordings by number and hands them to Python as plain functions; see replay.h.
#include "bindings/replay.h"

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bindings/exports.h"

namespace rbln {
namespace {

constexpr size_t kAlignment = 64;

// Blocks that die go back to be taken by the next tensor that fits; none goes back to the system.
class Arena final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    const std::lock_guard<std::mutex> guard(mutex_);
    auto block = free_.lower_bound(size);
    // A block much larger than wanted is left for a tensor of its size.
    if (block == free_.end() || block->first > 2 * size) {
      void* memory = std::aligned_alloc(kAlignment, size);
      if (memory == nullptr) throw std::bad_alloc();
      return hand_out(memory, size);
    }
    const auto [found, memory] = *block;
    free_.erase(block);
    return hand_out(memory, found);
  }

  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }

 private:
  struct Block {
    Arena* arena;
    void* memory;
    size_t size;
  };

  c10::DataPtr hand_out(void* memory, size_t size) {
    return {memory, new Block{this, memory, size}, &Arena::take_back,
            c10::Device(c10::DeviceType::CPU)};
  }

  static void take_back(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    const std::lock_guard<std::mutex> guard(block->arena->mutex_);
    block->arena->free_.emplace(block->size, block->memory);
  }

  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
};

struct Recording {
  std::vector<std::function<void()>> calls;
  int64_t last_write = -1;  // the last call that writes a KV cache
  bool lost_write = false;  // one of them was forbidden
};

// By number. Never taken down: tensors in the arena may outlive every other static object.
std::vector<std::unique_ptr<Recording>>& recordings() {
  static auto* const all = new std::vector<std::unique_ptr<Recording>>;
  return *all;
}

thread_local Recording* current = nullptr;
thread_local bool forbidden = false;
thread_local bool rehearsing = false;
// Counts of rows, and how many of the first ones are useful: of tokens or requests, of LM heads.
thread_local struct {
  int64_t all, useful;
} known_rows[2] = {};
thread_local bool only_writes = false;
thread_local std::string failure;

}  // namespace

bool is_recording() { return current != nullptr; }

bool is_computing() { return !rehearsing; }

c10::Allocator* arena() {
  static auto* const shared = new Arena;
  return shared;
}

void keep_call(std::function<void()> call) { current->calls.push_back(std::move(call)); }

void mark_cache_write() {
  if (is_recording()) current->last_write = int64_t(current->calls.size()) - 1;
}

bool writes_only() { return only_writes; }

void forbid_replay() { forbidden = true; }

int64_t useful_rows(int64_t count) {
  for (const auto& known : known_rows)
    if (known.all == count) return known.useful;
  return count;
}

}  // namespace rbln

// The calls below come one at a time: from the thread that runs graphs.

// Starts a recording on this thread; returns its number. A rehearsal computes nothing.
RBLN_EXPORT int64_t rbln_emulator_begin_recording(int is_rehearsal) {
  auto& all = rbln::recordings();
  all.push_back(std::make_unique<rbln::Recording>());
  rbln::current = all.back().get();
  rbln::forbidden = false;
  rbln::rehearsing = is_rehearsal != 0;
  return int64_t(all.size()) - 1;
}

RBLN_EXPORT void rbln_emulator_end_recording() {
  rbln::current = nullptr;
  rbln::rehearsing = false;
}

// The calls recorded so far. Those after the first `known` are dropped if one of them was forbidden.
RBLN_EXPORT int64_t rbln_emulator_recorded_calls(int64_t known) {
  rbln::Recording& recording = *rbln::current;
  if (rbln::forbidden) {
    recording.lost_write |= recording.last_write >= known;
    recording.calls.resize(size_t(known));
  }
  rbln::forbidden = false;
  return int64_t(recording.calls.size());
}

// The last call that writes a KV cache; -1 if there is none, or one of them cannot be made again.
RBLN_EXPORT int64_t rbln_emulator_last_cache_write(int64_t recording) {
  const rbln::Recording& whole = *rbln::recordings()[size_t(recording)];
  return whole.lost_write ? -1 : whole.last_write;
}

RBLN_EXPORT void rbln_emulator_drop_recording(int64_t recording) {
  rbln::recordings()[size_t(recording)].reset();
}

// Until the next call on this thread, `useful` of the `all` tokens or requests of a graph are, and of
// its `all_ends` rows of logits `ends`.
RBLN_EXPORT void rbln_emulator_set_useful_rows(int64_t all, int64_t useful, int64_t all_ends,
                                               int64_t ends) {
  rbln::known_rows[0] = {all, useful};
  rbln::known_rows[1] = {all_ends, ends};
}

// Makes the calls [first, end) again, the last one for the KV cache alone if `only_writes`; returns
// what went wrong, or null.
RBLN_EXPORT const char* rbln_emulator_replay(int64_t recording, int64_t first, int64_t end,
                                             int only_writes) {
  const auto& calls = rbln::recordings()[size_t(recording)]->calls;
  const char* failure = nullptr;
  try {
    for (int64_t i = first; i < end; ++i) {
      rbln::only_writes = only_writes != 0 && i == end - 1;
      calls[size_t(i)]();
    }
  } catch (const std::exception& error) {
    rbln::failure = error.what();
    failure = rbln::failure.c_str();
  }
  rbln::only_writes = false;
  return failure;
}
