"""`pegboard plugins new`: a package for each contract that works as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import InvalidRequest, PluginError
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.registry.registry import Registry
from pegboard.tools.config.describe import option_keys
from pegboard.tools.plugins.new import create, template, template_contracts
from tests.core.cli.test_main import pegboard, run, run_json

NEW = tuple(f"my_{contract}" for contract in template_contracts())


def new_packages(folder: Path) -> dict[str, Path]:
    """A package of each template, as an editable install leaves it, by contract."""
    made = {}
    for contract in template_contracts():
        root, _ = create(f"my_{contract}", contract, folder)
        info = root / "src" / f"my_{contract}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {root.name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[pegboard]\nmy_{contract} = my_{contract}:plugin\n")
        made[contract] = root
    return made


class TestNew:
    def test_the_templates_are_listed(self) -> None:
        listed = run_json("plugins", "new", "--list")
        assert [one["contract"] for one in listed["templates"]] == template_contracts()
        contracts = Registry.discover().contracts
        assert {one["contract"] for one in listed["without"]} == contracts.keys() - set(template_contracts())
        assert not set(template_contracts()) & {"model_family", "runner", "grammar"}
        text = run("plugins", "new", "--list").stdout
        assert "admission_gate    so many requests per minute of each API key" in text
        assert "Without a template: model_family, runner, adapters, grammar, " in text
        assert "session_store. `pegboard plugins list` names" in text

    def test_a_template_is_small(self, tmp_path: Path) -> None:
        for contract in template_contracts():
            root, files = create("my_thing", contract, tmp_path / contract)
            text = (root / "src" / "my_thing" / f"{template(contract).module}.py").read_text("utf-8")
            # A correct prefix cache takes more, of books; a storage connects again after its place was replaced.
            most = {"prefix_cache": 140, "kv_storage": 90}.get(contract, 80)
            assert len([line for line in text.splitlines() if line.strip()]) <= most, contract
            assert not [one for one in files if "$" in str(one) or "$" in one.read_text("utf-8")]

    def test_every_new_package_can_be_configured(
        self, tmp_path: Path, site: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On the path with its entry point, as an installer would put it: found, named in its README, configured."""
        site.modules |= set(NEW)
        for contract, path in new_packages(tmp_path).items():
            monkeypatch.syspath_prepend(str(path / "src"))
            (record,) = Registry.discover().find(f"my_{contract}")
            assert (record.problem, record.provider.contract) == ("", contract)
            assert bool(record.conformance) == bool(Registry.discover().contract(contract).suite)
            (key, *_) = option_keys(record)
            assert key.meaning, contract
            config = (path / "config.yaml").read_text("utf-8")
            assert textwrap.indent(config, "    ").rstrip() in (path / "README.md").read_text("utf-8")
            assert run("config", "check", str(path / "config.yaml")).stdout.startswith("ok (not checked: "), contract
            chosen = compose([path / "config.yaml"], env={}).candidates[contract]
            assert chosen[-1].name == f"my_{contract}"

    @pytest.mark.full
    @pytest.mark.parametrize("contract", template_contracts())
    def test_a_new_package_conforms(self, tmp_path: Path, contract: str) -> None:
        """Really installed: checked and configured by the script, and its tests pass."""
        root, _ = create("my_thing", contract, tmp_path)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
        subprocess.run([*pip, str(tmp_path / "site"), str(root)], check=True)
        path = str(tmp_path / "site")
        if Registry.discover().contract(contract).suite:
            checked = pegboard("plugins", "check", "my_thing", PYTHONPATH=path)
            assert checked.returncode == 0, checked.stdout
        configured = pegboard("config", "check", str(root / "config.yaml"), PYTHONPATH=path)
        assert configured.stdout.startswith("ok (not checked: "), configured.stderr
        tests = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
            cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert tests.returncode == 0, tests.stdout

    @pytest.mark.full
    def test_new_packages_serve_together(self, tmp_path: Path, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of the engine, in one: cached prefixes, parameters of requests, and the answers of the shipped ones."""
        site.modules |= set(NEW)
        model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2)
        config: dict[str, Any] = {"model": {"path": str(model)}, "runner": {"use": "layered"}}
        greedy = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
        prompts = ["one two three four " * 8, "one two three four " * 8 + "five", "six"]
        with Engine.from_config(config) as engine:
            expected = [answer.token_ids for answer in engine.generate(prompts, greedy)]
        for path in new_packages(tmp_path / "new").values():
            monkeypatch.syspath_prepend(str(path / "src"))
        config |= {
            "attention": {"use": "my_attention"},
            "memory": {"pool": {"use": "my_kv_pool"}, "allocator": {"use": "my_token_allocator"}},
            "prefix_cache": {"use": "my_prefix_cache"},
            "scheduler": {"policy": {"use": "my_schedule_policy"}},
            "gates": ["my_admission_gate"],
            "logits_processors": ["my_logits_processor"],
            "sampler": {"use": "my_sampler"},
            "speculation": {"use": "my_speculator"},
        }
        source = {"use": "my_model_source", "root": str(tmp_path)}
        config["model"] = {"path": f"my_model_source:{model.name}", "source": source}
        said = {"my_logits_processor": {"bias": 10.0}, "my_sampler": {"n": 0.001}}
        copying = SamplingParams(temperature=1.0, max_new_tokens=12, ignore_eos=True, extra=said)
        with Engine.from_config(config) as engine:
            for _ in range(2):
                answers = engine.generate(prompts, greedy)
                assert [answer.token_ids for answer in answers] == expected
            assert answers[0].cached_tokens > 0
            assert engine.generate(prompts[0], copying).token_ids != expected[0]
            with pytest.raises(InvalidRequest, match="my_logits_processor"):
                engine.generate("Hello", SamplingParams(extra={"my_logits_processor": {}}))

    def test_new_code_is_clean(self, tmp_path: Path) -> None:
        """By the rules that the package brings along."""
        for contract in template_contracts():
            create("my_thing", contract, tmp_path / contract)
        ruff = Path(sys.executable).parent / "ruff"
        for command in (["check", "--quiet"], ["format", "--check"]):
            done = subprocess.run([ruff, *command, tmp_path], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout

    @pytest.mark.parametrize("name", ["My-Thing", "1st", "class", "a.b", ""])
    def test_bad_names_are_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(PluginError, match="bad name"):
            create(name, "schedule_policy", tmp_path)

    def test_without_a_name(self) -> None:
        done = run("plugins", "new")
        assert done.exit_code == 2
        assert "give the new plugin a name" in done.stderr

    def test_a_contract_without_a_template(self, tmp_path: Path) -> None:
        with pytest.raises(PluginError, match=r"no template for 'runner'; .*of runner, .* known: model_source, "):
            create("my_thing", "runner", tmp_path)
        with pytest.raises(PluginError, match="did you mean 'sampler'"):
            create("my_thing", "smapler", tmp_path)

    def test_nothing_is_overwritten(self, tmp_path: Path) -> None:
        create("my_thing", "schedule_policy", tmp_path)
        with pytest.raises(PluginError, match="is there already; nothing was written"):
            create("my_thing", "schedule_policy", tmp_path)
