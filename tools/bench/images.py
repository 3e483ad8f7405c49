"""Pictures that the bench makes: drawn from a seed, as clients send them."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.errors import ConfigError, PegboardError
from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt
from pegboard.toolkit.media.service import reader_of

if TYPE_CHECKING:
    from numpy.random import Generator

    from pegboard.core.engine.engine import Engine

QUALITY = 90
COARSE = 16
"""Pixels between two points whose colours are drawn. What lies between is smooth, so that a picture has about as many
bytes as a photograph has."""
MOST = 16_384
"""Pixels of a side."""


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Pixels of a picture."""

    width: int = 1024
    height: int = 1024

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @classmethod
    def parse(cls, text: str) -> ImageSize:
        """Read ``WIDTHxHEIGHT``. Raises PegboardError."""
        found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
        if found is None or not all(0 < int(side) <= MOST for side in found.groups()):
            raise PegboardError(f"--image-size: {text!r} is not WIDTHxHEIGHT, such as 1024x768")
        return cls(int(found[1]), int(found[2]))


def draw(random: Generator, size: ImageSize) -> bytes:
    """Return a JPEG file that is like no other. Raises ConfigError where Pillow (the extra `images`) is missing."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("pictures need Pillow: pip install 'pegboard[images]'") from None
    points = (size.height // COARSE + 2, size.width // COARSE + 2, 3)
    coarse = Image.fromarray(random.integers(0, 256, points, np.uint8))
    file = io.BytesIO()
    coarse.resize((size.width, size.height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def content_part(picture: bytes) -> dict[str, Any]:
    """Return a picture as a part of a message in OpenAI's form, with a `data:` address."""
    address = f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
    return {"type": "image_url", "image_url": {"url": address}}


def chat_prompt(engine: Engine, messages: list[dict[str, Any]]) -> str | MediaPrompt:
    """Return the prompt of messages in OpenAI's form, as the model's chat template has it. Raises PegboardError for
    pictures where the model takes none.
    """
    media: list[MediaInput] = []

    def templated(content: Any) -> Any:
        return content if isinstance(content, str) else [part(one) for one in content]

    def part(said: dict[str, Any]) -> Any:
        if said["type"] != "image_url":
            return said
        media.append(MediaInput(kind="image", url=said["image_url"]["url"]))
        return image_part(engine)

    shown = [{**one, "content": templated(one["content"])} for one in messages]
    text = engine.tokenizer.apply_chat_template(shown)
    return MediaPrompt(base=text, media=tuple(media)) if media else text


def image_part(engine: Engine) -> dict[str, object]:
    """Return the content part that the model's chat template takes for a picture. Raises PegboardError where the model
    takes none.
    """
    reader = reader_of(engine)
    if reader is None or "image" not in reader.kinds:
        raise PegboardError(f"the model {engine.info.served_name} takes no pictures")
    return dict(reader.part("image"))
