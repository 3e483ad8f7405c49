"""The section `weight_updates` of the config."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import NameList, SectionFields


class WeightUpdateSection(SectionFields):
    """Weights that are replaced while the server runs, and memory that is given back meanwhile."""

    enabled: bool = False
    """Whether weights may be replaced, and memory given back, through the admin's routes or `Engine.control`."""

    directories: NameList = ()
    """Directories below which new weights may be read. The model's own is always one of them."""

    process_groups: bool = False
    """Whether a trainer may broadcast new weights in a process group. The server then connects to any address that the
    admin's request names; nothing on these connections is encrypted or has a password."""

    group_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that the ranks of a process group, and each of its tensors, are waited for."""


class WeightUpdateFields(SectionFields):
    """Keys of the whole config."""

    weight_updates: WeightUpdateSection = WeightUpdateSection()
    """Weights that are replaced while the server runs, and memory that is given back meanwhile."""
