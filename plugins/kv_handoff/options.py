"""The section of the config that chooses what moves KV."""

from __future__ import annotations

from pegboard.core.interfaces.options import SectionFields


class TransferSection(SectionFields):
    """What reads KV out of other servers' memory, for gates that bring it from there."""
