"""The section `weight_updates` of the config."""

from __future__ import annotations

from pegboard.core.interfaces.options import NameList, SectionFields


class WeightUpdateSection(SectionFields):
    """Weights that are replaced while the server runs, and memory that is given back meanwhile."""

    enabled: bool = False
    """Whether weights may be replaced, and memory given back, through the admin's routes or `Engine.control`."""

    directories: NameList = ()
    """Directories below which new weights may be read. The model's own is always one of them."""


class WeightUpdateFields(SectionFields):
    """Keys of the whole config."""

    weight_updates: WeightUpdateSection = WeightUpdateSection()
    """Weights that are replaced while the server runs, and memory that is given back meanwhile."""
