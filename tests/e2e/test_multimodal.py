"""Pictures and video through a whole engine: the tokens of transformers, and the same ones in every setting."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pegboard.conformance.covering import covering
from pegboard.conformance.vl_checkpoints import VL_FAMILIES, vl_checkpoint
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.media.choosing import piece_tokens
from pegboard.plugins.media.options import MediaSection
from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt
from tests.e2e.vl_reference import VLAnswer, VLReference
from tests.plugins.mm_qwen_vl.clips import clip_frames, video_file

TOKENS = 32
TOLERANCE = 1e-3
NEAR_TIE = 2e-3
"""A greedy choice by less than this may go either way, and an answer is compared no further then."""
LEAST_COMPARED = 0.9


def picture(seed: int, height: int, width: int) -> MediaInput:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return MediaInput(kind="image", data=file.getvalue())


def clip(name: str, frames: int) -> MediaInput:
    return MediaInput(kind="video", data=video_file(clip_frames(name)[:frames]))


def asked(*parts: str | MediaInput) -> MediaPrompt:
    """A user's turn, as the template writes it."""
    pads = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    marks = {kind: f"<|vision_start|>{pad}<|vision_end|>" for kind, pad in pads.items()}
    text = "".join(part if isinstance(part, str) else marks[part.kind] for part in parts)
    base = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return MediaPrompt(base=base, media=tuple(part for part in parts if not isinstance(part, str)))


def prompts() -> dict[str, MediaPrompt]:
    first, second, third = picture(1, 60, 90), picture(2, 200, 100), picture(3, 30, 31)
    return {
        "none": asked("What is there to see? Nothing at all, one would think."),
        "one": asked("What is this? ", first, " Tell me."),
        "three": asked(first, "and", second, third, "or what?"),
        "video": asked("Watch: ", clip("short", 7), " What happened?"),
        "both": asked(second, " then ", clip("short", 4), " and ", first, clip("wide", 6), "Which was last?"),
    }


def engine(path: Path, **config: Any) -> Engine:
    base: dict[str, Any] = {
        "model": {"path": str(path), "dtype": "float32"},
        "media": {"processor": {"use": "qwen_vl", "mrope_after_video": "transformers"}},
        "runner": {"use": "layered"},
        "memory": {"max_total_tokens": 4096},
    }
    return Engine.from_config(merged(base, config))


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in more.items():
        found[key] = merged(found[key], value) if isinstance(value, dict) and key in found else value
    return found


def requests(found: Sequence[MediaPrompt], tokens: int = TOKENS) -> list[GenerateRequest]:
    # Not `ignore_eos`: admission plans for all that such a request will generate, and nothing is ever retracted.
    sampling = SamplingParams(max_new_tokens=tokens, min_new_tokens=tokens, temperature=0.0)
    return [GenerateRequest(prompt=one, sampling=sampling, logprobs=0, add_special_tokens=False) for one in found]


def compared(output: GenerateOutput, expected: VLAnswer, name: str, tolerance: float = TOLERANCE) -> int:
    """Tokens that were compared: all, or those before a choice that was too close to call."""
    assert output.logprobs is not None, output.finish_reason
    for i, (token, logprob, gap) in enumerate(zip(expected.tokens, expected.logprobs, expected.gaps, strict=True)):
        if output.token_ids[i] != token:
            assert gap < NEAR_TIE, f"{name}: token {i} is {output.token_ids[i]} and not {token}"
            return i
        assert output.logprobs[i][0] == pytest.approx(logprob, abs=tolerance), f"{name}: token {i}"
    assert len(output.token_ids) == len(expected.tokens)
    return len(expected.tokens)


@pytest.mark.parametrize("names", ["new", "hub"])
@pytest.mark.parametrize("family", VL_FAMILIES)
def test_as_transformers(family: str, names: Any, checkpoints: Path, tmp_path: Path) -> None:
    path = vl_checkpoint(checkpoints, family, names=names)
    reference = VLReference(vl_checkpoint(checkpoints, family))
    expected = {name: reference.answer(prompt, TOKENS, tmp_path) for name, prompt in prompts().items()}
    with engine(path) as made:
        outputs = made.run(requests(list(prompts().values())))
    total = sum(compared(output, expected[name], name) for name, output in zip(expected, outputs, strict=True))
    assert total >= LEAST_COMPARED * TOKENS * len(expected)


