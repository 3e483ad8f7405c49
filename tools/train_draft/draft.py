"""The draft head in torch, and its pass of test-time training.

EAGLE-3 (Li et al. 2025): one decoder layer reads the embedding of a token beside a state that stands for all tokens
before it, and predicts the next token. First that state is mixed from three states of the model; for each further token
it is the layer's own output. So a head that drafts well has to see its own outputs while it is trained, which is what
`Draft.steps` gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pegboard.toolkit.model.layers import activation
from pegboard.toolkit.model.rope import RotaryEmbedding, apply_rope
from pegboard.toolkit.model.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of a head, in elements. `taps` are the places of the model's states that it reads, see `Taps`."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    eps: float
    act: str
    rope: RopeSpec
    taps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences side by side. Entry i of a sequence is its token i + 1 beside the model's states of token i.

    `embeddings` [entries, hidden] and `states` [entries, taps x hidden] are float32; `lengths` are the sequences'
    numbers of entries.
    """

    embeddings: Tensor
    states: Tensor
    lengths: tuple[int, ...]

    def places(self) -> Tensor:
        """Return int64 [entries]: the place of each entry in its sequence, which is its position for rotations."""
        return torch.cat([torch.arange(length) for length in self.lengths])


class _Norm(nn.Module):
    """A root mean square norm in float32, whatever the products are in."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight, self._eps)


class _SelfAttention(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)
        self._act = activation(shape.act)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = _Norm(shape.hidden, shape.eps)
        self.hidden_norm = _Norm(shape.hidden, shape.eps)
        self.self_attn = _SelfAttention(shape)
        self.post_attention_layernorm = _Norm(shape.hidden, shape.eps)
        self.mlp = _Mlp(shape)


class Draft(nn.Module):
    """The head. Its parameters have the names that SpecForge and SGLang give them."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = _Norm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self._rope = RotaryEmbedding(shape.rope)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits float32 [n, draft vocabulary] of the layer's outputs [n, hidden]."""
        out: Tensor = self.lm_head(self.norm(states)).float()
        return out

    def steps(self, pack: Pack, count: int) -> Iterator[Tensor]:
        """Yield the layer's outputs [entries, hidden] for the first, second ... `count`-th drafted token.

        In step j an entry stands for the j-th token (from 0) that was drafted behind entry i - j: the state that it
        reads is the output of step j - 1 for the entry before it. It sees what it would see when drafting: entries up
        to i - j as they are after the model's own pass (keys of step 0), and behind them those of its own branch, the
        key of step s standing at entry i - j + s. The first j entries of a sequence have nothing to stand behind in
        step j; what comes out there means nothing and reaches no other entry.
        """
        place = pack.places()
        cos, sin = self._rope(place, torch.float32)
        attention = _Branches(pack.lengths, place, self.shape)
        state = self.fc(pack.states)
        for _ in range(count):
            state = self._layer(pack.embeddings, state, cos, sin, attention)
            yield state
            state = state.roll(1, 0)

    def _layer(self, embeddings: Tensor, state: Tensor, cos: Tensor, sin: Tensor, attention: _Branches) -> Tensor:
        layer, shape = self.midlayer, self.shape
        x = torch.cat((layer.input_layernorm(embeddings), layer.hidden_norm(state)), dim=1)
        own = layer.self_attn
        q = apply_rope(own.q_proj(x).view(-1, shape.heads, shape.head_dim), cos, sin)
        k = apply_rope(own.k_proj(x).view(-1, shape.kv_heads, shape.head_dim), cos, sin)
        v = own.v_proj(x).view(-1, shape.kv_heads, shape.head_dim)
        state = state + own.o_proj(attention.attend(q, k, v).flatten(1))
        out: Tensor = state + layer.mlp(layer.post_attention_layernorm(state))
        return out


class _Branches:
    """Attention of one step after another; see `Draft.steps`."""

    def __init__(self, lengths: Sequence[int], place: Tensor, shape: DraftShape) -> None:
        self._lengths = list(lengths)
        self._place = place
        self._group = shape.heads // shape.kv_heads
        self._scale = shape.head_dim**-0.5
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [entries, heads, head_dim] of the next step's q [entries, heads, head_dim], k and v [entries,
        kv_heads, head_dim].
        """
        self._keys.append(k.repeat_interleave(self._group, 1))
        self._values.append(v.repeat_interleave(self._group, 1))
        step = len(self._keys) - 1
        q = q * self._scale
        # The branch's own keys: one of each step but the first, at a fixed distance, so no product of all by all.
        back = range(step - 1, -1, -1)
        own_keys = [key.roll(away, 0) for away, key in zip(back, self._keys[1:], strict=True)]
        own_values = [value.roll(away, 0) for away, value in zip(back, self._values[1:], strict=True)]
        own = [
            (q * key).sum(-1).float().masked_fill(self._place[:, None] < away, float("-inf"))
            for away, key in zip(back, own_keys, strict=True)
        ]
        weights = self._weights(q, own, step)
        found = torch.cat(
            [
                (of[..., : of.shape[1]].to(value.dtype) @ value.transpose(0, 1)).transpose(0, 1)
                for of, value in zip(weights, torch.split(self._values[0], self._lengths), strict=True)
            ]
        )
        if step:
            branch = torch.cat([of[..., of.shape[1] :].transpose(0, 1) for of in weights])
            for index, value in enumerate(own_values):
                found = found + branch[..., index, None].to(value.dtype) * value
        return found

    def _weights(self, q: Tensor, own: list[Tensor], step: int) -> list[Tensor]:
        """Return for each sequence float32 [heads, entries, entries + step]: weights of the first step's keys, then of
        those of the branch.
        """
        branch = torch.split(torch.stack(own, -1), self._lengths) if own else [None] * len(self._lengths)
        found = []
        parts = zip(torch.split(q, self._lengths), torch.split(self._keys[0], self._lengths), branch, strict=True)
        for queries, keys, further in parts:
            scores = (queries.transpose(0, 1) @ keys.permute(1, 2, 0)).float()
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 - step)
            scores = scores.masked_fill(hidden, float("-inf"))
            if further is not None:
                scores = torch.cat((scores, further.transpose(0, 1)), dim=-1)
            found.append(scores.softmax(-1))
        return found
