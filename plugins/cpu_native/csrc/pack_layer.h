// Weights of a layer, as the library's caller gives them, into the model's own memory.
#pragma once

#include <algorithm>
#include <vector>

#include "model.h"

namespace {

inline void keep(std::vector<float>& to, const float* from, int n, int n_pad) {
  if (!from) return;
  to.assign(n_pad, 0.0f);
  std::copy(from, from + n, to.begin());
}

inline void pack_matrices(Model& m, Layer& layer, const PbLayerWeights& w) {
  const int hidden = m.shape.hidden, inter = m.shape.inter, q = m.q_size(), kv = m.kv_size();
  const auto pack = [&](Matrix& to, int n, int k, auto&& row) {
    to.pack(m.team, m.arena, n, k, Wanted(m.shape.wanted), row);
  };
  pack(layer.qkv, q + 2 * kv, hidden, [&](int i) {
    if (i < q) return w.q + size_t(i) * hidden;
    return i < q + kv ? w.k + size_t(i - q) * hidden : w.v + size_t(i - q - kv) * hidden;
  });
  pack(layer.o, hidden, q, [&](int i) { return w.o + size_t(i) * q; });
  // 16 rows of the gate, then the same 16 of the other.
  pack(layer.gate_up, round_up(inter, 16) * 2, hidden, [&](int i) {
    const int at = i / 32 * 16 + i % 16;
    return at < inter ? (i % 32 < 16 ? w.gate : w.up) + size_t(at) * hidden : nullptr;
  });
  pack(layer.down, hidden, inter, [&](int i) { return w.down + size_t(i) * inter; });
}

// Norms and biases, once the matrices are packed.
inline void keep_vectors(const Model& m, Layer& layer, const PbLayerWeights& w) {
  const int hidden = m.shape.hidden, dim = m.shape.head_dim, q = m.q_size(), kv = m.kv_size();
  keep(layer.norm1, w.norm1, hidden, hidden);
  keep(layer.norm2, w.norm2, hidden, hidden);
  keep(layer.q_norm, w.q_norm, dim, dim);
  keep(layer.k_norm, w.k_norm, dim, dim);
  keep(layer.o_bias, w.o_bias, hidden, layer.o.n_pad);
  keep(layer.down_bias, w.down_bias, hidden, layer.down.n_pad);
  if (w.q_bias) {
    layer.qkv_bias.assign(layer.qkv.n_pad, 0.0f);
    std::copy(w.q_bias, w.q_bias + q, layer.qkv_bias.begin());
    std::copy(w.k_bias, w.k_bias + kv, layer.qkv_bias.begin() + q);
    std::copy(w.v_bias, w.v_bias + kv, layer.qkv_bias.begin() + q + kv);
  }
  if (w.gate_bias) {
    layer.gate_up_bias.assign(layer.gate_up.n_pad, 0.0f);
    for (int i = 0; i < m.shape.inter; ++i) {
      layer.gate_up_bias[i / 16 * 32 + i % 16] = w.gate_bias[i];
      layer.gate_up_bias[i / 16 * 32 + 16 + i % 16] = w.up_bias[i];
    }
  }
}

}  // namespace
