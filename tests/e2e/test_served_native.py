"""The native routes of a running server: sessions, log-probabilities of prompts, hidden states, and an operator."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0, "ignore_eos": True}


class Asker:
    """A client of one server."""

    def __init__(self, server: Served, client: httpx.Client) -> None:
        self.server = server
        self.http = client

    def post(self, path: str, body: Any = None) -> Any:
        done = self.http.post(path, json=body)
        assert done.status_code == 200, done.text
        return done.json()

    def generate(self, tokens: int = 8, **body: Any) -> Any:
        return self.post("/generate", {"sampling_params": {"max_new_tokens": tokens, **GREEDY}, **body})

    def running(self) -> int:
        scheduler = self.http.get("/server_info").json()["scheduler"]
        return int(scheduler["running_requests"] + scheduler["waiting_requests"])


@pytest.fixture(scope="module", params=[pytest.param("normal", marks=pytest.mark.full), "overlap"])
def ask(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    model = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)
    config = {
        "model": {"path": str(model), "dtype": "float32", "hidden_states": True},
        "memory": {"max_total_tokens": 4096},
        "scheduler": {"loop": request.param, "chunked_prefill_size": 16},
        "server": {"sessions": {"max_sessions": 8}},
    }
    with (
        serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server,
        httpx.Client(base_url=server.address, timeout=60.0) as client,
    ):
        yield Asker(server, client)


@pytest.fixture
def session(ask: Asker) -> Iterator[str]:
    name: str = ask.post("/open_session", {"capacity_of_str_len": 4000})
    yield name
    ask.post("/close_session", {"session_id": name})


def test_a_turn_is_asked_with_its_history_and_finds_it_cached(ask: Asker, session: str) -> None:
    prompts = ["the quick brown fox jumps", " over the lazy dog", " and then the other dogs"]
    history: list[int] = []
    for number, prompt in enumerate(prompts):
        turn = ask.generate(text=prompt, session_params={"id": session}, rid=f"{session}-{number}")
        new = ask.post("/tokenize", {"prompt": prompt, "add_special_tokens": number == 0})["tokens"]
        assert turn["meta_info"]["prompt_tokens"] == len(history) + len(new)
        if history:
            # All but the answer's last token, which was never computed.
            assert turn["meta_info"]["cached_tokens"] >= len(history) - 1
        history += new
        plain = ask.generate(input_ids=history)
        assert turn["output_ids"] == plain["output_ids"]
        history += turn["output_ids"]
    branch = ask.generate(text=" one two", session_params={"id": session, "rid": f"{session}-0"})
    again = ask.generate(text=" one two", session_params={"id": session, "rid": f"{session}-0"})
    assert branch["output_ids"] == again["output_ids"]
    assert branch["meta_info"]["prompt_tokens"] < len(history)


@pytest.mark.parametrize("how", ["leaves", "aborted"])
def test_36475_an_abandoned_turn_leaves_the_session_as_it_was(ask: Asker, session: str, how: str) -> None:
    """The next turn comes at once, while the abandoned one may still be running."""
    first = ask.generate(text="one two three four", session_params={"id": session})
    known = first["meta_info"]["prompt_tokens"] + 8
    for number in range(6):
        rid = f"{session}-{how}-{number}"
        body = {
            "text": " five six",
            "rid": rid,
            "stream": True,
            "session_params": {"id": session},
            "sampling_params": {"max_new_tokens": 3000, **GREEDY},
        }
        with ask.http.stream("POST", "/generate", json=body) as answer:
            events = (line for line in answer.iter_lines() if line.startswith("data: "))
            begun = json.loads(next(events).removeprefix("data: "))
            assert begun["meta_info"]["prompt_tokens"] > known
            if how == "aborted":
                ask.post("/abort_request", {"rid": rid})
                last = [line for line in events if line != "data: [DONE]"][-1]
                assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
        body = {"text": " seven", "session_params": {"id": session}, "sampling_params": {"max_new_tokens": 2, **GREEDY}}
        # The server may hear of the closed connection after it has read the next request.
        while (done := ask.http.post("/generate", json=body)).status_code == 409:
            assert how == "leaves"
        assert done.status_code == 200, done.text
        new = len(ask.post("/tokenize", {"prompt": " seven", "add_special_tokens": False})["tokens"])
        assert done.json()["meta_info"]["prompt_tokens"] == known + new
        known += new + 2
    assert ask.running() == 0


def test_sessions_of_others_do_not_mix(ask: Asker, session: str) -> None:
    def talk(number: int) -> list[int]:
        name = ask.post("/open_session", {})
        history: list[int] = []
        for turn in range(3):
            new = [10 + number, 20 + turn, 30]
            answer = ask.generate(input_ids=new, session_params={"id": name})
            assert answer["meta_info"]["prompt_tokens"] == len(history) + 3
            history += new + answer["output_ids"]
        ask.post("/close_session", {"session_id": name})
        return history

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(talk, range(4)))
    assert together == [talk(number) for number in range(4)]


def test_logprobs_of_a_prompt_are_those_it_was_generated_with(ask: Asker) -> None:
    """Whichever part of it is cached, and over several chunks. The tolerance is that of issue 4, in float32."""
    prompt = list(range(3, 40))
    wanted = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 9]}
    first = ask.generate(24, input_ids=prompt, **wanted)
    whole = prompt + first["output_ids"]
    told = first["meta_info"]
    for start in (0, len(prompt), len(whole) - 1):
        meta = ask.generate(1, input_ids=whole, logprob_start_len=start, **wanted)["meta_info"]
        found = meta["input_token_logprobs"]
        assert [token for _, token, _ in found] == whole[start:]
        assert [value is None for value, _, _ in found] == [start + i == 0 for i in range(len(found))]
        # From the first token on that it generated itself.
        ours, theirs = max(0, len(prompt) - start), max(0, start - len(prompt))
        for (mine, _, _), (its, _, _) in zip(found[ours:], told["output_token_logprobs"][theirs:], strict=True):
            assert mine == pytest.approx(its, abs=1e-3)
        tops, chosen = meta["input_top_logprobs"], meta["input_token_ids_logprobs"]
        assert len(tops) == len(chosen) == len(found)
        for my_top, its_top in zip(tops[ours:], told["output_top_logprobs"][theirs:], strict=True):
            assert [one[0] for one in my_top] == pytest.approx([one[0] for one in its_top], abs=1e-3)
        assert [token for _, token, _ in chosen[-1]] == [5, 9]


def test_hidden_states_and_vectors(ask: Asker) -> None:
    answer = ask.generate(5, input_ids=[3, 4, 5], return_hidden_states=True)
    states = answer["meta_info"]["hidden_states"]
    assert len(states) == 5
    assert len({len(row) for row in states}) == 1
    one = ask.post("/encode", {"text": "the quick brown fox"})
    both = ask.post("/encode", {"text": ["a lazy dog", "the quick brown fox"]})
    assert len(one["embedding"]) == len(states[0])
    assert both[1]["embedding"] == pytest.approx(one["embedding"], abs=1e-4)
    assert both[0]["embedding"] != pytest.approx(one["embedding"], abs=1e-2)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_no_answer(ask: Asker, mode: str) -> None:
    body = {"input_ids": [7, 8, 9], "stream": True, "sampling_params": {"max_new_tokens": 600, **GREEDY}}
    expected = ask.generate(600, input_ids=[7, 8, 9])["output_ids"]
    with ThreadPoolExecutor(1) as pool, ask.http.stream("POST", "/generate", json=body) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(events)
        assert ask.post("/pause_generation", {"mode": mode})["success"]
        try:
            ill = ask.http.get("/health_generate")
            assert (ill.status_code, ill.json()["error"]["code"]) == (503, "paused")
            assert ask.http.get("/health").status_code == 200
            waiting = pool.submit(ask.generate, 3, input_ids=[1, 2])
            generated = [ask.http.get("/server_info").json()["scheduler"]["generated_tokens"] for _ in range(3)]
            assert len(set(generated)) == 1
            assert not waiting.done()
        finally:
            ask.post("/continue_generation")
        last = [line for line in events if line != "data: [DONE]"][-1]
        assert json.loads(last.removeprefix("data: "))["output_ids"] == expected
        assert len(waiting.result()["output_ids"]) == 3
    assert ask.http.get("/health_generate").status_code == 200


def test_a_pause_ends_all_requests_unless_said_otherwise(ask: Asker) -> None:
    body = {"input_ids": [7, 8, 9], "stream": True, "sampling_params": {"max_new_tokens": 3000, **GREEDY}}
    with ask.http.stream("POST", "/generate", json=body) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(events)
        ask.post("/pause_generation")
        last = [line for line in events if line != "data: [DONE]"][-1]
        assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
    assert ask.post("/flush_cache")["success"]
    ask.post("/continue_generation")


def test_what_is_logged_changes_at_run_time(ask: Asker) -> None:
    ask.generate(2, input_ids=[1, 2], rid="quiet")
    told = ask.post("/configure_logging", {"log_requests": True, "log_level": "info"})
    assert (told["log_level"], told["log_requests"]) == ("info", True)
    ask.generate(2, input_ids=[1, 2], rid="loud")
    ask.post("/configure_logging", {"log_requests": False})
    ask.generate(2, input_ids=[1, 2], rid="quiet-again")
    lines = [line for line in ask.server.log().splitlines() if "Finished." in line]
    assert [line.partition("rid=")[2].split()[0] for line in lines] == ["'loud'"]
    assert ask.post("/freeze_gc")["objects"] > 1000


def test_the_servers_own_parsers_are_known_by_name(ask: Asker) -> None:
    chosen = ask.http.get("/server_info").json()["providers"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"text": "a", "tools": tools, "tool_call_parser": chosen["tool_parser"][0]}
    assert ask.post("/parse_function_call", body)["normal_text"] == "a"
    body = {"text": "a", "reasoning_parser": chosen["reasoning_parser"][0]}
    assert ask.post("/separate_reasoning", body)["text"] == "a"


@pytest.mark.full
def test_sessions_outlive_the_scheduler(ask: Asker, session: str) -> None:
    """Nothing of them is in its process."""
    first = ask.generate(input_ids=[3, 4, 5], session_params={"id": session})
    killed = _scheduler(ask.server.process.pid)
    assert killed
    os.kill(killed, 9)
    # Not when the process is gone: the server may hear of that later, and is ready until then.
    while _scheduler(ask.server.process.pid) in (None, killed):
        time.sleep(0.01)
    while ask.http.get("/ready").status_code != 200:
        time.sleep(0.01)
    second = ask.generate(input_ids=[6], session_params={"id": session})
    assert second["meta_info"]["prompt_tokens"] == 3 + 8 + 1
    assert second["output_ids"] == ask.generate(input_ids=[3, 4, 5, *first["output_ids"], 6])["output_ids"]


def _scheduler(server: int) -> int | None:
    """The process of its scheduler, if there is one that runs."""
    for child in psutil.Process(server).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "scheduler_process" in " ".join(child.cmdline()):
                return int(child.pid)
    return None
