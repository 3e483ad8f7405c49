"""Loading and unloading: states, uses, and what is let go."""

from __future__ import annotations

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.adapters.messages import Drop, Load, Loaded, Poll, Work
from pegboard.plugins.adapters.store import AdapterStore


class Far:
    """Where batches run: loads end when the test says so."""

    def __init__(self) -> None:
        self.orders: list[Load] = []
        self.ended: list[Loaded] = []
        self.dropped: list[int] = []

    def ask(self, work: Work) -> object:
        if isinstance(work, Load):
            self.orders.append(work)
        elif isinstance(work, Drop):
            self.dropped += work.uids
        else:
            assert isinstance(work, Poll)
            found, self.ended = self.ended, []
            return found
        return True

    def end(self, uid: int, error: str = "", nbytes: int = 10) -> None:
        self.ended.append(Loaded(uid, error, "" if error else f"digest {uid}", 4, 0 if error else nbytes))


@pytest.fixture
def far() -> Far:
    return Far()


@pytest.fixture
def store(far: Far) -> AdapterStore:
    made = AdapterStore({}, 100, 2)
    made.ask = far.ask
    return made


def loaded(store: AdapterStore, far: Far, name: str = "a") -> int:
    made = store.load(name, f"/{name}")
    far.end(made.uid)
    assert store.state(made.uid).state == "ready"
    return made.uid


def test_a_life(store: AdapterStore, far: Far) -> None:
    made = store.load("a", "/a")
    assert (made.state, far.orders) == ("loading", [Load(1, "/a")])
    assert store.state(1).state == "loading"
    far.end(1)
    assert store.state(1).state == "ready"
    used = store.use("a")
    assert (used.digest, used.users) == ("digest 1", 1)
    assert store.unload("a").state == "leaving"
    with pytest.raises(InvalidRequest, match="there is no adapter 'a'"):
        store.use("a")
    assert store.state(1).state == "leaving"
    store.unuse(used)
    assert store.state(1).state == "gone"
    assert far.dropped == [1]
    assert not list(store.loaded)


def test_what_is_configured_is_loaded_first() -> None:
    far, store = Far(), AdapterStore({"a": "/a", "b": "/b"}, 100, 2)
    store.ask = far.ask
    far.end(1)
    far.end(2)
    store.refresh()
    assert [one.state for one in store.names.values()] == ["ready", "ready"]
    assert store.load("c", "/c").uid == 3


def test_a_name_is_taken_while_it_is_loaded_or_loading(store: AdapterStore, far: Far) -> None:
    store.load("a", "/a")
    for state in ("loading", "ready"):
        with pytest.raises(InvalidRequest, match=f"the adapter 'a' is {state} already") as refused:
            store.load("a", "/b")
        assert refused.value.status == 409
        far.end(1)
        store.refresh()
    assert len(far.orders) == 1


def test_a_load_that_fails_leaves_the_name_free(store: AdapterStore, far: Far) -> None:
    used = store.load("a", "/a")
    assert store.use("a") is used
    far.end(1, "damaged")
    assert (store.state(1).state, store.state(1).error) == ("failed", "damaged")
    assert "a" not in store.names
    store.unuse(used)
    assert loaded(store, far) == 2


def test_another_one_under_the_same_name(store: AdapterStore, far: Far) -> None:
    """It is used once it is loaded. Requests of the first one end with it; new ones get the second."""
    loaded(store, far)
    old = store.use("a")
    new = store.load("a", "/other", replace=True)
    assert store.names["a"] is old
    far.end(2)
    assert (store.state(1).state, store.state(2).state) == ("leaving", "ready")
    assert store.use("a") is new
    store.unuse(old)
    assert store.state(1).state == "gone"
    assert far.dropped == [1]
    assert new.users == 1


def test_a_replacement_that_fails_changes_nothing(store: AdapterStore, far: Far) -> None:
    loaded(store, far)
    store.load("a", "/broken", replace=True)
    far.end(2, "damaged")
    assert store.state(2).state == "failed"
    assert (store.use("a").uid, store.state(1).state) == (1, "ready")
    assert [one.error for one in store.failed] == ["damaged"]


def test_the_newest_replacement_keeps_the_name(store: AdapterStore, far: Far) -> None:
    """Whichever of them is loaded first; and unloading ends those that are on their way."""
    loaded(store, far)
    for uid in (2, 3, 4):
        assert store.load("a", f"/{uid}", replace=True).uid == uid
    far.end(3)
    assert (store.state(3).state, store.state(1).state, store.names["a"].uid) == ("ready", "gone", 3)
    far.end(2)
    assert (store.state(2).state, store.names["a"].uid) == ("gone", 3)
    store.unload("a")
    far.end(4)
    assert (store.state(4).state, store.state(3).state) == ("gone", "gone")
    assert not store.names


def test_a_pinned_one_can_be_replaced_and_leaves_its_pin(store: AdapterStore, far: Far) -> None:
    store.load("a", "/a", pinned=True)
    store.load("b", "/b", pinned=True)
    far.end(1)
    far.end(2)
    store.refresh()
    used = store.use("a")
    store.load("a", "/other", pinned=True, replace=True)
    far.end(3)
    assert store.state(3).state == "ready"
    assert (used.state, used.pinned) == ("leaving", False)