CELLS = list(itertools.product((7, 32, 0), (1, 16), ("normal", "overlap"), (False, True), (False, True)))
"""Chunk size, page size, loop, decodes in a prefill's batch, and whether the pool is small."""
PAIRS = covering(CELLS)
TRIPLES = covering(CELLS, 3, beside=PAIRS)
ROOMY, TIGHT = 4096, 208
LONG = 56
"""Tokens of an answer, so that a small pool holds the prompts of several requests and not their answers."""


def conversations() -> list[MediaPrompt]:
    """Twelve prompts that share pictures, beginnings, both or neither, each of 220 tokens at most."""
    pictures = [picture(i, 40 + 30 * (i % 3), 50 + 25 * (i % 4)) for i in range(5)]
    opening = "You see pictures, and say what is in them. "
    found = [asked(opening if i % 2 else "", pictures[i % 5], f" What is number {i}?") for i in range(5)]
    found += [asked(opening, pictures[i], pictures[(i + 2) % 5], f"{i} or not {i}? ") for i in range(3)]
    found += [asked(f"Nothing to see, {i}. " * (i + 1)) for i in range(2)]
    found += [asked("See ", clip("short", 4), " and ", pictures[i], " now.") for i in range(2)]
    return found


@pytest.fixture(scope="module")
def alone(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> list[VLAnswer]:
    """What transformers answers to the conversations."""
    reference = VLReference(vl_checkpoint(checkpoints, "qwen3_vl"))
    scratch = tmp_path_factory.mktemp("scratch")
    return [reference.answer(prompt, LONG, scratch) for prompt in conversations()]


def settings(cell: tuple[Any, ...]) -> dict[str, Any]:
    chunk, page, loop, mixed, tight = cell
    return {
        "memory": {"page_size": page, "max_total_tokens": TIGHT if tight else ROOMY},
        "scheduler": {
            **({"conservativeness": 0.01} if tight else {}),
            "chunked_prefill_size": max(chunk, page) if chunk else 0,
            "loop": loop,
            "mixed_chunk": mixed,
            "max_running_requests": 8,
        },
        "media": {"encode_tokens": 24, **({"cache_bytes": 48 * 64 * 3 * 4} if tight else {})},
    }


@pytest.mark.parametrize(
    "cell",
    [
        *(pytest.param(one, id="-".join(map(str, one))) for one in PAIRS),
        *(pytest.param(one, id="triple-" + "-".join(map(str, one))) for one in TRIPLES),
    ],
)
def test_the_same_in_every_setting(cell: tuple[Any, ...], alone: list[VLAnswer], checkpoints: Path) -> None:
    with engine(vl_checkpoint(checkpoints, "qwen3_vl"), **settings(cell)) as made:
        outputs = made.run(requests(conversations(), LONG))
        again = made.run(requests(conversations()[:3], LONG))
        stats = made.stats()
    pairs = [*zip(outputs, alone, strict=True), *zip(again, alone, strict=False)]
    total = sum(compared(output, expected, f"prompt {i}") for i, (output, expected) in enumerate(pairs))
    assert total >= LEAST_COMPARED * LONG * len(pairs)
    assert stats["book_errors"] == stats["failed_batches"] == 0
    if cell[-1]:
        assert stats["retractions"] > 0


@pytest.mark.parametrize("use", ["ngram", "drill"])
def test_drafts_behind_pictures(use: str, alone: list[VLAnswer], checkpoints: Path) -> None:
    """Their positions go on where the pictures' ended, whether they are right or, as the drill's branches, wrong."""
    drill = {"noise": True, "shape": "tree"} if use == "drill" else {}
    drafts = {"use": use, "adaptive": False, "max_nodes": 6, **drill}
    with engine(vl_checkpoint(checkpoints, "qwen3_vl"), speculation=drafts, **settings(PAIRS[0])) as made:
        outputs = made.run(requests(conversations(), LONG))
        stats = made.stats()
    pairs = zip(outputs, alone, strict=True)
    total = sum(compared(output, expected, f"prompt {i}") for i, (output, expected) in enumerate(pairs))
    assert total >= LEAST_COMPARED * LONG * len(alone)
    assert stats["drafted_tokens"] > 0
    assert stats["accepted_tokens"] > 0 or use == "drill"
    assert stats["plugin_failures"] == stats["failed_batches"] == 0


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_the_native_runner_computes_the_same(loop: str, checkpoints: Path) -> None:
    """In bfloat16, so what it says together is held against what it says one by one."""
    path = vl_checkpoint(checkpoints, "qwen3_vl")
    native = {"model": {"dtype": "bfloat16"}, "runner": {"use": "cpu_native"}}
    with engine(path, **native) as made:
        expected = [made.run(requests([prompt], LONG))[0] for prompt in conversations()]
    with engine(path, **merged(native, settings((32, 16, loop, True, True)))) as made:
        outputs = made.run(requests(conversations(), LONG))
        assert made.stats()["retractions"] > 0
    same = [
        one == other
        for output, reference in zip(outputs, expected, strict=True)
        for one, other in zip(output.token_ids, reference.token_ids, strict=True)
    ]
    assert sum(same) >= 0.8 * len(same)


def test_pictures_share_kv_as_far_as_they_are_equal(checkpoints: Path) -> None:
    """The same text with another picture shares nothing from there on, were it one pixel; the same picture does."""
    pixels = np.random.default_rng(5).integers(0, 256, (64, 64, 3), np.uint8)
    other = pixels.copy()
    other[40, 40, 1] ^= 255

    def shown(image: Any) -> MediaInput:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return MediaInput(kind="image", data=file.getvalue())

    with engine(vl_checkpoint(checkpoints, "qwen3_vl")) as made:

        def cached(image: Any) -> tuple[int, int]:
            [output] = made.run(requests([asked("Look: ", shown(image), " What is it?")]))
            return output.cached_tokens, output.prompt_tokens

        nothing, length = cached(pixels)
        again, _ = cached(pixels)
        changed, _ = cached(other)
        wider, _ = cached(np.concatenate([pixels, pixels], axis=1))
        encoded = made.stats()["encoded_pieces"]
        cached(pixels)
        assert made.stats()["encoded_pieces"] == encoded
    text = len("<|im_start|>")  # an upper bound on the tokens before the picture
    assert (nothing, again) == (0, length - 1)
    assert 0 < changed < 4 + text
    assert wider == changed


def test_a_step_encodes_what_the_device_can(checkpoints: Path) -> None:
    path = vl_checkpoint(checkpoints, "qwen3_vl")
    shown = asked(picture(1, 200, 200))
    with engine(path) as made:
        assert made.info.stages["media"]["piece_tokens"] == 2048
        whole = made.run(requests([shown], 1))[0].prompt_tokens
    with engine(path, media={"max_piece_tokens": 16}) as made:
        assert made.run(requests([shown], 1))[0].prompt_tokens == whole - 36 + 16
    assert piece_tokens(MediaSection(), torch.device("cuda:1")) == 16_384
    assert piece_tokens(MediaSection(max_piece_tokens=5), torch.device("cuda:1")) == 5


def test_media_that_cannot_be_taken(checkpoints: Path) -> None:
    from pegboard.core.interfaces.errors import InvalidRequest

    path = vl_checkpoint(checkpoints, "qwen3_vl")
    with engine(path) as made:
        for prompt, code in (
            (MediaPrompt(base="no place for it", media=(picture(1, 40, 40),)), None),
            (MediaPrompt(base="<|image_pad|>", media=(MediaInput(kind="image", data=b"not a picture"),)), None),
            (MediaPrompt(base="<|image_pad|>" * 17, media=(picture(1, 40, 40),) * 17), "too_many_media"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                made.run(requests([prompt]))
            assert caught.value.status == 400
            assert code in (None, caught.value.code)
    with engine(path, media={"enabled": False}) as made:
        assert not [one for one in made.info.features if one.startswith("media.")]
        with pytest.raises(InvalidRequest, match=r"media|pictures"):
            made.run(requests([asked(picture(1, 40, 40))]))
