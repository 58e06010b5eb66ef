#include "channel/channel.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/simd.h"
#include "core/team.h"

namespace rbln {
namespace {

// Ranks reach a call at nearly the same time, if each has a core. Then looking is faster than
// sleeping; if they share one, the other must get it soon.
constexpr int kSpins = 1500;
constexpr int kYields = 20;
constexpr int64_t kNapNanoseconds = 20'000'000;
// Elements, from which the team helps.
constexpr int64_t kParallelWork = 1 << 16;
constexpr int64_t kBlock = 1 << 12;

struct alignas(64) Seat {
  // The number of the latest call for which this rank's tensor can be read.
  std::atomic<uint32_t> posted;
  std::atomic<uint32_t> sleepers;
};
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

int64_t seats_bytes(int ranks) { return int64_t(sizeof(Seat)) * ranks; }

void nap(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec longest{0, kNapNanoseconds};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &longest, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// A process of another rank; a descriptor notices its end even before its parent does.
class Peer {
 public:
  explicit Peer(int32_t process) : process_(process) {
#if defined(SYS_pidfd_open)
    descriptor_ = int(syscall(SYS_pidfd_open, process, 0));
#endif
  }
  Peer(const Peer&) = delete;
  ~Peer() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  bool has_ended() const {
    if (descriptor_ < 0) return kill(process_, 0) != 0 && errno == ESRCH;
    pollfd asked{descriptor_, POLLIN, 0};
    return poll(&asked, 1, 0) == 1;
  }

 private:
  int32_t process_;
  int descriptor_ = -1;
};

template <class T>
void sum_range(const std::vector<const void*>& parts, T* out, int64_t first, int64_t end) {
  int64_t i = first;
  for (; i + kLanes <= end; i += kLanes) {
    VecF total = load(static_cast<const T*>(parts[0]) + i);
    for (size_t rank = 1; rank < parts.size(); ++rank)
      total = total + load(static_cast<const T*>(parts[rank]) + i);
    store(out + i, total);
  }
  if (i == end) return;
  VecF total = load_some(static_cast<const T*>(parts[0]) + i, end - i);
  for (size_t rank = 1; rank < parts.size(); ++rank)
    total = total + load_some(static_cast<const T*>(parts[rank]) + i, end - i);
  store_some(out + i, total, end - i);
}

template <class T>
void sum(const std::vector<const void*>& parts, void* out, int64_t count) {
  T* const target = static_cast<T*>(out);
  if (count < kParallelWork) return sum_range<T>(parts, target, 0, count);
  parallel_for((count + kBlock - 1) / kBlock, 4, team_threads(), [&](int64_t block) {
    sum_range<T>(parts, target, block * kBlock, std::min(count, (block + 1) * kBlock));
  });
}

void sum_of(Dtype dtype, const std::vector<const void*>& parts, void* out, int64_t count) {
  if (dtype == Dtype::f32) sum<float>(parts, out, count);
  if (dtype == Dtype::bf16) sum<bf16>(parts, out, count);
  if (dtype == Dtype::f16) sum<f16>(parts, out, count);
}

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

class SharedChannel final : public Channel {
 public:
  SharedChannel(char* memory, int rank, int ranks, int64_t seat_bytes, const int32_t* processes)
      : seats_(reinterpret_cast<Seat*>(memory)),
        desks_(memory + seats_bytes(ranks)),
        rank_(rank),
        ranks_(ranks),
        seat_bytes_(seat_bytes) {
    for (int other = 0; other < ranks; ++other)
      peers_.push_back(other == rank ? nullptr : std::make_unique<Peer>(processes[other]));
  }

  int64_t ranks() const override { return ranks_; }

  void all_reduce(Dtype dtype, const void* in, void* out, int64_t count) override {
    const int64_t width = bytes_of(dtype);
    const int64_t at_once = seat_bytes_ / width;
    for (int64_t done = 0; done < count; done += at_once) {
      const int64_t some = std::min(at_once, count - done);
      const auto* const source = static_cast<const char*>(in) + done * width;
      begin();
      std::memcpy(desk(rank_), source, size_t(some * width));
      meet();
      std::vector<const void*> parts;
      for (int other = 0; other < ranks_; ++other)
        parts.push_back(other == rank_ ? source : desk(other));
      sum_of(dtype, parts, static_cast<char*>(out) + done * width, some);
    }
  }

  void reduce_scatter(Dtype dtype, const void* in, void* out, int64_t count) override {
    const int64_t width = bytes_of(dtype);
    // A piece of every rank's part at once.
    const int64_t at_once = seat_bytes_ / width / ranks_;
    for (int64_t done = 0; done < count; done += at_once) {
      const int64_t some = std::min(at_once, count - done);
      begin();
      for (int part = 0; part < ranks_; ++part)
        std::memcpy(desk(rank_) + part * some * width,
                    static_cast<const char*>(in) + (part * count + done) * width,
                    size_t(some * width));
      meet();
      std::vector<const void*> parts;
      for (int other = 0; other < ranks_; ++other)
        parts.push_back(desk(other) + rank_ * some * width);
      sum_of(dtype, parts, static_cast<char*>(out) + done * width, some);
    }
  }

  void all_gather(const void* in, void* out, int64_t rows, int64_t row_bytes) override {
    // Whole rows at a time, or pieces of one.
    const int64_t rows_at_once = std::max<int64_t>(1, seat_bytes_ / std::max<int64_t>(1, row_bytes));
    const int64_t piece = std::min(row_bytes, seat_bytes_);
    for (int64_t row = 0; row < rows; row += rows_at_once) {
      const int64_t some = std::min(rows_at_once, rows - row);
      for (int64_t column = 0; column < row_bytes; column += piece)
        gather_piece(static_cast<const char*>(in) + row * row_bytes + column,
                     static_cast<char*>(out) + row * ranks_ * row_bytes + column, some, row_bytes,
                     std::min(piece, row_bytes - column));
    }
  }

 private:
  // Rows of `bytes`, `stride` apart in the source, ranks_ times that in the target.
  void gather_piece(const char* in, char* out, int64_t rows, int64_t stride, int64_t bytes) {
    begin();
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(desk(rank_) + row * bytes, in + row * stride, size_t(bytes));
    meet();
    for (int other = 0; other < ranks_; ++other)
      for (int64_t row = 0; row < rows; ++row)
        std::memcpy(out + (row * ranks_ + other) * stride, desk(other) + row * bytes,
                    size_t(bytes));
  }

  // Every rank has two desks and uses them in turn: whoever has posted the next call has read all
  // desks of this one.
  char* desk(int rank) const {
    return desks_ + (2 * int64_t(rank) + (call_ & 1)) * seat_bytes_;
  }

  void begin() { ++call_; }

  // Posts this rank's tensor and returns once all others have posted theirs.
  void meet() {
    Seat& own = seats_[rank_];
    own.posted.store(call_);
    if (own.sleepers.load() > 0) wake(own.posted);
    for (int other = 0; other < ranks_; ++other)
      if (other != rank_) wait_for(other);
  }

  void wait_for(int other) {
    Seat& seat = seats_[other];
    const auto is_behind = [&](uint32_t posted) { return int32_t(posted - call_) < 0; };
    for (int looks = 0; is_behind(seat.posted.load(std::memory_order_acquire)); ++looks) {
      if (looks < kSpins) {
        relax();
      } else if (looks < kSpins + kYields) {
        sched_yield();
      } else {
        seat.sleepers.fetch_add(1);
        const uint32_t seen = seat.posted.load();
        if (is_behind(seen)) nap(seat.posted, seen);
        seat.sleepers.fetch_sub(1);
        if (is_behind(seat.posted.load()) && peers_[size_t(other)]->has_ended())
          throw std::runtime_error("rank " + std::to_string(other) + " of " +
                                   std::to_string(ranks_) + " has ended");
      }
    }
  }

  Seat* seats_;
  char* desks_;
  int rank_, ranks_;
  int64_t seat_bytes_;
  uint32_t call_ = 0;
  std::vector<std::unique_ptr<Peer>> peers_;
};

// By number, and never taken down: recordings may hold a channel to the end of the process.
std::vector<std::unique_ptr<Channel>>& channels() {
  static auto* const all = new std::vector<std::unique_ptr<Channel>>;
  return *all;
}

}  // namespace

int64_t channel_bytes(int ranks, int64_t seat_bytes) {
  return seats_bytes(ranks) + 2 * ranks * seat_bytes;
}

int64_t open_channel(const char* path, int rank, int ranks, int64_t seat_bytes,
                     const int32_t* processes) {
  // A process in another namespace could not be watched.
  for (int other = 0; other < ranks; ++other)
    if (kill(processes[other], 0) != 0) return -1;
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return -1;
  const auto size = size_t(channel_bytes(ranks, seat_bytes));
  void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int reason = errno;
  close(file);
  errno = reason;
  if (memory == MAP_FAILED) return -1;
  channels().push_back(std::make_unique<SharedChannel>(static_cast<char*>(memory), rank, ranks,
                                                       seat_bytes, processes));
  return int64_t(channels().size()) - 1;
}

Channel& channel(int64_t number) {
  auto& all = channels();
  if (number < 0 || number >= int64_t(all.size())) throw std::runtime_error("no such channel");
  return *all[size_t(number)];
}

}  // namespace rbln
