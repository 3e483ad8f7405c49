"""A repeated prompt and a shared prefix are computed once: `cached_tokens` says so, and the answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_new_tokens=12, ignore_eos=True)

CACHES = [("radix", 1), ("radix", 16), ("block", 1), ("block", 16), ("none", 1), ("none", 16)]

PROMPT = [3 + (7 * i) % 300 for i in range(75)]
OTHER = [3 + (11 * i + 5) % 300 for i in range(40)]


def engine(checkpoints: Path, cache: str, page_size: int, **more: Any) -> Engine:
    directory = tiny_checkpoint(checkpoints, "llama")
    return Engine.from_config(
        {
            "model": {"path": str(directory), "dtype": "float32", "device": "cpu"},
            "attention": {"use": "torch"},
            "prefix_cache": {"use": cache},
            "memory": {"page_size": page_size, "max_total_tokens": 2048},
            **more,
        }
    )


@pytest.fixture(scope="module", params=CACHES, ids=lambda one: "-".join(map(str, one)))
def built(request: pytest.FixtureRequest, checkpoints: Path) -> Iterator[Engine]:
    """One engine of each kind for all tests that want nothing else of it; `emptied` is what they take."""
    with engine(checkpoints, *request.param) as made:
        yield made


@pytest.fixture
def emptied(built: Engine) -> Engine:
    """The engine as it was before it had answered anybody, which its counters have to confirm."""
    built.flush_cache()
    stats = built.stats()
    assert stats["free_tokens"] == stats["total_tokens"]
    assert stats["book_errors"] == 0
    return built


def kind_of(engine: Engine) -> tuple[str, int]:
    """Its cache and its page size."""
    return engine.resolved.engine.prefix_cache.use, engine.resolved.engine.memory.page_size


def whole_pages(tokens: int, cache: str, page_size: int) -> int:
    """What of a prefix can be found again."""
    return 0 if cache == "none" else tokens // page_size * page_size


def assert_all_free(engine: Engine) -> None:
    stats = engine.stats()
    assert stats["locked_tokens"] == 0
    assert stats["held_tokens"] == 0
    assert stats["free_tokens"] + stats["cached_tokens_now"] == stats["total_tokens"]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_repeated_prompt(emptied: Engine, sampling: SamplingParams) -> None:
    first, second = (emptied.generate([PROMPT], sampling)[0] for _ in range(2))
    assert first.cached_tokens == 0
    assert second.cached_tokens == whole_pages(len(PROMPT) - 1, *kind_of(emptied))
    assert second.token_ids == first.token_ids
    assert second.text == first.text
    assert_all_free(emptied)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 64, 74])
def test_shared_prefix(emptied: Engine, length: int) -> None:
    """Of any length, also one that ends within a page."""
    prompt = PROMPT[:length] + OTHER
    expected = emptied.generate([prompt], GREEDY)[0]
    emptied.flush_cache()
    emptied.generate([PROMPT], GREEDY)
    found = emptied.generate([prompt], GREEDY)[0]
    assert found.cached_tokens == whole_pages(length, *kind_of(emptied))
    assert found.token_ids == expected.token_ids
    assert_all_free(emptied)


def test_next_turn_finds_prompt_and_answer(emptied: Engine) -> None:
    answer = emptied.generate([PROMPT], GREEDY)[0].token_ids
    turn = PROMPT + answer + OTHER
    found = emptied.generate([turn], GREEDY)[0]
    # The last token of an answer is sampled, and never computed unless something follows it.
    assert found.cached_tokens == whole_pages(len(PROMPT) + len(answer) - 1, *kind_of(emptied))
    emptied.flush_cache()
    assert emptied.generate([turn], GREEDY)[0].token_ids == found.token_ids


@pytest.mark.parametrize(("cache", "page_size"), CACHES)
def test_shared_prefix_in_company(cache: str, page_size: int, checkpoints: Path) -> None:
    """Twenty requests over one prefix, all at once and in chunks, each answered as it is alone."""
    prompts = [PROMPT[: 40 + i % 5] + [3 + (i * 13 + j) % 300 for j in range(1 + i)] for i in range(20)]
    with engine(checkpoints, cache, page_size, scheduler={"chunked_prefill_size": 48}) as built:
        alone = []
        for prompt in prompts:
            built.flush_cache()
            alone.append(built.generate([prompt], GREEDY)[0].token_ids)
        built.flush_cache()
        built.generate([PROMPT], GREEDY)
        outputs: list[GenerateOutput] = built.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == alone
        least = whole_pages(40, cache, page_size)
        assert all(output.cached_tokens >= least for output in outputs)
        assert_all_free(built)


@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("block", 16)])
def test_salts_do_not_share(cache: str, page_size: int, checkpoints: Path) -> None:
    with engine(checkpoints, cache, page_size) as built:

        def ask(salt: str) -> GenerateOutput:
            return built.run([GenerateRequest(prompt=PROMPT, sampling=GREEDY, cache_salt=salt)])[0]

        first, other, again = ask("a"), ask("b"), ask("a")
        assert (first.cached_tokens, other.cached_tokens) == (0, 0)
        assert again.cached_tokens == whole_pages(len(PROMPT) - 1, cache, page_size)
        assert first.token_ids == other.token_ids == again.token_ids


@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("radix", 16), ("block", 16)])
def test_eviction_changes_no_answer(cache: str, page_size: int, checkpoints: Path) -> None:
    """A pool of a few prompts, and three times as many: prefixes come and go, answers stay."""
    prompts = [[3 + (i * 31 + j * 7) % 300 for j in range(90)] for i in range(12)]
    with engine(checkpoints, cache, page_size, memory={"page_size": page_size, "max_total_tokens": 512}) as built:
        first = [built.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
        outputs = built.generate(prompts + prompts[::-1], GREEDY)
        assert [output.token_ids for output in outputs] == first + first[::-1]
        assert_all_free(built)
