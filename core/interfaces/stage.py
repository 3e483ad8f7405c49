"""Stages: how a feature takes part in the pipeline. A plugin's hook class brings up to three halves of one name.

`Stage` decides in the scheduler's loop, `DevicePart` computes where batches run, `FrontendStage` works in the API
process. They hold no references to each other: a message's `features`, a batch's payload and what parts compute travel
between them. A point is called on stages that override its method, for requests in which they take part, in the order
of their plugins (`pegboard plugins`), built-in ones first.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from pegboard.core.interfaces.ahead import Wants
from pegboard.core.interfaces.req import WHOLE_PREFIX

if TYPE_CHECKING:
    from pathlib import Path

    import msgspec
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext
    from pegboard.core.interfaces.ahead import AheadRoom, DeviceServices, LoadedModel, LogPart, Verified
    from pegboard.core.interfaces.batch import BatchExtras, ModelWorkerBatch, ScheduleBatch
    from pegboard.core.interfaces.choosing import NamedProvider
    from pegboard.core.interfaces.contract import Contract, Ctx, T
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput, LogprobOutput
    from pegboard.core.interfaces.layers import ModelSpec
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.model_family import ModelContext
    from pegboard.core.interfaces.req import Req, ReqKV
    from pegboard.core.interfaces.sampling import SamplingParams
    from pegboard.core.interfaces.status import FinishReason
    from pegboard.core.interfaces.step import AnySource, BaseStep, CoreServices
    from pegboard.core.interfaces.stops import CompiledStops, Ending
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.core.interfaces.trees import Accepted, TokenTrees

R = TypeVar("R")


class Wait(enum.Enum):
    """For `Stage.clip`: no token of the request can be computed in this step."""

    SKIP = "skip"
    """Other requests may be admitted in its place."""
    STOP = "stop"
    """Nothing further is admitted to this prefill."""
    SHORT = "short"
    """STOP, as others have the stage's own memory: less urgent ones give theirs up (`unplaced`), so do parked ones."""
    HOLD = "hold"
    """STOP, for a step of the stage's own; while nothing is admitted, others are asked, so that it serves all."""


