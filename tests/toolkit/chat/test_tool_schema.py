"""Functions of tools and their schemas: what is odd is refused with its path, in whichever format it came."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.tool_schema import (
    MAX_TOOLS,
    FunctionSource,
    check_choice,
    check_schema,
    checked_functions,
    named_choice,
    wrong,
)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def flat(where: str, tool: Mapping[str, Any]) -> FunctionSource:
    """A format whose tools are their functions."""
    return FunctionSource(where, tool)


def deep(where: str, tool: Mapping[str, Any]) -> FunctionSource:
    """A format whose tools have their functions two levels below, with schemas under another name."""
    if not isinstance(tool.get("is"), Mapping):
        raise wrong(f"{where}.is", "must be an object")
    return FunctionSource(f"{where}.is", tool["is"], "takes")


def tool(name: Any = "weather", **more: Any) -> dict[str, Any]:
    return {"name": name, "parameters": SCHEMA, **more}


class TestFunctions:
    def test_they_have_one_form(self) -> None:
        weather = {"name": "weather", "description": "It rains.", "parameters": SCHEMA, "strict": True}
        now = {"name": "now", "parameters": {"type": "object", "properties": {}}}
        assert checked_functions([{**weather, "more": 1}, {"name": "now", "parameters": None}], flat) == (weather, now)
        given = {"is": {"name": "weather", "description": "It rains.", "takes": SCHEMA, "strict": True}}
        assert checked_functions([given, {"is": {"name": "now"}}], deep) == (weather, now)

    def test_none(self) -> None:
        assert checked_functions(None, flat) == checked_functions([], flat) == ()

    def test_a_schema_without_a_type_is_an_objects(self) -> None:
        (found,) = checked_functions([{"name": "f", "parameters": {"properties": {}}}], flat)
        assert found["parameters"] == {"type": "object", "properties": {}}

    @pytest.mark.parametrize(
        ("tools", "param"),
        [
            ("x", "tools"),
            ({"name": "f"}, "tools"),
            ([5], "tools.0"),
            ([{}], "tools.0.name"),
            ([tool(), tool("")], "tools.1.name"),
            ([tool("a b")], "tools.0.name"),
            ([tool("é")], "tools.0.name"),
            ([tool("x\n")], "tools.0.name"),
            ([tool("x" * 65)], "tools.0.name"),
            ([tool(5)], "tools.0.name"),
            ([tool(), tool("now"), tool()], "tools.2.name"),
            ([tool(description=5)], "tools.0.description"),
            ([tool(strict="yes")], "tools.0.strict"),
            ([tool(parameters="{}")], "tools.0.parameters"),
            ([tool(parameters=[])], "tools.0.parameters"),
            ([tool(parameters={"type": "string"})], "tools.0.parameters.type"),
            ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools"),
            ([tool(description="x" * 600_000)], "tools"),
            ([tool(description="\ud800")], "tools"),
            ([tool(parameters={"type": "object", "default": float("nan")})], "tools"),
        ],
    )
    def test_odd_ones(self, tools: Any, param: str) -> None:
        with pytest.raises(InvalidRequest) as error:
            checked_functions(tools, flat)
        assert (error.value.status, error.value.param) == (400, param)
        assert error.value.message.startswith(f"{param}: ")
        assert len(error.value.message) < 300

    def test_errors_name_the_place_in_the_body(self) -> None:
        twice = [{"is": {"name": "f"}}, {"is": {"name": "f"}}]
        schema = {"is": {"name": "f", "takes": {"type": "object", "required": 1}}}
        for tools, param in (
            ([{}], "tools.0.is"),
            ([{"is": {}}], "tools.0.is.name"),
            (twice, "tools.1.is.name"),
            ([schema], "tools.0.is.takes.required"),
        ):
            with pytest.raises(InvalidRequest) as error:
                checked_functions(tools, deep)
            assert error.value.param == param


class TestChoices:
    def test_a_named_function_has_to_be_there(self) -> None:
        functions = checked_functions([tool(), tool("now")], flat)
        assert named_choice("now", "here", functions) == ("required", "now")
        for name, said in ((5, "here: must be a string"), ("sun", "here: no tool is called 'sun'")):
            with pytest.raises(InvalidRequest) as error:
                named_choice(name, "here", functions)
            assert (error.value.message, error.value.param) == (said, "here")

    def test_a_call_of_nothing_cannot_be_required(self) -> None:
        with pytest.raises(InvalidRequest, match="here: a call is required, but there are no tools"):
            check_choice("required", "here", ())
        check_choice("auto", "here", ())
        check_choice("none", "here", ())
        check_choice("required", "here", checked_functions([tool()], flat))


class TestSchemas:
    @pytest.mark.parametrize(
        ("schema", "below"),
        [
            ({"properties": {"a": {"type": "strin"}}}, "properties.a.type"),
            ({"properties": {"a": {"type": []}}}, "properties.a.type"),
            ({"properties": {"a": {"type": {}}}}, "properties.a.type"),
            ({"properties": {"a": {"type": [["string"]]}}}, "properties.a.type"),
            ({"properties": {"a": 5}}, "properties.a"),
            ({"properties": [1]}, "properties"),
            ({"properties": {"a": {"pattern": 7}}}, "properties.a.pattern"),
            ({"properties": {"a": {"enum": []}}}, "properties.a.enum"),
            ({"required": "a"}, "required"),
            ({"required": [1]}, "required"),
            ({"$ref": 1}, "$ref"),
            ({"anyOf": []}, "anyOf"),
            ({"anyOf": [{}, "x"]}, "anyOf.1"),
            ({"$defs": {"x": {"items": "y"}}}, "$defs.x.items"),
            ({"properties": {"a": {"items": [{}, 1]}}}, "properties.a.items.1"),
            ({"properties": {"a": {"minLength": -1}}}, "properties.a.minLength"),
            ({"properties": {"a": {"maxItems": "2"}}}, "properties.a.maxItems"),
            ({"properties": {"a": {"maxItems": float("inf")}}}, "properties.a.maxItems"),
            ({"properties": {"a": {"minimum": "2"}}}, "properties.a.minimum"),
            ({"additionalProperties": "no"}, "additionalProperties"),
        ],
    )
    def test_cve_2025_48944_odd_schemas(self, schema: dict[str, Any], below: str) -> None:
        """CVE-2025-48944: a tool schema with an odd `type` or `pattern` ended the server."""
        with pytest.raises(InvalidRequest) as error:
            checked_functions([tool(parameters={"type": "object", **schema})], flat)
        assert (error.value.status, error.value.param) == (400, f"tools.0.parameters.{below}")

    def test_deep_schemas(self) -> None:
        schema: dict[str, Any] = {}
        for _ in range(5000):
            schema = {"items": schema}
        with pytest.raises(InvalidRequest, match="levels deep"):
            checked_functions([tool(parameters={"type": "object", "properties": {"a": schema}})], flat)
        value: Any = 1
        for _ in range(100_000):
            value = [value]
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            checked_functions([tool(parameters={"type": "object", "default": value})], flat)

    @pytest.mark.parametrize(
        "schema",
        [
            {},
            True,
            {"type": ["string", "null"], "minLength": 0, "maxLength": 3.0},
            {"items": [{}, True], "prefixItems": []},
            {"exclusiveMinimum": True, "minimum": -1.5},
            {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"enum": [None, 1, "x"]}}, "x-own": object()},
            {"properties": {"type": {"type": "string"}, "properties": {}, "required": {}}},
        ],
    )
    def test_sound_schemas(self, schema: Any) -> None:
        check_schema(schema, "here")

    @properties()
    @given(
        schema=st.recursive(
            st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["string", "object", "x", ""]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["type", "properties", "items", "anyOf", "enum", "required", "pattern", "$defs", "a"]
                    ),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        )
    )
    def test_each_is_taken_or_refused(self, schema: Any) -> None:
        with contextlib.suppress(InvalidRequest):
            json.dumps(checked_functions([{"name": "f", "parameters": schema}], flat))
