"""CostModel: how long a device takes for a batch. Fitted by `benchmarks/fit_cost.py`, or written down by hand."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.registry.names import or_hint

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import EncodeWork, ModelWorkerBatch

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


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
