"""Chat templates are a model's code: whatever one does, the server goes on and other conversations are rendered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pegboard.conformance.fake_client import TEMPLATE, FakeEngineClient, FakeTokenizer
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat import rendering
from pegboard.toolkit.chat.chat_prompt import ChatPrompt
from pegboard.toolkit.chat.rendering import RenderPool, render_chat
from pegboard.toolkit.chat.tool_calls import Tools
from pegboard.toolkit.parsing.output_parser import OutputParser, ParserStream

CHAT = [{"role": "user", "content": "Hi 漢😀"}]
RENDERED = "user: Hi 漢😀\nassistant:"
WEATHER = Tools(({"name": "weather", "parameters": {"type": "object"}},))
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom", "n": 1}'}}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def render(messages: list[dict[str, Any]] = CHAT, *, template: str = TEMPLATE, **more: Any) -> str:
    async def scene() -> str:
        client = FakeEngineClient(tokenizer=FakeTokenizer(template=template))
        return str(await render_chat(client, messages, **more))

    return asyncio.run(scene())


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[RenderPool]:
    """A pool of one helper that has little time and memory."""
    pool = RenderPool(helpers=1, seconds=0.5, memory=512 << 20)
    monkeypatch.setattr(rendering, "_the_pool", pool)
    yield pool
    pool.close()


def helper_pid(pool: RenderPool) -> int:
    [pid] = pool.pids()
    return pid


class Parser(OutputParser):
    """Explains tools, and writes calls."""

    def stream(self, tools: Any = (), *, prompt: str = "") -> ParserStream:
        raise NotImplementedError

    def instructions(self, tools: Any) -> str:
        return "TOOLS: " + ", ".join(one["name"] for one in tools)

    def write_calls(self, calls: Any) -> str:
        return " ".join(f"{one['name']}({one['arguments']['city']})" for one in calls)


def refused(error: pytest.ExceptionInfo[InvalidRequest]) -> tuple[int, str | None, str]:
    return error.value.status, error.value.param, error.value.code


class TestWhatIsRendered:
    def test_a_conversation(self) -> None:
        assert render() == RENDERED
        assert render(add_generation_prompt=False) == RENDERED.removesuffix("assistant:")

    def test_the_final_message_can_stay_open(self) -> None:
        chat = [*CHAT, {"role": "assistant", "content": "Hello "}]
        more: Any = {"continue_final_message": True, "add_generation_prompt": False}
        assert render(chat, **more) == RENDERED + " Hello "
        trimming = "{% for m in messages %}{{ m.content | trim }}|{% endfor %}"
        assert render(chat, template=trimming, **more) == "Hi 漢😀|Hello"

    def test_special_tokens_have_names(self) -> None:
        assert render(template="{{ eos_token }}{{ bos_token is defined }}") == "\x03False"

    def test_templates_that_read_tools_get_them(self) -> None:
        template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages | length }}"
        text = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]1'
        assert render(template=template, tools=WEATHER, tool_parser=Parser(None, None)) == text  # type: ignore[arg-type]
        none = Tools(WEATHER.functions, "none")
        assert render(template=template, tools=none, tool_parser=Parser(None, None)) == "1"  # type: ignore[arg-type]

    def test_others_have_them_explained(self) -> None:
        more: Any = {"tools": WEATHER, "tool_parser": Parser(None, None)}  # type: ignore[arg-type]
        assert render(**more) == "system: TOOLS: weather\n" + RENDERED
        chat = [{"role": "system", "content": "Be brief."}, *CHAT]
        assert render(chat, **more) == "system: Be brief.\n\nTOOLS: weather\n" + RENDERED

    def test_hints_are_for_templates_that_listen(self) -> None:
        hints = {"enable_thinking": False, "messages": [], "eos_token": "x"}
        assert render(hints=hints) == RENDERED
        template = "{{ enable_thinking }}{{ eos_token }}"
        assert render(template=template, hints=hints) == "False\x03"
        assert render(template=template, hints=hints, kwargs={"enable_thinking": True}) == "True\x03"

    def test_a_template_for_tools_is_used_with_tools(self) -> None:
        async def scene() -> list[object]:
            client = FakeEngineClient()
            client.tokenizer.chat_templates = {"default": "plain", "tool_use": "tools", "rag": "rag"}
            return [
                await render_chat(client, CHAT),
                await render_chat(client, CHAT, tools=WEATHER),
                await render_chat(client, CHAT, template="rag"),
            ]

        assert asyncio.run(scene()) == ["plain", "tools", "rag"]

    def test_arguments_of_calls_are_objects(self) -> None:
        chat = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
        template = (
            "{% for c in messages[1].tool_calls %}{{ c.id }}{{ c.function.arguments.items() | list }}{% endfor %}"
        )
        assert render(chat, template=template) == "c1[('city', 'Rom'), ('n', 1)]"  # type: ignore[arg-type]
        for text, found in (("", "{}"), ("[1]", "[1]"), ("{oops", "{oops")):
            call = {"function": {"name": "f", "arguments": text}}
            template = "{{ messages[0].tool_calls[0].function.arguments }}"
            assert render([{"role": "assistant", "tool_calls": [call]}], template=template) == found

    def test_calls_are_written_where_the_template_does_not_know_them(self) -> None:
        chat = [*CHAT, {"role": "assistant", "content": "So:", "tool_calls": [CALL]}, {"role": "tool", "content": "5°"}]
        parser: Any = Parser(None, None)  # type: ignore[arg-type]
        written = "user: Hi 漢😀\nassistant: So:\nweather(Rom)\ntool: 5°\nassistant:"
        assert render(chat, tool_parser=parser) == written  # type: ignore[arg-type]
        knows = "{{ messages[1].content }}{{ messages[1].tool_calls | length }}"
        assert render(chat, template=knows, tool_parser=parser) == "So:1"  # type: ignore[arg-type]

    def test_no_calls_are_no_key(self) -> None:
        for empty in (None, []):  # type: ignore[var-annotated]
            chat = [{"role": "assistant", "content": "x", "tool_calls": empty}]
            assert render(chat, template="{{ 'tool_calls' in messages[0] }}") == "False"

    def test_developers_are_systems_where_the_template_knows_none(self) -> None:
        chat = [{"role": "developer", "content": "x"}]
        assert render(chat) == "system: x\nassistant:"
        assert render(chat, template="{# developer #}{{ messages[0].role }}") == "developer"


class TestBadRequests:
    @pytest.mark.parametrize(
        ("calls", "param"),
        [
            ("x", "messages.0.tool_calls"),
            ({"a": 1}, "messages.0.tool_calls"),
            ([1], "messages.0.tool_calls.0.function"),
            ([{"function": {}}], "messages.0.tool_calls.0.function.name"),
            ([CALL, {"function": {"name": "f", "arguments": 5}}], "messages.0.tool_calls.1.function.arguments"),
        ],
    )
    def test_odd_calls(self, calls: Any, param: str) -> None:
        with pytest.raises(InvalidRequest) as error:
            render([{"role": "assistant", "tool_calls": calls}])
        assert refused(error)[:2] == (400, param)

    def test_cve_2025_62426_kwargs_are_those_that_the_template_reads(self) -> None:
        """CVE-2025-62426: chat_template_kwargs reached whatever they named."""
        template = "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}{{ eos_token }}"
        assert render(template=template, kwargs={"enable_thinking": False}) == "quick\x03"
        for name in ("tokenize", "chat_template", "messages", "tools", "eos_token", "self", "range", "__class__"):
            with pytest.raises(InvalidRequest, match="it reads: enable_thinking") as error:
                render(template=template, kwargs={name: "x"})
            assert refused(error)[:2] == (400, "chat_template_kwargs")

    def test_what_the_template_refuses(self) -> None:
        with pytest.raises(InvalidRequest, match="roles must alternate") as error:
            render(template="{{ raise_exception('roles must alternate') }}")
        assert refused(error) == (400, "messages", "chat_template")

    def test_values_that_no_template_can_read(self) -> None:
        for value in (2**70, "\ud800"):
            with pytest.raises(InvalidRequest) as error:
                render([{"role": "user", "content": value}])
            assert refused(error)[0] == 400
        assert render() == RENDERED

    def test_no_template(self) -> None:
        async def scene() -> None:
            await render_chat(FakeEngineClient(tokenizer=FakeTokenizer(has_chat_template=False)), CHAT)

        with pytest.raises(InvalidRequest, match="no chat template"):
            asyncio.run(scene())


@pytest.mark.usefixtures("pool")
class TestHarm:
    """CVE-2025-61620 and others: time, memory and code of templates."""

    @pytest.mark.parametrize("template", [ENDLESS, "{{ 9 ** (9 ** 9) }}", "{{ x }}" + ENDLESS])
    def test_time_is_bounded(self, template: str) -> None:
        """Also the time to compile one: the second, a constant, is worked out then."""
        with pytest.raises(InvalidRequest, match="takes too long") as error:
            render(template=template)
        assert refused(error) == (400, "messages", "chat_template")
        assert render() == RENDERED

    @pytest.mark.parametrize("template", ["{{ 'x' * 10 ** 12 }}", "{{ messages[0].content * 10 ** 9 }}"])
    def test_memory_is_bounded(self, template: str) -> None:
        with pytest.raises(InvalidRequest, match=r"memory|process ended|too long"):
            render(template=template)
        assert render() == RENDERED

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages.__class__.__base__.__subclasses__() }}",
            "{{ self._TemplateReference__context.environment }}",
            "{{ cycler.__init__.__globals__.os.system('true') }}",
            "{{ lipsum.__globals__['os'].popen('id').read() }}",
            "{{ ''|attr('__class__') }}",
            "{% set x = '%c'|format(95) %}{{ messages|attr(x~x~'class'~x~x) }}",
            "{% include '/etc/passwd' %}",
        ],
    )
    def test_cve_2026_5760_code_does_not_leave_the_sandbox(self, template: str) -> None:
        """CVE-2026-5760: a template from a model file ran commands."""
        text = ""
        with contextlib.suppress(InvalidRequest):
            text = render(template=template)
        assert text == ""

    def test_the_process_has_no_secrets(self, pool: RenderPool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert render() == RENDERED
        if sys.platform == "linux":
            assert b"HF_TOKEN" not in Path(f"/proc/{helper_pid(pool)}/environ").read_bytes()

    def test_cve_2025_61620_the_loop_goes_on_meanwhile(self) -> None:
        """CVE-2025-61620: one slow conversation, and the server stood still. Here the loop turns, and the threads that
        all share are free."""

        async def scene() -> tuple[int, int]:
            client = FakeEngineClient(tokenizer=FakeTokenizer(template=ENDLESS))
            slow = [asyncio.ensure_future(render_chat(client, CHAT)) for _ in range(2)]
            turns = threads = 0
            while not all(one.done() for one in slow):
                turns += 1
                threads += await asyncio.to_thread(lambda: 1)
                await asyncio.sleep(0.001)
            assert all(isinstance(one.exception(), InvalidRequest) for one in slow)
            return turns, threads

        turns, threads = asyncio.run(scene())
        assert turns > 20
        assert threads == turns

    def test_who_leaves_costs_nothing(self, pool: RenderPool) -> None:
        async def scene() -> None:
            client = FakeEngineClient(tokenizer=FakeTokenizer(template=ENDLESS))
            first = asyncio.ensure_future(render_chat(client, CHAT))
            await asyncio.sleep(0.05)
            others = [asyncio.ensure_future(render_chat(client, CHAT)) for _ in range(50)]
            await asyncio.sleep(0)
            for one in (first, *others):
                one.cancel()
            await asyncio.gather(first, *others, return_exceptions=True)
            # Fifty times the time limit would be no answer.
            assert await asyncio.wait_for(render_chat(FakeEngineClient(), CHAT), 20) == RENDERED

        asyncio.run(scene())

    def test_keys_take_turns(self, pool: RenderPool) -> None:
        """One that has many slow conversations waiting has one of them rendered before another key's turn."""

        class Bob(FakeEngineClient):
            asker = "bob"

        async def scene() -> None:
            client = FakeEngineClient(tokenizer=FakeTokenizer(template=ENDLESS))
            slow = [asyncio.ensure_future(render_chat(client, CHAT)) for _ in range(6)]
            await asyncio.sleep(0)
            assert await render_chat(Bob(), CHAT) == RENDERED
            assert sum(one.done() for one in slow) <= 2
            for one in slow:
                one.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

        asyncio.run(scene())

    def test_too_many_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rendering, "MAX_WAITING", 2)

        async def scene() -> list[Any]:
            client = FakeEngineClient()
            return await asyncio.gather(*(render_chat(client, CHAT) for _ in range(4)), return_exceptions=True)

        found = asyncio.run(scene())
        assert found[:2] == [RENDERED, RENDERED]
        assert [(one.status, one.code) for one in found[2:]] == [(503, "overloaded")] * 2
        assert render() == RENDERED

    def test_a_helper_that_dies_is_replaced(self, pool: RenderPool) -> None:
        assert render() == RENDERED
        before = helper_pid(pool)
        os.kill(before, signal.SIGKILL)
        assert render() == RENDERED
        assert helper_pid(pool) != before


