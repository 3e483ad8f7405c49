"""The expander of media keeps its contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pegboard.conformance.prompt_expander import PromptExpanderContract
from pegboard.conformance.rig.media_toy import TOKENS, ToyProcessor
from pegboard.core.interfaces.client import AnnotatedPrompt
from pegboard.core.interfaces.frontend import PromptExpander
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.media.api import MediaContext
from pegboard.plugins.media.frontend.layout import Layouts
from pegboard.plugins.media.frontend.prompts import MediaFrontend
from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt
from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.fakes.toy_media import ppm, toy_settings
from tests.plugins.media.frontend.scene import picture, preparing, toy_model


class TestMediaExpander(PromptExpanderContract):
    @pytest.fixture(autouse=True)
    def _made(self, tmp_path: Path) -> Iterator[None]:
        self.tokenizer = Tokenizer.from_directory(toy_model(tmp_path / "model"))
        with preparing(tmp_path) as preparer:
            toy = ToyProcessor(NoOptions(), MediaContext(tmp_path, {"toy_media": toy_settings()}))
            self.frontend = MediaFrontend(preparer, Layouts(toy, self.tokenizer), frozenset({"image"}), 4)
            yield

    def make_expander(self) -> PromptExpander:
        return self.frontend

    def prompt(self) -> tuple[AnnotatedPrompt, list[int]]:
        text = f"a {TOKENS[1]}"
        media = (MediaInput(kind="image", data=ppm(picture(8, 16, 1))),)
        return MediaPrompt(base=text, media=media), self.tokenizer.encode(text)

    def lost(self, expander: PromptExpander) -> object:
        return self.frontend.preparer.store.files
