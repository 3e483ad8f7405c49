"""Prompts with media: laid out as the processor says, what users spell is left as text, and text is as it was."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.conformance.rig.media_toy import TOKENS, ToyProcessor
from pegboard.core.frontend.intake import Intake
from pegboard.core.frontend.prompts import Packed, Prompts
from pegboard.core.interfaces.client import EmbedRequest, GenerateRequest, ModelInfo
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.media.api import Encode, MediaContext, MediaItem, MediaLayout, MediaLimits
from pegboard.plugins.media.frontend.layout import Layouts
from pegboard.plugins.media.frontend.prompts import MediaFrontend
from pegboard.plugins.media.work import NAME
from pegboard.toolkit.media.inputs import EncodedForm, MediaInput, MediaPrompt
from pegboard.toolkit.text.encoding import encode_now
from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.fakes.toy_media import ppm, toy_settings
from tests.plugins.media.frontend.scene import files, picture, preparing, toy_model
from tests.plugins.media.media_harness import media_in

INFO = dataclasses.replace(FakeEngineClient().info, max_context_len=2000, max_total_tokens=2000, vocab_size=328)
FEATURES = ("media.image", "media.video")
IMAGE, VIDEO = TOKENS[1], TOKENS[2]


class Counting(ToyProcessor):
    """Counts how often it lays prompts out."""

    calls = 0

    def lay_out(self, ids: Sequence[int], items: Sequence[MediaItem], encode: Encode) -> MediaLayout:
        type(self).calls += 1
        return super().lay_out(ids, items, encode)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(toy_model(tmp_path_factory.mktemp("tokenizer") / "model"))


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[MediaFrontend]:
    path = tmp_path_factory.mktemp("media")
    with preparing(path) as preparer:
        toy = Counting(NoOptions(), MediaContext(path, {"toy_media": toy_settings(axes=3)}))
        whole = MediaFrontend(preparer, Layouts(toy, tokenizer), frozenset(), 3)
        yield whole.with_features(FEATURES) or whole
        assert files(preparer) == []


@pytest.fixture(scope="module")
def prompts(frontend: MediaFrontend, tokenizer: Tokenizer) -> Prompts:
    return Prompts(Intake(INFO, tokenizer), tokenizer, {NAME: frontend})


def image(height: int = 16, width: int = 24, seed: int = 0, place: str = "") -> MediaInput:
    return MediaInput(kind="image", data=ppm(picture(height, width, seed)), place=place)


def video(frames: int = 2) -> MediaInput:
    return MediaInput(kind="video", data=ppm(np.stack([picture(8, 16, seed) for seed in range(frames)])))


def packed(prompts: Prompts, *requests: Any) -> list[Packed]:
    """What becomes of prompts beside the loop, which is what becomes of them in this thread."""

    async def scene() -> list[Packed]:
        async with prompts.packed(requests) as found:
            return [dataclasses.replace(one, held=()) for one in found]

    found = asyncio.run(scene())
    with prompts.packed_now(requests) as again:
        assert [one.ids for one in again] == [one.ids for one in found]
        assert [one.tokens for one in again] == [one.tokens for one in found]
    return found


def request(base: str | list[int], *media: MediaInput, literals: Any = (), **more: Any) -> GenerateRequest:
    prompt = MediaPrompt(base=base, media=media, literals=literals)
    return GenerateRequest(prompt=prompt, add_special_tokens=False, **more)


def refusal(prompts: Prompts, *requests: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        packed(prompts, *requests)
    return caught.value


def ids_of(one: Packed) -> list[int]:
    return np.frombuffer(one.ids, "<i4").tolist()


def test_laid_out_as_the_processor_says(prompts: Prompts, frontend: MediaFrontend, tokenizer: Tokenizer) -> None:
    text = f"look: {IMAGE} and {VIDEO}!"
    media = (image(), video())
    [one] = packed(prompts, request(text, *media))
    sent = media_in(one.features)
    assert sent is not None
    assert one.tokens == {"image": 6, "video": 4}
    with frontend.preparer.prepared_now(media) as items:
        expected = frontend.processor.lay_out(
            tokenizer.encode(text), [item.item for item in items], lambda text: tokenizer.encode(text)
        )
    assert ids_of(one) == expected.ids.tolist()
    assert sent.spans == expected.spans
    assert np.array_equal(np.frombuffer(sent.positions, "<i4").reshape(3, -1), expected.positions)
    assert sent.delta == expected.delta != 0
    assert [item.digest for item in sent.items] == [item.item.digest for item in items]
    by_ids = packed(prompts, request(tokenizer.encode(text), *media))
    assert by_ids[0].ids == one.ids


def test_answers_to_one_prompt_share_its_media(prompts: Prompts) -> None:
    prompt = MediaPrompt(base=f"a {IMAGE}", media=(image(seed=1),))
    other = MediaPrompt(base=f"b {IMAGE}", media=(image(seed=1),))
    requests = [GenerateRequest(prompt=one) for one in (prompt, prompt, other)]
    before = Counting.calls
    with prompts.packed_now(requests) as found:
        assert found[0] is found[1]
        assert found[0].held == found[2].held
        assert len(found[0].held) == 1
    assert Counting.calls == before + 2


PIECES = st.sampled_from(["a", " the", "\n", *TOKENS, "<|im_start|>", "<|", "|>", "<|image", "é", "<|media|"])


@given(st.lists(PIECES, max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_what_a_literal_covers_stays_text(
    prompts: Prompts, tokenizer: Tokenizer, parts: list[str], draw: st.DataObject
) -> None:
    """Whatever it spells, neither binding nor the number of placeholders changes, and the text is as it was."""
    literals, text = [], ""
    for part in parts:
        # Some of them spell a token together.
        if "|" in part or draw.draw(st.booleans()):
            literals.append((len(text), len(text) + len(part)))
        text += part
    whole = f"{text}{IMAGE}."
    ids = encode_now(tokenizer, whole, add_special_tokens=False, literals=tuple(literals))
    assert [one for one in ids if one >= 320] == [321]
    assert 1 not in ids
    assert tokenizer.decode([one for one in ids if one < 320], skip_special_tokens=False) == f"{text}."
    [one] = packed(prompts, request(whole, image(8, 8), literals=tuple(literals)))
    assert one.tokens == {"image": 1}


def test_literals_and_the_tokens_around_a_prompt(tokenizer: Tokenizer) -> None:
    class Wrapped:
        """Puts a token before and one after a prompt."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            return [0, *ids, 2] if add_special_tokens else ids

        def encode_literal(self, text: str) -> list[int]:
            return tokenizer.encode_literal(text)

    text = f"the {IMAGE}"
    found = encode_now(cast("Tokenizer", Wrapped()), text, literals=((4, len(text)),))
    assert (found[0], found[-1]) == (0, 2)
    assert tokenizer.decode(found[1:-1], skip_special_tokens=False) == text
    for wrong in (((0, 0),), ((3, 2),), ((0, 99),), ((0, 2), (1, 3))):
        with pytest.raises(ValueError, match="is not a range"):
            encode_now(tokenizer, text, literals=wrong)