def test_closing_ends_helpers_and_threads() -> None:
    before = set(threading.enumerate())
    pool = RenderPool(helpers=2)
    prompts = [ChatPrompt(source="{{ messages[0] }}", messages=[str(i)]) for i in range(20)]
    assert [future.result(30).text for future in [pool.submit(one) for one in prompts]] == [str(i) for i in range(20)]
    pids = pool.pids()
    assert 1 <= len(pids) <= 2
    pool.close()
    assert not any(map(psutil.pid_exists, pids))
    assert set(threading.enumerate()) <= before
    with pytest.raises(InvalidRequest) as error:
        pool.submit(prompts[0]).result(30)
    assert error.value.status == 503


def test_a_slow_conversation_is_cut_off_when_the_pool_closes() -> None:
    pool = RenderPool(helpers=1, seconds=60)
    future = pool.submit(ChatPrompt(source=ENDLESS, messages=[]))
    while not pool.pids():
        pass
    pool.close()
    with pytest.raises(InvalidRequest):
        future.result(10)


@pytest.mark.parametrize("source", ["x", ENDLESS], ids=["at rest", "at work"])
def test_helpers_end_with_a_server_that_is_killed(source: str) -> None:
    code = (
        "import time; from pegboard.toolkit.chat import rendering; "
        "from pegboard.toolkit.chat.chat_prompt import ChatPrompt; "
        f"pool = rendering.RenderPool(helpers=1, seconds=1); pool.submit(ChatPrompt(source={source!r}, messages=[]))\n"
        "while not pool.pids(): time.sleep(0.01)\n"
        "print(*pool.pids(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        helper = psutil.Process(int(server.stdout.readline()))
        server.kill()
    helper.wait(30)
