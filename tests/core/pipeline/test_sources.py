"""Steps end where they came from: each is settled, repaired or undone once, and takes nothing with it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.interfaces.batch import ModelWorkerBatch, StageWork
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.step import SETTLE, BaseStep, Settle, StageStep, StepLost, StepSource
from pegboard.core.pipeline import lost, recovery
from pegboard.core.pipeline.executor import Done, LocalExecutor
from pegboard.core.pipeline.planner import Planner
from pegboard.core.pipeline.sources import BatchSource
from pegboard.core.pipeline.step import Step
from pegboard.plugins.media.encoding import Encoding
from pegboard.plugins.media.work import EncodeWork
from pegboard.plugins.prefill_in_parts.source import SplitPrefill
from tests.core.pipeline.harness import IGNORE, FakeModel, Harness, Seer, oracle, prompts
from tests.core.pipeline.noticing import noticed
from tests.plugins.media.media_harness import Album, MediaModel, Prompt, media_harness, model_of, submit

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])
ENDS = ("process_result", "failed", "behind_failed", "undo")


# ---- a source of somebody else's -------------------------------------------------------------------------------------


class CountingModel(FakeModel):
    """Adds numbers up where batches run, and notes the order of everything."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stage_parts["sum"] = self.add
        self.order: list[str] = []
        self.fails = 0

    def add(self, numbers: list[int]) -> Done[int]:
        self.order.append("sum")
        if self.fails:
            self.fails -= 1
            raise RuntimeError("cannot add")
        return Done(sum(numbers))

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        self.order.append(work.forward_mode.value)
        return super().__call__(work)


class Sums(StepSource[StageStep, int]):
    """Has one sum after the other computed, in steps without a batch; asked before prefills."""

    def __init__(self, harness: Harness, sums: list[list[int]], waits: bool = False) -> None:
        self._builder = harness.scheduler.components.builder
        self._sums = sums
        self._waits = waits
        self.found: list[int] = []
        self.ends: list[str] = []
        planner = harness.scheduler.planner
        planner.prefills = (self, *planner.prefills)

    def next(self, in_flight: BaseStep | None) -> StageStep | Settle | None:
        if not self._sums:
            return None
        if self._waits and in_flight is not None:
            return SETTLE
        step = StageStep(next(self._builder.numbers), StageWork("sum", self._sums.pop(0)))
        step.source = self
        return step

    def process_result(self, step: StageStep, result: int) -> None:
        self.ends.append("process_result")
        self.found.append(result)

    def failed(self, step: StageStep, error: Exception) -> None:
        self.ends.append("failed")

    def undo(self, step: StageStep) -> None:
        self.ends.append("undo")


def counting(loop: str, **more: Any) -> tuple[Harness, CountingModel]:
    harness = Harness(loop=loop, model=CountingModel, **more)
    assert isinstance(harness.model, CountingModel)
    return harness, harness.model


@LOOPS
@pytest.mark.parametrize("waits", [False, True])
def test_steps_of_a_stage_take_turns_with_decodes(loop: str, waits: bool) -> None:
    harness, model = counting(loop)
    harness.submit("a", [1, 2, 3], 12, **IGNORE)
    harness.step()
    source = Sums(harness, [[1, 2], [3, 4], [5]], waits)
    model.order.clear()
    harness.run()
    assert source.found == [3, 7, 5]
    assert harness.tokens("a") == oracle([1, 2, 3], 12, ignore_eos=True)
    first = model.order.index("sum")
    assert model.order[first : first + 5] == ["sum", "decode", "sum", "decode", "sum"]


@LOOPS
def test_a_failed_stage_costs_nobody_a_token(loop: str) -> None:
    """Not even those whose batch had been launched behind it."""
    for fails in range(1, 4):
        harness, model = counting(loop, chunk=16, mixed_chunk=True)
        harness.submit("a", [1, 2, 3], 12, **IGNORE)
        harness.step()
        source = Sums(harness, [[1]] * fails)
        model.fails = fails
        harness.submit("b", list(range(40)), 4, **IGNORE)
        harness.run()
        assert source.ends in (["failed"] * fails, ["failed", *["undo", "failed"] * fails][:fails])
        assert harness.tokens("a") == oracle([1, 2, 3], 12, ignore_eos=True)
        assert harness.tokens("b") == oracle(list(range(40)), 4, ignore_eos=True)


