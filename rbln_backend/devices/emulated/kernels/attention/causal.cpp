// Causal attention over the paged KV cache: writes the new keys and values, then attends.
#include "attention/attend.h"

namespace rbln {
namespace {

// The keys of one request and head, through its block table.
template <class T>
class Pages {
 public:
  Pages(const AttentionArgs& args, int64_t batch, int64_t head)
      : args_(args), table_(args.tables + batch * args.table_width),
        cache_(static_cast<T*>(args.cache) + head * args.cache_stride.head) {}

  // Reads go from `first` to `end`, and on with those `after`.
  void limit(int64_t first, int64_t end, KeyTile<T>::Run after) {
    first_ = first;
    end_ = end;
    after_ = after;
  }

  int64_t reach() const { return args_.table_width * args_.block_size; }

  T* row(int64_t position) const {
    return row(position / args_.block_size, position % args_.block_size);
  }

  void locate(int64_t begin, int64_t count, KeyTile<T>& tile) const {
    const int64_t block_size = args_.block_size, stride = args_.cache_stride.slot;
    int64_t page = begin / block_size, slot = begin % block_size;
    tile.value_stride = slot + count <= block_size ? stride : 0;
    for (int64_t i = 0; i < count; slot = 0, ++page) {
      const int64_t end = std::min(count, i + block_size - slot);
      for (const T* key = row(page, slot); i < end; key += stride) tile.keys[i++] = key;
    }
    const int64_t apart = tile.value_stride == 0 ? count : 1;
    for (int64_t i = 0; i < apart; ++i) tile.values[i] = tile.keys[i] + args_.cache_stride.kv;
    const int64_t left = end_ - begin - count;
    tile.look_ahead(count, begin == first_, {left > 0 ? row(begin + count) : nullptr, left},
                    after_, stride);
  }

 private:
  T* row(int64_t page, int64_t slot) const {
    return cache_ + table_[page] * args_.cache_stride.block + slot * args_.cache_stride.slot;
  }

  const AttentionArgs& args_;
  const int64_t* table_;
  T* cache_;
  int64_t first_ = 0, end_ = 0;
  KeyTile<T>::Run after_{};
};

// Stores the new keys and values of one request and head; positions past the table are dropped.
template <class T>
void write_cache(const AttentionArgs& args, int64_t batch, int64_t head) {
  const Pages<T> pages(args, batch, head);
  const int64_t start = args.starts[batch];
  const int64_t count = std::min(args.length, pages.reach() - start);
  for (int64_t token = 0; token < count; ++token) {
    T* target = pages.row(start + token);
    std::copy_n(new_row<T>(args.k, args.k_stride, batch, head, token), args.k_size, target);
    std::copy_n(new_row<T>(args.v, args.v_stride, batch, head, token), args.v_size,
                target + args.v_place);
  }
}

int64_t total_work(const AttentionArgs& args) {
  int64_t keys = 0;
  for (int64_t b = 0; b < args.batch; ++b)
    keys += args.length * (args.starts[b] + args.length);
  return keys * args.kv_heads * args.group * args.head_size;
}

// Runs of queries, all that one item computes. The last of a request see the most keys: they go
// first.
template <class T>
struct Runs {
  const AttentionArgs& args;
  int64_t tokens, tiles, heads;

  explicit Runs(const AttentionArgs& args_)
      : args(args_), tokens(tokens_per_item(args_)),
        tiles((args_.length + tokens - 1) / tokens), heads(args_.batch * args_.kv_heads) {}

  int64_t count() const { return heads * tiles; }

  QueryRun at(int64_t item) const {
    const int64_t batch = item % heads / args.kv_heads, head = item % heads % args.kv_heads;
    const int64_t first = (tiles - 1 - item / heads) * tokens;
    const int64_t window = args.window == 0 ? kUnlimited : args.window;
    return {batch, head, first, std::min(tokens, args.length - first), args.starts[batch],
            Pages<T>(args, batch, head).reach(), window};
  }

  // What an item reads, and the item that is expected to come after it on this thread.
  Pages<T> pages(int64_t item, int64_t next) const {
    const QueryRun run = at(item), after = at(next);
    Pages<T> pages(args, run.batch, run.head);
    const int64_t first = run.limit(0), limit = after.limit(0), low = after.low(limit, args.chunk);
    pages.limit(run.low(first, args.chunk), run.limit(run.count - 1),
                {Pages<T>(args, after.batch, after.head).row(low),
                 after.limit(after.count - 1) - low});
    return pages;
  }
};

// Has this core own the memory of a token's key and value before it writes them.
template <class T>
void fetch_to_write(const AttentionArgs& args, const QueryRun& run) {
  if (run.start >= run.end) return;
  const T* const key = Pages<T>(args, run.batch, run.head).row(run.start);
  for (int64_t d = 0; d < args.head_size; d += 64 / int64_t(sizeof(T))) {
    prefetch_to_write(key + d);
    prefetch_to_write(key + args.v_place + d);
  }
}

template <class T>
void run(const AttentionArgs& args) {
  const Runs<T> runs(args);
  const int threads = team_size(total_work(args), kSerialWork);
  if (runs.tiles > 1 || args.writes_only)
    parallel_for(runs.heads, 1, threads, [&](int64_t bh) {
      write_cache<T>(args, bh / args.kv_heads, bh % args.kv_heads);
    });
  if (args.writes_only) return;
  const int64_t some = items_at_once(runs.count(), threads);
  parallel_for((runs.count() + some - 1) / some, 1, threads, [&](int64_t claim) {
    thread_local Scratch scratch;
    const int64_t end = std::min(runs.count(), (claim + 1) * some);
    for (int64_t item = claim * some; item < end; ++item) {
      const QueryRun run = runs.at(item);
      if (runs.tiles == 1) write_cache<T>(args, run.batch, run.head);
      const int64_t next = std::min(item + to_own_next(item, some, threads), runs.count() - 1);
      if (runs.tiles == 1) fetch_to_write<T>(args, runs.at(next));
      const Pages<T> pages = runs.pages(item, next);
      attend<T>(args, scratch, pages, run);
    }
  });
}

}  // namespace

void causal_attention(const AttentionArgs& args) {
  if (args.batch == 0 || args.length == 0 || args.kv_heads == 0 || args.group == 0) return;
  with_stored_type(args, [&]<class T>() { run<T>(args); });
}

}  // namespace rbln
