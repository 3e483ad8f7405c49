"""The key of the config that split prefill adds, and what goes with it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from pegboard.core.interfaces.options import SectionFields


class PartFields(SectionFields):
    """Keys of `scheduler`."""

    split_prefill_layers: Annotated[int, Field(ge=0)] = 0
    """Number of layers of a prefill per step while requests run; a decode step follows each part. 0: all layers at
    once. Not with `mixed_chunk`."""


class PartRules(SectionFields):
    """What the whole config must keep."""

    @model_validator(mode="after")
    def _one_way_to_share_a_step(self) -> PartRules:
        scheduler = getattr(self, "scheduler", None)  # not there where these are built by themselves
        if getattr(scheduler, "split_prefill_layers", 0) and getattr(scheduler, "mixed_chunk", None):
            raise ValueError(
                "scheduler.mixed_chunk and scheduler.split_prefill_layers exclude each other: decodes run either in a "
                "prefill's batch or between its parts"
            )
        return self