@LOOPS
def test_work_of_no_stage_fails_alone(loop: str) -> None:
    harness = Harness(loop=loop)
    harness.submit("a", [1, 2, 3], 5, **IGNORE)
    source = Sums(harness, [[1]])
    harness.run()
    assert source.ends == ["failed"]
    assert harness.tokens("a") == oracle([1, 2, 3], 5, ignore_eos=True)
    with pytest.raises(RuntimeError, match="no part of the stage 'sum'"):
        harness.scheduler.components.executor.ask("sum", [1])


@LOOPS
def test_asking_a_stage_waits_for_its_answer(loop: str) -> None:
    harness, _ = counting(loop)
    assert harness.scheduler.components.executor.ask("sum", [4, 5]) == 9
    harness.scheduler.components.executor.close()


def watch_closed(planner: Planner, closed: Counter[int]) -> None:
    """Count how often each batch is closed, by its number."""
    close = planner.closed

    def counted(step: Step) -> None:
        closed[(step.whole or step).number] += 1
        close(step)

    setattr(planner, "closed", counted)  # noqa: B010


# ---- steps that are lost ---------------------------------------------------------------------------------------------


def loses(harness: Harness, number: int) -> None:
    """Have the batch of this number be lost, with its KV undefined."""
    model, batches = harness.model, iter(range(1, 10_000))

    def fail_on(work: ModelWorkerBatch) -> bool:
        if next(batches) == number:
            model.slots[work.out_cache_loc] = -1
            model.early = None if work.part is not None else model.early
            raise StepLost("it has not come")
        return False

    model.fail_on = fail_on


@LOOPS
@pytest.mark.parametrize(
    "settings",
    [{}, {"chunk": 8, "mixed_chunk": True}, {"split_prefill_layers": 2}, {"speculator": Seer(0.7, "tree")}],
    ids=["plain", "mixed", "split", "drafts"],
)
def test_a_lost_step_is_computed_again_and_never_halved(loop: str, settings: dict[str, Any]) -> None:
    asked = dict(enumerate(prompts(6, seed=3)))
    for number in range(1, 12):
        harness = Harness(loop=loop, **settings)
        loses(harness, number)
        for rid, prompt in asked.items():
            harness.submit(str(rid), prompt, 6, **IGNORE)
            harness.step()
        harness.run()
        assert harness.scheduler.counters.failed_batches == 1
        for rid, prompt in asked.items():
            assert harness.tokens(str(rid)) == oracle(prompt, 6, ignore_eos=True)


def test_a_half_that_is_lost_is_computed_again() -> None:
    """Its batch failed because of another request, which alone ends."""
    harness = Harness()
    bad, lost = 250, iter([True])

    def fail_on(work: ModelWorkerBatch) -> bool:
        if len(work.rows) == 2 and bad not in work.input_ids and next(lost, False):
            raise StepLost("it has not come")
        return bad in work.input_ids

    harness.model.fail_on = fail_on
    asked = {"a": [1, 2], "b": [3, 4], "c": [5, bad], "d": [6, 7]}
    for rid, prompt in asked.items():
        harness.submit(rid, prompt, 6, **IGNORE)
    harness.run()
    assert harness.finish("c")["status"] == 500
    for rid in "abd":
        assert harness.tokens(rid) == oracle(asked[rid], 6, ignore_eos=True)


def test_a_part_that_fails_after_all_have_gone_closes_nothing_twice() -> None:
    harness = Harness(loop="overlap", split_prefill_layers=1)
    scheduler, closed = harness.scheduler, Counter[int]()
    watch_closed(scheduler.planner, closed)
    harness.model.fail_on = lambda work: work.part is not None and not work.part.first
    harness.submit("d", [1, 2], 30, **IGNORE)
    for _ in range(3):
        harness.step()
    harness.submit("s", list(range(20)), 5)
    while not (
        isinstance(in_flight := scheduler.loop.in_flight, Step)
        and in_flight.work.part
        and not in_flight.work.part.first
    ):
        harness.step()
    scheduler.receive([AbortRequest(rid="s")])
    harness.run()
    assert harness.tokens("d") == oracle([1, 2], 30, ignore_eos=True)
    assert scheduler.counters.failed_batches == 1
    assert set(closed.values()) == {1}


