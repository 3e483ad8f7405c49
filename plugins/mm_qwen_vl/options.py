"""Options of the processor."""

from __future__ import annotations

from typing import Literal

from pegboard.core.interfaces.options import Options


class QwenVLProcessorOptions(Options):
    """How prompts with media are laid out."""

    mrope_after_video: Literal["trained", "transformers"] = "trained"
    """Position of the text after a video in Qwen2-VL and 2.5-VL: the largest one so far and one more, as these models
    were trained, or what transformers does from 5.3 on, where text may share positions with late frames."""
