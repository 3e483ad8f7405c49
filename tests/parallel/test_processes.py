"""Ranks as processes, over HTTP: answers are transformers', a rank's end is told, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from pegboard.conformance.servers import Served, serving
from tests.e2e.reference import Comparison, Reference
from tests.parallel.prompts import LENGTH, PROMPTS

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

PATIENCE = 90.0
LOGPROBS_OFF = 0.1
"""Of bfloat16: with these weights transformers itself is off by as much."""
TOLD_WITHIN = 30.0
"""Seconds from a rank's end to the answer that tells it: two on an idle machine, and less than `PATIENCE` on any."""


def settings(model: Path, **parallel: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "runner": {"use": "layered"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": 4096},
        "parallel": {"tensor": 2, "cores": 2, **parallel},
    }


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with serving(settings(model)) as one:
        yield one
        started = psutil.Process(one.process.pid).children(recursive=True)
    _, left = psutil.wait_procs(started, PATIENCE)
    assert not left, "processes go on after the server's end"


def generate(server: Served, ids: list[int], length: int = LENGTH) -> httpx.Response:
    params = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params}
    return httpx.post(f"{server.address}/generate", json=body, timeout=PATIENCE)


def ranks(server: Served) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [one for one in found if "pegboard.core.server.follower_process" in one.cmdline()]


def right(server: Served, reference: Reference) -> None:
    comparison = Comparison()
    for prompt, expected in zip(PROMPTS, reference.answers(PROMPTS, LENGTH), strict=True):
        answer = generate(server, prompt)
        assert answer.status_code == 200, answer.text
        comparison.add(answer.json()["output_ids"], expected, str(prompt[:3]))
    comparison.finish()


def busy(server: Served) -> None:
    """Wait until a request runs."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        state = httpx.get(f"{server.address}/server_info", timeout=PATIENCE).json()["scheduler"]
        if state["running_requests"]:
            return
        time.sleep(0.02)
    raise AssertionError("no request runs")


def ready_again(server: Served) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if ranks(server) and httpx.get(f"{server.address}/ready", timeout=PATIENCE).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("the server is not ready again")


def test_answers_are_those_of_transformers(server: Served, model: Path, reference_dir: Path) -> None:
    """Also after a signal of the terminal, which reaches the whole group: it is for the server's own process."""
    reference = Reference(model, reference_dir)
    right(server, reference)
    (rank,) = ranks(server)
    rank.send_signal(signal.SIGINT)
    rank.send_signal(signal.SIGTERM)
    right(server, reference)
    assert rank.is_running()


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 2)])
def test_sections(tensor: int, pipeline: int, model: Path, reference_dir: Path) -> None:
    """Requests together, too, and an error that names the rank which was killed."""
    ranks_of_it = {"tensor": tensor, "pipeline": pipeline, "cores": tensor * pipeline}
    with serving(settings(model, **ranks_of_it)) as server:
        right(server, Reference(model, reference_dir))
        assert len(ranks(server)) == tensor * pipeline - 1
        expected, comparison = Reference(model, reference_dir).answers(PROMPTS, LENGTH), Comparison()
        with ThreadPoolExecutor(8) as clients:
            together = list(clients.map(lambda prompt: generate(server, prompt).json()["output_ids"], PROMPTS * 4))
        for number, found in enumerate(together):
            comparison.add(found, expected[number % len(PROMPTS)], f"client {number}")
        comparison.finish()
        rank = ranks(server)[-1]
        rank.kill()
        answer = generate(server, [5, 6, 7])
        assert answer.status_code == 503 or answer.json()["output_ids"], answer.text
        ready_again(server)
        right(server, Reference(model, reference_dir))


def killed_and_replaced(server: Served) -> float:
    """Kill rank 1 while a request runs, which is told of it; return how many seconds that took."""
    (rank,) = ranks(server)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(generate(server, [5, 6, 7], 3000)))
    asking.start()
    busy(server)
    rank.kill()
    killed = time.monotonic()
    asking.join(PATIENCE)
    waited = time.monotonic() - killed
    assert answers[0].status_code == 503, answers[0].text
    assert f"rank 1 (process {rank.pid}) was ended by signal 9" in answers[0].text
    ready_again(server)
    assert not psutil.pid_exists(rank.pid)
    return waited


