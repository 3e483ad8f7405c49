"""Weights that are replaced while an engine serves: answers come from exactly one set of them."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from pegboard import Engine
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.rig.other_weights import another, other_weights, tensors_of
from pegboard.core.engine.engine import GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import ConfigError, InvalidRequest
from pegboard.core.interfaces.messages import ControlReply, ControlRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.memory_paged.pool import MHAPool
from pegboard.plugins.weight_updates.source import FileSource, MemorySource
from pegboard.toolkit.model.weight_memory import WeightMemory
from tests.plugins.adapters.peft_files import agrees, merged, write_adapter

PROMPTS = ([40, 41, 42, 43, 50, 51, 52, 53, 54] * 2, [70, 71, 40, 41, 90], list(range(100, 135)))
LENGTH = 16

ARRANGEMENTS: Mapping[str, dict[str, Any]] = {
    "dense": {"model": {"use": "dense", "dtype": "float32"}, "runner": {"use": "layered"}},
    "transformers": {"model": {"use": "transformers", "dtype": "float32"}, "runner": {"use": "layered"}},
    "packed": {"model": {"use": "dense", "dtype": "bfloat16", "packed": "auto"}, "runner": {"use": "layered"}},
    "unpacked": {"model": {"use": "dense", "dtype": "bfloat16", "packed": "off"}, "runner": {"use": "layered"}},
    "native": {"model": {"dtype": "bfloat16"}, "runner": {"use": "cpu_native"}},
}


@pytest.fixture(scope="module")
def base(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def other(base: Path) -> Path:
    return other_weights(base)


def config(path: Path, arrangement: str = "dense", more: Mapping[str, object] | None = None) -> dict[str, Any]:
    found = {name: dict(section) for name, section in ARRANGEMENTS[arrangement].items()}
    found["model"]["path"] = str(path)
    updates = {"enabled": True, "directories": [str(path.parent)]}
    return {**found, "memory": {"max_total_tokens": 2048}, "weight_updates": updates, **(more or {})}


def request(prompt: Sequence[int], length: int = LENGTH, adapter: str = "") -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True)
    params = {"adapter": adapter} if adapter else {}
    return GenerateRequest(prompt=list(prompt), sampling=sampling, stream=True, params=params)


def answers(engine: Engine) -> list[GenerateOutput]:
    return engine.run([request(prompt) for prompt in PROMPTS])


def tokens_of(engine: Engine) -> list[list[int]]:
    return [one.token_ids for one in answers(engine)]


@functools.cache
def fresh(path: Path, arrangement: str = "dense") -> list[list[int]]:
    with Engine.from_config(config(path, arrangement)) as engine:
        return tokens_of(engine)


def refused(engine: Engine, action: str = "update_weights", **args: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        engine.control(action, **args)
    return raised.value


FULL = ("transformers", "unpacked", "packed")


@pytest.mark.parametrize(
    "arrangement", [pytest.param(one, marks=[pytest.mark.full] if one in FULL else []) for one in ARRANGEMENTS]
)
def test_tokens_are_those_of_a_fresh_start(base: Path, other: Path, arrangement: str) -> None:
    """From disk, and back again from tensors. Nothing that was cached is found, and each answer tells its version."""
    wanted = {path: fresh(path, arrangement) for path in (base, other)}
    assert wanted[base] != wanted[other]
    with Engine.from_config(config(base, arrangement)) as engine:
        assert tokens_of(engine) == wanted[base]
        assert engine.control("update_weights", path=str(other), weight_version="v2")["weight_version"] == "v2"
        found = answers(engine)
        assert [one.token_ids for one in found] == wanted[other]
        assert [one.cached_tokens for one in found] == [0] * len(PROMPTS)
        assert [one.extra for one in found] == [{"weight_version": "v2"}] * len(PROMPTS)
        assert all(one.cached_tokens for one in answers(engine)), "prefixes of the new weights are found"
        assert engine.control("update_weights", tensors=tensors_of(base))["weight_version"] == "2"
        found = answers(engine)
        assert [one.token_ids for one in found] == wanted[base]
        assert [one.cached_tokens for one in found] == [0] * len(PROMPTS)
        assert engine.stats()["book_errors"] == 0


def polled(engine: Engine, rids: Mapping[str, int], until: int) -> dict[str, list[int]]:
    """Read submitted requests until one of them has so many tokens; the tokens of each so far."""
    found: dict[str, list[int]] = {rid: [] for rid in rids}
    while max(map(len, found.values())) < until:
        for chunk in engine.poll():
            found[chunk.rid] += chunk.token_ids
    return found


def rest_of(engine: Engine, before: Mapping[str, list[int]]) -> dict[str, GenerateOutput]:
    """Read submitted requests to their ends; what comes after what was read."""
    found = {rid: GenerateOutput(rid) for rid in before}
    while not all(one.finish_reason for one in found.values()):
        for chunk in engine.poll():
            found[chunk.rid].add(chunk)
    return found


@pytest.mark.parametrize(
    ("loop", "cache"), [pytest.param("normal", "radix", marks=pytest.mark.full), ("overlap", "hiradix")]
)
def test_retracted_requests_go_on_with_the_new_weights(base: Path, other: Path, loop: str, cache: str) -> None:
    """What comes after the update is what the new weights make of prompt and output so far, and of nothing cached."""
    sections = {"scheduler": {"loop": loop}, "prefix_cache": {"use": cache}}
    with Engine.from_config(config(base, more=sections)) as engine:
        rids = {engine.submit(request(prompt, 2 * LENGTH)): index for index, prompt in enumerate(PROMPTS)}
        before = polled(engine, rids, LENGTH)
        engine.control("update_weights", path=str(other), weight_version="v2")
        after = rest_of(engine, before)
        for output in after.values():
            assert output.finish_reason["type"] == "length"
            assert output.extra == {"weight_version": "v2", "weight_version_start": "default"}
            assert output.num_retractions == 1
        assert engine.stats()["book_errors"] == 0
        told = {rid: before[rid] + after[rid].token_ids for rid in rids}
        lengths = [2 * LENGTH] * len(rids)
        assert list(map(len, told.values())) == lengths
        engine.control("update_weights", path=str(base))
        old = engine.run([request(prompt, 2 * LENGTH) for prompt in PROMPTS])
        engine.control("update_weights", path=str(other))
        for (rid, index), answer in zip(rids.items(), old, strict=True):
            # As far as the old weights would have said the same, then what the new ones make of that.
            pairs = zip(told[rid], answer.token_ids, strict=True)
            own = next(place for place, (one, another_one) in enumerate(pairs) if one != another_one)
            assert own >= len(before[rid])
            prompt = [*PROMPTS[index], *told[rid][:own]]
            assert engine.run([request(prompt, 2 * LENGTH - own)])[0].token_ids == told[rid][own:]


def test_requests_that_are_left_in_place(base: Path, other: Path) -> None:
    """They go on with what they have. Nobody else finds it: neither those that wait nor those that come."""
    sections = {"scheduler": {"max_running_requests": 2}}
    with Engine.from_config(config(base, more=sections)) as engine:
        running = {engine.submit(request(PROMPTS[0], 2 * LENGTH)): 0, engine.submit(request(PROMPTS[2], 2 * LENGTH)): 2}
        waiting = {engine.submit(request(PROMPTS[0])): 0}
        before = polled(engine, {**running, **waiting}, 4)
        engine.control("update_weights", path=str(other), mode="in_place")
        after = rest_of(engine, before)
        for rid in running:
            assert len(before[rid]) + len(after[rid].token_ids) == 2 * LENGTH
            assert after[rid].num_retractions == 0
            assert after[rid].extra == {"weight_version": "1", "weight_version_start": "default"}
        for rid in waiting:
            assert after[rid].cached_tokens == 0
            assert after[rid].extra == {"weight_version": "1"}
        late = engine.run([request(PROMPTS[2])])[0]
        assert late.cached_tokens == 0
        found = [after[next(iter(waiting))].token_ids, late.token_ids]
        assert engine.stats()["book_errors"] == 0
    assert found == [fresh(other)[0], fresh(other)[2]]


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_updates_that_take_many_turns(base: Path, other: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr("pegboard.plugins.weight_updates.update._SLICE", 0.0)
    with Engine.from_config(config(base)) as engine:
        answers(engine)
        engine.control("update_weights", path=str(other), mode=mode)
        assert tokens_of(engine) == fresh(other)
        engine.control("update_weights", path=str(base), mode=mode)
        assert tokens_of(engine) == fresh(base)


def test_requests_do_not_stay_in_place_beside_tiers(base: Path, other: Path) -> None:
    """What they compute with the new weights would be kept as if with the old."""
    with Engine.from_config(config(base, more={"prefix_cache": {"use": "hiradix"}})) as engine:
        assert "use retract" in refused(engine, path=str(other), mode="in_place").message


@pytest.mark.parametrize("fails", [False, True])
def test_windows_are_not_read_from_memory_that_was_given_back(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Not even where giving it back fails half-way: requests wait then, until it is taken again."""
    path = tiny_checkpoint(checkpoints, "mistral", num_hidden_layers=2)
    more = {
        "memory": {"max_total_tokens": 512, "page_size": 4, "window_pages": True},
        "plugins": {"windows": {"snapshot_every": 8}},
    }
    with Engine.from_config(config(path, more=more)) as engine:
        before = [tokens_of(engine), tokens_of(engine)]
        if fails:
            monkeypatch.setattr(MHAPool, "release", failing_late(MHAPool.release))
            error = refused(engine, "release_memory", tags=["kv_cache"])
            assert (error.status, error.code) == (500, "release_failed")
            assert engine.stats()["paused"] is True
        else:
            engine.control("release_memory", tags=["kv_cache"])
        engine.control("resume_memory", tags=["kv_cache"])
        assert engine.stats()["paused"] is False
        assert [tokens_of(engine), tokens_of(engine)] == before


