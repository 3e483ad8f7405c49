"""The head's pass of test-time training against drafting one token after another, and its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pegboard.toolkit.model.rope import RotaryEmbedding, apply_rope
from pegboard.toolkit.model.rope_spec import RopeSpec
from pegboard.tools.train_draft.data import Vocabulary, plan
from pegboard.tools.train_draft.draft import Draft, DraftShape, Pack
from pegboard.tools.train_draft.settings import LOSS_DECAY
from pegboard.tools.train_draft.states import SequenceStates
from pegboard.tools.train_draft.train import Batches, batch_loss

SHAPE = DraftShape(16, 24, 4, 2, 8, 40, 11, 1e-5, "silu", RopeSpec(8, 100.0, 64), (1, 2, 3))


def make_draft() -> Draft:
    torch.manual_seed(3)
    draft = Draft(SHAPE)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (weight.dim() == 1))
    return draft


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + SHAPE.eps) * weight


class Drafting:
    """One sequence, as it is served: entries with keys and values, in the order in which they are written."""

    def __init__(self, draft: Draft, embeddings: Tensor, states: Tensor) -> None:
        self.weights = {name: weight.detach() for name, weight in draft.named_parameters()}
        self.embeddings = embeddings
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.outputs = [self.step(states[i] @ self.weights["fc.weight"].T, i) for i in range(len(states))]
        """Of each entry, from the model's own states."""

    def step(self, state: Tensor, place: int) -> Tensor:
        """Write the entry at `place`, whose token is the sequence's, and return the layer's output."""
        w = {name.removeprefix("midlayer."): weight for name, weight in self.weights.items()}
        x = torch.cat((norm(self.embeddings[place], w["input_layernorm.weight"]), norm(state, w["hidden_norm.weight"])))
        cos, sin = RotaryEmbedding(SHAPE.rope)(torch.tensor([place]), torch.float32)
        q, k = (
            apply_rope((x @ w[f"self_attn.{name}_proj.weight"].T).view(1, -1, 8), cos, sin)[0] for name in ("q", "k")
        )
        self.keys.append(k)
        self.values.append((x @ w["self_attn.v_proj.weight"].T).view(-1, 8))
        heads = []
        for head in range(SHAPE.heads):
            keys = torch.stack([one[head // 2] for one in self.keys])
            values = torch.stack([one[head // 2] for one in self.values])
            heads.append((keys @ q[head] / 8**0.5).softmax(-1) @ values)
        state = state + torch.cat(heads) @ w["self_attn.o_proj.weight"].T
        y = norm(state, w["post_attention_layernorm.weight"])
        gated = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        return state + gated @ w["mlp.down_proj.weight"].T

    def branch(self, entry: int, steps: int) -> list[Tensor]:
        """Draft from an entry: the outputs of `steps` steps, the drafted tokens being those of the sequence."""
        keys, values = self.keys, self.values
        self.keys, self.values = keys[: entry + 1], values[: entry + 1]
        found = [self.outputs[entry]]
        for step in range(1, steps):
            found.append(self.step(found[-1], entry + step))
        self.keys, self.values = keys, values
        return found


def test_steps_are_what_drafting_computes() -> None:
    """Each branch of each sequence of a pack: 7 steps behind every entry that has as many tokens after it."""
    draft, steps, lengths = make_draft(), 7, (9, 1, 12)
    embeddings, states = torch.randn(sum(lengths), 16), torch.randn(sum(lengths), 48)
    found = [one.detach() for one in draft.steps(Pack(embeddings, states, lengths), steps)]
    compared = start = 0
    for length in lengths:
        here = slice(start, start + length)
        drafting = Drafting(draft, embeddings[here], states[here])
        for entry in range(length):
            for step, expected in enumerate(drafting.branch(entry, min(steps, length - entry))):
                torch.testing.assert_close(found[step][start + entry + step], expected, atol=1e-5, rtol=1e-5)
                logits = norm(expected, drafting.weights["norm.weight"]) @ drafting.weights["lm_head.weight"].T
                torch.testing.assert_close(
                    draft.logits(found[step][start + entry + step]).detach(), logits, atol=1e-4, rtol=1e-4
                )
                compared += 1
        start += length
    assert compared == 7 * 3 + sum(range(1, 7)) + 1 + 7 * 6 + sum(range(1, 7))


def sequence(length: int, prompt: int, seed: int) -> SequenceStates:
    torch.manual_seed(seed)
    tops = torch.stack([torch.randperm(SHAPE.vocab)[:5] for _ in range(length - prompt)]).int()
    shares = torch.rand(length - prompt, 5) / 5
    return SequenceStates(torch.randint(0, SHAPE.vocab, (length,)), prompt, torch.randn(length, 48), tops, shares)


def test_the_loss_is_the_cross_entropy_with_the_models_distribution() -> None:
    """Written out position by position, with a gradient by torch itself."""
    draft, steps = make_draft(), 3
    vocabulary = Vocabulary(torch.tensor([0, 2, 3, 5, 8, 13, 21, 30, 31, 33, 39]), SHAPE.vocab)
    table = torch.randn(SHAPE.vocab, 16)
    batches = Batches(torch.arange(SHAPE.vocab), table, vocabulary)
    sequences = [sequence(9, 3, 1), sequence(6, 1, 2), sequence(3, 2, 3)]
    loss, hits = batch_loss(draft, batches.make(sequences), steps)
    loss.backward()
    gradients = [weight.grad.clone() for weight in draft.parameters() if weight.grad is not None]
    draft.zero_grad()

    number = {token: index for index, token in enumerate(vocabulary.ids.tolist())}
    sums, counts, right = [torch.zeros(())] * steps, [0] * steps, [0] * steps
    for one in sequences:
        pack = Pack(table[one.ids[1:-1]], one.taps[:-2], (one.entries,))
        for step, states in enumerate(draft.steps(pack, steps)):
            for token in range(max(1, one.prompt - 1), one.ids.shape[0] - 1):
                if token - 1 < step:
                    continue
                logs = draft.logits(states[token - 1]).log_softmax(-1)
                row = token - one.prompt + 1
                for top, share in zip(one.tops[row].tolist(), one.shares[row], strict=True):
                    if top in number:
                        sums[step] = sums[step] - share * logs[number[top]]
                counts[step] += 1
                right[step] += number.get(int(one.tops[row][0])) == int(logs.argmax())
    weights = [LOSS_DECAY**step for step in range(steps)]
    expected = sum(w * s / n for w, s, n in zip(weights, sums, counts, strict=True)) / sum(weights)
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(loss, expected)
    assert hits == [F.relu(torch.tensor(r / n)).item() for r, n in zip(right, counts, strict=True)]
    expected.backward()
    for found, weight in zip(gradients, draft.parameters(), strict=True):
        torch.testing.assert_close(found, weight.grad, atol=1e-6, rtol=1e-4)


def test_the_draft_vocabulary() -> None:
    answers = [[7, 7, 7, 30, 5], [30, 5, 2, 39]]
    vocabulary = Vocabulary.most_frequent(answers, 4, SHAPE.vocab)
    assert vocabulary.ids.tolist() == [2, 5, 7, 30]
    assert (vocabulary.d2t() + torch.arange(4)).tolist() == vocabulary.ids.tolist()
    assert vocabulary.t2d().nonzero().flatten().tolist() == vocabulary.ids.tolist()
    assert vocabulary.draft_ids()[torch.tensor([2, 30, 3])].tolist() == [0, 3, -1]
    assert len(Vocabulary.most_frequent(answers, 100, SHAPE.vocab)) == 5


def test_every_epoch_has_every_sequence_once() -> None:
    lengths = [5, 0, 7, 30, 2, 9, 9]
    found = plan(lengths, 3, 16, 5)
    assert found == plan(lengths, 3, 16, 5) != plan(lengths, 3, 16, 6)
    flat = [index for batch in found for index in batch]
    epochs = [flat[start : start + 6] for start in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [[0, 2, 3, 4, 5, 6]] * 3
    assert epochs[0] != epochs[1]
    assert all(len(batch) == 1 or sum(lengths[index] for index in batch) <= 16 for batch in found)
