"""The console in headless Chromium, with the server of a tiny model. `make test-full` runs it where Chromium is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.conformance.servers import Served, free_ports, serving
from tests.e2e.browser import DOWN, ENTER, LEFT, RIGHT, Browser, chromium, missing
from tests.e2e.clients import ADMIN_KEY, CONTEXT, KEY, MODEL, tiny_model

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}"),
    pytest.mark.timeout(300),
]

VIEWS = ("chat", "live", "cache", "steps", "config", "plugins")
ALIAS = "another-name"
RESTARTED = "The scheduler was restarted"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def settings(model: Path, **server: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "context_length": CONTEXT, "served_name": [MODEL, ALIAS]},
        "memory": {"max_total_tokens": 8 * CONTEXT},
        "attention": {"use": "torch"},
        "server": server,
    }


ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with serving(settings(model), env=ENV) as served:
        yield served


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        opened.size(1280, 800)
        yield opened


@pytest.fixture
def page(browser: Browser, server: Served) -> Browser:
    """The page, with the figures of a scheduler that has generated."""
    browser.open(server.address)
    browser.shows("#state", "live")
    generate(server)
    return browser


def generate(server: Served, tokens: int = 20) -> None:
    body = {"input_ids": list(range(5, 60)), "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    httpx.post(f"{server.address}/generate", json=body, timeout=60).raise_for_status()


def show(page: Browser, view: str) -> None:
    page.find(f"#tab-{view}").click()
    page.until("return !document.getElementById(arguments[0]).hidden", f"panel-{view}")


def scheduler_of(server: Served) -> int:
    processes = psutil.Process(server.process.pid).children()
    (found,) = [one.pid for one in processes if "scheduler_process" in " ".join(one.cmdline())]
    return int(found)


def ask(page: Browser, text: str) -> None:
    """Have a message answered with 8 tokens at most."""
    page.run("at('max-tokens').value = 8; at('temperature').value = 0")
    page.find("#ask-text").type(text + ENTER)
    page.shows("#speed", "tokens")
    assert page.run("return chat.messages.map((one) => [one.role, Boolean(one.error)])") == [
        ["user", False],
        ["assistant", False],
    ]


def test_every_view_shows_what_the_server_does(page: Browser) -> None:
    show(page, "live")
    page.until("return Number(at('tile-finished').innerText) > 0")
    page.until("return /[0-9]/.test(at('tile-step').innerText) && at('tile-kv').innerText.endsWith('%')")
    page.until("return document.querySelectorAll('#chart-tokens path').length > 0")
    show(page, "cache")
    page.until("return document.querySelectorAll('#tree tbody tr').length > 0")
    show(page, "steps")
    page.until("return document.querySelectorAll('#steps-chart rect').length > 10")
    show(page, "config")
    page.shows("#config-table", "memory.max_total_tokens")
    show(page, "plugins")
    page.shows("#points", "batch_committed")
    assert page.log() == [], "the browser refuses nothing, and no script fails"


def test_a_chat_is_answered(page: Browser) -> None:
    ask(page, "hello")
    assert page.find(".turn.user .said").text == "hello"
    assert page.find(".turn.assistant .said").text
    page.find("#clear").click()
    page.shows("#turns", "Send a message")
    assert page.log() == []


def test_a_chosen_model_stays_chosen_when_the_models_are_asked_for_again(page: Browser) -> None:
    asked_again = "return learnModels().then(() => at('chat-model').value)"
    assert page.run(asked_again) == MODEL
    page.run("at('chat-model').value = arguments[0]", ALIAS)
    assert page.run(asked_again) == ALIAS
    page.run("at('chat-model').append(el('option', { selected: true }, 'gone'))")
    assert page.run(asked_again) == MODEL


def test_the_keyboard_alone_will_do(page: Browser) -> None:
    show(page, "live")
    page.press(RIGHT + RIGHT)
    page.until("return document.activeElement.id === 'tab-steps' && !at('panel-steps').hidden")
    page.press(LEFT + DOWN)
    page.until("return document.querySelectorAll('#steps-chart rect').length > 10")
    page.run("at('steps-chart').focus()")
    page.press(LEFT)
    page.until("return document.querySelectorAll('#steps-chart .chosen').length === 1")


COLUMNS = {1600: 4, 1280: 4, 768: 4, 390: 2}
"""Tiles side by side, by the width of the screen in CSS pixels."""


def test_it_fits_every_width_and_follows_the_systems_colours(page: Browser) -> None:
    places = "[...document.querySelectorAll('.tile')].map((tile) => tile.getBoundingClientRect().left)"
    for width, columns in COLUMNS.items():
        colours = set()
        for dark in (False, True):
            page.size(width, 800, dark=dark)
            for view in VIEWS:
                show(page, view)
                assert page.run("return document.documentElement.scrollWidth") <= width, (width, view)
            colours.add(page.run("return getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2
        show(page, "live")
        assert page.run(f"return new Set({places}).size") == columns


def test_another_scheduler_is_noticed(page: Browser, server: Served) -> None:
    os.kill(scheduler_of(server), signal.SIGKILL)
    page.shows("#notice", RESTARTED)
    page.shows("#state", "live")
    page.find("#notice-close").click()
    page.until("return at('notice').hidden")
    ask(page, "hello")


def test_a_server_that_starts_again_is_found_again(browser: Browser, model: Path) -> None:
    (port,) = free_ports(1)
    with serving(settings(model), env=ENV, port=port) as server:
        browser.open(server.address)
        browser.shows("#state", "live")
    browser.shows("#state", "no connection")
    browser.shows("#notice", "does not answer")
    with serving(settings(model), env=ENV, port=port):
        browser.shows("#state", "live")
        browser.shows("#notice", RESTARTED)
        ask(browser, "hello")
        browser.open("about:blank")


def test_keys_are_asked_for(browser: Browser, model: Path) -> None:
    with serving(settings(model, api_key=KEY, admin_key=ADMIN_KEY), env=ENV) as server:
        browser.open(server.address)
        browser.shows("#state", "needs a key")
        browser.shows("#key-form", "needs a key")
        show(browser, "live")
        browser.shows("#panel-live", "needs the admin key")
        browser.find("#key").type("wrong" + ENTER)
        browser.until("return at('key-problem').innerText")
        browser.find("#key").type(KEY + ENTER)
        browser.shows("#state", "chat only")
        show(browser, "chat")
        ask(browser, "hello")
        browser.find("#show-key").click()
        browser.find("#key").type(ADMIN_KEY + ENTER)
        browser.shows("#state", "live")
        browser.open(f"{server.address}/#live")
        browser.shows("#state", "live")
        browser.find("#show-key").click()
        browser.find("#forget").click()
        browser.shows("#state", "needs a key")
        browser.open("about:blank")