@dataclass(frozen=True, slots=True)
class Interest:
    """What a stage needs for a request that it takes part in. `history`: the tokens before a step are known when it is
    packed. `single`: each output token is drawn in a row of its own, so the request gets neither tokens ahead nor
    forced tokens. `constrained`: it has a TokenConstraint before it is admitted. Without `look` the stage's `send` is
    asked only when output is sent anyway, and at the end; what `finishers` and `compile_stops` bring, at each token.
    """

    history: bool = False
    single: bool = False
    look: bool = True
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A number per request for the model, in `ForwardBatch.extras` as ``"<stage>.<name>"``.

    `of` returns a request's number; it stays the same while the request has memory. Requests in which the stage takes
    no part have 0. The running batch keeps the numbers flat, so a decode costs no call per request; halves of a failed
    batch have theirs. With `per` "token" a request's number stands once for each of its new tokens.
    """

    name: str
    of: Callable[[Req], float]
    per: Literal["request", "token"] = "request"
    dtype: type[np.generic] = np.int64


class StepView(Protocol):
    """A step as stages see it, to be read only. Halves of a failed step are steps of their own, with the same `number`.

    `kvs` are the `Req.kv` of `batch.reqs` as they were at launch: a request that ended or was retracted since has
    another one. `sampled` are the requests that a token is drawn for, in the batch's order. In `notes` a stage keeps,
    under its name, what it needs when results arrive. `recomputed` int64 [requests] or None: so many tokens at a
    request's front were computed before, and are computed once more.
    """

    @property
    def number(self) -> int: ...
    @property
    def batch(self) -> ScheduleBatch: ...
    @property
    def work(self) -> ModelWorkerBatch: ...
    @property
    def kvs(self) -> list[ReqKV]: ...
    @property
    def sampled(self) -> list[Req]: ...
    @property
    def notes(self) -> dict[str, object]: ...
    @property
    def recomputed(self) -> NDArray[np.int64] | None: ...


class StepResult(Protocol):
    """What a step computed, on the host: `tokens` int64 [sampled], the logprobs that requests want of them, and in
    `parts` what each DevicePart computed, by its stage's name.
    """

    @property
    def tokens(self) -> NDArray[np.int64]: ...
    @property
    def logprobs(self) -> LogprobOutput | None: ...
    @property
    def parts(self) -> Mapping[str, Mapping[str, NDArray[np.generic]]]: ...


@dataclass(frozen=True, slots=True)
class Sent:
    """What a stage adds to an output: a value for all of it, and one per token; anything that msgspec encodes."""

    whole: object = None
    rows: Sequence[object] = ()


@dataclass(frozen=True, slots=True)
class StageContext:
    """What stages and device parts are built with, before weights are read. `config` is the EngineConfig. `runner` are
    the capabilities of the chosen runner, which is called `runner_name`. `choose` says what is chosen for a contract;
    `provider` builds it, once for all who ask. What takes memory by the model's sizes is built later, in `gate` or
    `attach`: weights may prove that config.json lies. `find` is None where the config names no provider and none
    supports the context, and `missing` says then which would but for a library, by the contract's name. `lacking` says
    who of those that compute the model lacks a capability, such as "model family 'llama'"; None: all have it. `end`
    finishes a request for a reason, from within `arrived`, `commit` or `closed`; none of its KV is shared. One that has
    ended keeps its reason. Tokens of a prompt are computed in chunks of `chunk_size`, or larger ones if a stage splits
    prefills; None: at once. `scratch` is a directory that this process shares with that of the API. `choices` are the
    providers chosen so far, by contract; `failed` counts a failure of what `provider` has built.
    """

    config: Any
    spec: ModelSpec
    model: ModelContext
    tokenizer: Tokenizer
    runner: frozenset[str]
    choose: Callable[[Contract[T, Ctx], Ctx], NamedProvider]
    provider: Callable[[Contract[T, Ctx], Ctx], T]
    find: Callable[[Contract[T, Ctx], Ctx], T | None]
    missing: Callable[[str], Sequence[str]]
    lacking: Callable[[str], str | None]
    end: Callable[[Req, FinishReason], None]
    runner_name: str
    chunk_size: int | None
    scratch: Path
    choices: Mapping[str, Sequence[NamedProvider]] = field(default_factory=dict)
    failed: Callable[[object], None] = lambda made: None

    @property
    def directory(self) -> Path:
        """The prepared model's."""
        return self.model.directory


