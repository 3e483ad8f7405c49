"""What a request tells plugins of itself: parameters for the sampler, who asks, and since when it waits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.plugin import Plugin, Provider
from pegboard.core.interfaces.req import ReqTiming
from pegboard.core.interfaces.sampler import Sampler
from pegboard.core.interfaces.sampling import SamplingBatch, SamplingParams
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.sampling.custom_params import read_params
from pegboard.toolkit.sampling.logprobs import token_logprobs

NAME = "fixed"
CONTEXT = 64


class Fixed(msgspec.Struct, forbid_unknown_fields=True):
    token: Annotated[int, msgspec.Meta(ge=0, lt=64)]


class FixedSampler(Sampler):
    """Draws the largest logit, or the token that a request names; notes how many rows it was told of."""

    seen: ClassVar[list[int]] = []

    def wants(self, params: SamplingParams) -> bool:
        return read_params(params, NAME, Fixed) is not None

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        tokens = logits.argmax(-1)
        self.seen.append(len(batch.rows))
        for index, row in enumerate(batch.rows):
            said = row.memo.setdefault(self, read_params(row.params, NAME, Fixed))
            if said is not None:
                tokens[index] = said.token + row.generated
        return tokens

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> Any:
        return token_logprobs(logits, tokens, batch.logprobs)


@pytest.fixture(params=["normal", "overlap"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    sys.modules.setdefault("pegboard_test_asks", sys.modules[__name__])
    sampler = Provider("sampler", NAME, "pegboard_test_asks:FixedSampler", "", provides=frozenset({"params"}), rank=-1)
    registry = Registry.of(*(one.plugin for one in Registry.discover(()).plugins), Plugin("acme", "1", (sampler,)))
    data = {
        "model": {"path": str(tiny_checkpoint(tmp_path, "llama")), "device": "cpu", "context_length": CONTEXT},
        "memory": {"max_total_tokens": CONTEXT},
        "sampler": {"use": NAME},
        "runner": {"use": "layered"},
        "scheduler": {"loop": request.param},
    }
    with Engine(compose(data=data, env={}, registry=registry)) as engine:
        yield engine


def test_a_sampler_gets_parameters_of_requests(engine: Engine) -> None:
    def ask(**extra: Any) -> GenerateRequest:
        return GenerateRequest(prompt="abc", sampling=SamplingParams(max_new_tokens=4, ignore_eos=True, extra=extra))

    FixedSampler.seen.clear()
    plain = engine.run([ask()])[0].token_ids
    assert FixedSampler.seen == [0] * 4, "rows cost something, and nothing was asked for"
    first, second, third = engine.run([ask(), ask(fixed={"token": 7}), ask(fixed={"token": 20})])
    assert first.token_ids == plain
    assert second.token_ids == [7, 8, 9, 10]
    assert third.token_ids == [20, 21, 22, 23]
    for extra, param in (({"token": 64}, ".token"), ({"tokem": 1}, ""), ("x", "")):
        with pytest.raises(InvalidRequest) as caught:
            engine.run([ask(fixed=extra)])
        assert caught.value.param == f"custom_params.fixed{param}"
    with pytest.raises(InvalidRequest, match=r"not a logits processor or sampler .* are: .*fixed"):
        engine.run([ask(other={})])


def test_a_prompt_fills_the_context_where_no_token_is_asked_for(engine: Engine) -> None:
    ids = [(i * 7) % 50 + 3 for i in range(CONTEXT)]

    def ask(prompt: list[int], most: int | None) -> GenerateRequest:
        return GenerateRequest(prompt=prompt, sampling=SamplingParams(max_new_tokens=most), logprobs=0, logprob_start=0)

    for _ in range(2):  # with an empty cache, and with what the first one left
        [answer] = engine.run([ask(ids, 0)])
        assert (answer.token_ids, len(answer.input_logprobs or ())) == ([], CONTEXT)
    assert len(engine.run([ask(ids[1:], None)])[0].token_ids) == 1
    for prompt, most in ((ids, 1), (ids, None), ([*ids, 3], 0)):
        with pytest.raises(InvalidRequest, match=r"prompt is too long: 6[45] tokens > 63 maximum"):
            engine.run([ask(prompt, most)])


def test_waiting_counts_from_the_first_time_in_the_queue() -> None:
    timing = ReqTiming(arrived=3.0)
    assert timing.waiting_since == 3.0
    timing.ready = timing.queued = 5.0
    timing.queued = 9.0
    assert timing.waiting_since == 5.0
