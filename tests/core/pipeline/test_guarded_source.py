"""Sources that stages bring, and that raise: they are set aside, and cost nobody else a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.core.interfaces.batch import PrefillItem, StageWork
from pegboard.core.interfaces.errors import ConfigError, PluginError
from pegboard.core.interfaces.messages import AbortRequest, Accepted, Rejected, TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Interest, Stage
from pegboard.core.interfaces.step import BaseStep, CoreServices, StageStep, StepSource
from pegboard.plugins.prefill_in_parts.source import SplitPrefill
from pegboard.toolkit.system.culprits import Culprits
from tests.core.pipeline.harness import IGNORE, Harness, oracle
from tests.core.pipeline.test_sources import CountingModel

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])
PROMPTS = {"mine": [5, 9, 2], "a": [1, 2, 3], "b": list(range(40))}


class Sums(StepSource[StageStep, int]):
    """Plans a sum at every second chance. `raises` is the method that raises, from some call on."""

    first = True

    def __init__(self, core: CoreServices, raises: str) -> None:
        self.core, self.raises = core, raises
        self.asked = self.after = self.chances = 0

    def count(self, method: str) -> None:
        if method != self.raises:
            return
        self.asked += 1
        if self.asked >= (3 if method in ("next", "process_result") else 1):
            self.after += 1
            raise KeyError(f"no {method}")

    def next(self, in_flight: BaseStep | None) -> StageStep | None:
        self.count("next")
        self.chances += 1
        if not self.core.decoding or self.chances % 2:
            return None
        step = StageStep(self.core.next_number(), StageWork("sum", [1]))
        step.source = self
        return step

    @property
    def under_way(self) -> StageStep | None:
        self.count("under_way")
        return None

    def holds(self, req: Req) -> bool:
        self.count("holds")
        return False

    def takes(self, items: Sequence[PrefillItem]) -> bool:
        self.count("takes")
        return False

    def process_result(self, step: StageStep, result: int) -> None:
        self.count("process_result")

    def failed(self, step: StageStep, error: Exception) -> None:
        self.count("failed")

    def undo(self, step: StageStep) -> None:
        self.count("undo")


class Adding(Stage):
    """Takes part in requests of which a feature says so."""

    name = "adding"

    def __init__(self, raises: str) -> None:
        self.raises = raises

    def sources(self, core: CoreServices) -> list[Sums]:
        self.made = Sums(core, self.raises)
        return [self.made]

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        return Interest() if "adding" in message.features else None


def played(loop: str, raises: str) -> tuple[Harness, Adding, Any]:
    stage = Adding(raises)
    harness = Harness(loop=loop, joining=[stage], model=CountingModel, chunk=8)
    model: Any = harness.model
    return harness, stage, model


@LOOPS
@pytest.mark.parametrize("raises", ["next", "process_result", "failed", "under_way", "holds", "takes"])
def test_a_source_that_raises_is_set_aside(loop: str, raises: str, caplog: pytest.LogCaptureFixture) -> None:
    harness, stage, model = played(loop, raises)
    features: Any = {"adding": b"\xc3"}
    for rid, prompt in PROMPTS.items():
        more = {"features": features} if rid == "mine" else {}
        harness.submit(rid, prompt, 60 if rid == "mine" else 12, **IGNORE, **more)
    if raises == "failed":
        model.fails = 50
    for number in range(6):
        harness.step()
        harness.submit(f"later {number}", [number, 1], 3, **IGNORE)
    harness.scheduler.receive([AbortRequest(rid="later 5")])
    harness.run()
    reason = harness.finish("mine")
    assert (reason["status"], reason["code"]) == (500, "plugin_failed")
    assert reason["message"] == f"the stage 'adding' failed: KeyError: 'no {raises}'"
    for rid in ("a", "b"):
        assert harness.tokens(rid) == oracle(PROMPTS[rid], 12, ignore_eos=True), rid
    assert stage.made.after <= 2, "it is asked again, beyond the step that was under way"
    assert "this source is not asked any more" in caplog.text
    assert isinstance(harness.submit("plain", [1], 2, **IGNORE), Accepted)
    refused = harness.submit("another", [1], 2, features=features, **IGNORE)
    assert isinstance(refused, Rejected)
    assert (refused.status, refused.code) == (500, "plugin_failed")
    harness.run()


def test_its_plugin_is_named() -> None:
    harness, stage, _ = played("normal", "next")
    culprits: Culprits = harness.points.culprits
    culprits.know_part("stage", "adding", "acme 1.0", stage)
    features: Any = {"adding": b"\xc3"}
    harness.submit("mine", [1, 2], 60, features=features, **IGNORE)
    harness.run()
    assert harness.finish("mine")["message"] == "the stage 'adding' (acme 1.0) failed: KeyError: 'no next'"
    assert culprits.counts["stage", "adding"] == 1


@pytest.mark.parametrize("answer", ["a step", 3])
def test_what_is_no_step_is_an_error_of_the_source(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, stage, _ = played("normal", "")
    monkeypatch.setattr(Sums, "next", lambda self, in_flight: answer)
    harness.submit("a", [1, 2], 6, **IGNORE)
    harness.run()
    assert harness.tokens("a") == oracle([1, 2], 6, ignore_eos=True)
    assert harness.points.broken[stage.flag].message.endswith(f"next() answers {answer!r}, which is not a step")


@LOOPS
@pytest.mark.parametrize("method", ["begin", "next", "process_result"])
def test_what_is_raised_about_a_batch_ends_the_engine(
    loop: str, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No one else knows which tokens of it count. The log says whose it was."""
    harness = Harness(loop=loop, split_prefill_layers=2)
    harness.submit("running", [1, 2], 40, **IGNORE)
    for _ in range(3):
        harness.step()
    harness.submit("a", list(range(30)), 4, **IGNORE)
    inner = getattr(SplitPrefill, method)

    def raising(self: Any, *args: Any) -> Any:
        if method != "next" or self.under_way is not None:
            raise RuntimeError("lost my place")
        return inner(self, *args)

    monkeypatch.setattr(SplitPrefill, method, raising)
    with pytest.raises(RuntimeError, match="lost my place"):
        harness.run()
    assert f"the stage 'prefill_in_parts': {method} of a source raised about a batch" in caplog.text


def test_a_stage_that_cannot_bring_its_sources_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(self: Stage, core: CoreServices) -> Any:
        raise errors.pop()

    monkeypatch.setattr(Adding, "sources", raising)
    errors: list[Exception] = [ConfigError("two layers at least"), KeyError("layers")]
    with pytest.raises(PluginError, match=r"the stage 'adding': sources\(\) raised KeyError: 'layers'"):
        Harness(joining=[Adding("")])
    with pytest.raises(ConfigError, match="two layers at least"):
        Harness(joining=[Adding("")])