class Stage:
    """The scheduler's half of a feature. All methods run in the scheduler's loop, so they compute on whole batches and
    neither wait nor read files. Override what is needed; the rest costs nothing.

    What `arrive` or `pack` raises fails one request (see there). What `arrived`, `commit` or `send` raises fails the
    requests of the step, or the request, that the stage takes part in. What a notice (`unplaced`, `gone`, `closed`)
    raises is logged. Answers and log name the stage and its plugin.
    """

    name: str = ""
    """Unique in an engine; that of its DevicePart and FrontendStage, too. Begins with the plugin's name."""
    offers: tuple[str, ...] = ()
    """What requests may ask of an engine with this stage (`ModelInfo.features`)."""
    columns: tuple[Column, ...] = ()
    splits: bool = False
    """Whether its sources take prefills over: decodes then join prefills only where the config says so."""
    lookback: int = 0
    """1: behind a cached prefix its part reads the states of the prefix's last token, which is computed once more; its
    KV is in the cache and is not written again."""
    flag: int = 0
    """One bit of `Req.flags`, set by the core: whether this stage takes part in a request."""

    def sources(self, core: CoreServices) -> Iterable[AnySource]:
        """Once, when the scheduler is built: bring sources of steps, which plan, settle and repair steps of their own.
        Each says in which turn, and whether before or after the core's own, it is asked. A source that raises is not
        asked any more, and the requests that the stage takes part in end with status 500; what it raises about a batch
        ends the engine.
        """
        return ()

    def gate(self, ctx: AdmissionGateContext) -> AdmissionGate | None:
        """Once, when the scheduler is built: bring a gate under the stage's name, in front of those of the config."""
        return None

    # ---- a request -------------------------------------------------------------------------------------------------
    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        """Once per request, before gates see it. Return what the stage needs for it; None: it takes no part, and none
        of its methods sees the request again. `message.features` has what the FrontendStage prepared.

        Raise InvalidRequest to refuse the request. Anything else that is raised refuses it with status 500. The stage
        may set `req.samples` to False: the request ends with its prompt, and no token is drawn. It may set
        `req.positions`, and give tokens keys: ``req.tokens = KeyedTokens(req.prompt_ids, keys)``.
        """
        return None

    def reusable(self, req: Req) -> int:
        """When a request starts to wait, each time: how many tokens a cached prefix may cover. The least counts."""
        return WHOLE_PREFIX

    def resumable(self, req: Req, length: int) -> int:
        """Whenever a cached prefix of `length` tokens is found for a request without memory: behind how many of these
        the stage can go on, in whole pages. The least counts, and the cache is asked for so many. Asked several times
        per plan, and also for requests that are not admitted afterwards.
        """
        return length

    def finishers(self, req: Req) -> Iterable[Ending]:
        """Once, at a request's first token: reasons to end it, asked at each token between stop strings and length."""
        return ()

    def compile_stops(self, sampling: SamplingParams) -> CompiledStops | None:
        """Once, at the request's first token: what ends it by its text, together with its stop strings. The match that
        ends first counts, the longest of those that end together. The FrontendStage must find the same.
        """
        return None

    def unplaced(self, req: Req) -> None:
        """Each time before a request's memory is taken: it has ended, was retracted, or its step is undone."""

    def gone(self, req: Req) -> None:
        """Exactly once for each request of the stage, at its very end, even if a gate or another stage refused it."""

    # ---- a plan ----------------------------------------------------------------------------------------------------
    def begin_plan(self) -> None:
        """Before each step is planned: what `clip` has noted for the plan before is out of date."""

    def skips(self, req: Req) -> bool:
        """Before a waiting request's cached prefix is looked for: return whether `clip` answers SKIP for any prefix."""
        return False

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        """While a prefill is planned: return how many of tokens [start, start + take) can be computed now, `take` at
        most. Asked several times per plan, and also for requests that are not admitted afterwards, so it changes
        nothing beyond the plan. The core rounds down to pages, and lets only one request of a prefill be cut.
        """
        return take

    def must_settle(self, running: Sequence[Req], in_flight: BaseStep) -> bool:
        """When a step is planned while another one is under way: return whether the results of that one are needed
        first, so that `ahead` is asked for these requests. Where it may gain several tokens, the core waits by itself.
        """
        return False

    def bound_ahead(self, reqs: Sequence[Req], most: NDArray[np.int64]) -> NDArray[np.int64]:
        """Before `ahead`, for requests of the stage that may have tokens ahead: return how many nodes the tree of each
        may have, its root included, int64 [requests], `most` at most. It is asked once per plan.
        """
        return most

    def ahead(self, room: AheadRoom) -> TokenTrees | None:
        """When a step that decodes is planned, none is under way, and room for one token of each request is found:
        return a tree of tokens for each request of `room`, to be computed in the same pass; None: none. The first
        answer of all stages counts. Requests in which the stage takes no part have a `room.most` of 1. The core cuts
        trees to what memory and constraints allow; what is not a tree, or is too large, is logged and left out.
        """
        return None

    def ahead_cut(self, seconds: float) -> None:
        """Once the trees that the stage has brought are cut: note how many seconds that took."""

    # ---- a step ----------------------------------------------------------------------------------------------------
    def pack(self, step: StepView, extras: BatchExtras) -> object | None:
        """Each time a batch with a request of this stage is about to run: bring arrays for the model into `extras`, and
        return the payload for the DevicePart, if any. Change neither the batch nor its requests.

        Called again, with fresh `extras`, for each half of a batch that failed. What it raises fails the batch, so that
        halves are tried: a request for which it raises fails alone. The parts of a split prefill are packed once.
        """
        return None

    def arrived(self, step: StepView, result: StepResult) -> None:
        """When the results of a batch are there, before its tokens are appended: keep what was computed. Requests that
        have ended since are in it still; `req.kv is not kvs[i]` where one was retracted.
        """

    def commit(self, step: StepView, result: StepResult) -> None:
        """After the batch's tokens have been appended and what ends was noted."""

    def closed(self, step: StepView) -> None:
        """Exactly once for each packed step, not halves: it is committed, its halves are through, or it is undone."""

    def send(self, req: Req, start: int, stop: int) -> Sent | None:
        """Whenever output is sent, tokens [start, stop) of the request's output and perhaps its end: what goes along.
        With `rows`, one per token. Overriding it costs each token of the stage's requests a look.
        """
        return None

    def adopt(self, req: Req, row: msgspec.Raw | None) -> None:
        """Before a request's first token is appended that another engine drew; `row` is what `send` gave there."""

    # ---- what is told ----------------------------------------------------------------------------------------------
    def info(self) -> Mapping[str, object]:
        """Once, when the engine is built: plain values that `ModelInfo.stages` has under the stage's name."""
        return {}

    def figures(self) -> Mapping[str, float]:
        """Whenever figures are wanted, for `/server_info` and metrics: totals (names in `_total`), and states."""
        return {}

    def log_totals(self) -> Mapping[str, tuple[str, int]]:
        """For each log line about a prefill: totals since the start, each by what the line calls it, with the field of
        the log record. The line says what came since the one before."""
        return {}

    def log_decodes(self) -> LogPart | None:
        """For each log line about decodes, which is about all since the one before: return what to add."""
        return None

    def idle_error(self) -> str | None:
        """Return what is wrong with the stage's books when the scheduler has no request, or None."""
        return None


