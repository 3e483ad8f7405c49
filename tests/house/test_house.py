"""The house stays as it was drawn: no circle, no arrow upwards, and nothing new that is too long."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.drawing import FLOORS, LONG_FILE, LONG_FUNCTION, House, _imports, room

LONG_FILES = {
    "conformance.model_runner": "one contract with seven capabilities",
    "conformance.sampler": "one contract; its statistics share their tables",
    "toolkit.grammars.gbnf": "one reader, from characters to rules",
}
"""Modules that may be longer, and why. A new entry needs a reason that a reviewer accepts."""

LONG_FUNCTIONS = {
    # Triton compiles a kernel as one function.
    "plugins.attn_triton.kernels.extend_kernel",
    "plugins.attn_triton.kernels.decode_kernel",
    "plugins.attn_triton.kernels.prefix_kernel",
    # They fill two records, field by field, of what was decided and what is to be computed.
    "core.pipeline.batch.decode",
    "core.pipeline.batch.extend",
}


LOOSE_TYPES = {"Any": 385, "cast": 2, "type: ignore": 8}
"""How often core and plugins may write what the type checker does not look into. Lower these, never raise them."""


@pytest.fixture(scope="module")
def house() -> House:
    return House.read()


def test_there_is_no_circle(house: House) -> None:
    assert house.circles() == []


def test_no_arrow_leads_upwards(house: House) -> None:
    assert house.upwards() == []


def test_every_room_has_a_floor(house: House) -> None:
    assert {room(name) for name in house.files} - {"plugins", "core"} == set(FLOORS)


def test_no_other_file_is_too_long(house: House) -> None:
    found = {name.removeprefix("pegboard.") for _, name in house.long_files()}
    assert found == set(LONG_FILES), f"over {LONG_FILE} lines, or listed and shorter by now"


def test_no_other_function_is_too_long(house: House) -> None:
    found = {name.removeprefix("pegboard.") for _, name in house.long_functions()}
    assert found == LONG_FUNCTIONS, f"over {LONG_FUNCTION} lines, or listed and shorter by now"


def test_the_core_has_no_loose_modules(house: House) -> None:
    assert [name for name in house.files if room(name) == "core"] == ["pegboard.core"]


def test_types_get_no_looser(house: House) -> None:
    found = house.loose_types()
    grown = {name: f"{count}, not {LOOSE_TYPES[name]}" for name, count in found.items() if count > LOOSE_TYPES[name]}
    assert not grown, "core and plugins write these more often than before: take object, a TypeGuard or a Protocol"


class TestDrawing:
    """What finds all of this can find it."""

    @staticmethod
    def house(**sources: str) -> House:
        trees = {name.replace("__", "."): ast.parse(text) for name, text in sources.items()}
        files = {name: Path(name) for name in trees}
        imports = {name: frozenset(_imports(tree, files.keys())) - {name} for name, tree in trees.items()}
        return House(files, trees, imports, dict.fromkeys(trees, 1))

    def test_circles_and_arrows(self) -> None:
        drawn = self.house(
            pegboard__core__pipeline__a="from pegboard.core.pipeline import b",
            pegboard__core__pipeline__b="if TYPE_CHECKING:\n    from pegboard.core.pipeline.c import C",
            pegboard__core__pipeline__c="def f():\n    import pegboard.core.pipeline.a\n",
            pegboard__toolkit__d="from pegboard.core.server import e",
            pegboard__core__server__e="",
            pegboard__core__frontend__f="from pegboard.core.pipeline import a\nfrom pegboard.core.registry import g",
            pegboard__core__registry__g="",
        )
        rooms = "pegboard.core.pipeline."
        assert drawn.circles() == [[f"{rooms}a", f"{rooms}b", f"{rooms}c"]]
        assert drawn.upwards() == [
            ("pegboard.toolkit.d", "pegboard.core.server.e"),
            ("pegboard.core.frontend.f", f"{rooms}a"),
        ]

    def test_loose_types(self, tmp_path: Path) -> None:
        for folder, text in (
            ("core", "x: dict[str, Any] = cast(Any, 1)  # type: ignore[misc]\n"),
            ("tools", "x: Any\n"),
        ):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "a.py").write_text(text)
        assert House.read(tmp_path).loose_types() == {"Any": 2, "cast": 1, "type: ignore": 1}

    def test_lengths(self) -> None:
        body = "\n".join(f"    x{number} = {number}" for number in range(LONG_FUNCTION))
        drawn = self.house(pegboard__tools__a=f"def long():\n{body}\n\ndef short():\n    pass\n")
        assert drawn.long_functions() == [(LONG_FUNCTION + 1, "pegboard.tools.a.long")]