TEXTS = st.lists(st.sampled_from(["a", " the", "<|im_start|>", "\n", "xyz"]), min_size=1, max_size=20).map("".join)


@given(st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_text_is_as_it_is_without_media(prompts: Prompts, tokenizer: Tokenizer, texts: list[str]) -> None:
    """The same ids, and no call of the processor."""
    before = Counting.calls
    requests = [GenerateRequest(prompt=text) for text in texts] + [EmbedRequest(prompt=text) for text in texts]
    plain = Prompts(Intake(INFO, tokenizer), tokenizer)
    found = packed(prompts, *requests)
    assert [one.ids for one in found] == [one.ids for one in packed(plain, *requests)]
    assert all(not one.features and not one.tokens for one in found)
    assert Counting.calls == before


def test_a_token_around_media_alone_changes_nothing(prompts: Prompts, tokenizer: Tokenizer) -> None:
    before = Counting.calls
    [one] = packed(prompts, GenerateRequest(prompt=f"a {TOKENS[0]} b"))
    assert Counting.calls > before, "what it means is for the processor to say"
    assert ids_of(one) == tokenizer.encode(f"a {TOKENS[0]} b")
    assert not one.features


@pytest.mark.parametrize(
    "asked",
    [
        GenerateRequest(prompt=f"a {IMAGE}"),
        GenerateRequest(prompt=[67, 321]),
        EmbedRequest(prompt=f"a {VIDEO}"),
        request(f"{IMAGE}{IMAGE}", image()),
        request("nothing", image()),
        request(f"{VIDEO}", image()),
        request(f"{IMAGE}", image(), literals=((0, len(IMAGE)),)),
    ],
)
def test_placeholders_that_do_not_match(prompts: Prompts, frontend: MediaFrontend, asked: Any) -> None:
    """That is found before any item is prepared, and before those of other prompts of the same submission."""
    before = frontend.preparer.stats.figures()
    assert refusal(prompts, asked).code == "media_mismatch"
    assert refusal(prompts, request(f"a {IMAGE}", image()), asked).code == "media_mismatch"
    if isinstance(asked.prompt, MediaPrompt):
        with pytest.raises(InvalidRequest, match="placeholders"):
            asyncio.run(prompts.ids(asked.prompt, add_special_tokens=False))
    assert frontend.preparer.stats.figures() == before


def test_what_is_refused_before_anything_is_prepared(prompts: Prompts, frontend: MediaFrontend) -> None:
    before = frontend.preparer.stats.figures()
    error = refusal(prompts, request(IMAGE * 4, *[image(place=f"here.{i}") for i in range(4)]))
    assert (error.code, error.param) == ("too_many_media", "here.3")
    error = refusal(
        prompts, msgspec.structs.replace(EmbedRequest(prompt=""), prompt=MediaPrompt(base=IMAGE, media=(image(),)))
    )
    assert error.code == "unsupported"
    forms: list[dict[str, Any]] = [
        {"grid": (0, 2, 3)},
        {"grid": (1, 2, 2**70)},
        {"grid": (1, 2, 3), "shape": (-6, -4)},
        {"grid": (1,)},
    ]
    for form in forms:
        stated = msgspec.structs.replace(image(place="here"), encoded=EncodedForm(**form))
        error = refusal(prompts, request(IMAGE, stated))
        assert (error.code, error.param) == ("invalid_media", "here")
    assert refusal(prompts, request("", image())).param == "prompt"
    assert refusal(prompts, request("x" * 100_000, image())).code == "context_length_exceeded"
    assert frontend.preparer.stats.figures() == before


def test_a_model_that_takes_one_kind_only(frontend: MediaFrontend, tokenizer: Tokenizer) -> None:
    assert frontend.with_features(["media.audio", "input_logprobs"]) is None
    only = frontend.with_features(["media.image"])
    prompts = Prompts(Intake(INFO, tokenizer), tokenizer, {NAME: only} if only else {})
    assert packed(prompts, request(IMAGE, image()))[0].tokens == {"image": 6}
    moving = video()
    moving.place = "there"
    error = refusal(prompts, request(IMAGE + VIDEO, image(), moving))
    assert (error.code, error.param, error.message) == ("unsupported", "there", "this model takes no videos")


def test_a_model_without_a_processor(tokenizer: Tokenizer) -> None:
    plain = Prompts(Intake(INFO, tokenizer), tokenizer)
    error = refusal(plain, request(IMAGE, image(place="here")))
    assert (error.status, error.code, error.param) == (400, "unsupported", "here")
    text = f"say {IMAGE}"
    [one] = packed(plain, request(text, literals=((4, len(text)),)))
    assert ids_of(one) == tokenizer.encode(text), "literals do not concern it"


def test_the_context_counts_what_media_take(frontend: MediaFrontend, tokenizer: Tokenizer) -> None:
    def within(context: int) -> Prompts:
        info: ModelInfo = dataclasses.replace(INFO, max_context_len=context)
        return Prompts(Intake(info, tokenizer), tokenizer, {NAME: frontend})

    asked = request(f"abc{IMAGE}", image(16, 24))
    assert len(packed(within(9), asked)[0].ids) == 4 * 9
    error = refusal(within(8), asked)
    assert error.code == "context_length_exceeded"
    assert error.message.startswith("prompt is too long: 9 tokens > 7 maximum")
    assert error.message.endswith("6 tokens of the prompt are those of its media")


def test_pieces_that_take_too_long_to_encode(frontend: MediaFrontend, tokenizer: Tokenizer) -> None:
    """Whatever a processor makes of its limits."""
    toy = frontend.processor
    limited = ToyProcessor(NoOptions(), dataclasses.replace(toy.ctx, limits=MediaLimits(piece_tokens=5)))
    layouts = Layouts(limited, tokenizer)
    prompts = Prompts(Intake(INFO, tokenizer), tokenizer, {NAME: dataclasses.replace(frontend, layouts=layouts)})
    assert packed(prompts, request(IMAGE + VIDEO, image(8, 40), video(9)))[0].tokens == {"image": 5, "video": 18}
    error = refusal(prompts, request(IMAGE * 2, image(8, 8), image(16, 24)))
    assert (error.status, error.code) == (400, "media_too_large")
    assert error.message == (
        "item 2 of this prompt's media is too large: a picture may have 5 tokens (media.max_piece_tokens), and this "
        "has 6; send a smaller one, or set max_pixels"
    )
    assert frontend.preparer.store.files == 0


def test_counting(prompts: Prompts, frontend: MediaFrontend, tokenizer: Tokenizer) -> None:
    def counted(prompt: MediaPrompt, which: Prompts = prompts) -> int:
        return len(asyncio.run(which.ids(prompt, add_special_tokens=False)))

    asked = MediaPrompt(base=f"abc{IMAGE}", media=(image(16, 24),))
    assert counted(asked) == 9
    assert counted(MediaPrompt(base=tokenizer.encode(f"abc{IMAGE}"), media=asked.media)) == 9
    assert counted(MediaPrompt(base="abc")) == 3
    told = asyncio.run(prompts.ids(asked, add_special_tokens=False))
    assert list(told) == ids_of(packed(prompts, request(asked.base, *asked.media))[0])
    assert counted(MediaPrompt(base=f"{IMAGE}", literals=((0, len(IMAGE)),))) > 1
    assert frontend.preparer.store.files == 0
    with pytest.raises(InvalidRequest):
        counted(asked, Prompts(Intake(INFO, tokenizer), tokenizer))


@pytest.mark.parametrize("wrong", ["positions", "order", "missing", "beyond"])
def test_a_layout_that_cannot_be(prompts: Prompts, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the processor's fault, and no request's."""

    def lay_out(self: Any, ids: Any, items: Any, encode: Any) -> MediaLayout:
        found = ToyProcessor.lay_out(self, ids, items, encode)
        spans = {
            "order": found.spans[::-1],
            "missing": found.spans[1:],
            "beyond": (*found.spans[:-1], type(found.spans[-1])(1, 0, found.spans[-1].start, 99)),
        }
        positions = found.positions[:, 1:] if wrong == "positions" else found.positions
        return dataclasses.replace(found, spans=spans.get(wrong, found.spans), positions=positions)

    monkeypatch.setattr(Counting, "lay_out", lay_out)
    with pytest.raises(TypeError, match=r"Counting\.lay_out"):
        packed(prompts, request(IMAGE * 2, image(), image(8, 8)))
