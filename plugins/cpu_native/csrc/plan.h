// What the attention of one step consists of: tasks that threads take, the same for every layer.
//
// A task lets some queries look at a range of positions of one request. Requests whose tables begin with the same slots
// (the prefix cache has let them share) look at that beginning together, in one task with the queries of all of them:
// its keys and values are read once. Long ranges are cut where there would be too few tasks for the threads. Either way
// a query may get its answer in parts, each with its own largest score and sum of weights, which the last to finish
// puts together.
//
// Where a request has a tail, the last of its keys, tokens see some of these only: Attention knows which. A tail is
// looked at by its own request's queries alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

namespace {

struct Task {
  int request;       // whose row of the table says where keys and values are
  int begin, end;    // where these stand in its row; a query sees none behind its last one
  int head, heads;   // KV heads
  int first, count;  // queries: packed tokens, Plan::queries[first, first + count)
  int part;          // which of its queries' parts this is
  double cost;
};

class Plan {
 public:
  std::vector<Task> tasks;  // most expensive first
  std::vector<int32_t> queries;
  std::vector<int32_t> last;   // of each packed token: where the last key stands that it may see
  std::vector<int32_t> place;  // of each packed token: how many tokens precede it; `last`, but in a tail
  std::vector<int32_t> parts;  // of each packed token
  std::vector<int64_t> base;   // its first part, counted through
  bool split = false;          // a query gets more than one part
  int64_t total_parts = 0;

  struct Input {
    const int64_t *rows, *seq_lens, *starts, *tails, *bits;  // the last two may be null
    const int32_t* table;
    int64_t stride;
    int batch, tokens, kv_heads, group, threads;
  };

  void make(const Input& input) {
    in_ = &input;
    items_.clear();
    leaves_.assign(input.batch, Leaf{});
    last.resize(input.tokens);
    place.resize(input.tokens);
    parts.assign(input.tokens, 1);
    base.assign(input.tokens, 0);
    queries.clear();
    tasks.clear();
    std::vector<int> sharing;
    for (int r = 0; r < input.batch; ++r) {
      for (int t = start(r); t < start(r + 1); ++t) stand(r, t);
      // Many queries pay for reading their keys by themselves.
      if (before(r) > 0 && count(r) > 0 && count(r) * input.group <= MAX_SHARING_ROWS) sharing.push_back(r);
    }
    if (sharing.size() > 1) share(sharing, 0, 0, -1);
    for (int r = 0; r < input.batch; ++r) add_own(r);
    cut();
    if (size_t(input.tokens) * input.kv_heads > left_size_) {
      left_size_ = size_t(input.tokens) * input.kv_heads;
      left_.reset(new std::atomic<int32_t>[left_size_]);
    }
    total_parts = 0;
    split = false;
    for (int t = 0; t < input.tokens; ++t) {
      base[t] = total_parts;
      if (parts[t] > 1) total_parts += parts[t], split = true;
      for (int h = 0; h < input.kv_heads; ++h) left(t, h).store(parts[t], std::memory_order_relaxed);
    }
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
    in_ = nullptr;
  }

  // The task that a thread gets probably after task `i`.
  const Task* after(int i, int threads) const {
    return size_t(i + threads) < tasks.size() ? &tasks[i + threads] : nullptr;
  }

  // Whether this was the last part of a token and KV head; all of them are visible then. The count is as at first
  // again.
  bool last_part(int token, int head, int kv_heads) {
    std::atomic<int32_t>& left = left_[size_t(token) * kv_heads + head];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
    left.store(parts[token], std::memory_order_relaxed);
    return true;
  }

 private:
  // With as many rows (queries times heads of a group) the tiles are busy: reading keys together would gain nothing.
  static constexpr int MAX_SHARING_ROWS = 64;
  // In something like cycles, as measured: a position for a query that reads it alone, for a task that packs it, and
  // for each 32 rows of that task; a task, and one more part of a query.
  static constexpr double READ = 45, PACK = 60, BLOCK = 25, BEGIN = 2000, PART = 1500;
  static constexpr int MAX_ROWS = 384;               // of a task
  static constexpr int MIN_CUT = 192;                // positions
  static constexpr double EVEN = 4, TOO_BIG = 2.01;  // tasks per thread; what of such a share is cut

  struct Item {
    int request, begin, end, first, count, parent;
    int parts_before, pieces;
  };
  struct Leaf {
    int covered = 0, parent = -1;
  };

  const Input* in_ = nullptr;
  std::vector<Item> items_;
  std::vector<Leaf> leaves_;
  std::unique_ptr<std::atomic<int32_t>[]> left_;
  size_t left_size_ = 0;

  std::atomic<int32_t>& left(int token, int head) { return left_[size_t(token) * in_->kv_heads + head]; }
  int start(int r) const { return int(in_->starts[r]); }
  int count(int r) const { return start(r + 1) - start(r); }
  int tail(int r) const { return in_->tails ? int(in_->tails[r]) : 0; }
  // Keys that every new token sees, but for windows.
  int before(int r) const { return int(in_->seq_lens[r]) - std::max(count(r), tail(r)); }
  const int32_t* slots(int r) const { return in_->table + in_->rows[r] * in_->stride; }

