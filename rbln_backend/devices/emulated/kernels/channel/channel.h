// Collectives of ranks that share a host: every rank has a seat in a mapped file, writes its tensor
// there, and reads the others' once all have posted the number of the call.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace rbln {

// The ranks of a channel make the same calls in the same order. Throws std::runtime_error when
// another rank has ended: it would be waited for without end.
class Channel {
 public:
  virtual ~Channel() = default;

  virtual int64_t ranks() const = 0;

  // out[i] = the sum over the ranks of in[i], added in their order in float32 and rounded once: the
  // same bits on every rank.
  virtual void all_reduce(Dtype dtype, const void* in, void* out, int64_t count) = 0;

  // out[i] = the same sum of in[first + i], first = this rank's place times count; in is `ranks`
  // times as long as out.
  virtual void reduce_scatter(Dtype dtype, const void* in, void* out, int64_t count) = 0;

  // in [rows, row_bytes] -> out [rows, ranks, row_bytes].
  virtual void all_gather(const void* in, void* out, int64_t rows, int64_t row_bytes) = 0;
};

// Bytes of the file of a channel.
int64_t channel_bytes(int ranks, int64_t seat_bytes);

// Maps `path`, zeroed and of channel_bytes. `processes` are the ranks' ids on this host. Returns the
// channel's number, or -1 with errno where the file cannot be mapped.
int64_t open_channel(const char* path, int rank, int ranks, int64_t seat_bytes,
                     const int32_t* processes);

// Throws std::runtime_error for a number that was never handed out.
Channel& channel(int64_t number);

}  // namespace rbln
