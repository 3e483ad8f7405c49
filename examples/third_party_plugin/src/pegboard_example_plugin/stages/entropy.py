"""A number per token: `params.entropy` asks how undecided the model was, in nats. All three halves of a stage."""

import msgspec
import numpy as np
from pegboard.core.interfaces import DevicePart, FrontendStage, Interest, ReqSlot, Sent, Stage
from pegboard.core.interfaces.ahead import Wants
from pegboard.core.interfaces.errors import InvalidRequest

NAME = "example_stages.entropy"
KEPT = ReqSlot(list)


class EntropyFrontend(FrontendStage):
    name = NAME

    def prepare(self, request, length, info):
        asked = getattr(request, "params", {}).get("entropy")
        if asked not in (None, True, False):
            raise InvalidRequest("params.entropy must be true or false", param="params.entropy")
        return asked or None

    def finish(self, chunk, whole, rows):
        if whole is not None:
            chunk.extra = {**(chunk.extra or {}), "entropy": msgspec.msgpack.decode(whole)}


class Entropy(Stage):
    name = NAME

    def arrive(self, req, message):
        return Interest(single=True) if NAME in message.features else None

    def pack(self, step, extras):
        trees = step.work.trees
        counts = np.ones(len(step.sampled), np.int64) if trees is None else trees.counts
        rows = zip(step.sampled, (np.cumsum(counts) - counts).tolist(), strict=True)
        step.notes[NAME] = own = [(req, row) for req, row in rows if req.flags & self.flag]
        return np.array([row for _, row in own], np.int64)

    def arrived(self, step, result):
        for (req, _), value in zip(step.notes[NAME], result.parts[NAME]["entropy"].tolist(), strict=True):
            if not req.finished:
                KEPT.of(req).append(value)

    def send(self, req, start, stop):
        return Sent(whole=KEPT.of(req)[: req.output_len]) if req.finished else None


class EntropyPart(DevicePart):
    name = NAME

    def wants(self, rows):
        return Wants(logits=True)

    def computed(self, rows, batch, output):
        logprobs = output.logits[rows].log_softmax(-1)
        return {"entropy": -(logprobs.exp() * logprobs).nan_to_num().sum(-1)}
