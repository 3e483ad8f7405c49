"""What prefill says of rooms whose KV a decode server does not get."""

from __future__ import annotations

from typing import NamedTuple

from pegboard.plugins.disagg.messages import Fail, RoomKey


class Answer(NamedTuple):
    """How a request fails: status, code, and text."""

    status: int
    code: str
    text: str

    def of(self, key: RoomKey, attempt: int) -> Fail:
        """Return the message that says so of a room."""
        return Fail(*key, attempt, self.status, self.code, self.text)


IN_USE = Answer(409, "room_in_use", "another decode server has asked for this room")
TAKEN = Answer(409, "room_taken", "the room's KV has been taken already")
NO_KV = Answer(502, "prefill_failed", "the prefill server has no KV of this room")
DROPPED = Answer(502, "room_dropped", "the decode server did not want the room any more")
TOO_MANY = Answer(503, "too_many_rooms", "too many rooms are wanted whose requests have not come")
NO_REQUEST = Answer(504, "no_request", "the prefill server was not sent this room's request")
GAVE_WAY = Answer(504, "lease_ended", "no decode server had asked for it, and it gave way to another key's request")
LEASE_ENDED = Answer(504, "lease_ended", "it was not taken in time")
LOST = Answer(502, "decode_lost", "the decode server was not heard of, and the KV was let go")