# ---- all sources, and trouble ----------------------------------------------------------------------------------------


class TroubledModel(MediaModel):
    """Fails or loses some steps of each kind."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rng, self.failing, self.losing = random.Random(0), 0.0, 0.0
        self.fail_on = self.hits

    def hits(self, work: ModelWorkerBatch) -> bool:
        if self.rng.random() < self.losing:
            self.slots[work.out_cache_loc] = -1
            self.early = None if work.part is not None else self.early
            raise StepLost("it has not come")
        return self.rng.random() < self.failing

    def encode(self, work: EncodeWork) -> Done[float]:
        chance = self.rng.random()
        if chance < self.failing + self.losing:
            for key in work.drop:
                del self.encoded[key]
            raise RuntimeError("out of luck") if chance < self.failing else StepLost("it has not come")
        return super().encode(work)


@LOOPS
def test_a_device_that_is_gone_ends_the_process_from_a_source_too(loop: str, tmp_path: Path) -> None:
    """It is no fault of the source that tells of it."""
    harness = media_harness(tmp_path, model=TroubledModel, loop=loop)
    model = model_of(harness)
    assert isinstance(model, TroubledModel)
    harness.scheduler.components.executor = LocalExecutor(
        harness.model.launch, healthy=lambda: False, stages=model.stage_parts
    )
    model.rng, model.failing, model.losing = random.Random(1), 1.0, 0.0
    album = Album(tmp_path)
    submit(harness, "a", album.prompt(album.words(2), album.item("a", 4, 4)))
    with pytest.raises(recovery.DeviceFailed):
        harness.run()


class Trouble:
    """Prompts with and without media, short and split, on too little memory, while steps fail and clients go."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.album = Album(directory, seed)
        settings: dict[str, Any] = rng.choice([{}, {"split_prefill_layers": 2}, {"mixed_chunk": True}])
        self.harness = media_harness(
            directory,
            capacity=24,
            encode_tokens=9,
            model=TroubledModel,
            loop=rng.choice(["normal", "overlap"]),
            chunk=rng.choice([None, 8]),
            tokens=rng.choice([96, 160]),
            cache=rng.choice(["radix", "none"]),
            **settings,
        )
        model = model_of(self.harness)
        assert isinstance(model, TroubledModel)
        model.rng = random.Random(seed)
        model.failing, model.losing = rng.choice([(0.0, 0.0), (0.06, 0.0), (0.3, 0.0), (0.0, 0.06), (0.0, 0.3)])
        self.prompts: dict[str, Prompt] = {}
        self.gone: set[str] = set()
        self.launched: list[BaseStep] = []
        self.ends: Counter[int] = Counter()
        self.closed: Counter[int] = Counter()
        self._depth = 0
        self._watch()

    def _watch(self) -> None:
        """Note every step that is launched, and each call of its source that ends it from outside."""
        scheduler = self.harness.scheduler
        launch = scheduler.launch

        def launched(in_flight: BaseStep | None) -> BaseStep | None:
            step = launch(in_flight)
            self.launched += [step] if step is not None else []
            return step

        setattr(scheduler, "launch", launched)  # noqa: B010
        watch_closed(scheduler.planner, self.closed)
        for source in scheduler.planner.sources:
            for name in ENDS:
                setattr(source, name, self._counted(getattr(source, name)))

    def _counted(self, call: Callable[..., None]) -> Callable[..., None]:
        def counted(step: BaseStep, *rest: Any) -> None:
            self.ends[id(step)] += self._depth == 0
            self._depth += 1
            try:
                call(step, *rest)
            finally:
                self._depth -= 1

        return counted

    def play(self) -> None:
        rng, harness = self.rng, self.harness
        for number in range(16):
            items = [self.album.item(rng.randrange(3), 2, 2) for _ in range(rng.choice([0, 0, 1, 2]))]
            parts = [part for item in items for part in (self.album.words(2), item)]
            prompt = self.prompts[f"{number}"] = self.album.prompt(*parts, self.album.words(rng.randint(1, 20)))
            submit(harness, f"{number}", prompt, rng.randint(1, 12))
            for _ in range(rng.randrange(4)):
                harness.step()
            if rng.random() < 0.2 and harness.scheduler.requests.alive:
                self.gone.add(rid := rng.choice(list(harness.scheduler.requests.alive)))
                harness.scheduler.receive([AbortRequest(rid=rid)])
        harness.run(600)
        self.check()

    def check(self) -> None:
        for step in self.launched:
            assert self.ends[id(step)] == 1, f"step {step.number} ended {self.ends[id(step)]} times"
            if isinstance(step, Step):
                number = (step.whole or step).number
                assert self.closed[number] == 1, f"batch {number} was closed {self.closed[number]} times"
        for rid, prompt in self.prompts.items():
            tokens, reason = self.harness.tokens(rid), self.harness.finish(rid)
            assert tokens == prompt.answer(20)[: len(tokens)], rid
            message = reason.get("message") or ""
            assert "has not come" not in message
            assert "first parts" not in message
            assert reason["type"] != "abort" or rid in self.gone or "out of luck" in message


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad luck lasts long here, and nobody is given up for it; that has tests of its own."""
    monkeypatch.setattr(lost, "MAX_LOST_STEPS", 10_000)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("seed", range(12))
def test_each_step_ends_once(seed: int, tmp_path: Path) -> None:
    Trouble(seed, tmp_path).play()


@pytest.mark.full
@pytest.mark.parametrize("first", [100, 250, 400])
@pytest.mark.usefixtures("patience")
def test_each_of_many_steps_ends_once(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 150):
        Trouble(seed, tmp_path).play()


@pytest.mark.full
@pytest.mark.usefixtures("patience")
def test_there_is_trouble_of_all_kinds(tmp_path: Path) -> None:
    """Each source has steps under way when some step fails."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        trouble = Trouble(seed, tmp_path)
        trouble.play()
        seen.update(type(getattr(step.source, "inner", step.source)).__name__ for step in trouble.launched)
        seen["failed"] += trouble.harness.scheduler.counters.failed_batches
        seen["gone"] += len(trouble.gone)
    assert min(seen[name] for name in ("Prefill", "Decode", "SplitPrefill", "Encoding", "failed", "gone")) > 20, seen


