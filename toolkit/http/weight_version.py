"""Which weights a server has: what answers say of it, for all APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.interfaces.client import EngineClient

DEFAULT = "default"
"""The version of the weights of the start."""
VERSION, STARTED_WITH = "weight_version", "weight_version_start"
"""In what stages tell of an answer: the version that its last token came from, and that of its first one where it was
another.
"""
BROKEN = "weights_broken"
"""The code of errors while the weights have no meaning."""


class ServedWeights:
    """The `version` of the weights, and their `fault`: why they have no meaning, "" where they have one."""

    def __init__(self) -> None:
        self.version = DEFAULT
        self.fault = ""

    def learn(self, version: object) -> None:
        """Note that there are weights of this version."""
        self.version, self.fault = str(version), ""


def served_weights(client: EngineClient) -> ServedWeights:
    """Return what is known of a server's weights."""
    offered = (one for one in client.services.values() if isinstance(one, ServedWeights))
    return next(offered, ServedWeights())


def told_versions(extra: Mapping[str, object]) -> dict[str, object]:
    """Return what stages tell of the weights that an answer came from."""
    return {name: extra[name] for name in (VERSION, STARTED_WITH) if name in extra}
