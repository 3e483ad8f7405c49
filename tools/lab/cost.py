"""CostModel: how long a device takes for a batch. Fitted by `benchmarks/fit_cost.py`, or written down by hand."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pegboard.core.interfaces.errors import ConfigError
from pegboard.toolkit.text.near_names import or_hint

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import ModelWorkerBatch
    from pegboard.plugins.media.work import EncodeWork

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GB = 1e9


class TierCost(BaseModel):
    """How fast KV gets from a tier and to it: GB/s (of 1e9 bytes), and the seconds that each move takes beside."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    read: Rate
    write: Rate
    latency: Seconds = 0.0


class StorageCost(TierCost):
    """The same of a storage. It keeps so many `bytes`; None: as many as its own option `max_bytes` says, if it has one,
    or all.
    """

    bytes: float | None = Field(default=None, gt=0)


class CostModel(BaseModel):
    """Seconds of one forward pass, as a sum over what the batch holds.

    A roofline in its simplest form: a pass reads all weights however small it is (`base`), multiplies each new token by
    them (`per_token`), reads the KV of every request's context (`per_context_token`), compares each new token with
    everything before it (`per_pair`), and has some work per request (`per_request`). While a pass is bound by reading
    weights its tokens are free, so the first two do not add up: the larger counts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    source: str = ""
    """Where the figures are from."""
    base: Seconds
    per_token: Seconds
    per_context_token: Seconds = 0.0
    per_pair: Seconds = 0.0
    per_request: Seconds = 0.0
    overhead: Seconds = 0.0
    """Seconds that every step takes beside the pass, scheduling included."""
    encode_base: Seconds = 0.0
    """Seconds that a step which encodes media takes at least."""
    encode_per_token: Seconds = 0.0
    """Per token that stands for media: the encoder's weights times all patches of it."""
    encode_per_pair: Seconds = 0.0
    """Per pair of tokens of one piece: the encoder's attention."""
    encoded_token_bytes: int = Field(default=8192, gt=0)
    """What the states of one such token take in the encoder cache: 4,096 numbers of 16 bits by default."""
    kv_token_bytes: int | None = Field(default=None, gt=0)
    """Bytes of a token's KV."""
    host: TierCost | None = None
    """Between the device and the host."""
    storages: dict[str, StorageCost] = {}
    """Between the host and a storage, by the name of its provider."""
    load_overlap: float = Field(default=0.0, ge=0, le=1)
    """The share of a load from the host that goes on while the pass computes, where that takes as long."""

    @property
    def encodes(self) -> bool:
        """Whether it says what encoding costs."""
        return bool(self.encode_base or self.encode_per_token)

    def encode_seconds(self, work: EncodeWork) -> float:
        """Return what the model says of one step that encodes media."""
        tokens = [piece.tokens for piece in work.pieces]
        pairs = sum(count * count for count in tokens)
        passed = max(self.encode_base, self.encode_per_token * sum(tokens))
        return self.overhead + passed + self.encode_per_pair * pairs

    def load_seconds(self, tokens: int) -> float:
        """Return what it takes to load KV from the host, beside everything else."""
        if self.host is None or self.kv_token_bytes is None:
            raise ValueError("this cost model does not say what tiers cost")
        return self.host.latency + tokens * self.kv_token_bytes / (self.host.read * GB)

    def delay(self, work: ModelWorkerBatch, tokens: int) -> float:
        """Return by how much loading so many tokens makes a batch longer."""
        load = self.load_seconds(tokens)
        return load - self.load_overlap * min(load, self.seconds(work) - self.overhead)

    def with_tier(self, text: str) -> CostModel:
        """Return the same with figures of one tier from ``name:key=number,...``. Raises ConfigError."""
        name, _, rest = text.partition(":")
        try:
            values = {key.strip(): float(value) for key, _, value in (one.partition("=") for one in rest.split(","))}
        except ValueError:
            values = {}
        if not name or not values:
            raise ConfigError(f"--tier: {text!r} is not NAME:KEY=NUMBER,...")
        known = self.host if name == "host" else self.storages.get(name)
        tier = {**({} if known is None else known.model_dump()), **values}
        said = self.model_dump()
        said |= {"host": tier} if name == "host" else {"storages": {**said["storages"], name: tier}}
        try:
            return CostModel.model_validate(said)
        except ValidationError as error:
            raise ConfigError(f"--tier {text}: {error}") from None

    def seconds(self, work: ModelWorkerBatch) -> float:
        """Return what the model says of one batch."""
        new, context = work.extend_lens, work.seq_lens
        tokens = int(new.sum())
        # Token number i of a request's new ones is compared with the prefix and the i before it.
        pairs = float(np.dot(new, context - (new - 1) / 2)) if tokens > len(new) else float(context.sum())
        return (
            self.overhead
            + max(self.base, self.per_token * tokens)
            + self.per_context_token * float(context.sum())
            + self.per_pair * pairs
            + self.per_request * len(new)
        )


def load_cost(name: str) -> CostModel:
    """Return a cost model that comes with Pegboard, by name, or one from a YAML or JSON file. Raises ConfigError."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"cost model {name}: {error.strerror}") from None
    else:
        names = cost_names()
        if name not in names:
            raise ConfigError(
                f"cost model {name!r} is unknown; {or_hint(name, names)}known: {', '.join(names)}; "
                "or name a .yaml or .json file"
            )
        text = (resources.files("pegboard.tools.lab") / "costs" / f"{name}.yaml").read_text("utf-8")
    try:
        return CostModel.model_validate(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"cost model {name}: {error}") from None


def cost_names() -> list[str]:
    """Return the cost models that come with Pegboard."""
    folder = resources.files("pegboard.tools.lab") / "costs"
    return sorted(one.name.removesuffix(".yaml") for one in folder.iterdir() if one.name.endswith(".yaml"))
