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

// Packs a matrix of [n, k], row i of which is row `at(i).row` of `parts[at(i).part]`, of `count`; a part below 0 stands
// for zeros. All parts are numbers, or codes of one Format.
struct At {
  int part, row;
};
template <class Fn>
inline void pack_parts(Team& team, Arena& arena, Matrix& to, int n, int k, Wanted wanted, const PbWeights* parts,
                       int count, Fn&& at) {
  if (!parts[0].words)
    return to.pack(team, arena, n, k, wanted, [&](int i) -> const bf16* {
      const At from = at(i);
      return from.part < 0 ? nullptr : static_cast<const bf16*>(parts[from.part].numbers) + size_t(from.row) * k;
    });
  const Format f = Format(parts[0].format);
  int group = parts[0].group ? parts[0].group : round_up(k, KB);
  for (int i = 1; i < count; ++i)
    if (parts[i].group != parts[0].group) group = 0;
  to.take(team, arena, n, k, f, group, [&](int i) -> CodedRow {
    const At from = at(i);
    if (from.part < 0) return {};
    const PbWeights& part = parts[from.part];
    const int group = part.group ? part.group : round_up(k, KB), groups = (k + group - 1) / group;
    const size_t bytes = in_nibbles(f) ? k / 2 : k;
    return {static_cast<const uint8_t*>(part.numbers) + from.row * bytes, part.words + size_t(from.row) * groups,
            group};
  });
}

// `parts` are q, k and v; gate and up; or one. Gate, up and down may be those of an expert, which is below 0 for none.
inline void pack_site(Model& m, int index, Site site, int expert, const PbWeights* parts) {
  const int hidden = m.shape.hidden, q = m.q_size(), kv = m.kv_size();
  const int inter = expert < 0 ? m.shape.inter : m.shape.expert_inter;
  if (expert >= 0) m.layers[index].experts.resize(m.shape.experts);
  const auto pack = [&](Matrix& to, int n, int k, auto&& at) {
    const int count = site == SITE_QKV ? 3 : site == SITE_GATE_UP ? 2 : 1;
    pack_parts(m.team, m.arena, to, n, k, Wanted(m.shape.wanted), parts, count, at);
  };
  const auto whole = [](int i) { return At{0, i}; };
  switch (site) {
    case SITE_QKV:
      return pack(m.layers[index].qkv, q + 2 * kv, hidden, [&](int i) {
        return i < q ? At{0, i} : i < q + kv ? At{1, i - q} : At{2, i - q - kv};
      });
    case SITE_O: return pack(m.layers[index].o, hidden, q, whole);
    case SITE_GATE_UP:  // 16 rows of the gate, then the same 16 of the other
      return pack(expert < 0 ? m.layers[index].gate_up : m.layers[index].experts[expert].gate_up,
                  round_up(inter, 16) * 2, hidden, [&](int i) {
                    const int row = i / 32 * 16 + i % 16;
                    return At{row < inter ? i % 32 / 16 : -1, row};
                  });
    case SITE_DOWN:
      return pack(expert < 0 ? m.layers[index].down : m.layers[index].experts[expert].down, hidden, inter, whole);
    case SITE_HEAD: return pack(m.head, m.shape.vocab, hidden, whole);
  }
}

// Norms and biases, once the matrices are packed.
inline void keep_vectors(const Model& m, Layer& layer, const PbVectors& w) {
  const int hidden = m.shape.hidden, dim = m.shape.head_dim, q = m.q_size(), kv = m.kv_size();
  keep(layer.norm1, w.norm1, hidden, hidden);
  keep(layer.norm2, w.norm2, hidden, hidden);
  keep(layer.q_norm, w.q_norm, dim, dim);
  keep(layer.k_norm, w.k_norm, dim, dim);
  keep(layer.o_bias, w.o_bias, hidden, layer.o.n_pad);
  keep(layer.down_bias, w.down_bias, hidden, layer.down.n_pad);
  keep(layer.router, w.router, m.shape.experts * hidden, m.shape.experts * hidden);
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