  void stand(int r, int t) {
    const int length = int(in_->seq_lens[r]);
    if (tail(r)) {
      last[t] = length - 1;
      place[t] = length - tail(r) + __builtin_popcountll(uint64_t(in_->bits[t])) - 1;
    } else {
      last[t] = place[t] = length - count(r) + t - start(r);
    }
  }

  // How far b's slots are those of a, from `from` on where they may differ and not beyond `to`.
  int same_until(int a, int b, int from, int to) const {
    const int32_t *x = slots(a), *y = slots(b);
    while (from + 64 <= to && !memcmp(x + from, y + from, 64 * sizeof(int32_t))) from += 64;
    while (from < to && x[from] == y[from]) ++from;
    return from;
  }

  // `members` agree on the first `depth` slots; tasks of `parent` and its parents look at the first `covered` of these.
  void share(std::vector<int>& members, int covered, int depth, int parent) {
    std::vector<int> longer;
    for (const int r : members) {
      leaves_[r] = {covered, parent};
      if (before(r) > depth) longer.push_back(r);
    }
    std::stable_sort(longer.begin(), longer.end(), [&](int a, int b) { return slots(a)[depth] < slots(b)[depth]; });
    for (size_t i = 0, end; i < longer.size(); i = end) {
      for (end = i + 1; end < longer.size() && slots(longer[end])[depth] == slots(longer[i])[depth];) ++end;
      if (end - i < 2) continue;
      std::vector<int> group(longer.begin() + i, longer.begin() + end);
      int common = before(group[0]);
      for (const int r : group) common = same_until(group[0], r, depth, std::min(common, before(r)));
      if (worth_it(group, common - covered)) {
        const int first = int(queries.size());
        for (const int r : group)
          for (int t = start(r); t < start(r + 1); ++t) queries.push_back(t);
        items_.push_back({group[0], covered, common, first, int(queries.size()) - first, parent, 0, 1});
        share(group, common, common, int(items_.size()) - 1);
      } else {
        share(group, covered, common, parent);
      }
    }
  }

  // Whether the queries of a group look at `n` positions together sooner than each request's for themselves.
  bool worth_it(const std::vector<int>& group, int n) const {
    double alone = 0;
    int together = 0;
    for (const int r : group) {
      alone += count(r) == 1 ? READ : packed(count(r));
      together += count(r);
    }
    return (alone - packed(together)) * n > BEGIN + PART * together;
  }

  // A position for a task of `count` queries, per KV head.
  double packed(int count) const { return PACK + BLOCK * ((count * in_->group + 31) / 32); }

  // What no request shares with r, in pieces of its new tokens.
  void add_own(int r) {
    if (!count(r)) return;
    const int most = most_queries();
    for (int t = start(r); t < start(r + 1); t += most) {
      const int n = std::min(most, start(r + 1) - t), first = int(queries.size());
      for (int i = 0; i < n; ++i) queries.push_back(t + i);
      items_.push_back({r, leaves_[r].covered, last[t + n - 1] + 1, first, n, leaves_[r].parent, 0, 1});
    }
  }

  // Queries of one task: their sums stay in the second level's cache. Rows of them fill whole blocks of 32.
  int most_queries() const { return std::max(32, MAX_ROWS / in_->group / 32 * 32); }

  // What `count` of an item's queries cost per KV head, where keys are cut into `pieces`.
  double cost(const Item& item, int count, int pieces) const {
    const double keys = double(item.end - item.begin) / pieces;
    if (count == 1) return PART + READ * keys;
    // Of what is their own they see a triangle less.
    const double unseen = item.end > last[queries[item.first]] ? 0.5 * count / pieces : 0;
    return BEGIN + packed(count) * std::max(1.0, keys - unseen);
  }

  void cut() {
    const int most = most_queries(), threads = in_->threads, kv_heads = in_->kv_heads;
    double total = 0;
    for (const Item& item : items_)
      for (int i = 0; i < item.count; i += most) total += cost(item, std::min(most, item.count - i), 1) * kv_heads;
    const double fair = total / (threads * EVEN);
    for (Item& item : items_) {
      const int keys = item.end - item.begin;
      // All heads of one query together: their keys are neighbours in memory.
      int heads = item.count == 1 ? kv_heads : 1;
      const double whole = cost(item, std::min(most, item.count), 1) * heads;
      int pieces = 1;
      if (whole > TOO_BIG * fair) {
        pieces = std::max(1, std::min(int(whole / fair), keys / MIN_CUT));
        if (pieces > threads) pieces = pieces / threads * threads;
        if (pieces == 1) heads = 1;
      }
      // Parents come before their children.
      if (item.parent >= 0) item.parts_before = items_[item.parent].parts_before + items_[item.parent].pieces;
      item.pieces = pieces;
      const int step = (keys + pieces - 1) / pieces;
      for (int p = 0; p < pieces; ++p)
        for (int i = 0; i < item.count; i += most)
          for (int h = 0; h < kv_heads; h += heads) {
            const int n = std::min(most, item.count - i), begin = std::min(item.end, item.begin + p * step);
            tasks.push_back({item.request, begin, std::min(item.end, begin + step), h, std::min(heads, kv_heads - h),
                             item.first + i, n, item.parts_before + p, cost(item, n, pieces) * heads});
          }
      // A token's last item is its own; what the items before have written is overwritten.
      for (int i = 0; i < item.count; ++i) parts[queries[item.first + i]] = item.parts_before + pieces;
    }
  }
};

}  // namespace