def test_a_rank_that_is_killed_is_told_and_replaced(server: Served, model: Path, reference_dir: Path) -> None:
    assert killed_and_replaced(server) < TOLD_WITHIN
    right(server, Reference(model, reference_dir))


def prompt_logprobs(server: Served, ids: list[int]) -> torch.Tensor:
    """Return those of a prompt's tokens but the first."""
    params = {"temperature": 0, "max_new_tokens": 1}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    answer = httpx.post(f"{server.address}/generate", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return torch.tensor([value for value, *_ in answer.json()["meta_info"]["input_token_logprobs"][1:]])


@torch.inference_mode()
def test_the_native_runner(model: Path, reference_dir: Path) -> None:
    """In bfloat16, so that logprobs are a little off. Where a rank is killed the other one waits in native code."""
    native = {"model": {"path": str(model), "dtype": "bfloat16", "device": "cpu"}, "runner": {"use": "cpu_native"}}
    given = {**settings(model), **native}
    del given["attention"]
    ids, reference = list(PROMPTS[1]), Reference(model, reference_dir)
    table = reference.logits(ids, len(ids))[:-1].log_softmax(-1)
    right = table.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    with serving(given) as server:
        first = prompt_logprobs(server, ids)
        assert float((first - right).abs().max()) < LOGPROBS_OFF
        tokens = [generate(server, prompt).json()["output_ids"] for prompt in PROMPTS]
        assert [len(found) for found in tokens] == [LENGTH] * len(PROMPTS)
        killed_and_replaced(server)
        assert torch.equal(prompt_logprobs(server, ids), first)
        assert [generate(server, prompt).json()["output_ids"] for prompt in PROMPTS] == tokens


def test_a_rank_that_falls_silent_is_replaced(model: Path) -> None:
    with serving(settings(model, timeout=8.0)) as server:
        (rank,) = ranks(server)
        rank.suspend()
        answer = generate(server, [5, 6, 7])
        assert answer.status_code == 503, answer.text
        assert f"rank 1 (process {rank.pid}) has not answered for 8 s" in answer.text
        ready_again(server)
        assert not psutil.pid_exists(rank.pid)
        assert generate(server, [5, 6, 7]).status_code == 200


def test_ranks_end_with_their_leader(model: Path) -> None:
    with serving(settings(model)) as server:
        (rank,) = ranks(server)
        parent = rank.parent()
        assert parent is not None
        parent.kill()
        rank.wait(PATIENCE)
        assert not rank.is_running()
        ready_again(server)
        assert generate(server, [5, 6, 7]).status_code == 200


def test_torchrun(model: Path, reference_dir: Path, tmp_path: Path) -> None:
    """As docs/parallel.md has it. A rank that is killed is replaced, torchrun's processes stay, and nothing is left."""
    program = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pegboard.plugins.parallel.torchrun")
    reference, environment = Reference(model, reference_dir), {**os.environ, "TMPDIR": str(tmp_path)}
    with serving(settings(model), env=environment, program=program) as server:
        right(server, reference)
        (rank,) = ranks(server)
        parent = rank.parent()
        assert parent is not None
        assert "pegboard.plugins.parallel.torchrun" in parent.cmdline()
        rank.kill()
        answer = generate(server, [5, 6, 7])
        assert answer.status_code == 503 or answer.json()["output_ids"], answer.text
        ready_again(server)
        right(server, reference)
        assert ranks(server)[0].parent() == parent
        assert f"rank 1 (process {rank.pid}) was ended by signal 9" in server.log()
        started = psutil.Process(server.process.pid).children(recursive=True)
    _, left = psutil.wait_procs(started, PATIENCE)
    assert not left, "processes go on after the server's end"
    assert not list(tmp_path.glob("pegboard-*")), "files are left"
