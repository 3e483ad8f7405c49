"""Steps of its own: one of many sums up the KV of a prompt, which has to stay as it is."""

from pegboard.core.interfaces import DevicePart, Interest, Stage, StageStep, StageWork, StepSource


class Checksums(Stage):
    name = "example_stages.checksums"

    def __init__(self, every=64):
        self.every, self.sums, self.counts = every, {}, {"kv_checked": 0, "kv_changed": 0}

    def sources(self, core):
        return [Checking(core, self)]

    def arrive(self, req, message):
        self.sums[req] = None
        return Interest(look=False)

    def unplaced(self, req):
        self.sums[req] = None  # it will have its KV elsewhere, and computed in another batch

    def gone(self, req):
        self.sums.pop(req, None)

    def figures(self):
        return self.counts


class Checking(StepSource):
    def __init__(self, core, stage):
        self.core, self.stage, self.plans, self.asked = core, stage, 0, {}

    def next(self, in_flight):
        self.plans += 1
        for req in [] if self.plans % self.stage.every else list(self.stage.sums):
            slots = self.core.slots(req)[: req.input_len]
            if len(slots) == req.input_len and not req.finished:
                self.stage.sums[req] = self.stage.sums.pop(req)  # the last one next time
                step = StageStep(self.core.next_number(), StageWork(self.stage.name, slots))
                self.asked[step.number], step.source = (req, req.kv), self
                return step

    def process_result(self, step, result):
        req, kv = self.asked.pop(step.number)
        if req in self.stage.sums and req.kv is kv:
            before, self.stage.sums[req] = self.stage.sums[req], result
            self.stage.counts["kv_checked"] += 1
            self.stage.counts["kv_changed"] += before is not None and abs(before - result) > 1e-3 * result

    def failed(self, step, error=None):
        del self.asked[step.number]

    undo = failed


class ChecksumPart(DevicePart):
    name = Checksums.name

    def run(self, slots, services):
        return float(sum(services.pool.keys(layer)[slots].float().abs().sum() for layer in services.pool.layer_ids))
