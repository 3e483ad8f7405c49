"""docs/writing-a-router.md works as it says: every block is written, run and compared, in order, in one folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_plugins_md import Reader, blocks

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-router.md"

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_every_block(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("lines-api")
    # No block loads a model, so the hub is not asked for this one.
    reader = Reader(folder, Path("org/no-model"))
    for block in blocks(PAGE):
        try:
            reader.follow(block)
        except AssertionError as error:
            raise AssertionError(f"{PAGE.name}, line {block.line}: {error}") from None
