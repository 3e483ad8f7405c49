"""The small model of examples/shapes: its pictures, its chats, what prepares them for training, and what it answers."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
)

from examples.shapes import pictures, train
from examples.shapes.batches import IGNORED, Batch, Prompts, collate, patches, random_batch
from examples.shapes.chats import Chat, all_texts, answer, question, random_chat
from examples.shapes.evaluate import Model, fresh, shares
from examples.shapes.files import MODEL, SPECIAL, build_config, build_tokenizer, write_files
from examples.shapes.pictures import COLOURS, NUMBERS, SHAPES, SIZES, Scene, draw, png, random_scene
from examples.shapes.quick import quicken
from pegboard.conformance.model_family.base import assert_close
from pegboard.toolkit.text.tokenizer import Tokenizer

CHANCE = {"colour": 1 / len(COLOURS), "count": 1 / len(NUMBERS), "shape": 1 / len(SHAPES)}


def scenes(name: str, count: int) -> list[Scene]:
    rng = random.Random(name)
    return [random_scene(rng) for _ in range(count)]


def inked(scene: Scene) -> NDArray[np.bool_]:
    """Where the picture is nearer to the ink than to the paper."""
    pixels = np.asarray(draw(scene), float)
    to_ink, to_paper = (np.abs(pixels - np.array(colour)).sum(2) for colour in (scene.ink, scene.paper))
    return np.asarray(to_ink < to_paper)


def inside(scene: Scene, mask: NDArray[np.bool_]) -> list[int]:
    """How much of the mask lies in each shape's circle, or at most 1.5 pixels outside and no nearer to another one."""
    rows, columns = np.indices(mask.shape) + 0.5
    beyond = np.stack([np.hypot(columns - x, rows - y) - r for x, y, r in scene.circles])
    nearest = np.where(mask & (beyond.min(0) < 1.5), beyond.argmin(0), -1)
    return [int((nearest == number).sum()) for number in range(scene.count)]


# Of a circle with a radius of 1: what each shape covers, by textbook formulas.
AREAS = {
    "circle": math.pi,
    "ring": math.pi * (1 - 0.64**2),
    "triangle": 3 * math.sqrt(3) / 4,
    "star": 10 * 0.42 * math.sin(math.pi / 5) / 2,
    "cross": 8 * 0.95 * 0.28 - 4 * 0.28**2,
    "bar": 4 * 0.24,
}


class TestPictures:
    def test_they_show_what_they_say(self) -> None:
        """In each of as many circles, which do not touch, as much ink as its shape has, and none elsewhere."""
        for scene in scenes("drawn", 150):
            mask = inked(scene)
            found = inside(scene, mask)
            assert len(found) == NUMBERS.index(scene.words.split()[0]) + 1
            assert found == pytest.approx([AREAS[scene.shape] * r * r for _, _, r in scene.circles], rel=0.12), scene
            assert sum(found) == mask.sum()
            for (x, y, r), (a, b, c) in itertools.combinations(scene.circles, 2):
                assert math.hypot(x - a, y - b) > r + c + 1

    def test_colours_are_apart(self) -> None:
        """The nearest of many other inks has the same name."""
        known = scenes("known", 3000)
        inks = np.array([scene.ink for scene in known])
        for scene in scenes("asked", 300):
            assert known[int(np.abs(inks - scene.ink).sum(1).argmin())].colour == scene.colour

    def test_all_kinds_are_as_likely(self) -> None:
        drawn = scenes("many", 4000)
        for kind, values in (("colour", COLOURS), ("count", NUMBERS), ("shape", SHAPES)):
            counts = Counter(answer(kind, scene) for scene in drawn)
            assert set(counts) == set(values)
            assert min(counts.values()) > 0.8 * len(drawn) / len(values)

    def test_a_seed_gives_the_same_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written = []
        for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
            monkeypatch.setattr("sys.argv", ["pictures", str(tmp_path / folder), "--count", "3", "--seed", str(seed)])
            pictures.main()
            written.append({path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()})
        assert len(written[0]) == 3
        assert written[0] == written[1] != written[2]

    def test_files_keep_every_pixel(self) -> None:
        for scene in scenes("files", 5):
            picture = draw(scene)
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(picture)))), np.asarray(picture))


