"""What the suite of ModelRunner puts around a runner: a network that is watched, a sampler and processors that follow a
script, and memory to run over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pegboard.conformance.rig.model_references import OverlaidPrompt, lay_over
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.rig.tails import Tree, as_int64, depths, tree_bits
from pegboard.conformance.sampler import make_sampling
from pegboard.core.interfaces.forward import Additions, ForwardBatch, ForwardMode, ForwardOutput, LogprobOutput, Taps
from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from pegboard.core.interfaces.model_family import Network
from pegboard.core.interfaces.model_runner import ModelRunner
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampler import Sampler, SamplerContext
from pegboard.core.interfaces.sampling import LogprobRequest, SamplingBatch, SamplingParams, SamplingRow

CPU = torch.device("cpu")


class WatchedNetwork(Network):
    """Passes everything on; `tokens` and `rows` list how many tokens and rows of logits each call asked for."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.tokens: list[int] = []
        self.rows: list[int] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.tokens.append(batch.num_tokens)
        return self._network.forward(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return self._network.logits(hidden)


class ScriptedSampler(Sampler):
    """Answers row r with token r + 5, overwrites the logits as it may, and keeps what it was given."""

    def __init__(self, vocab: int) -> None:
        super().__init__(NoOptions(), SamplerContext(vocab, CPU))
        self.seen: list[torch.Tensor] = []
        self.batches: list[SamplingBatch] = []

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        self.seen.append(logits.clone())
        self.batches.append(batch)
        logits.fill_(torch.nan)
        return torch.arange(5, 5 + len(logits))

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        return LogprobOutput(logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))


class ScriptedProcessor(LogitsProcessor):
    """Applies `change` to all logits, and logs its name and what it was prepared with. `idle` has nothing to do."""

    def __init__(
        self, name: str, log: list[tuple[str, Any]], change: Callable[[torch.Tensor], object], idle: bool = False
    ) -> None:
        super().__init__(NoOptions(), LogitsProcessorContext(1, CPU, frozenset()))
        self.name, self.log, self.change, self.idle = name, log, change, idle

    def wants(self, params: SamplingParams) -> bool:
        return True

    def prepare(self, rows: Sequence[SamplingRow]) -> Any:
        self.log.append((f"prepare {self.name}", tuple(rows)))
        return None if self.idle else self

    def apply(self, logits: torch.Tensor, state: Any) -> None:
        assert state is self, "apply() gets what prepare() returned, and is not called where that is None"
        self.log.append((f"apply {self.name}", len(logits)))
        self.change(logits)


