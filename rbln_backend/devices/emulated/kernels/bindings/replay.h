// Recordings: the kernel calls of one graph, to be made again over the same memory.
//
// A graph's shapes never change, so neither need the addresses: what a second run repeats is the
// plain calls, without the interpreter, the dispatcher, views or allocation. While a thread records,
// outputs come from an arena in which a later tensor takes the place of a dead one; the order of
// calls is the same at every replay, and so is who follows whom.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <functional>
#include <utility>

namespace rbln {

// True if this thread records.
bool is_recording();

// True if calls run now: a rehearsal only records them.
bool is_computing();

// Where a recorded op's outputs live.
c10::Allocator* arena();

// Adds a call to the recording.
void keep_call(std::function<void()> call);

// For an op that computes with memory of its own: its calls cannot be made again.
void forbid_replay();

// How many of `count` rows a call should compute: where `count` is the number of a graph's tokens,
// requests or rows of logits, nothing may read the results of the last ones.
int64_t useful_rows(int64_t count);

// Marks the call that was recorded last as one that writes a KV cache.
void mark_cache_write();

// True in the last call that writes a KV cache, where nothing reads what the graph computes.
bool writes_only();

// Makes the call, now (but in a rehearsal) and at every replay. It may point into the arguments and
// results of its op, and to nothing else that the op made.
template <class Call>
void launch(Call call) {
  if (is_computing()) call();
  if (is_recording()) keep_call(std::move(call));
}

// Makes call(args), which computes the first args.rows rows, at every replay of the useful ones alone.
// A token has `each` rows.
template <class Args, class Call>
void launch_rows(const Args& args, Call call, int64_t each = 1) {
  launch([own = args, call, each, tokens = args.rows / each]() mutable {
    own.rows = useful_rows(tokens) * each;
    if (own.rows > 0) call(own);
  });
}

}  // namespace rbln
