// Sliding-window attention: one block per request, whose slots are the window's tokens in order.
//
// Positions count as the lengths do: the request's tokens, or those that the block held. Before the
// step the block holds the last of the `starts` tokens before it, afterwards the last of all, from
// slot 0 on; slots after those keep what they held, which nothing reads.
//
// One new token sees exactly what the block holds afterwards. There the block slides tile by tile,
// just before each is read, so that the step brings it through the caches once.
#include <cstring>
#include <utility>

#include "attention/attend.h"

namespace rbln {
namespace {

// The keys of one request and head: its block, and the new tokens.
template <class T>
class Window {
 public:
  Window(const AttentionArgs& args, int64_t batch, int64_t head)
      : args_(args), batch_(batch), head_(head), start_(args.starts[batch]),
        end_(start_ + args.counts[batch]), before_(first_held(start_)), after_(first_held(end_)),
        block_(static_cast<T*>(args.cache) + args.tables[batch] * args.cache_stride.block +
               head * args.cache_stride.head) {}

  bool is_one_token() const { return args_.counts[batch_] == 1; }
  // What is fetched after its own keys: those of a head that comes after.
  void go_on_to(const Window& other) { next_ = {other.block_, other.kept()}; }

  // Tokens that the block holds after the step.
  int64_t kept() const { return end_ - after_; }

  QueryRun queries(int64_t first, int64_t count) const {
    return {batch_, head_, first, count, start_, kUnlimited, args_.block_size};
  }

  void locate(int64_t begin, int64_t count, KeyTile<T>& tile) const {
    if (is_one_token()) return slide_and_locate(begin, count, tile);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = begin + i, token = position - start_;
      tile.keys[i] = token < 0 ? slot(position - before_) : new_key(token);
      tile.values[i] = token < 0 ? tile.keys[i] + args_.cache_stride.kv : new_value(token);
    }
    const bool old = begin + count <= start_, fresh = begin >= start_;
    tile.value_stride = old ? args_.cache_stride.slot : fresh ? args_.v_stride.token : 0;
    // None of the new keys, which have just been written.
    const int64_t next = begin + count, left = std::max<int64_t>(0, start_ - next);
    tile.look_ahead(count, begin == before_, {slot(next - before_), left}, {},
                    args_.cache_stride.slot);
  }

  // Makes slots [begin, end) what they are after the step. What a slot takes is never before it,
  // so slots can be made in any steps from 0 up.
  void slide(int64_t begin, int64_t end) const {
    const int64_t old = std::min(end, start_ - after_);
    if (dropped() > 0 && begin < old) move(begin, old);
    for (int64_t i = std::max(begin, start_ - after_); i < end; ++i) {
      const int64_t token = i + after_ - start_;
      std::copy_n(new_key(token), args_.k_size, slot(i));
      std::copy_n(new_value(token), args_.v_size, slot(i) + args_.v_place);
    }
  }

 private:
  // The position that slot 0 has when `end` tokens were seen.
  int64_t first_held(int64_t end) const { return std::max<int64_t>(0, end - args_.block_size); }
  int64_t dropped() const { return after_ - before_; }
  T* slot(int64_t index) const { return block_ + index * args_.cache_stride.slot; }
  const T* new_key(int64_t token) const {
    return new_row<T>(args_.k, args_.k_stride, batch_, head_, token);
  }
  const T* new_value(int64_t token) const {
    return new_row<T>(args_.v, args_.v_stride, batch_, head_, token);
  }

  void slide_and_locate(int64_t begin, int64_t count, KeyTile<T>& tile) const {
    const int64_t first = begin - after_, end = first + count;
    slide(first, end);
    for (int64_t i = 0; i < count; ++i) tile.keys[i] = slot(first + i);
    tile.values[0] = tile.keys[0] + args_.cache_stride.kv;
    tile.value_stride = args_.cache_stride.slot;
    tile.look_ahead(count, first == 0, {slot(end), kept() - end}, next_, args_.cache_stride.slot);
  }

