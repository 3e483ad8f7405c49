"""A field of requests: `params.seconds` ends an answer after that time, with what there is by then."""

import time

import msgspec
from pegboard.core.interfaces import FinishReason, FrontendStage, Interest, ReqSlot, Stage
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.status import FinishType

NAME = "example_stages.seconds"
UNTIL = ReqSlot(lambda: [0.0])


class SecondsFrontend(FrontendStage):
    name = NAME

    def prepare(self, request, length, info):
        seconds = getattr(request, "params", {}).get("seconds")
        if seconds is not None and not (type(seconds) in (int, float) and 0 < seconds <= 3600):
            raise InvalidRequest("params.seconds must be above 0, and 3600 at most", param="params.seconds")
        return seconds


class Seconds(Stage):
    name = NAME

    def __init__(self, clock=time.monotonic):
        self.clock = clock

    def arrive(self, req, message):
        if NAME not in message.features:
            return None
        UNTIL.of(req)[0] = self.clock() + msgspec.msgpack.decode(message.features[NAME])
        return Interest()

    def finishers(self, req):
        return [self]

    def after(self, req, token):
        return FinishReason(FinishType.LENGTH) if self.clock() >= UNTIL.of(req)[0] else None