def test_unloading_one_that_is_being_loaded(store: AdapterStore, far: Far) -> None:
    """It is gone once the load has ended, and its requests too."""
    waiting = store.load("a", "/a")
    store.use("a")
    store.unload("a")
    far.end(1)
    assert store.state(1).state == "leaving"
    store.unuse(waiting)
    assert store.state(1).state == "gone"
    second = store.load("a", "/a")
    used = store.use("a")
    store.unload("a")
    store.unuse(used)
    assert store.state(second.uid).state == "leaving"
    far.end(second.uid)
    assert store.state(second.uid).state == "gone"
    assert far.dropped == [1, 2]


def test_memory_is_bounded(store: AdapterStore, far: Far) -> None:
    store.load("a", "/a")
    far.end(1, nbytes=60)
    store.use("a")
    store.load("b", "/b")
    far.end(2, nbytes=50)
    found = store.state(2)
    assert found.state == "failed"
    assert "it takes 50 bytes, of adapters.host_bytes 40 are left" in found.error
    assert far.dropped == [2]
    store.load("b", "/b")
    far.end(3, nbytes=40)
    assert store.state(3).state == "ready"
    assert store.host_bytes == 100


def test_one_that_no_request_uses_makes_room(store: AdapterStore, far: Far) -> None:
    """The one longest unasked. Its name stays, and it is read again for the next request, with the same digest."""
    ended: list[int] = []
    store.ended = lambda adapter: ended.append(adapter.uid)
    for uid, name in enumerate("abc", start=1):
        store.load(name, f"/{name}")
        far.end(uid, nbytes=30)
        store.refresh()
    store.unuse(store.use("a"))
    store.load("d", "/d")
    far.end(4, nbytes=50)
    store.refresh()
    assert [one.kept for one in store.names.values()] == [True, False, False, True]
    assert (store.host_bytes, store.evictions) == (80, 2)
    assert sorted(far.dropped) == sorted(ended) == [2, 3]
    assert {one.state for one in store.names.values()} == {"ready"}
    used = store.use("b")
    store.refresh()
    assert far.orders[-1] == Load(2, "/b", "digest 2")
    assert not used.kept
    assert store.names["a"].kept is False, "it had to make room in turn"
    store.refresh()
    assert len(far.orders) == 5, "it is read once"
    far.end(2, nbytes=30)
    store.refresh()
    assert (used.kept, used.state, used.users, store.host_bytes) == (True, "ready", 1, 80)


def test_one_that_is_read_again_waits_for_room(store: AdapterStore, far: Far) -> None:
    for uid, name in enumerate("ab", start=1):
        store.load(name, f"/{name}")
        far.end(uid, nbytes=60)
        store.refresh()
    assert [one.kept for one in store.names.values()] == [False, True]
    b, a = store.use("b"), store.use("a")
    store.refresh()
    assert len(far.orders) == 2
    assert (a.kept, b.kept) == (False, True)
    store.unuse(b)
    store.refresh()
    assert far.orders[-1] == Load(1, "/a", "digest 1")
    assert (a.pending, b.kept, far.dropped) == (True, False, [1, 2])
    store.unuse(a)
    far.end(1, nbytes=60)
    store.refresh()
    assert a.kept, "whoever asks next has it"


def test_files_that_are_gone_when_it_is_read_again(store: AdapterStore, far: Far) -> None:
    """Requests end with the reason, and the name is free."""
    for uid, name in enumerate("ab", start=1):
        store.load(name, f"/{name}")
        far.end(uid, nbytes=60)
        store.refresh()
    used = store.use("a")
    store.refresh()
    far.end(1, "it is missing")
    store.refresh()
    assert (used.state, used.error, used.kept) == ("failed", "it is missing", False)
    assert "a" not in store.names
    store.unuse(used)
    assert loaded(store, far) == 3


def test_what_is_pinned_or_leaving_stays(store: AdapterStore, far: Far) -> None:
    store.load("a", "/a", pinned=True)
    far.end(1, nbytes=50)
    store.load("b", "/b")
    far.end(2, nbytes=50)
    store.refresh()
    used = store.use("b")
    store.unload("b")
    store.load("c", "/c")
    far.end(3, nbytes=10)
    assert "beside adapters that are in use or pinned" in store.state(3).error
    assert (store.names["a"].kept, used.kept) == (True, True)
    assert [one.uid for one in store.named("b")] == [2]
    assert store.unload("b", leaving=True) is used


def test_pinned_ones_leave_a_slot(store: AdapterStore, far: Far) -> None:
    for name in "ab":
        store.load(name, "/", pinned=True)
    with pytest.raises(InvalidRequest, match=r"adapters\.slots allows 2 pinned adapters at most"):
        store.load("c", "/", pinned=True)
    assert len(far.orders) == 2
    assert store.load("c", "/").state == "loading"


def test_unknown_ones(store: AdapterStore) -> None:
    for call in (lambda: store.unload("x"), lambda: store.use("x"), lambda: store.state(7)):
        with pytest.raises(InvalidRequest) as refused:
            call()
        assert refused.value.status == 404


def test_what_has_gone_is_not_remembered_for_ever(store: AdapterStore, far: Far) -> None:
    for _ in range(300):
        loaded(store, far)
        store.unload("a")
        store.refresh()
    with pytest.raises(InvalidRequest):
        store.state(1)
    assert store.state(300).state == "gone"
    assert len(far.dropped) == 300
