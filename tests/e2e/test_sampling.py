"""Sampling through the whole engine, in both loops: what is drawn follows the model's distribution, a seed decides what
whatever else is in the batch, and penalties and stops do what transformers and `re` do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pegboard.conformance.checkpoints import VOCAB_SIZE, tiny_checkpoint
from pegboard.conformance.sampler import P_VALUE, chi_square, exact_probabilities
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.http.generation import SamplingFields, for_answer

PROCESSORS = ["penalties", "logit_bias", "min_new_tokens", "dry", "bad_words"]
PROMPT = [10, 40, 70, 10, 41, 99, 200, 10]
LOOPS = pytest.mark.parametrize("engine", ["normal", "overlap"], indirect=True)


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama")


def make(checkpoint: Path, loop: str, tokens: int = 8192, **scheduler: Any) -> Engine:
    config = {
        "model": {"path": str(checkpoint), "dtype": "float32", "device": "cpu"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": tokens},
        "logits_processors": PROCESSORS,
        "scheduler": {"loop": loop, **scheduler},
    }
    return Engine(compose(data=config, env={}))


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> Iterator[dict[str, Engine]]:
    with make(checkpoint, "normal") as normal, make(checkpoint, "overlap") as overlap:
        yield {"normal": normal, "overlap": overlap}


@pytest.fixture
def engine(engines: dict[str, Engine], request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = engines[request.param]
    yield engine
    assert engine.built.scheduler.idle
    assert engine.built.scheduler.components.memory.idle_error() is None


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def logits_after(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0, -1]
    return found


def run(engine: Engine, *asked: tuple[Sequence[int], SamplingParams]) -> list[GenerateOutput]:
    return engine.run([GenerateRequest(prompt=list(prompt), sampling=params) for prompt, params in asked])


def tokens_of(engine: Engine, prompt: Sequence[int], **sampling: Any) -> list[int]:
    (output,) = run(engine, (prompt, SamplingParams(**sampling)))
    return output.token_ids


# ---- distributions --------------------------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize(
    "row",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 12},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_follow_the_models_distribution(engine: Engine, model: Any, row: dict[str, Any]) -> None:
    draws = 400
    seeds = [SamplingParams(max_new_tokens=1, ignore_eos=True, seed=seed, **row) for seed in range(draws)]
    outputs = run(engine, *((PROMPT, one) for one in seeds))
    counts = np.bincount([output.token_ids[0] for output in outputs], minlength=VOCAB_SIZE)
    exact = exact_probabilities(logits_after(model, PROMPT).numpy(), row)
    assert chi_square(counts, exact) > P_VALUE
    assert np.count_nonzero(counts) > 3


# ---- seeds ----------------------------------------------------------------------------------------------------------

SEEDED = [
    SamplingParams(max_new_tokens=24, ignore_eos=True, seed=1, temperature=0.9),
    SamplingParams(max_new_tokens=17, ignore_eos=True, seed=-5, temperature=1.2, top_k=20),
    SamplingParams(max_new_tokens=30, ignore_eos=True, seed=2**62, temperature=1.0, top_p=0.9, presence_penalty=0.7),
    SamplingParams(max_new_tokens=12, ignore_eos=True, seed=7, temperature=0.8, min_p=0.05, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=20, ignore_eos=True, seed=9, temperature=1.1, extra={"dry": {"multiplier": 2}}),
]


def prompt_of(number: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(3, VOCAB_SIZE, 3 + 7 * number % 19)]


def companions(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests of every kind, with and without seeds, of many lengths."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        params = SamplingParams(
            max_new_tokens=int(rng.integers(1, 40)),
            temperature=float(rng.choice([0.0, 0.7, 1.4])),
            top_k=int(rng.choice([-1, 5])),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
            min_new_tokens=0,
            seed=int(rng.integers(100)) if number % 2 else None,
        )
        found.append((prompt_of(number + 50), params))
    return found


def test_a_seed_gives_the_same_tokens_in_any_batch_and_loop(engines: dict[str, Engine]) -> None:
    asked = [(prompt_of(number), params) for number, params in enumerate(SEEDED)]
    alone = [run(engines["normal"], one)[0].token_ids for one in asked]
    assert len({tuple(tokens[:8]) for tokens in alone}) == len(alone)
    for loop, engine in engines.items():
        for count, order in ((0, 1), (3, -1), (14, 1)):
            outputs = run(engine, *companions(count, count), *asked[::order], *companions(count // 2, 99))
            found = [output.token_ids for output in outputs[count : count + len(asked)]][::order]
            assert found == alone, f"other tokens beside {count} companions in the {loop} loop"


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_a_seed_gives_the_same_tokens_where_memory_runs_out(
    checkpoint: Path, engines: dict[str, Engine], loop: str
) -> None:
    """Requests are retracted and computed anew, and their penalties go on from where they were."""
    asked = [(prompt_of(number), params) for number, params in enumerate(SEEDED * 3)]
    expected = [output.token_ids for output in run(engines["normal"], *asked)]
    with make(checkpoint, loop, tokens=96, estimate_max_new_tokens=1) as small:
        assert [output.token_ids for output in run(small, *asked)] == expected
        assert small.stats()["retractions"] > 0


@LOOPS
def test_answers_of_one_request_differ_and_come_again(engine: Engine) -> None:
    body = SamplingFields(seed=11, temperature=1.0, ignore_eos=True)
    answers = [
        (PROMPT, for_answer(body.sampling_params(max_new_tokens=12, min_new_tokens=0), number)) for number in range(4)
    ]
    first = [output.token_ids for output in run(engine, *answers)]
    assert len({tuple(tokens) for tokens in first}) == 4
    assert [output.token_ids for output in run(engine, *answers[::-1])][::-1] == first


@LOOPS
def test_without_a_seed_answers_differ(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True)
    assert len({tuple(output.token_ids) for output in run(engine, *[(PROMPT, params)] * 5)}) == 5


# ---- penalties and other processors, greedily -----------------------------------------------------------------------


def greedy(model: Any, prompt: Sequence[int], length: int, change: Any) -> list[int]:
    """A plain loop: the largest logit after `change(logits, prompt, output)`."""
    output: list[int] = []
    for _ in range(length):
        logits = logits_after(model, [*prompt, *output]).clone()
        change(logits, list(prompt), output)
        output.append(int(logits.argmax()))
    return output


@LOOPS
def test_repetition_penalty_as_transformers_generates(engine: Engine, model: Any) -> None:
    for number, penalty in enumerate((1.1, 1.5, 0.8)):
        prompt = prompt_of(number)
        theirs = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=20, min_new_tokens=20, repetition_penalty=penalty,
            eos_token_id=[2], pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        ours = tokens_of(
            engine, prompt, temperature=0.0, max_new_tokens=20, min_new_tokens=20, repetition_penalty=penalty
        )
        assert ours == theirs


@LOOPS
@pytest.mark.parametrize(("frequency", "presence"), [(0.6, 0.0), (0.0, 1.5), (-0.4, 0.7)])
def test_frequency_and_presence_penalties(engine: Engine, model: Any, frequency: float, presence: float) -> None:
    def change(logits: torch.Tensor, prompt: list[int], output: list[int]) -> None:
        for token in set(output):
            logits[token] -= frequency * output.count(token) + presence

    ours = tokens_of(
        engine, PROMPT, temperature=0.0, max_new_tokens=24, ignore_eos=True, frequency_penalty=frequency,
        presence_penalty=presence,
    )  # fmt: skip
    assert ours == greedy(model, PROMPT, 24, change)


@LOOPS
def test_bias(engine: Engine, model: Any) -> None:
    bias = {5: 3.0, 77: -100.0, 200: 2.0}

    def change(logits: torch.Tensor, prompt: list[int], output: list[int]) -> None:
        for token, value in bias.items():
            logits[token] += value

    ours = tokens_of(engine, PROMPT, temperature=0.0, max_new_tokens=16, ignore_eos=True, logit_bias=bias)
    assert ours == greedy(model, PROMPT, 16, change)
    assert tokens_of(engine, PROMPT, max_new_tokens=8, ignore_eos=True, seed=1, logit_bias={9: 100.0}) == [9] * 8


@LOOPS
def test_min_new_tokens(engine: Engine) -> None:
    """The end is likelier than anything else, and comes as soon as it may."""
    asked = {"max_new_tokens": 20, "logit_bias": {2: 100.0}, "seed": 3}
    assert tokens_of(engine, PROMPT, **asked) == [2]
    found = tokens_of(engine, PROMPT, min_new_tokens=7, stop_token_ids=(4,), **asked)
    assert len(found) == 8
    assert found[-1] == 2
    assert not {2, 4} & set(found[:-1])


@LOOPS
def test_custom_processors(engine: Engine, model: Any) -> None:
    free = tokens_of(engine, PROMPT, temperature=0.0, max_new_tokens=40, ignore_eos=True)
    words = {token: engine.tokenizer.decode([token]) for token in free}
    token = next(one for one, text in words.items() if text.isalnum() and engine.tokenizer.encode(text) == [one])
    bad = SamplingParams(
        temperature=0, max_new_tokens=40, ignore_eos=True, extra={"bad_words": {"words": [words[token]]}}
    )
    (output,) = run(engine, (PROMPT, bad))
    assert token not in output.token_ids
    assert output.token_ids[: free.index(token)] == free[: free.index(token)]

    def change(logits: torch.Tensor, prompt: list[int], output: list[int]) -> None:
        tokens = prompt + output
        for place in range(len(tokens) - 1):
            if tokens[place] == tokens[-1]:
                logits[tokens[place + 1]] = -torch.inf

    strong = {"dry": {"multiplier": 1000, "allowed_length": 1, "sequence_breakers": []}}
    ours = tokens_of(engine, PROMPT, temperature=0.0, max_new_tokens=40, ignore_eos=True, extra=strong)
    assert ours == greedy(model, PROMPT, 40, change)


@LOOPS
@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"extra": {"dry": {"base": 0}}}, "custom_params.dry.base"),
        ({"extra": {"penalties": {}}}, "custom_logit_processor"),
        ({"extra": {"no_such": {}}}, "custom_logit_processor"),
        ({"min_new_tokens": 1, "stop_token_ids": tuple(range(VOCAB_SIZE))}, "min_new_tokens"),
    ],
)
def test_what_a_processor_refuses_is_the_clients_fault(engine: Engine, sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        run(engine, (PROMPT, SamplingParams(**sampling)))
    assert (caught.value.status, caught.value.param) == (400, param)


# ---- stop expressions -----------------------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("keep", [False, True])
def test_stop_regex(engine: Engine, keep: bool) -> None:
    """The text ends where the first match of the free text ends, streamed or not."""
    free = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=4, temperature=1.0)
    (whole,) = run(engine, (PROMPT, free))
    for pattern in (r"[a-z]{2,}", r"[^\x00-\x7f]+[a-z]", r"(?i)[aeiou].[aeiou]", r"\W{3}"):
        match = min((m for m in _matches(pattern, whole.text)), default=None)
        params = msgspec.structs.replace(free, stop_regex=(pattern,), no_stop_trim=keep)
        (output,) = run(engine, (PROMPT, params))
        streamed = "".join(chunk.text for chunk in engine.stream(PROMPT, params))
        if match is None:
            assert output.text == streamed == whole.text
            continue
        end, start = match
        assert output.text == streamed == whole.text[: end if keep else start]
        assert output.finish_reason == {"type": "stop", "matched": pattern}
        assert whole.token_ids[: len(output.token_ids)] == output.token_ids


def _matches(pattern: str, text: str) -> Iterator[tuple[int, int]]:
    """(end, start) of the first match to end, for each place where one may begin."""
    compiled = re.compile(pattern)
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            if compiled.fullmatch(text, start, end):
                yield end, start
                break
