"""What the routes make of a body."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from starlette.requests import Request

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.weight_updates.controls import tensors_of
from pegboard.plugins.weight_updates.routes import Routes
from pegboard.plugins.weight_updates.uploads import Uploads
from pegboard.toolkit.http.weight_version import ServedWeights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.interfaces.client import EngineClient


class Scheduler:
    """Refuses, as the scheduler does, what is not whole."""

    async def control(self, action: str, args: dict[str, object]) -> Mapping[str, object]:
        self.asked = action
        tensors_of(args)
        return {}


@pytest.mark.parametrize(("dtypes", "shapes"), [(["float32"], [[1], [2]]), (["float32", "float32"], [[1]])])
def test_lists_of_other_lengths_reach_the_scheduler(tmp_path: Path, dtypes: list[str], shapes: list[list[int]]) -> None:
    """It leaves the trainer's group where it refuses them: the trainer broadcasts what was refused."""

    async def receive() -> dict[str, object]:
        body = {"names": ["a", "b"], "dtypes": dtypes, "shapes": shapes}
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    scheduler = Scheduler()
    routes = Routes(cast("EngineClient", scheduler), ServedWeights(), Uploads(tmp_path / "uploads"))
    request = Request({"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}, receive)
    with pytest.raises(InvalidRequest, match=r"needs a name, type and shape: .*null") as refused:
        asyncio.run(routes.from_trainer(request))
    assert (scheduler.asked, refused.value.param) == ("update_weights", "names")