  void move(int64_t begin, int64_t end) const {
    for (const int64_t part : {int64_t{0}, args_.cache_stride.kv}) {
      if (args_.cache_stride.slot == args_.head_size) {
        std::memmove(slot(begin) + part, slot(begin + dropped()) + part,
                     size_t((end - begin) * args_.head_size) * sizeof(T));
      } else {
        for (int64_t i = begin; i < end; ++i)
          std::copy_n(slot(i + dropped()) + part, args_.head_size, slot(i) + part);
      }
    }
  }

  const AttentionArgs& args_;
  const int64_t batch_, head_, start_, end_;
  const int64_t before_, after_;  // the positions of slot 0
  T* const block_;
  KeyTile<T>::Run next_{};
};

void write_zeros(const AttentionArgs& args, int64_t batch, int64_t head, int64_t first,
                 int64_t end) {
  const int64_t width = args.group * args.value_size * (args.dtype == Dtype::f32 ? 4 : 2);
  for (int64_t token = first; token < end; ++token) {
    const int64_t row = (batch * args.length + token) * args.kv_heads + head;
    std::memset(static_cast<char*>(args.out) + row * width, 0, size_t(width));
  }
}

int64_t total_work(const AttentionArgs& args) {
  int64_t keys = 0;
  for (int64_t b = 0; b < args.batch; ++b)
    keys += args.counts[b] * std::min(args.starts[b] + args.counts[b], args.block_size);
  return keys * args.kv_heads * args.group * args.head_size;
}

template <class T>
void run(const AttentionArgs& args) {
  const int64_t tokens = tokens_per_item(args);
  const int64_t tiles = (args.length + tokens - 1) / tokens;
  const int64_t heads = args.batch * args.kv_heads;
  const int threads = team_size(total_work(args), kSerialWork);
  const auto slide = [&](const Window<T>& window) {
    if (!window.is_one_token()) window.slide(0, window.kept());
  };
  const auto window_of = [&](int64_t item) {
    const int64_t bh = item % heads;
    return Window<T>(args, bh / args.kv_heads, bh % args.kv_heads);
  };
  const auto compute = [&](int64_t item, bool is_last) {
    // The last query tiles see the most keys: they go first.
    const int64_t bh = item % heads, first = (tiles - 1 - item / heads) * tokens;
    const int64_t batch = bh / args.kv_heads, head = bh % args.kv_heads;
    const int64_t end = std::min(first + tokens, args.length);
    const int64_t real = std::min(end, args.counts[batch]);
    write_zeros(args, batch, head, std::max(first, real), end);
    if (real <= first) return;
    Window<T> window = window_of(item);
    // A row of padding names no block.
    if (!is_last && args.counts[(item + 1) % heads / args.kv_heads] > 0)
      window.go_on_to(window_of(item + 1));
    thread_local Scratch scratch;
    attend<T>(args, scratch, std::as_const(window), window.queries(first, real - first));
    if (tiles == 1) slide(window);
  };
  const int64_t items = heads * tiles, some = items_at_once(items, threads);
  parallel_for((items + some - 1) / some, 1, threads, [&](int64_t claim) {
    const int64_t end = std::min(items, (claim + 1) * some);
    for (int64_t item = claim * some; item < end; ++item) compute(item, item + 1 == end);
  });
  if (tiles == 1) return;
  parallel_for(heads, 1, threads, [&](int64_t bh) {
    if (args.counts[bh / args.kv_heads] > 0)
      slide(Window<T>(args, bh / args.kv_heads, bh % args.kv_heads));
  });
}

}  // namespace

void window_attention(const AttentionArgs& args) {
  if (args.batch == 0 || args.length == 0 || args.kv_heads == 0 || args.group == 0) return;
  with_stored_type(args, [&]<class T>() { run<T>(args); });
}

}  // namespace rbln
