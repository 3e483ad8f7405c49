"""Check the verdicts of gates, before they are acted on and told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from pegboard.core.interfaces.admission_gate import GateState, Verdict
from pegboard.core.interfaces.req import NO_ROW
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.namespaces import MAX_LENGTH, composed, move

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.gate_progress import GateProgress


def taken(verdict: object, req: Req, progress: GateProgress, gate: str) -> Verdict:
    """Do to a request what a gate's verdict says of it, and return the verdict, fit to be compared, counted and sent.
    Raises TypeError for what is not one.
    """
    found = validate(verdict)
    if found.namespace is not None and found.state is not GateState.FAILED:
        parts = {**progress.added, gate: found.namespace}
        namespace = composed({name: part for name, part in parts.items() if part}, progress.namespace)
        if namespace != req.namespace and req.kv.row != NO_ROW:
            raise TypeError(
                "the namespace of a request cannot change once it has memory, whose KV was found in the old one"
            )
        progress.added = parts
        move(req, namespace)
    if found.state is GateState.OPEN:
        limit(req, found.max_new_tokens)
    return found


def validate(verdict: object) -> Verdict:
    """Return the verdict, fit to be compared, counted and sent. Raises TypeError for what is not one."""
    if not isinstance(verdict, Verdict) or not isinstance(verdict.state, GateState):
        raise TypeError(f"it answered {verdict!r}, which is not a verdict")
    if not all(isinstance(text, str) for text in (verdict.reason, verdict.code, verdict.param)):
        raise TypeError(f"reason, code and param of a verdict are strings, not {verdict!r}")
    status: object = verdict.status
    if verdict.state is GateState.FAILED and not (isinstance(status, int) and 400 <= status <= 599):
        raise TypeError(f"the status of a failure is from 400 to 599, not {status!r}")
    most: object = verdict.max_new_tokens
    if most is not None and not (type(most) is int and most >= 1):
        raise TypeError(f"max_new_tokens of a verdict is at least 1, not {most!r}")
    namespace: object = verdict.namespace
    if namespace is not None and not (isinstance(namespace, str) and len(namespace) <= MAX_LENGTH):
        raise TypeError(
            f"the namespace of a verdict is a string of at most {MAX_LENGTH} characters, not {namespace!r:.80}"
        )
    progress = verdict.progress
    if progress is None or (type(progress) is float and 0.0 <= progress <= 1.0):
        return verdict
    # A share that is none (or a NaN) is not worth a request: it counts as unknown. Others become plain, to be sent.
    return replace(verdict, progress=float(progress) if 0.0 <= progress <= 1.0 else None)


def timed_out(name: str, verdict: Verdict, waited: float) -> Verdict:
    """Return the failure of a request that a gate has blocked for too long."""
    done = "" if verdict.progress is None else f", {verdict.progress:.0%} done"
    text = f"not ready after {waited:.1f} s at the gate {name!r}: {verdict.reason}{done}"
    return Verdict.failed(text, status=504, code="gate_timeout")


def reason_of(verdict: Verdict) -> FinishReason:
    """Return how a request ends that a gate has failed."""
    return FinishReason(
        FinishType.ABORT, message=verdict.reason, status=verdict.status, code=verdict.code, param=verdict.param
    )


def limit(req: Req, most: int | None) -> None:
    """Allow a request no more than `most` new tokens; None: as many as it asked for."""
    params = req.sampling
    if most is not None and (params.max_new_tokens is None or params.max_new_tokens > most):
        req.sampling = structs.replace(params, max_new_tokens=most, min_new_tokens=min(params.min_new_tokens, most))