class TestChats:
    def test_answers_are_true(self) -> None:
        for number in range(2000):
            rng = random.Random(f"chat {number}")
            shown = [random_scene(rng) for _ in range(number % 3)]
            chat = random_chat(rng, shown, 1 + number % 4)
            said: list[Scene] = []
            for asked, reply in zip(*[iter(m for m in chat.messages if m["role"] != "system")] * 2, strict=True):
                content = asked["content"]
                parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
                said += shown[len(said) : len(said) + sum(part["type"] == "image" for part in parts)]
                [text] = [part["text"] for part in parts if part["type"] == "text"]
                assert is_true(text.lower(), str(reply["content"]), said), chat.messages
            assert said == shown


def is_true(text: str, reply: str, shown: list[Scene]) -> bool:
    if not shown:
        return reply == "I see no picture."
    scene = shown[0 if "first" in text else -1]
    if reply in ("yes", "no"):
        words = {scene.colour, scene.shape, pictures.plural(scene.shape)}
        return bool(words & set(re.findall(r"\w+", text))) == (reply == "yes")
    kinds = {
        "colour": r"colou?r",
        "count": r"how many|count|number",
        "shape": r"shape (is|do|does|are)|(kind of|name|the) shape\b|which shape",
    }
    found = [kind for kind, words in kinds.items() if re.search(words, text)]
    return reply == answer(found[0] if found else "all", scene)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(build_tokenizer())


def vars_of(batch: Batch) -> dict[str, torch.Tensor | None]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


def files_of(messages: Sequence[Mapping[str, object]], shown: Sequence[Scene]) -> list[bytes]:
    """The files of as many scenes as these messages have pictures."""
    contents = [message["content"] for message in messages]
    count = sum(part["type"] == "image" for parts in contents if isinstance(parts, list) for part in parts)
    return [png(draw(scene)) for scene in shown[:count]]


def some_chats(count: int) -> list[Chat]:
    rng = random.Random("some")
    return [random_chat(rng, [random_scene(rng) for _ in range(n % 3)], 1 + n % 3) for n in range(count)]


