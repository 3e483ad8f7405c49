"""Items that a request has encoded itself, through a whole engine: as if it had sent the picture or the video."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save

from pegboard.conformance.vl_checkpoints import vl_checkpoint
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.media.api import MediaContext, MediaItem, MediaPiece, MediaSource
from pegboard.plugins.mm_qwen_vl.encoder import QwenVLEncoder
from pegboard.plugins.mm_qwen_vl.options import QwenVLProcessorOptions
from pegboard.plugins.mm_qwen_vl.processor import QwenVLProcessor
from pegboard.toolkit.media.inputs import EncodedForm, MediaInput
from pegboard.toolkit.model.model_config import read_model_config
from tests.e2e.test_multimodal import asked, clip, engine, picture, requests


class Client:
    """Encodes items on its own side, with the model's vision tower."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self.scratch = scratch
        hf_config = read_model_config(path)
        self.processor = QwenVLProcessor(QwenVLProcessorOptions(), MediaContext(path, hf_config))
        self.encoder = QwenVLEncoder(
            NoOptions(), ModelContext(path, hf_config, dtype=torch.float32, device=torch.device("cpu"))
        )
        self.encoder.load()

    def rows(self, media: MediaInput) -> tuple[MediaItem, torch.Tensor]:
        """What an item is, and its states [tokens, width]."""
        self.scratch.write_bytes(media.data)
        out = io.BytesIO()
        shape = self.processor.prepare(MediaSource(media.kind, self.scratch), out)
        item = MediaItem(media.kind, bytes(32), "x", shape.shape, shape.grid, shape.pieces, shape.times)
        pixels = np.frombuffer(out.getvalue(), np.uint8).reshape(item.pieces, -1, *shape.shape[1:])
        made = self.encoder.encode([MediaPiece(item, index, one) for index, one in enumerate(pixels)])
        return item, torch.cat([torch.cat((one.states, *one.deep), dim=1) for one in made])

    def encoded(self, media: MediaInput, *, raw: bool = False, dtype: torch.dtype = torch.float32) -> MediaInput:
        item, rows = self.rows(media)
        form = EncodedForm(grid=item.grid, times=item.times)
        if not raw:
            return MediaInput(kind=media.kind, data=save({"states": rows.to(dtype)}), encoded=form, place="here")
        form = msgspec.structs.replace(form, format="raw", dtype="float32", shape=tuple(rows.shape))
        return MediaInput(kind=media.kind, data=rows.numpy().tobytes(), encoded=form)


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.full)])
def test_the_same_as_of_pixels(family: str, checkpoints: Path, tmp_path: Path) -> None:
    path = vl_checkpoint(checkpoints, family)
    client = Client(path, tmp_path / "item")
    first, second, video = picture(1, 60, 90), picture(2, 200, 100), clip("short", 7)
    prompts = {
        "a picture": lambda see: asked("What is this? ", see(first), " Tell me."),
        "several": lambda see: asked(see(second), " then ", see(video), " and ", see(first), "Which was last?"),
    }
    small = {"scheduler": {"chunked_prefill_size": 7}, "media": {"encode_tokens": 24}}
    with engine(path, **small) as made:
        seen = made.run(requests([prompt(lambda one: one) for prompt in prompts.values()], 16))
        encoded_pieces = counted(made)
        for raw in (False, True):
            stated = [prompt(lambda one, raw=raw: client.encoded(one, raw=raw)) for prompt in prompts.values()]
            for name, there, here in zip(prompts, seen, made.run(requests(stated, 16)), strict=True):
                assert here.token_ids == there.token_ids, name
                assert here.logprobs is not None
                assert there.logprobs is not None
                for one, other in zip(here.logprobs, there.logprobs, strict=True):
                    assert one[0] == pytest.approx(other[0], abs=1e-5), name
                # Whether it came raw or as safetensors makes no difference, and it is not taken for the picture.
                assert (here.cached_tokens >= 30) is raw, name
        # The second way of sending them is a hit of the prefix cache.
        assert counted(made) == 2 * encoded_pieces


def counted(made: Any) -> int:
    """Pieces that were encoded, or read, so far."""
    return int(made.stats()["encoded_pieces"])


def test_states_of_another_type_and_others_that_do_not_fit(checkpoints: Path, tmp_path: Path) -> None:
    path = vl_checkpoint(checkpoints, "qwen3_vl")
    client = Client(path, tmp_path / "item")
    one = picture(1, 60, 90)
    with engine(path) as made:
        (exact,), (short,) = (
            made.run(requests([asked("What? ", client.encoded(one, dtype=dtype))], 4))
            for dtype in (torch.float32, torch.bfloat16)
        )
        assert exact.logprobs is not None
        assert short.logprobs is not None
        assert short.logprobs[0][0] == pytest.approx(exact.logprobs[0][0], abs=0.05)
        assert short.logprobs[0][0] != exact.logprobs[0][0]

        item, rows = client.rows(one)
        wrong = MediaInput(
            kind="image", data=save({"x": rows[:, :-1].contiguous()}), encoded=EncodedForm(grid=item.grid), place="here"
        )
        with pytest.raises(InvalidRequest, match=f"here: its states have {rows.shape[1] - 1} numbers a token") as no:
            made.run(requests([asked("What? ", wrong)], 4))
        assert (no.value.status, no.value.param) == (400, "here")
        fewer = MediaInput(kind="image", data=save({"x": rows[:-1]}), encoded=EncodedForm(grid=item.grid))
        with pytest.raises(InvalidRequest, match=f"{len(rows) - 1} states came with it"):
            made.run(requests([asked("What? ", fewer)], 4))


def test_states_that_the_models_type_cannot_hold_fail_alone(checkpoints: Path, tmp_path: Path) -> None:
    path = vl_checkpoint(checkpoints, "qwen3_vl")
    client = Client(path, tmp_path / "item")
    item, rows = client.rows(picture(1, 60, 90))
    large = MediaInput(kind="image", data=save({"x": rows * 0 + 1e6}), encoded=EncodedForm(grid=item.grid))
    with engine(path, model={"dtype": "float16"}) as made:
        failed, fine = made.run(requests([asked("What? ", large), asked("What? ", picture(2, 60, 90))], 4))
    assert failed.finish_reason is not None
    assert failed.finish_reason["status"] == 500
    assert "cannot hold" in failed.finish_reason["message"]
    assert len(fine.token_ids) == 4
