"""GateKeeper: requests on their way through the admission gates, and finished ones that a gate still holds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.admission_gate import AdmissionGate, GateState, Verdict
from pegboard.core.interfaces.req import NO_ROW
from pegboard.core.interfaces.status import FinishReason, ReqStatus
from pegboard.core.pipeline.guarded_gate import GateEvents, GateProgress, GuardedGate, reason_of, rename, timed_out
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.req import Req

logger = logging.getLogger(__name__)


class GateKeeper:
    """Leads requests through the gates in the config's order, and ends the wait of those whose time is up.

    False while no request is blocked or held and no gate is busy, so that a step costs one look.
    """

    def __init__(self, gates: Sequence[tuple[str, AdmissionGate]], clock: Clock) -> None:
        self._entries = [GuardedGate(name, gate) for name, gate in gates]
        self.overdue = 0  # held requests whose gate did not let them go in time
        self._watchful = [entry for entry in self._entries if entry.watchful]
        self._clock = clock
        self._progress: dict[str, GateProgress] = {}
        self._busy = 0  # requests that are blocked or held

    def __bool__(self) -> bool:
        return self._busy > 0 or self.busy

    @property
    def busy(self) -> bool:
        """Whether some gate wants to be asked though it blocks and holds no request."""
        return any(entry.gate.busy for entry in self._watchful)

    @property
    def blocked(self) -> int:
        return sum(len(entry.blocked) for entry in self._entries)

    @property
    def held(self) -> int:
        return len({rid for entry in self._entries for rid in entry.held})

    @property
    def failures_by(self) -> dict[str, int]:
        """Calls of each gate that raised, by its name."""
        return {entry.name: entry.failures for entry in self._entries}

    def waiting_on(self) -> list[dict[str, object]]:
        """Blocked requests, for operators: rid, gate, reason, progress (None: unknown) and seconds so far."""
        now = self._clock()
        return [
            {
                "rid": rid,
                "gate": entry.name,
                "reason": progress.verdict.reason,
                "progress": progress.verdict.progress,
                "seconds": now - progress.since,
            }
            for entry in self._entries
            for rid in entry.blocked
            if (progress := self._progress.get(rid)) is not None
        ]

    def stats(self) -> dict[str, dict[str, float]]:
        """Return what the gates tell of themselves, by name."""
        return {entry.name: told for entry in self._entries if (told := entry.stats())}

    def close(self) -> None:
        """Close the gates; none of them is called any more."""
        for entry in self._entries:
            entry.close()

    def arrive(self, req: Req) -> Verdict | None:
        """Lead a new request as far as it gets. A failure is returned, and then nothing is kept of it; otherwise the
        request is through, or its status is BLOCKED and `blocked_by` names the gate.
        """
        entries = []
        for entry in self._entries:
            concerned, failure = entry.ask("concerns", entry.gate.concerns, req)
            if failure is not None:
                return failure
            if concerned:
                entries.append(entry)
        if not entries:
            return None
        progress = self._progress[req.rid] = GateProgress(
            entries, 0, self._clock(), Verdict(GateState.OPEN), req.namespace
        )
        verdict = self._lead(req, progress)
        return verdict if verdict.state is GateState.FAILED else None

    def poll(self) -> GateEvents:
        """Return what the gates have to say now, and whose time is up."""
        events = GateEvents()
        # Releases come first. What fails below may leave memory that its gate lets go at once, and that is heard only
        # after the caller has ended the request.
        for entry in self._entries:
            if entry.held or (entry.watchful and entry.gate.busy):
                self._release(entry, events)
        for entry in self._entries:
            if entry.blocked:
                self._look(entry, events)
        return events

    def cancel(self, req: Req) -> bool:
        """End the wait of a blocked request that ends, whyever. Return whether its memory is still being written to;
        then `poll` tells when it is released.
        """
        progress = self._progress.get(req.rid)
        if progress is not None and not progress.quarantined:
            del self._progress[req.rid]
            self._leave(req, progress)
        return req.rid in self._progress

    def rename(self, req: Req, gate: str, added: str) -> None:
        """Change what a gate adds to a request's namespace. Raises TypeError where it has memory."""
        if (progress := self._progress.get(req.rid)) is not None:
            rename(req, progress, gate, added)

    def leads(self, req: Req) -> bool:
        """Return whether some gate is concerned with a request."""
        return req.rid in self._progress

    def finish(self, req: Req) -> bool:
        """Tell the gates that a request which was through has ended. Return whether one of them holds it; its status is
        then the caller's to set.
        """
        progress = self._progress.get(req.rid)
        if progress is None:
            return False
        for entry in progress.entries:
            holds, failure = entry.ask("finished", entry.gate.finished, req)
            if holds and failure is None:
                self._hold(req, entry, progress)
        if not progress.holders:
            del self._progress[req.rid]
            return False
        self._busy += 1
        return True

    def drop(self, req: Req) -> bool:
        """Let a held request go at once. False where that cannot be: its memory is still written to."""
        progress = self._progress.get(req.rid)
        if progress is None:
            return True
        if progress.quarantined:
            return False
        del self._progress[req.rid]
        self._busy -= 1
        for entry in progress.entries:
            if entry.held.pop(req.rid, None) is not None:
                entry.ask("drop", entry.gate.drop, req)
        return True

    def passed(self, req: Req) -> bool | FinishReason:
        """Tell the gates that a request which was blocked has passed them all. Return whether one of them has taken it
        further; why it ends, where one raised.
        """
        for entry in self._progress[req.rid].entries:
            if type(entry.gate).passed is not AdmissionGate.passed:
                further, failure = entry.ask("passed", entry.gate.passed, req)
                if failure is not None:
                    return reason_of(failure)
                if further:
                    return True
        return False

    @property
    def quarantined(self) -> list[Req]:
        """Requests that have ended and whose memory is still written to."""
        return [req for entry in self._entries for req in entry.held.values() if self._progress[req.rid].quarantined]

    def _lead(self, req: Req, progress: GateProgress) -> Verdict:
        """On to the first gate that is not open. A request that fails leaves all gates that it has seen."""
        while progress.passed < len(progress.entries):
            entry = progress.entries[progress.passed]
            progress.verdict = verdict = entry.enter(req, progress)
            if verdict.state is GateState.BLOCKED:
                self._block(req, entry, progress)
                return verdict
            if verdict.state is GateState.FAILED:
                del self._progress[req.rid]
                self._leave(req, progress)
                return verdict
            progress.passed += 1
        return progress.verdict

    def _block(self, req: Req, entry: GuardedGate, progress: GateProgress) -> None:
        if req.status is not ReqStatus.BLOCKED:
            req.move_to(ReqStatus.BLOCKED)
            self._busy += 1
        req.blocked_by = entry.name
        entry.blocked[req.rid] = req
        progress.since = self._clock()

    def _leave(self, req: Req, progress: GateProgress) -> None:
        """Tell every gate that knows a request which is not going to run."""
        if req.blocked_by:
            self._busy -= 1
        for entry in progress.entries[: progress.passed + 1]:
            entry.blocked.pop(req.rid, None)
            still, _ = entry.ask("cancel", entry.gate.cancel, req)
            if still is True and req.kv.row != NO_ROW:
                self._hold(req, entry, progress)
        if progress.holders:
            progress.quarantined = True
            self._progress[req.rid] = progress
            self._busy += 1

    def _look(self, entry: GuardedGate, events: GateEvents) -> None:
        waiting = list(entry.blocked.values())
        verdicts = entry.poll(waiting)
        now = self._clock()
        for req in waiting:
            progress = self._progress[req.rid]
            if req.rid in verdicts:
                progress.verdict = entry.examined(verdicts[req.rid], req, progress)
            if progress.verdict.state is GateState.OPEN:
                self._pass(req, entry, progress, events)
            elif progress.verdict.state is GateState.FAILED:
                self._fail(req, progress, progress.verdict, events)
            elif entry.timeout is not None and (waited := now - progress.since) >= entry.timeout:
                self._fail(req, progress, timed_out(entry.name, progress.verdict, waited), events)

    def _pass(self, req: Req, entry: GuardedGate, progress: GateProgress, events: GateEvents) -> None:
        del entry.blocked[req.rid]
        progress.passed += 1
        verdict = self._lead(req, progress)
        if verdict.state is GateState.FAILED:
            events.failed.append((req, reason_of(verdict)))
        elif verdict.state is GateState.OPEN:
            self._busy -= 1
            req.blocked_by = ""
            events.ready.append(req)

    def _fail(self, req: Req, progress: GateProgress, verdict: Verdict, events: GateEvents) -> None:
        del self._progress[req.rid]
        self._leave(req, progress)
        events.failed.append((req, reason_of(verdict)))

    def _release(self, entry: GuardedGate, events: GateEvents) -> None:
        try:
            free = [rid for rid in dict.fromkeys(entry.gate.released()) if rid in entry.held]
        except Exception as error:
            entry.raised("released", error)
            # It may never name them, and KV that is never freed is lost. So they go, but for memory under a writer.
            free = [rid for rid in entry.held if not self._progress[rid].quarantined]
            for rid in free:
                entry.ask("drop", entry.gate.drop, entry.held[rid])
        free += [rid for rid in self._overdue(entry) if rid not in free]
        for rid in free:
            req = entry.held.pop(rid)
            progress = self._progress[rid]
            progress.holders.discard(entry.name)
            if not progress.holders:
                del self._progress[rid]
                self._busy -= 1
                events.released.append(req)

    def _hold(self, req: Req, entry: GuardedGate, progress: GateProgress) -> None:
        entry.held[req.rid] = req
        progress.holders.add(entry.name)
        progress.since = self._clock()

    def _overdue(self, entry: GuardedGate) -> list[str]:
        """Return those that a gate has held for too long, and tell of them. Those whose memory is still written to are
        never among them: their pages would be given away under the writer.
        """
        if entry.hold_timeout is None:
            return []
        since = self._clock() - entry.hold_timeout
        found = [req for rid, req in entry.held.items() if self._progress[rid].since <= since]
        for req in found:
            progress = self._progress[req.rid]
            self.overdue += 1
            if progress.quarantined:
                progress.since = float("inf")
                text = "the memory of %s, which has ended, is still written to; it is lost until that ends"
                logger.error(text, quoted(req.name))
            else:
                logger.warning("the gate %r has held %s for too long; it is released", entry.name, quoted(req.name))
                entry.ask("drop", entry.gate.drop, req)
        return [req.rid for req in found if not self._progress[req.rid].quarantined]