# ---- mutants ---------------------------------------------------------------------------------------------------------


def nothing(*args: Any) -> None:
    """Do nothing."""


def settles_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchSource, "process_result", nothing)


def forgets_batches_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchSource, "behind_failed", nothing)


def forgets_splits_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SplitPrefill, "behind_failed", nothing)


def forgets_media_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Encoding, "behind_failed", nothing)


def keeps_lost_media(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Encoding, "undo", nothing)


def undoes_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchSource, "undo", nothing)


def goes_on_with_what_was_undone(patch: pytest.MonkeyPatch) -> None:
    def undo(self: SplitPrefill, step: Step) -> None:
        self._core.rewind(step)
        self._close(step)

    patch.setattr(SplitPrefill, "undo", undo)


def never_lets_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SplitPrefill, "holds", lambda self, req: True)


def holds_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SplitPrefill, "holds", lambda self, req: False)


def blames_for_what_was_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "StepLost", type("Never", (Exception,), {}))


def closes_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Planner, "closed", nothing)


def waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """What cannot be planned before results are known is left for good."""
    patch.setattr(Encoding, "next", lambda self, in_flight: None)


MUTANTS = (
    settles_nothing,
    forgets_batches_behind,
    forgets_splits_behind,
    forgets_media_behind,
    keeps_lost_media,
    undoes_nothing,
    goes_on_with_what_was_undone,
    never_lets_go,
    holds_nothing,
    blames_for_what_was_lost,
    closes_nothing,
    waits_for_nothing,
)


@pytest.mark.full
@pytest.mark.parametrize("change", MUTANTS, ids=lambda change: change.__name__)
def test_broken_sources_are_noticed(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change(monkeypatch)
    for seed in range(200):
        if noticed(change, Trouble(seed, tmp_path).play):
            return
    pytest.fail("nothing is noticed")
