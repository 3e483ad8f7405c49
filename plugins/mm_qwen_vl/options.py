"""Options of the processor."""

from __future__ import annotations

from typing import Literal

from pegboard.core.interfaces.options import Options


class QwenVLProcessorOptions(Options):
    """How prompts with media are laid out."""

    mrope_after_video: Literal["trained", "transformers"] = "trained"
    """Position of the text after a video in Qwen2-VL and 2.5-VL. `trained`: the largest position so far plus one, as
    these models were trained. `transformers`: as in transformers 5.3 and later, where text may share positions with
    late frames."""
