"""Templates render as transformers renders them, and can do no harm."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat import chat_template
from pegboard.toolkit.chat.chat_template import ChatTemplate

CHAT = [{"role": "user", "content": '2 < 3 & "q" 漢'}, {"role": "assistant", "content": " yes "}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [1, None]}}}]

TEMPLATES = (
    "{{ messages | tojson }}",
    "{{ tools | tojson(indent=2) }}",
    "{{ messages[0] | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}",
    "{% for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "  {% if true %}\n  trimmed\n  {% endif %}\nend",
    "{% generation %}{{ messages[1]['content'] | trim }}{% endgeneration %}",
    "{{ messages[0].content.split('<')[1] }}{{ bos_token }}{{ missing }}{{ custom is defined }}",
    "{%- for m in messages -%}\n{{- m['content'] -}}\n{%- endfor -%}",
    "{{ add_generation_prompt }}{{ documents }}",
    "{% macro row(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ row(m) }}{% endfor %}",
)


@pytest.mark.parametrize("source", TEMPLATES)
def test_equals_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [CHAT], tools=TOOLS, chat_template=source, add_generation_prompt=True, bos_token="<s>", custom=1
    )
    found = ChatTemplate(source).render(
        CHAT, tools=TOOLS, add_generation_prompt=True, variables={"bos_token": "<s>", "custom": 1}
    )
    assert found == rendered[0]


def test_the_date_is_available() -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([])) == 10


def test_variables_are_what_the_template_reads() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m }}{% endfor %}{% if enable_thinking %}{{ bos_token }}{% endif %}"
    )
    assert template.variables == {"messages", "enable_thinking", "bos_token"}


def test_continue_final_message() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert template.render(CHAT, continue_final_message=True) == "[" + CHAT[0]["content"] + "][ yes "
    parts = [{"role": "user", "content": [{"type": "text", "text": "half"}]}]
    lists = ChatTemplate("{{ messages[0].content[0].text }}|end")
    assert lists.render(parts, continue_final_message=True) == "half"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ messages[0].nothing.deeper }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused|unsafe"),
        ("{{ messages.append(1) }}", "refused|unsafe|cannot"),
        ("{{ namespace.__init__.__globals__ }}", "refused|unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "refused|cannot"),
        ("{{ 1 // 0 }}", "cannot render"),
        ("{% macro r() %}{{ r() }}{% endmacro %}{{ r() }}", "cannot render"),
    ],
)
def test_what_a_template_refuses_is_the_requests_error(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        ChatTemplate(source).render(CHAT)
    assert (raised.value.status, raised.value.param) == (400, "messages")


def test_broken_templates_name_the_line() -> None:
    with pytest.raises(InvalidRequest, match="not valid jinja2: line 2"):
        ChatTemplate("a\n{% if %}")


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="exceeds 1000 characters"):
        ChatTemplate("{% for i in range(2000) %}x{{ i }}{% endfor %}").render([])


def test_only_plain_values_reach_the_template() -> None:
    class Secret:
        key = "leaked"

    class Text(str):
        def leak(self) -> str:
            return "leaked"

    chat: list[dict[str, Any]] = [{"content": Secret(), "name": Text("t")}]
    assert ChatTemplate("{{ messages[0].content }}{{ messages[0].content.key }}").render(chat) == "<Secret>"
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages[0].name.leak() }}").render(chat)


LLAMA = (
    "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
    "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ date_string }}{{ tools }}"
)


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        (LLAMA, {"custom_tools", "date_string", "tools"}),
        ("{% if not a is defined %}{% set a = false %}{% endif %}{% set ns = namespace(x=1) %}{{ ns.x }}", {"a"}),
        ("{% macro r(a) %}{{ a }}{{ b }}{% endmacro %}{{ r(1) }}{% for m in messages %}{{ loop.index }}{% endfor %}",
         {"b", "messages"}),
        ("{% set own = 1 %}{{ own }}{{ raise_exception }}{{ strftime_now }}{{ range }}", set()),
    ],
)  # fmt: skip
def test_variables_of_real_shapes(source: str, variables: set[str]) -> None:
    template = ChatTemplate(source)
    assert template.variables == variables
    assert all(template.reads(name) for name in variables)


@pytest.mark.parametrize("final", ["so", "so ", " so\n", "a <think>b</think> so", ""])
@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}[{{ m.content }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content.split('</think>')[-1] }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content.split('</think>')[-1].lstrip() }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content | tojson }}]{% endfor %}",
        "{{ messages[0].content }}",
    ],
)
def test_continuing_equals_transformers(source: str, final: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": final}]

    def rendered(make: Any) -> str | None:
        try:
            return str(make())
        except (ValueError, InvalidRequest):
            return None

    wanted = rendered(lambda: render_jinja_template([chat], chat_template=source, continue_final_message=True)[0][0])
    assert rendered(lambda: ChatTemplate(source).render(chat, continue_final_message=True)) == wanted


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_reserved_variables_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"may not set {name}"):
        ChatTemplate("x").render([], variables={name: 1})


@pytest.mark.parametrize("chat", [[], [{"role": "user"}], [{"role": "user", "content": []}]])
def test_nothing_to_continue(chat: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        ChatTemplate("x").render(chat, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        ChatTemplate("x").render(chat, continue_final_message=True, add_generation_prompt=True)
