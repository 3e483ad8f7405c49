"""What all sections of the config are made of."""

from __future__ import annotations

from pegboard.core.interfaces.options import SectionFields

AUTO = "auto"
"""`use: auto` picks the highest ranked provider whose requirements are met and that supports model and device."""


class Section(SectionFields):
    """Base of the core's sections: frozen, strict about unknown keys, described by its docstrings."""


class UseSection(Section):
    """A section that chooses one provider."""

    use: str = AUTO
    """Name of the provider, or `auto`."""