class DevicePart:
    """Where batches run: called in launch order, on every rank. What it raises fails the batch, so that halves are
    tried. A payload is read on each call and must not be changed. With several `Executor.lanes` batches begin in that
    order, and calls for two of them alternate: keep nothing of a batch but by its payload.

    It gets the payloads of the Stage of its name; or, with `loads`, those of a prefix cache that names it as its
    `loader`.
    """

    name: str = ""
    loads: bool = False
    device_bytes: int = 0
    """Bytes on the device that it takes beside its weights, which KV does not get."""
    states: bool = False
    """Whether it brings `ForwardBatch.states`, for models whose layers keep some."""
    state_memory: Mapping[str, torch.Tensor] | None = None
    """Of one with `states`, once it is attached: the `memory` of all batches' states."""
    kv_groups: bool = False
    """Whether it adds the views of all KV groups but the first to `ForwardBatch.kv_groups`."""
    payload: type | None = None
    """The type of its payload, arrays and what msgspec decodes, if the part also works where followers compute batches:
    they get the payloads, and what their parts compute is dropped. None: it does not."""

    def load(self) -> None:
        """Once, before the model's weights are read and KV gets memory: read its own. Raises as `ModelFamily.load`."""

    def attach(self, model: LoadedModel) -> None:
        """Once, with weights read and memory not sized yet: take what it needs. What it raises stops the start."""

    def numerics(self) -> str:
        """Once it is attached: name what KV depends on because of it, "" for nothing; see `ModelRunner.numerics`."""
        return ""

    def wants(self, payload: object) -> Wants:
        """Before the pass: return what it reads of the model beside tokens, for `accept` and `computed`."""
        return Wants()

    def unpack(self, payload: object, batch: ForwardBatch, put: Callable[[NDArray[np.generic]], torch.Tensor]) -> None:
        """Before the pass: put the payload of the Stage into the batch. `put` brings an array to the device along with
        all others, in one copy; the tensor may be read after the pass has begun.
        """

    def accept(self, payload: object, verified: Verified) -> Accepted | None:
        """After a pass with tokens ahead: return which of them stand; None: those stand that agree with what was drawn.
        The first answer of all parts counts. What is not a path in each tree fails the batch.
        """
        return None

    def execute(self, payload: object, batch: ForwardBatch, run: Callable[[], R]) -> R:
        """Around the pass, or around the first part of a split one: call `run` once, and return what it returns. Raise
        StepLost where what the pass reads is not there and no request is to blame.
        """
        return run()

    def computed(self, payload: object, batch: ForwardBatch, output: ForwardOutput) -> Mapping[str, torch.Tensor]:
        """After the pass: return tensors that go to the host with the tokens, in one copy. The Stage finds them in
        `StepResult.parts`. Must not wait for the device. `output` says what was accepted, and the newest tokens.
        """
        return {}

    def run(self, payload: object, services: DeviceServices) -> object:
        """Whenever a source of its stage has StageWork done, between batches: return the result, which is not None, or
        what waits for it (`Pending`). It may wait for the device; batches that are launched later wait for it.
        """
        raise NotImplementedError
