#include "core/team.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "core/simd.h"

namespace rbln {
namespace {

// Idle threads look for work this often before they sleep: longer than the gap between two kernels
// of a step, shorter than the gap between two steps.
constexpr int kSpins = 4000;
constexpr uint64_t kCountBits = 24;
constexpr uint64_t kCountMask = (uint64_t{1} << kCountBits) - 1;

// True if this thread is running an item: nested calls are then serial.
thread_local bool inside = false;

// A ticket holds a generation, the number of items and the next unclaimed item. Whoever advances
// it owns that item; the caller publishes no new job before every owner is done, so an owner always
// finds its own job's function and context.
struct Team {
  std::atomic<uint64_t> ticket{0};
  std::atomic<int64_t> done{0};
  std::atomic<int> active{0};
  std::atomic<uint32_t> bell{0};
  std::atomic<int> sleepers{0};
  ItemFunction function = nullptr;
  const void* context = nullptr;
  uint64_t generation = 0;
  int workers = 0;
  std::mutex caller;

  static int64_t total(uint64_t t) { return static_cast<int64_t>(t >> kCountBits & kCountMask); }
  static int64_t next(uint64_t t) { return static_cast<int64_t>(t & kCountMask); }

  bool has_work() const {
    const uint64_t t = ticket.load();
    return next(t) < total(t);
  }

  bool run_one() {
    uint64_t t = ticket.load(std::memory_order_acquire);
    while (next(t) < total(t)) {
      if (!ticket.compare_exchange_weak(t, t + 1)) continue;
      inside = true;
      function(context, next(t));
      inside = false;
      done.fetch_add(1, std::memory_order_release);
      return true;
    }
    return false;
  }

  void sleep() {
    sleepers.fetch_add(1);
    const uint32_t heard = bell.load();
    if (!has_work()) bell.wait(heard);
    sleepers.fetch_sub(1);
  }

  void work(int index) {
    for (;;) {
      int spins = 0;
      while (index >= active.load(std::memory_order_relaxed) || !run_one()) {
        if (++spins < kSpins) {
          relax();
        } else {
          sleep();
          spins = 0;
        }
      }
    }
  }

  void run(int64_t items, int threads, ItemFunction job, const void* job_context) {
    for (; workers < threads - 1; ++workers)
      std::thread([this, index = workers] { work(index); }).detach();
    active.store(threads - 1);
    function = job;
    context = job_context;
    done.store(0);
    const auto count = static_cast<uint64_t>(items);
    ticket.store(++generation << 2 * kCountBits | count << kCountBits);
    if (sleepers.load() > 0) {
      bell.fetch_add(1);
      bell.notify_all();
    }
    while (run_one()) {
    }
    for (int spins = 0; done.load(std::memory_order_acquire) < items; ++spins) {
      // The owner of the last item may need this very core.
      if (spins < kSpins) {
        relax();
      } else {
        sched_yield();
      }
    }
  }
};

// A forked child has none of its parent's threads: it starts with a team of its own. Teams are
// never destroyed, since their threads run until the process ends.
Team* team = new Team;

std::atomic<int> configured_threads{1};

const int at_fork = pthread_atfork(nullptr, nullptr, [] { team = new Team; });

}  // namespace

int team_threads() { return configured_threads.load(std::memory_order_relaxed); }

void set_team_threads(int threads) { configured_threads.store(std::max(threads, 1)); }

void run_items(int64_t items, int threads, ItemFunction function, const void* context) {
  if (!inside && items <= static_cast<int64_t>(kCountMask)) {
    const std::unique_lock lock(team->caller, std::try_to_lock);
    if (lock.owns_lock()) return team->run(items, threads, function, context);
  }
  for (int64_t item = 0; item < items; ++item) function(context, item);
}

}  // namespace rbln
