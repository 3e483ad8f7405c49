"""Keys of the section `memory` that are about tiers."""

from __future__ import annotations

from pegboard.core.interfaces.options import PositiveInt, SectionFields


class HostSection(SectionFields):
    """KV memory on the host, below the device's; there only where the prefix cache has tiers."""

    max_total_tokens: PositiveInt | None = None
    """Size in tokens. Unset: twice the device's pool, but at most a quarter of the memory that is available then."""


class TierFields(SectionFields):
    """How KV is kept in storages."""

    storage_block: PositiveInt = 64
    """Tokens per block in storages; a multiple of the page size."""
