"""Files, settings and tokens of the toy's media (`pegboard.conformance.rig.media_toy`)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pegboard.conformance.checkpoints import VOCAB_SIZE
from pegboard.conformance.rig.media_toy import TOKENS


def ppm(pixels: NDArray[np.uint8]) -> bytes:
    """Return a picture [height, width, 3], or a video [frames, height, width, 3], as a file."""
    frames = pixels if pixels.ndim == 4 else pixels[None]
    return b"".join(b"P6 %d %d 255\n" % (one.shape[1], one.shape[0]) + one.tobytes() for one in frames)


def toy_settings(**more: object) -> dict[str, object]:
    """Return what the config.json of a model with the toy's tokens says, as fields of `ToySettings`."""
    ids = {"image_token_id": VOCAB_SIZE + 1, "video_token_id": VOCAB_SIZE + 2}
    return {**ids, **more}


def add_toy_tokens(path: Path) -> None:
    """Have the tiny tokenizer in a folder know the toy's tokens."""
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    config["added_tokens_decoder"] = {
        str(VOCAB_SIZE + i): {"content": name, "special": True} for i, name in enumerate(TOKENS)
    }
    with tempfile.NamedTemporaryFile("w", dir=path, suffix=".json", delete=False, encoding="utf-8") as scratch:
        json.dump(config, scratch)
    Path(scratch.name).replace(file)
