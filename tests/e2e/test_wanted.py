"""What requests may want beside tokens: logprobs of the prompt, hidden states, embeddings. transformers is the
reference, whatever is chunked, cached, split, retracted or overlapped on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams
from tests.token_prompts import prompt_ids

TOLERANCE = 1e-3

TIGHT = 104
"""Tokens of a pool that a few requests outgrow."""


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", num_hidden_layers=3)


@cache
def _model(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


class Reference:
    """transformers in float32."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = _model(checkpoint)

    @torch.inference_mode()
    def run(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs [len, vocab] and hidden states after the final norm [len, hidden]."""
        output = self.model(torch.tensor([ids]), output_hidden_states=True)
        return output.logits[0].float().log_softmax(-1), output.hidden_states[-1][0].float()


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def config(checkpoint: Path, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"path": str(checkpoint), "dtype": "float32", "device": "cpu", "hidden_states": True},
        "attention": {"use": "torch"},
        "log_level": "warning",
        "memory": {"max_total_tokens": 2048},
    }
    for key, value in more.items():
        base[key] = {**base.get(key, {}), **value}
    return base


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"scheduler": {"chunked_prefill_size": 16}},
    "chunks-overlap": {"scheduler": {"chunked_prefill_size": 16, "loop": "overlap"}},
    "mixed-pages": {"scheduler": {"chunked_prefill_size": 16, "mixed_chunk": True}, "memory": {"page_size": 16}},
    "split": {"scheduler": {"split_prefill_layers": 1, "chunked_prefill_size": 32}},
    "no-cache": {"prefix_cache": {"use": "none"}},
    "tight": {
        "memory": {"max_total_tokens": TIGHT},
        "scheduler": {"chunked_prefill_size": 16, "estimate_max_new_tokens": 1},
    },
}


@pytest.fixture(scope="module", params=ARRANGEMENTS, ids=str)
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Engine]:
    with Engine.from_config(config(checkpoint, **ARRANGEMENTS[request.param])) as made:
        yield made


def prompts(engine: Engine, lengths: tuple[int, ...] = (61, 40, 7, 1)) -> list[list[int]]:
    """Prompts whose beginnings are shared, so that later ones find something cached."""
    draw = np.random.default_rng(3)
    stem = draw.integers(3, engine.info.vocab_size, size=30).tolist()
    return [(stem + draw.integers(3, engine.info.vocab_size, size=n).tolist())[-n:] for n in lengths[2:]] + [
        stem + draw.integers(3, engine.info.vocab_size, size=n - 30).tolist() for n in lengths[:2]
    ]


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True)


class TestPromptLogprobs:
    def test_like_transformers(self, engine: Engine, reference: Reference) -> None:
        """Twice, so that the second time all prompts are cached; several requests at once, some of them plain."""
        asked = prompts(engine)
        for _ in range(2):
            starts = [0, None, 0, 35]
            requests = [
                GenerateRequest(
                    prompt=prompt,
                    sampling=greedy(20),
                    logprobs=None if start is None else 2,
                    logprob_start=start if start is None or start < len(prompt) else 0,
                    token_ids_logprob=() if start is None else (5, 9),
                )
                for prompt, start in zip(asked, starts, strict=True)
            ]
            for request, answer in zip(requests, engine.run(requests), strict=True):
                self.check(request, answer, reference)

    def check(self, request: GenerateRequest, answer: Any, reference: Reference) -> None:
        prompt, start = prompt_ids(request), request.logprob_start
        assert len(answer.token_ids) == request.sampling.max_new_tokens or not request.sampling.ignore_eos
        if start is None:
            assert answer.input_logprobs is None
            return
        table, _ = reference.run([*prompt, *answer.token_ids])
        found = answer.input_logprobs
        assert [token for _, token, _ in found] == prompt[start:]
        for position, (value, token, tops) in enumerate(found, start):
            if position == 0:
                assert value is None
                assert tops == []
                continue
            row = table[position - 1]
            assert value == pytest.approx(float(row[token]), abs=TOLERANCE)
            assert [one for one, _ in tops[:2]] == pytest.approx(row.topk(2).values.tolist(), abs=TOLERANCE)
            assert [token for _, token in tops[2:]] == [5, 9]
            assert [one for one, _ in tops[2:]] == pytest.approx(row[[5, 9]].tolist(), abs=TOLERANCE)
        for position, (value, token, _) in enumerate(answer.logprobs, len(prompt)):
            assert value == pytest.approx(float(table[position - 1][token]), abs=TOLERANCE)

    def test_scoring_without_generating(self, engine: Engine, reference: Reference) -> None:
        (prompt,) = prompts(engine)[-1:]
        (answer,) = engine.generate([prompt], greedy(0), logprobs=0, logprob_start=0)
        table, _ = reference.run(prompt)
        expected = [float(table[i][token]) for i, token in enumerate(prompt[1:])]
        assert [value for value, _, _ in answer.input_logprobs][1:] == pytest.approx(expected, abs=TOLERANCE)  # type: ignore[union-attr]
        assert answer.token_ids == []

    def test_streamed_once(self, engine: Engine) -> None:
        chunks = list(engine.stream(prompts(engine)[2], greedy(4), logprobs=0, logprob_start=50))
        assert [chunk.input_logprobs is not None for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
        assert len(chunks[0].input_logprobs or ()) == 11

    @pytest.mark.parametrize("start", [-1, 61])
    def test_start_is_in_the_prompt(self, engine: Engine, start: int) -> None:
        with pytest.raises(InvalidRequest, match="logprob_start must be from 0 to 60") as caught:
            engine.generate([prompts(engine)[2]], greedy(1), logprobs=0, logprob_start=start)
        assert caught.value.param == "logprob_start"

    def test_start_needs_logprobs(self, engine: Engine) -> None:
        with pytest.raises(InvalidRequest, match="want logprobs"):
            engine.generate([[5, 6]], greedy(1), logprob_start=0)

    def test_retractions_repeat_nothing(self, engine: Engine, reference: Reference) -> None:
        """Six that grow together: in the tight pool some have to go back and are prefilled once more. (Of requests that
        ignore end-of-sequence tokens the scheduler knows how long they get, and admits no more than fit.)
        """
        requests = [
            GenerateRequest(
                prompt=prompt[:12],
                sampling=SamplingParams(temperature=0.0, max_new_tokens=60),
                logprobs=2,
                logprob_start=i,
                token_ids_logprob=(5, 9),
                return_hidden_states=True,
            )
            for i, prompt in enumerate([prompts(engine)[2], prompts(engine)[3][::-1]] * 3)
        ]
        answers = engine.run(requests)
        assert (engine.stats()["retractions"] > 0) == (engine.resolved.engine.memory.max_total_tokens == TIGHT)
        for request, answer in zip(requests, answers, strict=True):
            self.check(request, answer, reference)
            _, hidden = reference.run([*prompt_ids(request), *answer.token_ids])
            found = torch.tensor(answer.hidden_states)
            torch.testing.assert_close(found, hidden[len(prompt_ids(request)) - 1 : -1], atol=1e-3, rtol=1e-3)


class TestHiddenStates:
    def test_like_transformers(self, engine: Engine, reference: Reference) -> None:
        asked = prompts(engine)
        requests = [
            GenerateRequest(prompt=prompt, sampling=greedy(12), return_hidden_states=index != 1)
            for index, prompt in enumerate(asked)
        ]
        answers = engine.run(requests)
        assert answers[1].hidden_states is None
        for prompt, answer in list(zip(asked, answers, strict=True))[::2]:
            _, hidden = reference.run([*prompt, *answer.token_ids])
            # The state behind which each token was drawn is that of the token before it.
            expected = hidden[len(prompt) - 1 : len(prompt) + 11]
            torch.testing.assert_close(torch.tensor(answer.hidden_states), expected, atol=1e-3, rtol=1e-3)

    def test_only_where_the_config_allows(self, checkpoint: Path) -> None:
        with Engine.from_config(config(checkpoint, model={"hidden_states": False})) as engine:
            with pytest.raises(InvalidRequest, match=r"model\.hidden_states") as caught:
                engine.generate([[5, 6]], greedy(1), return_hidden_states=True)
            assert caught.value.param == "return_hidden_states"


def pooled(mode: str, hidden: torch.Tensor) -> torch.Tensor:
    return {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[mode]


class TestEmbeddings:
    @pytest.mark.parametrize("mode", ["last", "mean", "cls"])
    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    def test_like_transformers(self, checkpoint: Path, reference: Reference, mode: str, arrangement: str) -> None:
        settings = config(checkpoint, **ARRANGEMENTS[arrangement], pooler={"use": mode})
        with Engine.from_config(settings) as engine:
            asked = prompts(engine)
            # Others are generating while they are embedded.
            other = engine.stream(asked[3], greedy(30))
            next(other)
            for _ in range(2):
                found = engine.embed(asked, normalize=False)
                for prompt, embedding in zip(asked, found, strict=True):
                    expected = pooled(mode, reference.run(prompt)[1])
                    torch.testing.assert_close(
                        torch.tensor(embedding.vector), expected.double().float(), atol=1e-3, rtol=1e-3
                    )
                    assert embedding.prompt_tokens == len(prompt)
            other.close()  # type: ignore[attr-defined]
            assert engine.stats()["book_errors"] == 0
            assert engine.built.scheduler.idle

    def test_normalised_and_cut(self, engine: Engine) -> None:
        (whole,) = engine.embed([[5, 6, 7]])
        assert np.linalg.norm(whole.vector) == pytest.approx(1.0)
        (cut,) = engine.embed([[5, 6, 7]], dimensions=8)
        head = np.array(whole.vector[:8])
        assert cut.vector == pytest.approx((head / np.linalg.norm(head)).tolist(), abs=1e-5)

    def test_too_many_dimensions(self, engine: Engine) -> None:
        with pytest.raises(InvalidRequest, match="dimensions must be at most") as caught:
            engine.embed([[5, 6, 7]], dimensions=10_000)
        assert caught.value.param == "dimensions"

    def test_a_cached_prompt_is_not_computed_again(self, engine: Engine) -> None:
        """The last token's state needs nothing but the last token."""
        if engine.resolved.engine.prefix_cache.use == "none":
            pytest.skip("nothing is cached")
        prompt = prompts(engine)[2]
        engine.embed([prompt])
        (again,) = engine.embed([prompt])
        page = engine.resolved.engine.memory.page_size
        assert again.cached_tokens == (len(prompt) - 1) // page * page