def failing_late(release: Callable[[MHAPool], int]) -> Callable[[MHAPool], int]:
    """Give memory back, and raise then."""

    def fails(pool: MHAPool) -> int:
        release(pool)
        raise OSError("the system says no")

    return fails


@pytest.mark.full
def test_requests_end_in_the_mode_abort(base: Path, other: Path) -> None:
    with Engine.from_config(config(base)) as engine:
        rids = {engine.submit(request(prompt)): 0 for prompt in PROMPTS}
        before = polled(engine, rids, 3)
        engine.control("update_weights", path=str(other), mode="abort")
        assert {one.finish_reason["status"] for one in rest_of(engine, before).values()} == {499}
        assert tokens_of(engine) == fresh(other)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_many_updates_under_load(base: Path, other: Path, mode: str) -> None:
    """No request is lost, in prompts of several chunks and parts, with little memory."""
    sections = {
        "memory": {"max_total_tokens": 160},
        "scheduler": {"loop": "overlap", "chunked_prefill_size": 16, "split_prefill_layers": 1, "mixed_chunk": False},
    }
    both = [tensors_of(base), tensors_of(other)]
    with Engine.from_config(config(base, more=sections)) as engine:
        lengths: dict[str, int] = {}
        reasons: list[str] = []

        def poll() -> None:
            for chunk in engine.poll():
                lengths[chunk.rid] += len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    reasons.append(chunk.finish_reason["type"])

        for number in range(50):
            lengths[engine.submit(request(PROMPTS[number % 3], 3 + number % 7))] = 0
            for _ in range(number % 4):
                poll()
            engine.control("update_weights", tensors=both[number % 2], mode=mode)
        while len(reasons) < 50:
            poll()
        assert set(reasons) == {"length"}
        assert list(lengths.values()) == [3 + number % 7 for number in range(50)]
        engine.control("update_weights", tensors=both[0])
        found = answers(engine)
        assert engine.stats()["book_errors"] == 0
    assert [one.token_ids for one in found] == fresh(base)
    assert [one.cached_tokens for one in found] == [0, 0, 0]