class Rig:
    """A runner over memory of its own. Requests are numbered from 0."""

    def __init__(self, runner: ModelRunner, run: PagedRun) -> None:
        self.runner = runner
        self.run = run
        self.pool = run.pool
        self._taps: Taps | None = None
        self.additions: Additions | None = None
        """What the next batch adds to products."""

    def tap(self, places: Sequence[int]) -> Taps:
        """Return what the next batch gives its states to."""
        self._taps = Taps(tuple(places))
        return self._taps

    def step(
        self,
        new: Mapping[int, Sequence[int]],
        rows: Sequence[Mapping[str, Any]] | None = (),
        *,
        sampled: Sequence[int] | None = None,
        decode: bool = False,
        logprobs: Sequence[LogprobRequest | None] = (),
        processed: bool = False,
        allowed: Mapping[int, Sequence[int]] | None = None,
        **wants: bool,
    ) -> ForwardOutput:
        """Run `new` tokens of requests and sample after the last token of each, or of the requests `sampled`.

        `rows` are the sampled rows' parameters as `make_sampling` takes them, greedy by default; None samples nothing.
        `processed` lets the rows take part in logits processors. `allowed` has the tokens that a sampled row may get.
        """
        batch, sampling = self._prepare(new, rows, sampled, decode, logprobs, processed)
        if allowed is not None and sampling is not None:
            sampling.mask_rows = torch.tensor(list(allowed))
            sampling.mask = token_mask(list(allowed.values()), self.run.spec.vocab_size)
        return self.runner.execute(batch, sampling, **wants)

    def run_wanted(
        self,
        new: Mapping[int, Sequence[int]],
        *,
        hidden_rows: Sequence[int] = (),
        logprobs: tuple[Sequence[int], Sequence[int], Sequence[LogprobRequest]] | None = None,
        sampled: Sequence[int] | None = None,
        processed: bool = False,
    ) -> ForwardOutput:
        """As `step`, greedy, with what a batch may want of packed tokens: hidden states of `hidden_rows`; `logprobs`
        are rows, targets and requests of prompts' tokens. Nothing is sampled for an empty `sampled`.
        """
        rows: Sequence[Mapping[str, Any]] | None = () if sampled is None or sampled else None
        batch, sampling = self._prepare(new, rows, sampled, False, (), processed)
        if hidden_rows:
            batch.hidden_rows = torch.tensor(hidden_rows)
        if logprobs is not None:
            batch.logprob_rows, batch.logprob_targets = torch.tensor(logprobs[0]), torch.tensor(logprobs[1])
            batch.logprob_requests = tuple(logprobs[2])
        return self.runner.execute(batch, sampling)

    def followed(
        self, new: Mapping[int, Sequence[int]], *, sampled: Sequence[int] | None = None, decode: bool = False
    ) -> ForwardOutput:
        """As `step`, with logits, where another process draws the tokens."""
        batch, _ = self._prepare(new, (), sampled, decode, (), False)
        return self.runner.execute(batch, None, return_logits=True)

    def in_parts(self, new: Mapping[int, Sequence[int]]) -> Generator[None, None, ForwardOutput]:
        """As `step`, with logits and the runner's pauses; greedy, and sampled after every request's last token."""
        batch, sampling = self._prepare(new, (), None, False, (), False)
        return self.runner.execute_in_parts(batch, sampling, return_logits=True)

    def run_trees(
        self, new: Mapping[int, Sequence[int]], trees: Mapping[int, Tree], *, decode: bool = False
    ) -> ForwardOutput:
        """As `step`, greedy and with logits after every token, where new tokens of some requests are the last nodes of
        `trees`. A tree's other nodes have been computed in the steps before.
        """
        batch = self._batch(new, decode)
        tails, bits, starts = [], [], np.cumsum([0, *(len(tokens) for tokens in new.values())])
        for request, start in zip(new, starts, strict=False):
            tree, count = trees.get(request, ()), len(new[request])
            tails.append(len(tree))
            bits += tree_bits(tree)[-count:] if tree else [0] * count
            if tree:
                first = len(self.run.tokens[request]) - len(tree)
                batch.positions[start : start + count] = first + torch.tensor(depths(tree)[-count:])
        batch.tail_lens_cpu = np.array(tails, dtype=np.int64)
        batch.tail_lens, batch.tail_bits = torch.from_numpy(batch.tail_lens_cpu), torch.from_numpy(as_int64(bits))
        if not decode:
            batch.forward_mode, batch.logits_indices = ForwardMode.TARGET_VERIFY, torch.arange(batch.num_tokens)
        sampling = make_sampling([{} for _ in range(batch.num_tokens)], self.run.spec.vocab_size)
        return self.runner.execute(batch, sampling, return_logits=True)

    def overlaid(
        self,
        new: Mapping[int, OverlaidPrompt],
        rows: Sequence[Mapping[str, Any]] | None = (),
        *,
        sampled: Sequence[int] | None = None,
    ) -> ForwardOutput:
        """As `step`, with logits, of prompts with states in place of some embeddings."""
        batch, sampling = self._prepare_overlaid(new, rows, sampled)
        return self.runner.execute(batch, sampling, return_logits=rows is not None)

    def overlaid_in_parts(self, new: Mapping[int, OverlaidPrompt]) -> Generator[None, None, ForwardOutput]:
        """As `in_parts`, of such prompts."""
        return self.runner.execute_in_parts(*self._prepare_overlaid(new, (), None))

    def decode_at(self, new: Mapping[int, int], positions: Sequence[int]) -> ForwardOutput:
        """Run a decode step, with logits, whose tokens stand at `positions`."""
        batch, sampling = self._prepare({request: [token] for request, token in new.items()}, (), None, True, (), False)
        batch.positions = torch.tensor(positions)
        return self.runner.execute(batch, sampling, return_logits=True)

    def _batch(self, new: Mapping[int, Sequence[int]], decode: bool) -> ForwardBatch:
        batch = self.run.batch(new, decode=decode)
        batch.taps, self._taps = self._taps, None
        batch.additions, self.additions = self.additions, None
        return batch

    def _prepare_overlaid(
        self,
        new: Mapping[int, OverlaidPrompt],
        rows: Sequence[Mapping[str, Any]] | None,
        sampled: Sequence[int] | None,
    ) -> tuple[ForwardBatch, SamplingBatch | None]:
        tokens = {request: part.tokens for request, part in new.items()}
        batch, sampling = self._prepare(tokens, rows, sampled, False, (), False)
        lay_over(batch, list(new.values()), self.pool.keys(0).dtype)
        return batch, sampling

    def _prepare(
        self,
        new: Mapping[int, Sequence[int]],
        rows: Sequence[Mapping[str, Any]] | None,
        sampled: Sequence[int] | None,
        decode: bool,
        logprobs: Sequence[LogprobRequest | None],
        processed: bool,
    ) -> tuple[ForwardBatch, SamplingBatch | None]:
        batch = self._batch(new, decode)
        chosen = list(new) if sampled is None else list(sampled)
        if not decode:
            ends = dict(zip(new, np.cumsum([len(tokens) for tokens in new.values()]) - 1, strict=True))
            batch.logits_indices = torch.tensor(
                [int(ends[one]) for one in chosen] if rows is not None else [], dtype=torch.int64
            )
        if rows is None:
            return batch, None
        sampling = make_sampling(rows or [{} for _ in chosen], self.run.spec.vocab_size, logprobs=logprobs)
        if processed:
            sampling.rows = tuple(
                SamplingRow(SamplingParams(), np.array(new[one], dtype=np.int64), np.empty(0, dtype=np.int64))
                for one in chosen
            )
        return batch, sampling


def token_mask(allowed: Sequence[Sequence[int]], vocab: int) -> torch.Tensor:
    """Return rows of `SamplingBatch.mask` with the bits of these tokens."""
    bits = np.zeros((len(allowed), -(-vocab // 32) * 32), np.uint8)
    for row, tokens in enumerate(allowed):
        bits[row, list(tokens)] = 1
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
