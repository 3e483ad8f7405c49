"""The gate that parts prefill from decode."""

from __future__ import annotations

import errno
import logging
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.admission_gate import AdmissionGateContext, Verdict
from pegboard.core.interfaces.errors import ConfigError, Temporary
from pegboard.plugins.disagg.decode import DecodeSide
from pegboard.plugins.disagg.handshake import INSTANCE, Self
from pegboard.plugins.disagg.link import LinkLimits
from pegboard.plugins.disagg.messages import Facts
from pegboard.plugins.disagg.network import NetworkLimits, ThreadedNetwork
from pegboard.plugins.disagg.options import DisaggOptions, split_address
from pegboard.plugins.disagg.prefill import PrefillSide
from pegboard.plugins.disagg.reading import Reader
from pegboard.plugins.disagg.requests import has_room
from pegboard.plugins.kv_handoff.api import HandoffGate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.admission_gate import KVAccess
    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.disagg.events import Network
    from pegboard.plugins.kv_handoff.api import KVReservation, KVTransfer

logger = logging.getLogger(__name__)

BACKLOG = 128


class DisaggGate(HandoffGate[DisaggOptions]):
    """A request that names a room is computed on a prefill server and answered on a decode server.

    On prefill it goes through with one token, and is held until its KV was read. On decode it waits until its KV is
    here. Both sides and what they say to each other are in prefill.py, decode.py and messages.py.
    """

    def __init__(self, options: DisaggOptions, ctx: AdmissionGateContext, network: Network | None = None) -> None:
        super().__init__(options, ctx)
        kv = ctx.kv
        if kv is None or self.handoff is None:
            raise ConfigError("the gate `disagg` needs a KV pool, and there is none here")
        self._transfer = transfer = self.handoff.transfer(kv.pool)
        self.network = network or self._connected(kv, transfer)
        regions = transfer.ctx.regions
        self.side: PrefillSide | DecodeSide
        if options.role == "prefill":
            tokens = regions[0].nbytes // regions[0].slot_bytes
            self.side = PrefillSide(
                options, self.network, transfer,
                clock=ctx.clock, rows=self.handoff.first_rows, page_size=kv.page_size, tokens=tokens,
            )  # fmt: skip
        else:
            reader = Reader(transfer, [one.slot_bytes for one in regions], options.max_bytes_in_flight)
            self.side = DecodeSide(options, self.network, reader)

    @classmethod
    def supports(cls, options: DisaggOptions, ctx: AdmissionGateContext) -> str | None:
        if ctx.kv is None:
            return "there is no KV pool here that could be read or filled"
        return super().supports(options, ctx)

    def concerns(self, req: Req) -> bool:
        if not req.samples:
            return False
        return has_room(req) or not self.options.allow_plain

    def judge(self, req: Req) -> Verdict:
        if not has_room(req):
            text = "this server takes requests that name a room only: bootstrap_host, bootstrap_port, bootstrap_room"
            return Verdict.failed(text, code="room_required", param="bootstrap_room")
        return self.side.enter(req)

    def news(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        return self.side.poll(blocked)

    def reserved(self, req: Req, reservation: KVReservation) -> None:
        if isinstance(self.side, PrefillSide):
            super().reserved(req, reservation)
        else:
            self.side.reserved(req, reservation)

    def follows(self, req: Req) -> bool:
        return isinstance(self.side, PrefillSide) and self.concerns(req)

    def computed(self, req: Req, slots: NDArray[np.int32]) -> None:
        if isinstance(self.side, DecodeSide):
            super().computed(req, slots)
        else:
            self.side.computed(req, slots)

    def forget(self, req: Req) -> bool | None:
        return self.side.cancel(req)

    def finished(self, req: Req) -> bool:
        return self.side.finished(req)

    def released(self) -> Iterable[str]:
        return self.side.released()

    def drop(self, req: Req) -> None:
        self.side.drop(req)

    @property
    def busy(self) -> bool:
        """Whether decode servers may ask for rooms of which nothing is here."""
        return isinstance(self.side, PrefillSide)

    def stats(self) -> Mapping[str, float]:
        """Return figures for operators, by name; those of the transfer engine begin with `transfer_`."""
        told = {f"transfer_{name}": value for name, value in self._transfer.stats().items()}
        return {**self.side.stats(), **told}

    def close(self) -> None:
        """End all connections, and close the transfer engine, before the memory of the pool goes."""
        if isinstance(self.network, ThreadedNetwork):
            self.network.close()
        self._transfer.close()

    @property
    def port(self) -> int:
        """Where this prefill server listens; 0 where it does not."""
        return self.network.port if isinstance(self.network, ThreadedNetwork) else 0

    def _connected(self, kv: KVAccess, transfer: KVTransfer) -> ThreadedNetwork:
        options, regions = self.options, transfer.ctx.regions
        facts = Facts(
            identity=kv.identity,
            described=dict(kv.described),
            engine=type(transfer).__name__,
            heads=tuple(region.heads for region in regions),
            head_bytes=tuple(region.slot_bytes // region.heads for region in regions),
        )
        prefill = options.role == "prefill"
        try:
            secret = options.secret()
            described = transfer.describe() if prefill else b""
            listening = listen(options.listen) if prefill else None
        except OSError as error:
            kind = Temporary if error.errno == errno.EADDRINUSE else ConfigError
            raise kind(f"the gate `disagg`: {error.strerror or error}") from error
        except ValueError as error:
            raise ConfigError(f"the gate `disagg`: {error}") from error
        own = Self(options.role, secrets.token_bytes(INSTANCE), facts, described, secret)
        links = LinkLimits(opening=options.connect_timeout, ping=options.ping)
        network = ThreadedNetwork(own, NetworkLimits(options.max_connections, links), listening)
        where = f"listens at {split_address(options.listen)[0]}, port {network.port}" if prefill else "does not listen"
        signed = f"connections are signed with {options.secret_file}" if secret else "no secret is used"
        logger.info("the gate disagg has the role %s, and %s; %s", options.role, where, signed)
        return network


def listen(address: str) -> socket.socket:
    """Return a socket that listens at `host:port`, the option `listen`. Raises OSError, with both."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port or 0), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        remedy = "; stop what uses the port, or choose another one" if error.errno == errno.EADDRINUSE else ""
        raise OSError(error.errno, f"option `listen`: cannot listen at {address}: {reason}{remedy}") from error
