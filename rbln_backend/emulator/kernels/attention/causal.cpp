// Causal attention over the paged KV cache: writes the new keys and values, then attends.
#include "attention/amx.h"

namespace rbln {
namespace {

// The keys of one request and head, through its block table.
template <class T>
class Pages {
 public:
  Pages(const AttentionArgs& args, int64_t batch, int64_t head)
      : args_(args), table_(args.tables + batch * args.table_width),
        cache_(static_cast<T*>(args.cache) + head * args.cache_stride.head) {}

  int64_t reach() const { return args_.table_width * args_.block_size; }

  T* row(int64_t position) const {
    return row(position / args_.block_size, position % args_.block_size);
  }

  void locate(int64_t begin, int64_t count, KeyTile<T>& tile) const {
    const int64_t block_size = args_.block_size, stride = args_.cache_stride.slot;
    int64_t page = begin / block_size, slot = begin % block_size;
    tile.value_stride = slot + count <= block_size ? stride : 0;
    tile.keys[0] = row(page, slot);
    for (int64_t i = 1; i < count; ++i) {
      const bool turn = ++slot == block_size;
      if (turn) slot = 0;
      tile.keys[i] = turn ? row(++page, 0) : tile.keys[i - 1] + stride;
    }
    const int64_t apart = tile.value_stride == 0 ? count : 1;
    for (int64_t i = 0; i < apart; ++i) tile.values[i] = tile.keys[i] + args_.cache_stride.kv;
    const bool turn = ++slot == block_size && page + 1 < args_.table_width;
    tile.fetch_values = tile.values[0];
    tile.fetch_keys = turn ? row(page + 1, 0) : tile.keys[count - 1];
  }

 private:
  T* row(int64_t page, int64_t slot) const {
    return cache_ + table_[page] * args_.cache_stride.block + slot * args_.cache_stride.slot;
  }

  const AttentionArgs& args_;
  const int64_t* table_;
  T* cache_;
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

template <class T>
void run(const AttentionArgs& args) {
  const int64_t tokens = tokens_per_item(args);
  const int64_t tiles = (args.length + tokens - 1) / tokens;
  const int64_t heads = args.batch * args.kv_heads;
  const int threads = team_size(total_work(args), kSerialWork);
  if (tiles > 1)
    parallel_for(heads, 1, threads, [&](int64_t bh) {
      write_cache<T>(args, bh / args.kv_heads, bh % args.kv_heads);
    });
  parallel_for(heads * tiles, 1, threads, [&](int64_t item) {
    thread_local Scratch scratch;
    // The last query tiles see the most keys: they go first.
    const int64_t bh = item % heads, first = (tiles - 1 - item / heads) * tokens;
    const int64_t batch = bh / args.kv_heads, head = bh % args.kv_heads;
    if (tiles == 1) write_cache<T>(args, batch, head);
    const Pages<T> pages(args, batch, head);
    const int64_t count = std::min(tokens, args.length - first);
    const int64_t window = args.window == 0 ? kUnlimited : args.window;
    const QueryRun run{batch, head, first, count, args.starts[batch], pages.reach(), window};
    attend<T>(args, scratch, pages, run);
  });
}

}  // namespace

void causal_attention(const AttentionArgs& args) {
  if (args.batch == 0 || args.length == 0 || args.kv_heads == 0 || args.group == 0) return;
  with_stored_type(args, [&]<class T>() { run<T>(args); });
}

}  // namespace rbln