class TestPreparing:
    def test_patches_are_the_processors(self, tmp_path: Path) -> None:
        write_files(tmp_path, build_tokenizer())
        processor = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
        for scene in scenes("patches", 40):
            picture = draw(scene)
            found = processor([Image.open(io.BytesIO(png(picture)))], return_tensors="np")
            values, grid = patches(picture)
            assert grid == found["image_grid_thw"][0].tolist()
            # (x / 255 - 0.5) / 0.5 in float32 is off by up to 4 * 2^-24 on each of the two ways. A step of x is 8e-3.
            assert np.abs(values - found["pixel_values"]).max() < 1e-6

    def test_pictures_of_one_size_have_one_grid(self) -> None:
        rng = random.Random("grids")
        for size in SIZES:
            assert len({tuple(patches(draw(random_scene(rng, size)))[1]) for _ in range(40)}) == 1

    def test_positions_are_transformers(self, prompts: Prompts) -> None:
        config = build_config(build_tokenizer())
        config.text_config.num_hidden_layers = config.vision_config.depth = 1
        config.vision_config.deepstack_visual_indexes = [0]
        model = Qwen3VLModel(config)
        for chat in some_chats(12):
            batch = collate([chat], prompts)
            kinds = (batch.input_ids == config.image_token_id).int()
            expected, _ = model.get_rope_index(
                batch.input_ids, mm_token_type_ids=kinds, image_grid_thw=batch.image_grid_thw
            )
            assert torch.equal(batch.position_ids, expected)

    def test_answers_and_their_ends_are_learned(self, prompts: Prompts) -> None:
        tokenizer = build_tokenizer()
        for chat in some_chats(30):
            labels = collate([chat], prompts).labels[0]
            said = "".join(str(m["content"]) + "<|im_end|>" for m in chat.messages if m["role"] == "assistant")
            assert tokenizer.decode(labels[labels != IGNORED].tolist(), skip_special_tokens=False) == said

    def test_a_seed_gives_the_same_batch(self, prompts: Prompts) -> None:
        one, two, other = (random_batch(seed, prompts, 4) for seed in ("a", "a", "b"))
        assert all(torch.equal(a, b) for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(two), strict=True))
        assert not torch.equal(one.input_ids, other.input_ids)

    @torch.no_grad()
    def test_training_computes_the_same_model(self, prompts: Prompts) -> None:
        rng = random.Random("quick")
        chats = [random_chat(rng, [random_scene(rng, SIZES[0])] * (1 + n % 2), 1 + n % 2) for n in range(4)]
        batch = collate(chats, prompts)
        torch.manual_seed(0)
        model = Qwen3VLForConditionalGeneration(build_config(build_tokenizer())).eval()
        inputs = {name: value for name, value in vars_of(batch).items() if name != "labels"}
        plain = model(**inputs, use_cache=False).logits
        quicken(model)
        known = batch.labels != IGNORED
        assert_close(model(**inputs, use_cache=False).logits[known], plain[known])

    @pytest.mark.full
    def test_an_interrupted_run_goes_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two steps, and two more by another run, make the weights that four steps make, bit by bit."""
        for folder, *more in (("whole",), ("parts", "--until", "2"), ("parts",)):
            options = ["--rows", "4", "--steps", "4", "--processes", "1", *more]
            monkeypatch.setattr("sys.argv", ["train", str(tmp_path / folder), *options])
            train.main()
        whole, parts = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "parts"))
        assert whole == parts


class TestFiles:
    def test_they_are_what_the_script_writes(self, tmp_path: Path) -> None:
        write_files(tmp_path, build_tokenizer())
        for path in tmp_path.iterdir():
            assert json.loads(path.read_text("utf-8")) == json.loads((MODEL / path.name).read_text("utf-8")), path.name
        here, there = build_config(build_tokenizer()).to_dict(), AutoConfig.from_pretrained(MODEL).to_dict()
        for config in (here, there):
            del config["dtype"], config["_name_or_path"]
        assert here == there

    def test_the_model_is_small(self) -> None:
        assert sum(path.stat().st_size for path in MODEL.iterdir()) < 6e6
        with safe_open(MODEL / "model.safetensors", "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118

    def test_all_tokenizers_agree(self) -> None:
        """transformers builds its own from the vocabulary; the server reads the file."""
        here, there, ours = build_tokenizer(), AutoTokenizer.from_pretrained(MODEL), Tokenizer.from_directory(MODEL)
        texts = [*all_texts(), "Grüße, 你好!  It's 12\n\n x", *SPECIAL, "<|im_start|>user\nHow many?<|im_end|>\n"]
        for text in texts:
            assert here.encode(text).ids == there(text).input_ids == ours.encode(text), text
        assert ours.eos_token_ids == {here.token_to_id("<|im_end|>"), here.token_to_id("<|endoftext|>")}

    def test_the_template_takes_parts_in_all_spellings(self) -> None:
        picture, clip = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
        parts: list[dict[str, object]] = [
            {"type": "image"},
            {"type": "image_url", "image_url": {"url": "x"}},
            {"image": "x"},
            {"type": "text", "text": "and"},
            {"type": "video"},
        ]
        messages = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": "How many?"},
        ]
        expected = (
            f"<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n{picture * 3}and{clip}<|im_end|>\n"
            "<|im_start|>assistant\nred<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n"
        )
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
        asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert asked == expected + "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(MODEL)


class TestAnswers:
    def test_few_pictures(self, model: Model) -> None:
        found = shares(model.ask, fresh(12, seed=2))
        assert min(found.values()) >= 0.75, found
        assert model.ask([question("What do you see?", 0)], []) == "I see no picture."

    @pytest.mark.full
    def test_three_hundred_pictures(self, model: Model) -> None:
        found = shares(model.ask, fresh(300), kinds=CHANCE)
        assert found["colour"] >= 0.98
        assert found["count"] >= 0.95
        assert found["shape"] >= 0.85

    @pytest.mark.full
    def test_other_pictures_bring_it_down_to_chance(self, model: Model) -> None:
        for kind, share in shares(model.ask, fresh(150), shuffled=True, kinds=CHANCE).items():
            chance = CHANCE[kind]
            assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / 150), kind

    @pytest.mark.full
    def test_conversations_about_two_pictures(self, model: Model) -> None:
        rng, right, asked = random.Random("two"), 0, 0
        for _ in range(30):
            shown = [random_scene(rng), random_scene(rng)]
            messages = random_chat(rng, shown, 3).messages
            for at, message in enumerate(messages):
                if message["role"] == "assistant":
                    asked += 1
                    right += model.ask(messages[:at], files_of(messages[:at], shown)) == message["content"]
        assert right / asked > 0.8
