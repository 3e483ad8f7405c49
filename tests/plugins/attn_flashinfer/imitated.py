"""The backend over the imitation of FlashInfer."""

from __future__ import annotations

from typing import ClassVar

import torch

from pegboard.core.interfaces.attention import AttentionContext
from pegboard.plugins.attn_flashinfer import plugin
from pegboard.plugins.attn_flashinfer.backend import FlashInferAttention
from pegboard.plugins.attn_flashinfer.options import FlashInferOptions
from pegboard.plugins.attn_flashinfer.shell import Limits
from tests.plugins.attn_flashinfer.fake_flashinfer import FakeFlashInfer

PROVIDES = plugin.providers[0].provides
OPTIONS = {"workspace_mib": 1}
CASCADE = {**OPTIONS, "cascade": True}


class Imitated(FlashInferAttention):
    """On a CPU, with float32 and heads of any size, so that the whole suite runs."""

    library_type: ClassVar[type[FakeFlashInfer]] = FakeFlashInfer
    limits = Limits((torch.float16, torch.bfloat16, torch.float32), None)

    def __init__(self, options: FlashInferOptions, ctx: AttentionContext) -> None:
        self.library = self.library_type(lax=True)
        super().__init__(options, ctx, self.library)

    @classmethod
    def supports(cls, options: FlashInferOptions, ctx: AttentionContext) -> str | None:
        return cls.unfit(options, ctx)
