"""A gate of another distribution with fields of its own in request bodies: what it is told, by real clients."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import serving

pytestmark = [pytest.mark.slow, pytest.mark.full]

RECORD = """
from pegboard.core.interfaces import BodyField, Plugin, Provider

plugin = Plugin(
    name="meeting",
    version="0.1.0",
    providers=(
        Provider(
            contract="admission_gate",
            name="meeting",
            factory="meeting_gate:Meeting",
            config="meeting_gate:MeetingOptions",
            summary="notes who is to meet where",
            body=(
                BodyField("bootstrap_host", str, meaning="Where."),
                BodyField("bootstrap_room", int, meaning="In which room."),
                BodyField("urgent", bool, each=False),
            ),
        ),
    ),
)
"""
GATE = """
import json

from pegboard.core.interfaces import OPEN, AdmissionGate, GateOptions


class MeetingOptions(GateOptions):
    file: str = ""
    \"\"\"Where it notes what requests say.\"\"\"


class Meeting(AdmissionGate):
    def concerns(self, req):
        return "meeting" in req.params

    def enter(self, req):
        with open(self.options.file, "a") as file:
            file.write(json.dumps(req.params["meeting"]) + "\\n")
        return OPEN

    def poll(self, blocked):
        return {}

    def cancel(self, req):
        pass
"""
HELLO: Any = [{"role": "user", "content": "hello"}]
FEW: Any = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}

Told = Callable[[], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("meeting")
    (folder / "meeting.py").write_text(RECORD)
    (folder / "meeting_gate.py").write_text(GATE)
    info = folder / "meeting-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: meeting\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[pegboard]\nmeeting = meeting:plugin\n")
    model = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)
    config = {
        "model": {"path": str(model), "dtype": "float32", "served_name": "tiny"},
        "memory": {"max_total_tokens": 2048},
        "gates": [{"use": "meeting", "file": str(folder / "told")}],
    }
    path = os.pathsep.join((str(folder), os.environ["PYTHONPATH"]))
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}) as server:
        yield server.address, folder / "told"


@pytest.fixture
def address(served: tuple[str, Path]) -> str:
    return served[0]


@pytest.fixture
def told(served: tuple[str, Path]) -> Told:
    """What the gate has been told since it was last asked."""
    served[1].write_text("")

    def read() -> list[dict[str, Any]]:
        lines = served[1].read_text().splitlines()
        served[1].write_text("")
        found = [json.loads(line) for line in lines]
        return sorted(found, key=lambda one: one.get("index", 0))

    return read


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_the_openai_client_sends_them_as_extra_fields(client: openai.OpenAI, told: Told) -> None:
    said = {"bootstrap_host": "h", "bootstrap_room": 2**63 - 1, "urgent": True, "ignore_eos": True}
    plain = {"bootstrap_host": "h", "bootstrap_room": 2**63 - 1, "urgent": True}
    chat: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0}
    client.chat.completions.create(**chat, extra_body=said)
    assert told() == [plain]
    client.chat.completions.create(**chat, n=2, extra_body=said)
    assert told() == [{**plain, "index": 0}, {**plain, "index": 1}]
    for chunk in client.chat.completions.create(**chat, n=2, stream=True, extra_body={"bootstrap_room": [5, 6]}):
        assert chunk.object == "chat.completion.chunk"
    assert told() == [{"bootstrap_room": 5, "index": 0}, {"bootstrap_room": 6, "index": 1}]
    client.completions.create(
        model="tiny",
        prompt=["a", "b"],
        n=2,
        max_tokens=4,
        extra_body={"bootstrap_room": [5, 6], "bootstrap_host": None},
    )
    assert [one["bootstrap_room"] for one in told()] == [5, 5, 6, 6]
    client.responses.create(model="tiny", input="hello", max_output_tokens=4, extra_body=said)
    assert told() == [plain]
    client.chat.completions.create(**chat)
    assert told() == [], "who says nothing does not concern it"
    for wrong in ("5", [5, 6, 7], {"a": 5}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**chat, n=2, extra_body={"bootstrap_room": wrong})
        assert caught.value.param == "bootstrap_room"
    assert told() == []


def test_generate_takes_what_a_router_sends(address: str, told: Told) -> None:
    def generate(stream: bool = False, **body: Any) -> str:
        done = httpx.post(f"{address}/generate", json={"sampling_params": FEW, "stream": stream, **body}, timeout=60)
        assert done.status_code == 200, done.text
        return done.text

    generate(text="hello", bootstrap_host="h", bootstrap_room=5)
    assert told() == [{"bootstrap_host": "h", "bootstrap_room": 5}]
    # A scalar goes to each answer; lists are dealt out over prompts.
    generate(text="hello", sampling_params={**FEW, "n": 2}, bootstrap_room=5)
    assert told() == [{"bootstrap_room": 5, "index": 0}, {"bootstrap_room": 5, "index": 1}]
    lists = {"bootstrap_host": ["h", "h"], "bootstrap_room": [5, 6]}
    for stream in (False, True):
        generate(stream, input_ids=[[3, 4], [5, 6]], **lists)
        assert told() == [
            {"bootstrap_host": "h", "bootstrap_room": room, "index": index} for index, room in enumerate((5, 6))
        ]
    done = httpx.post(f"{address}/generate", json={"text": "a", "bootstrap_port": 8998}, timeout=60)
    assert (done.status_code, done.json()["error"]["param"]) == (400, "bootstrap_port"), "this gate declares none"
    large = httpx.post(f"{address}/generate", json={"text": "a", "bootstrap_host": "h" * 2**16}, timeout=60)
    assert (large.status_code, large.json()["error"]["param"]) == (400, "params"), "the limit of params holds"
    assert told() == []


def test_messages_and_the_document(address: str, told: Told) -> None:
    body = {"model": "tiny", "max_tokens": 4, "messages": HELLO, "bootstrap_room": 5}
    for stream in (False, True):
        done = httpx.post(f"{address}/v1/messages", json={**body, "stream": stream}, timeout=60)
        assert done.status_code == 200, done.text
        assert told() == [{"bootstrap_room": 5}]
    paths = httpx.get(f"{address}/openapi.json", timeout=60).json()["paths"]
    for path in ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert schema["bootstrap_room"]["description"].startswith("In which room. (For meeting;"), path
