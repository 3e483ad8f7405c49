"""The console's chat in headless Chromium: tools with a model that was taught to call them, pictures with another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pegboard.conformance.servers import serving
from pegboard.conformance.vl_checkpoints import vl_checkpoint
from tests.e2e.browser import ENTER, Browser, chromium, missing
from tests.e2e.clients import CONTEXT, MODEL, teach, tiny_model
from tests.e2e.test_clients_agents import CALLS, END, LESSONS, QUESTION, RESULTS, THOUGHT, WORDS
from tests.e2e.test_clients_media import config, png

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}"),
    pytest.mark.timeout(300),
]

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
DONE = "return chat.messages.length === arguments[0] && chat.messages.at(-1).done"


def ask(page: Browser, text: str, messages: int) -> None:
    page.run("at('temperature').value = 0; at('max-tokens').value = 200")
    page.find("#ask-text").type(text + ENTER)
    page.until(DONE, messages)


def shown(page: Browser, selector: str) -> list[str]:
    found: list[str] = page.run(
        "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)", selector
    )
    return found


def prompt_tokens(page: Browser) -> int:
    """Return the tokens of the newest prompt, which stand beside its speed."""
    found: int = page.run("return Number(/ms, ([0-9]+)/.exec(at('speed').textContent)[1])")
    return found


def test_tools_are_called_and_their_results_go_back(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    teach(model, LESSONS)
    settings = {
        "model": {"path": str(model), "dtype": "float32", "context_length": CONTEXT, "served_name": ["first", MODEL]},
        "memory": {"max_total_tokens": 8 * CONTEXT},
        "attention": {"use": "torch"},
    }
    with serving(settings, env=ENV) as server, chromium() as page:
        page.size(1280, 800)
        page.open(server.address)
        page.shows("#state", "live")
        page.find("#tools").type("[not JSON")
        page.find("#ask-text").type(QUESTION[0]["content"] + ENTER)
        page.shows("#notice", "Tools must be JSON")
        page.find("#clear").click()
        functions = [{"type": "function", "function": {"name": name}} for name in CALLS]
        page.run(
            "at('tools').value = JSON.stringify(arguments[0]); at('chat-model').value = arguments[1]", functions, MODEL
        )
        ask(page, QUESTION[0]["content"], 2)
        assert shown(page, ".turn.assistant .who") == [MODEL], "the model that was asked"
        assert shown(page, ".thought") == [THOUGHT]
        assert WORDS in shown(page, ".turn.assistant .said")[0]
        assert shown(page, ".call b") == list(CALLS)
        page.find("#ask-text").type("And now?" + ENTER)
        page.shows("#notice", "Enter the results of the tools first")
        for name, result in RESULTS.items():
            page.find(f'textarea[aria-label="Result of {name}"]').type(result)
            page.find(f'form:has(textarea[aria-label="Result of {name}"]) button').click()
        page.until(DONE, 5)
        assert shown(page, ".turn.tool .said") == list(RESULTS.values())
        assert shown(page, ".turn.assistant .said")[-1] == END
        assert page.log() == []
        page.open("about:blank")


def test_pictures_are_sent_shown_and_taken_back(tmp_path: Path) -> None:
    checkpoint = vl_checkpoint(tmp_path / "model", "qwen2_vl")
    for seed in range(2):
        (tmp_path / f"{seed}.png").write_bytes(png(seed))
    (tmp_path / "a.txt").write_text("text")
    with serving(config(checkpoint), env=ENV) as server, chromium() as page:
        page.size(1280, 800)
        page.open(server.address)
        page.shows("#state", "live")
        for name in ("0.png", "1.png", "a.txt"):
            page.find("#file").type(str(tmp_path / name))
        page.until("return document.querySelectorAll('#pictures img').length === 2")
        page.find("#pictures figure:first-child button").click()
        page.until("return document.querySelectorAll('#pictures img').length === 1")
        page.run("at('max-tokens').value = 8; at('temperature').value = 0")
        page.find("#ask-text").type("What is it?" + ENTER)
        page.until(DONE, 2)
        assert page.run("return chat.messages.map((one) => one.error || '')") == ["", ""]
        width = page.until("return document.querySelector('.turn.user img').naturalWidth")
        assert (width, shown(page, "#pictures img")) == (90, [])
        page.shows("#speed", "tokens")
        seen = prompt_tokens(page)
        page.find("#clear").click()
        ask(page, "What is it?", 2)
        assert seen > prompt_tokens(page) > 0, "the picture was part of the prompt"
        assert page.log() == []
        page.open("about:blank")