@pytest.mark.full
def test_adapters_and_drafts(base: Path, other: Path) -> None:
    """Adapters add to the new weights, and drafts are verified with them."""
    adapter = write_adapter(base.parent / "adapters" / "a0", base, seed=1, r=4, lora_alpha=16)
    sections = {"adapters": {"preload": {"a0": str(adapter)}}, "speculation": {"use": "ngram"}}
    prompt = PROMPTS[0]
    with Engine.from_config(config(base, more=sections)) as engine:
        asked = [request(prompt, 2 * LENGTH), request(prompt, adapter="a0")]
        engine.run(asked)
        engine.control("update_weights", path=str(other))
        found = engine.run(asked)
        assert [one.cached_tokens for one in found] == [0, 0]
        assert agrees(merged(other, adapter, lambda module: 4.0), prompt, found[1].token_ids) > 0.8 * LENGTH
        assert found[0].token_ids[:LENGTH] == fresh(other)[0]


def test_ranks_are_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel.tensor: the stage 'weight_updates' .* switch it off"):
        Engine.from_config(config(base, more={"parallel": {"tensor": 2}}))


# ---- what is refused, and what fails --------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_and_nothing_changes(base: Path, other: Path, tmp_path: Path) -> None:
    tensors = tensors_of(other)
    norm = "model.norm.weight"
    spoilt = Path(shutil.copytree(other, base.parent / "spoilt", dirs_exist_ok=True))
    save_file({**tensors, norm: tensors[norm][:-1].clone()}, spoilt / "model.safetensors", {"format": "pt"})
    rope = Path(shutil.copytree(other, base.parent / "rope", dirs_exist_ok=True))
    text = (rope / "config.json").read_text()
    (rope / "config.json").write_text(text.replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    empty = base.parent / "nothing"
    empty.mkdir(exist_ok=True)
    (empty / "pytorch_model.bin").touch()
    with Engine.from_config(config(base)) as engine:
        wanted = tokens_of(engine)
        for args, words in (
            ({"path": str(tmp_path)}, "not below weight_updates.directories"),
            ({"path": str(base / ".." / ".." / "elsewhere")}, "not below weight_updates.directories"),
            ({"file": str(other / "model.safetensors")}, "is not a file of this server"),
            ({"path": str(base.parent / "none")}, "is not a directory"),
            ({"path": str(empty)}, "pickled weights only"),
            ({"path": str(spoilt)}, r"model.safetensors: model.norm.weight has shape \[63\], the model's is \[64\]"),
            ({"path": str(rope)}, "config.json: rms_norm_eps is 1"),
            ({"tensors": {**tensors, "model.odd.weight": torch.zeros(3)}}, "model.odd.weight .3. has no place"),
            ({"tensors": {norm: tensors[norm]}}, r"model.embed_tokens.weight \[\d+, 64\] is missing"),
            ({"tensors": {norm: tensors[norm].to(torch.float8_e4m3fn)}, "partial": True}, "float8_e4m3fn: quantised"),
            ({"tensors": {norm: tensors[norm].int()}, "partial": True}, "stored as int32"),
            ({"tensors": {}}, "is missing"),
            ({"tensors": {}, "partial": True}, "there are no tensors"),
            ({"tensors": [1]}, "tensors must map names to tensors"),
            ({}, "exactly one of path, file, tensors and group"),
            ({"path": str(other), "tensors": tensors}, "exactly one of path, file, tensors and group"),
            ({"path": str(other), "mode": "gently"}, "mode must be one of abort, retract, in_place"),
            ({"path": str(other), "weight_version": "v" * 300}, "at most 256 characters"),
            ({"path": 3}, "path must be str"),
        ):
            error = refused(engine, **args)
            assert error.status == 400
            engine_words = pytest.raises(AssertionError, match=words)
            with engine_words:
                raise AssertionError(error.message)
        found = answers(engine)
        assert [one.token_ids for one in found] == wanted
        assert all(one.cached_tokens for one in found), "what is cached is still found"


def test_a_tensor_alone(base: Path, other: Path) -> None:
    """With `partial` the others stay what they are; the native runner takes all or none."""
    name = "model.layers.1.mlp.up_proj.weight"
    wanted = fresh(other_weights(base, name))
    with Engine.from_config(config(base)) as engine:
        engine.control("update_weights", tensors={name: another(tensors_of(base)[name])}, partial=True)
        assert tokens_of(engine) == wanted
        shown = engine.control("get_weights_by_name", name=name, truncate_size=5)
        assert shown["shape"] == list(tensors_of(base)[name].shape)
        assert shown["values"] == another(tensors_of(base)[name]).reshape(-1)[:5].tolist()
        assert refused(engine, "get_weights_by_name", name="model.odd").status == 404
        assert refused(engine, "get_weights_by_name", name=name, truncate_size=0).param == "truncate_size"
    with Engine.from_config(config(base, "native")) as engine:
        error = refused(engine, tensors={name: tensors_of(other)[name]}, partial=True)
        assert "the tensors of the whole model are replaced together" in error.message
        assert refused(engine, "get_weights_by_name", name=name).status == 400


def test_two_updates_at_once(base: Path, other: Path) -> None:
    with Engine.from_config(config(base)) as engine:
        scheduler = engine.built.scheduler
        calls = [ControlRequest(call_id=one, action="update_weights", args={"path": str(other)}) for one in (1, 2)]
        replies = scheduler.receive(calls)
        while len(replies) < 2:
            scheduler.step()
            replies += scheduler.receive([])
        by_call = {one.call_id: one for one in replies if isinstance(one, ControlReply)}
        assert by_call[1].ok
        assert (by_call[2].payload["status"], by_call[2].payload["code"]) == (409, "update_under_way")
        assert tokens_of(engine) == fresh(other)


def test_a_directory_that_changes_before_the_first_write(
    base: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.from_config(config(base)) as engine:
        wanted = tokens_of(engine)
        with monkeypatch.context() as patched:
            patched.setattr(FileSource, "changed", lambda self: "model.safetensors has changed")
            error = refused(engine, path=str(other))
        assert (error.status, error.code) == (400, "bad_weights")
        assert "nothing was written" in error.message
        assert tokens_of(engine) == wanted


@pytest.mark.parametrize("arrangement", ["dense", "native"])
def test_a_fault_while_writing(base: Path, other: Path, arrangement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is answered from half an update: all requests end, and others are refused until one has succeeded."""

    def read(self: MemorySource, name: str, memory: torch.Tensor | None) -> torch.Tensor:
        if name == "model.norm.weight":
            raise OSError("the disk is gone")
        return self._tensors[name]

    with Engine.from_config(config(base, arrangement)) as engine:
        rids = {engine.submit(request(prompt)): 0 for prompt in PROMPTS}
        before = polled(engine, rids, 2)
        with monkeypatch.context() as patched:
            patched.setattr(MemorySource, "read", read)
            error = refused(engine, tensors=tensors_of(other))
        assert (error.status, error.code) == (500, "weights_broken")
        assert "the disk is gone" in error.message
        for one in rest_of(engine, before).values():
            assert (one.finish_reason["status"], one.finish_reason["code"]) == (503, "weights_broken")
        with pytest.raises(InvalidRequest, match="the disk is gone") as raised:
            answers(engine)
        assert (raised.value.status, raised.value.code) == (503, "weights_broken")
        assert refused(engine, tensors={}, partial=True).param == "partial"
        assert refused(engine, path=str(base.parent / "none")).status == 400
        with pytest.raises(InvalidRequest, match="send another one"):
            answers(engine)
        engine.control("update_weights", path=str(other))
        assert tokens_of(engine) == fresh(other, arrangement)
        assert engine.stats()["book_errors"] == 0


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrangement", ["dense", pytest.param("packed", marks=pytest.mark.full), "native"])
def test_memory_is_given_back_and_requests_wait(base: Path, other: Path, arrangement: str) -> None:
    """Both kinds, one after the other and together. The same tokens afterwards, and of KV nothing is found."""
    wanted = fresh(base, arrangement)
    with Engine.from_config(config(base, arrangement)) as engine:
        assert tokens_of(engine) == wanted
        for tags in (["kv_cache"], ["weights"], None):
            released = engine.control("release_memory", tags=tags)["released_bytes"]
            assert isinstance(released, dict)
            assert set(released) == set(tags or ["kv_cache", "weights"])
            assert all(size > 0 for size in released.values())
            assert engine.control("release_memory", tags=tags) == {"released_bytes": {}}
            rids = {engine.submit(request(prompt)): 0 for prompt in PROMPTS}
            for _ in range(5):
                assert engine.poll() == []
            stats = engine.stats()
            assert (stats["paused"], stats["waiting_requests"]) == (True, len(PROMPTS))
            gone = next(iter(rids))
            engine.abort(gone)
            engine.control("resume_memory", tags=tags)
            after = rest_of(engine, {rid: [] for rid in rids if rid != gone})
            assert [one.token_ids for one in after.values()] == wanted[1:]
            assert [one.cached_tokens for one in after.values()] == [0, 0]
        assert engine.stats()["book_errors"] == 0
        assert tokens_of(engine) == wanted
        # What was updated from tensors is nowhere to be read again.
        engine.control("update_weights", tensors=tensors_of(other))
        engine.control("release_memory")
        assert engine.control("resume_memory") == {"waits_for": "update_weights"}
        assert refused(engine, "get_weights_by_name", name="model.norm.weight").code == "no_weights"
        assert engine.stats()["paused"] is True
        some = {"model.norm.weight": tensors_of(base)["model.norm.weight"]}
        assert refused(engine, tensors=some, partial=True).param == "partial"
        engine.control("update_weights", tensors=tensors_of(base))
        assert engine.stats()["paused"] is False
        assert tokens_of(engine) == wanted


@pytest.mark.parametrize("change", ["link", "file"])
def test_files_that_are_others_when_memory_is_taken_again(base: Path, other: Path, tmp_path: Path, change: str) -> None:
    """Other weights would be served under the version of those before."""
    first, link = tmp_path / "first", tmp_path / "latest"
    shutil.copytree(other, first)
    link.symlink_to(first)
    settings = config(base)
    settings["weight_updates"]["directories"] = [str(tmp_path)]
    with Engine.from_config(settings) as engine:
        engine.control("update_weights", path=str(link))
        engine.control("release_memory", tags=["weights"])
        if change == "link":
            shutil.copytree(base, tmp_path / "second")
            link.unlink()
            link.symlink_to(tmp_path / "second")
            engine.control("resume_memory")
            assert tokens_of(engine) == fresh(other), "those that were there before"
        else:
            shutil.copy(base / "model.safetensors", first / "model.safetensors")
            assert engine.control("resume_memory") == {"waits_for": "update_weights"}
            engine.control("update_weights", path=str(link))
            assert tokens_of(engine) == fresh(base)


def test_weights_that_were_given_back_in_part(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is answered from what is left of them, until they are read again."""
    release = WeightMemory.release

    def fails(self: WeightMemory, tensors: Iterable[torch.Tensor]) -> int:
        release(self, list(tensors)[:2])
        raise OSError("the system says no")

    wanted = fresh(base)
    with Engine.from_config(config(base)) as engine:
        assert tokens_of(engine) == wanted
        with monkeypatch.context() as patched:
            patched.setattr(WeightMemory, "release", fails)
            error = refused(engine, "release_memory")
        assert (error.status, error.code) == (500, "weights_broken")
        assert "the system says no" in error.message
        assert engine.stats()["paused"] is True
        with pytest.raises(InvalidRequest, match="the system says no") as raised:
            answers(engine)
        assert (raised.value.status, raised.value.code) == (503, "weights_broken")
        assert refused(engine, "get_weights_by_name", name="model.norm.weight").code == "no_weights"
        engine.control("resume_memory")
        assert engine.stats()["paused"] is False
        assert tokens_of(engine) == wanted
        assert engine.stats()["book_errors"] == 0


def test_memory_is_not_given_back_while_requests_run(base: Path) -> None:
    """Unless generation is paused, and they are retracted; both have to go on then."""
    with Engine.from_config(config(base)) as engine:
        rids = {engine.submit(request(prompt)): 0 for prompt in PROMPTS}
        before = polled(engine, rids, 2)
        for tags in (["kv_cache"], ["weights"], None):
            error = refused(engine, "release_memory", tags=tags)
            assert (error.status, error.code) == (409, "busy")
        assert engine.stats()["paused"] is False
        for bad in (["kv"], "kv_cache", [3]):
            assert refused(engine, "release_memory", tags=bad).param == "tags"
        engine.control("pause_generation", mode="retract")
        engine.control("release_memory")
        engine.control("continue_generation")
        assert engine.stats()["paused"] is True
        engine.control("resume_memory", tags=["weights"])
        assert engine.stats()["paused"] is True
        engine.control("resume_memory", tags=["kv_cache"])
        after = rest_of(engine, before)
        assert [before[rid] + after[rid].token_ids for rid in rids] == fresh(base)


@pytest.mark.full
def test_memory_goes_to_the_system_round_after_round(checkpoints: Path) -> None:
    """At least 90% of what KV has touched, and of the weights; the resident size stays flat over rounds."""
    large = tiny_checkpoint(checkpoints, "llama", num_hidden_layers=4, hidden_size=512, intermediate_size=4096)
    memory = {"max_total_tokens": 16384, "prepare_seconds": 0}
    with Engine.from_config(config(large, more={"memory": memory})) as engine:
        process, pool = psutil.Process(), engine.built.pool
        wanted, sizes = tokens_of(engine), []
        for _ in range(6):
            with torch.inference_mode():
                pool.prepare(60.0)
            before = process.memory_info().rss
            released = engine.control("release_memory")["released_bytes"]
            assert isinstance(released, dict)
            freed = before - process.memory_info().rss
            assert released["kv_cache"] == pool.nbytes > 2**25
            assert released["weights"] > 2**26
            assert freed >= 0.9 * sum(released.values())
            engine.control("resume_memory")
            assert tokens_of(engine) == wanted
            sizes.append(process.memory_info().rss)
        assert max(sizes[2:]) <= 1.02 * sizes[1]
