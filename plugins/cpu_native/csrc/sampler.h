// Samples and takes logprobs of logits that others have computed, rows shared among threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "sampling.h"
#include "team.h"

namespace {

struct Sampler {
  int threads;
  std::mutex busy;
  std::unique_ptr<Team> team;  // once a batch has more than one row
  std::vector<SampleSpace> space;

  // f(row, memory) for all rows, by as many threads as there is work for.
  template <class F>
  void each_row(int rows, int vocab, F&& f) {
    std::lock_guard<std::mutex> lock(busy);
    space.resize(threads);
    const bool alone = rows < 2 || threads < 2;
    for (int i = 0; i < (alone ? 1 : threads); ++i) space[i].need(vocab);
    if (alone) {
      for (int row = 0; row < rows; ++row) f(row, space[0]);
      return;
    }
    if (!team) team = std::make_unique<Team>(threads);
    std::atomic<int> next{0};
    team->run([&](int id) {
      for (int row; (row = next.fetch_add(1, std::memory_order_relaxed)) < rows;) f(row, space[id]);
    });
  }
};

}  // namespace

extern "C" {

void* pb_sampler_create(int threads) {
  try {
    return new Sampler{threads, {}, {}, {}};
  } catch (...) {
    return nullptr;
  }
}

void pb_sampler_destroy(void* handle) { delete static_cast<Sampler*>(handle); }

// Tokens (or a Failure) of logits [rows, vocab], which may be changed. 0, or 1 where memory does not suffice.
int pb_sample(void* handle, float* logits, int64_t stride, int rows, int vocab, const PbSampling* sampling,
              int64_t* tokens) {
  try {
    static_cast<Sampler*>(handle)->each_row(rows, vocab, [&](int row, SampleSpace& space) {
      tokens[row] =
          sample_row(logits + row * stride, vocab, row_params(*sampling, row), mask_of(*sampling, row), space);
    });
    return 0;
  } catch (...) {
    return 1;
  }
}

// Logarithms of the sums of e^logit, double [rows], and of each row the `tops[row]` largest logits and their ids, in
// [rows, width]. 0; 1 where memory does not suffice; 2 where a row's largest logit is not finite or one is NaN.
int pb_log_sums(void* handle, float* logits, int64_t stride, int rows, int vocab, const int32_t* tops, int width,
                double* log_sums, float* values, int64_t* ids) {
  std::atomic<int> code{0};
  try {
    static_cast<Sampler*>(handle)->each_row(rows, vocab, [&](int r, SampleSpace& space) {
      SampledRow row{logits + r * stride, vocab, space};
      if (row.survey() || !(std::fabs(row.peak) <= FLT_MAX)) {
        code = 2;
        return;
      }
      row.set_temperature(1.0f);
      log_sums[r] = double(row.peak) + std::log(row.mass_where(SampledRow::everything));
      if (!tops[r]) return;
      row.head(tops[r], -INFINITY);
      for (int i = 0; i < tops[r]; ++i) {
        const int id = id_of(space.places[i]);
        values[int64_t(r) * width + i] = row.x[id];
        ids[int64_t(r) * width + i] = id;
      }
    });
    return code;
  } catch (...) {
    return 1;
  }
}

}  // extern "C"
