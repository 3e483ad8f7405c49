"""What a persistent storage has after a restart: a part of the suite of KVStorage."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.conformance.rig.dying import die_after_change, work_and_die
from pegboard.conformance.suite import capability
from pegboard.plugins.kv_tiers.suite.storage_rig import StorageRig, Stores, Talk, numbered, odd_keys, saying

CRASHES = 30
"""Changes to files by one call after which a process is killed, at most."""

ENDS = pytest.mark.parametrize("how", ["closed", "crashed"])
"""A storage is closed, or its process is killed. No other one has the place open then, so it may be locked."""


class RestartTests(StorageRig):
    """With the capability `persistent`, what was written is there after a restart, and what was removed is not."""

    @capability("persistent")
    @ENDS
    def test_blocks_outlive_what_wrote_them(self, stores: Stores, how: str) -> None:
        keys = numbered(10)
        two = stores.after(how, lambda one: one.written(keys))
        two.holds(keys, f"after what wrote them was {how}, and the place was opened again")
        two.written(numbered(3, 50))
        two.holds([*numbered(3, 50), *keys])

    @capability("persistent")
    def test_any_keys_outlive_what_wrote_them(self, stores: Stores) -> None:
        """Of all lengths, those that end in zeros among them."""
        keys = odd_keys()
        two = stores.after("closed", lambda one: one.written(keys))
        lost = [key.hex() for key in keys if not two.read([key])]
        assert not lost, f"after a restart blocks are missing under {len(lost)} of {len(keys)} keys, such as {lost[:3]}"

    @capability("persistent")
    @ENDS
    def test_what_is_removed_stays_removed(self, stores: Stores, how: str) -> None:
        keys = numbered(9)

        def delete(talk: Talk) -> None:
            talk.written(keys)
            talk.storage.delete(keys[2:5])

        two = stores.after(how, delete)
        two.lacks(keys[2:5], f"were deleted before the storage was {how}")
        two.holds(keys[:2] + keys[5:], f"after others were deleted and the storage was {how}")
        stores.close(two)
        later = numbered(3, 20)

        def clear(talk: Talk) -> None:
            talk.storage.clear()
            talk.written(later)

        three = stores.after(how, clear)
        three.lacks(keys, f"were cleared before the storage was {how}")
        three.holds(later, f"after others were cleared, these written, and the storage was {how}")
        three.written(keys)
        three.holds(keys)

    @capability("persistent")
    @pytest.mark.parametrize("what", ["set", "delete", "open"])
    def test_a_crash_amid_a_call(self, stores: Stores, tmp_path: Path, what: str) -> None:
        """A process is killed in the midst of a call, once after each change to files that Python sees: the call's
        block is there as it was written, or it is not, and all others are. The place can be opened and written to.
        """
        if type(self).in_child is not StorageRig.in_child:
            pytest.skip("its place is this process's memory, which is gone with the process")
        keys = numbered(3)
        stores.close(stores.after("crashed", lambda one: one.written(keys)))
        for change in range(CRASHES):
            [key] = numbered(1, 200 + change)

            def work(change: int = change, key: bytes = key) -> None:
                if what == "open":
                    die_after_change(change, tmp_path)
                talk = stores.open()
                if what == "delete":
                    talk.written([key])
                die_after_change(change, tmp_path)
                if what == "delete":
                    talk.storage.delete([key])
                elif what == "set":
                    talk.put([key])

            ended = work_and_die(work)
            with saying(f"after a process was killed amid {what}, at its change {change} to files"):
                talk = stores.open()
                talk.read([key])
                talk.holds(keys, "which were there before")
                talk.written([key])
                talk.holds([key])
                stores.close(talk)
            if ended:
                return
            keys.append(key)
