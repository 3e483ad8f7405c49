"""``pegboard bench serve`` from its options to its figures, against a server whose delays and faults are known.

Delays are lower bounds of what is measured; how much longer it takes is the machine's affair, and no test's.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pegboard.core.cli.main import app
from pegboard.core.interfaces.errors import PegboardError
from tests.tools.bench.fake_server import FakeServer, fake_server


def bench(fake: FakeServer | str, *options: str, code: int = 0) -> Any:
    """The JSON of a measurement, and under "stderr" what was told besides."""
    url = fake if isinstance(fake, str) else fake.url
    result = CliRunner().invoke(app, ["bench", "serve", "--url", url, "--json", "-", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return {**json.loads(result.stdout), "stderr": result.stderr}


SMALL = ("--num-prompts", "12", "--input-len", "8", "--output-len", "5")


class TestFigures:
    def test_delays_are_found_again(self) -> None:
        with fake_server(first_s=0.05, piece_s=0.01, cached=2) as fake:
            data = bench(fake, *SMALL, "--concurrency", "3", "--save-requests", "--slo", "ttft:40", "--warmup", "0")
            run = data["median"]
            assert (run["completed"], run["failed"], run["input_tokens"], run["output_tokens"]) == (12, 0, 96, 60)
            # A timer may be a millisecond early. Of pieces no more can be said: a late first one shortens the gaps.
            assert run["ttft_ms"]["min"] >= 48
            assert run["e2e_ms"]["min"] >= 80
            assert run["itl_ms"]["mean"] == pytest.approx(run["tpot_ms"]["mean"], abs=0.001)
            assert run["hit_rate"] == 0.25
            assert run["goodput"] == 0
            assert run["output_throughput"] == pytest.approx(60 / run["duration_s"], rel=1e-3)
            assert run["mean_concurrency"] <= 3.001
            assert fake.most_at_once == 3
            records = data["runs"][0]["records"]
            assert len(records) == 12
            for one in records:
                assert one["sent"] <= one["first"] <= one["end"]
                assert len(one["times"]) == one["output_tokens"] == 5

    def test_requests_are_what_was_asked_for(self) -> None:
        with fake_server() as fake:
            options = ("--model", "m", "--extra-body", '{"top_p": 0.5}', "--temperature", "0.7", "--warmup", "2")
            bench(fake, *SMALL, *options)
            assert len(fake.seen) == 1 + 2 + 12
            for body in fake.seen[3:]:
                assert len(body["prompt"]) == 8
                del body["prompt"]
                assert body == {
                    "model": "m", "max_tokens": 5, "temperature": 0.7, "top_p": 0.5, "stream": True,
                    "stream_options": {"include_usage": True}, "ignore_eos": True,
                }  # fmt: skip

    def test_pictures_come_in_chats(self) -> None:
        with fake_server() as fake:
            size = ("--images", "2", "--image-size", "64x48")
            data = bench(fake, *SMALL, "--workload", "images", *size, "--warmup", "1", "--concurrency", "4")
            run = data["median"]
            assert (run["completed"], run["failed"], run["output_tokens"]) == (12, 0, 60)
            assert run["ttft_ms"] is not None
            assert run["itl_ms"] is not None
            assert data["server"]["api"] == "openai-chat"
            assert data["settings"]["shape"]["image_size"] == {"width": 64, "height": 48}
            asked = [body["messages"][0]["content"] for body in fake.seen[1:]]
            assert [[part["type"] for part in content] for content in asked] == [["image_url"] * 2 + ["text"]] * 13
            assert len({part["image_url"]["url"] for content in asked for part in content[:2]}) == 26

    def test_several_tokens_in_a_piece(self) -> None:
        with fake_server(tokens_per_piece=4, piece_s=0.02) as fake:
            data = bench(fake, "--num-prompts", "3", "--output-len", "16", "--concurrency", "1")
            run = data["median"]
            assert run["output_tokens"] == 48
            # Between the first and the last of four pieces there are three gaps, and 15 tokens.
            assert run["itl_ms"]["mean"] == pytest.approx(5 * run["tpot_ms"]["mean"], abs=0.001)
            assert "48 tokens came in 12 pieces" in data["stderr"]

    def test_repeated_runs_share_nothing(self) -> None:
        with fake_server() as fake:
            data = bench(fake, *SMALL, "--repeat", "3")
            assert len(data["runs"]) == 3
            middle = sorted(run["duration_s"] for run in data["runs"])[1]
            assert data["median"]["duration_s"] == middle
            assert len({tuple(body["prompt"]) for body in fake.seen}) == len(fake.seen)

    def test_the_tables(self) -> None:
        with fake_server(first_s=0.01) as fake:
            result = CliRunner().invoke(app, ["bench", "serve", "--url", fake.url, *SMALL])
            lines = result.stdout.splitlines()
            assert next(line for line in lines if line.startswith("requests  ")).split()[1:] == ["12", "of", "12"]
            assert next(line for line in lines if line.startswith("ms ")).split() == [
                "ms", "mean", "p50", "p90", "p95", "p99", "max"
            ]  # fmt: skip
            ttft = next(line for line in lines if line.startswith("TTFT (time to first token)"))
            mean, *percentiles = map(float, ttft.split()[-6:])
            assert percentiles == sorted(percentiles)
            assert 9 <= mean <= percentiles[-1]


class TestLoads:
    def test_an_open_loop_does_not_wait_for_answers(self) -> None:
        with fake_server(first_s=1.5) as fake:
            data = bench(fake, *SMALL, "--request-rate", "200", "--save-requests", "--warmup", "0")
            assert fake.most_at_once == 12
            due = [one["due"] for one in data["runs"][0]["records"]]
            assert due == sorted(due)
            assert all(one["sent"] >= one["due"] for one in data["runs"][0]["records"])

    def test_all_at_once(self) -> None:
        with fake_server(first_s=1.5) as fake:
            bench(fake, *SMALL, "--warmup", "0")
            assert fake.most_at_once == 12

    def test_an_open_loop_with_a_limit(self) -> None:
        with fake_server(first_s=0.02) as fake:
            bench(fake, *SMALL, "--request-rate", "1000", "--concurrency", "2", "--warmup", "0")
            assert fake.most_at_once == 2

    def test_times_of_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        lines = [{"prompt": f"p{n}", "timestamp": at, "output_len": 2} for n, at in enumerate((100.0, 102.0, 101.0))]
        path.write_text("\n".join(map(json.dumps, lines)))
        with fake_server() as fake:
            data = bench(fake, "--file", str(path), "--replay", "20", "--save-requests")
            assert [body["prompt"] for body in fake.seen[-3:]] == ["p0", "p2", "p1"]
            due = [one["due"] for one in data["runs"][0]["records"]]
            assert [after - before for before, after in itertools.pairwise(due)] == pytest.approx([0.05, 0.05])


class TestWorkloads:
    def test_conversations_hold_the_servers_answers(self) -> None:
        with fake_server() as fake:
            options = ("--workload", "multi-turn", "--turns", "3", "--num-prompts", "3", "--warmup", "0")
            data = bench(fake, *options, "--input-len", "4", "--output-len", "2", "--save-requests")
            first, second, third = (body["prompt"] for body in fake.seen[-3:])
            assert second.startswith(first + " a a ")
            assert third.startswith(second + " a a ")
            records = data["runs"][0]["records"]
            assert [one["input_tokens"] for one in records] == [4, 10, 16]
            assert [(one["conversation"], one["turn"]) for one in records] == [(0, 0), (0, 1), (0, 2)]

    def test_conversations_in_a_chat(self) -> None:
        with fake_server() as fake:
            options = ("--workload", "multi-turn", "--turns", "2", "--num-prompts", "2", "--warmup", "0")
            bench(fake, *options, "--api", "openai-chat", "--output-len", "2")
            roles = [one["role"] for one in fake.seen[-1]["messages"]]
            assert roles == ["user", "assistant", "user"]
            assert fake.seen[-1]["messages"][1]["content"] == " a a"

    def test_a_shared_prefix(self) -> None:
        with fake_server() as fake:
            options = ("--workload", "shared-prefix", "--prefix-len", "20", "--groups", "2", "--warmup", "0")
            bench(fake, *SMALL, *options)
            prompts = [tuple(body["prompt"]) for body in fake.seen[-12:]]
            assert {len(prompt) for prompt in prompts} == {28}
            assert len({prompt[:20] for prompt in prompts}) == 2

    def test_chats_from_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}\n')
        with fake_server() as fake:
            data = bench(fake, "--file", str(path))
            assert (data["server"]["api"], data["settings"]["workload"]) == ("openai-chat", "file")
            assert (fake.seen[-1]["messages"][0]["content"], fake.seen[-1]["max_tokens"]) == ("Hi", 3)


class TestDialects:
    def test_a_server_that_takes_text_only_and_counts_nothing(self) -> None:
        with fake_server(takes_tokens=False, usage=False) as fake:
            data = bench(fake, *SMALL)
            assert data["server"]["prompt_kind"] == "text"
            assert "takes no tokens as prompts" in data["stderr"]
            assert "does not count tokens" in data["stderr"]
            assert (data["median"]["output_tokens"], data["median"]["counted"]) == (60, {"limit": 12})
            assert data["median"]["input_tokens"] == 96

    def test_fields_that_a_server_refuses_are_left_out(self) -> None:
        with fake_server(refuses=frozenset({"ignore_eos", "stream_options"})) as fake:
            data = bench(fake, *SMALL)
            assert "does not know ignore_eos" in data["stderr"]
            assert not {"ignore_eos", "stream_options"} & fake.seen[-1].keys()

    @pytest.mark.parametrize(
        "names",
        [("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), ("sglang:cached_tokens_total",) * 1
         + ("sglang:prompt_tokens_total",)],
    )  # fmt: skip
    def test_the_hit_rate_of_metrics(self, names: tuple[str, str]) -> None:
        with fake_server(counters=names) as fake:
            assert bench(fake, *SMALL)["median"]["hit_rate"] == 0.25

    def test_answers_that_end_early(self) -> None:
        with fake_server(stops=True) as fake:
            said = bench(fake, *SMALL)
            assert "12 answers ended before their length: the server does not heed ignore_eos" in said["stderr"]
            assert said["notes"]
            assert not bench(fake, *SMALL, "--stop-at-eos")["notes"]

    def test_prompts_that_are_longer_than_they_were_to_be(self) -> None:
        with fake_server(prompt_tokens=11) as fake:
            said = bench(fake, *SMALL)
            assert "prompts have 132 tokens by the server's count, and were to have 96" in said["stderr"]
            assert said["median"]["input_tokens"] == 132

    def test_prompts_that_were_asked_before(self) -> None:
        with fake_server(cached=8) as fake:
            assert "take another --seed" in bench(fake, *SMALL)["stderr"]


class TestFaults:
    def test_some_requests_fail(self) -> None:
        with fake_server(fail_every=4) as fake:
            data = bench(fake, *SMALL, "--concurrency", "1", "--warmup", "0", code=1)
            assert (data["median"]["completed"], data["median"]["failed"]) == (9, 3)
            assert data["median"]["errors"] == [{"message": "status 503: the queue is full", "count": 3}]
            assert "3 of 12 requests failed:\n  3 x status 503: the queue is full" in data["stderr"]

    @pytest.mark.parametrize(
        ("settings", "problem"),
        [
            ({"status": 500}, "refuses a first, short request: status 500: the queue is full"),
            ({"break_after": 2}, "the server broke off in the middle of the answer"),
            ({"error_event": True}, "out of memory"),
            ({"hang_from": 1}, "not a byte within 1.5 s (--timeout)"),
            ({"models": False}, "/generate refuses a first, short request: status"),
        ],
    )
    def test_a_server_that_does_not_answer_at_all(self, settings: Any, problem: str) -> None:
        with fake_server(**settings) as fake, pytest.raises(PegboardError) as caught:
            bench(fake, *SMALL, "--timeout", "1.5")
        assert problem in str(caught.value)

    def test_nobody_is_there(self) -> None:
        with fake_server() as fake:
            url = fake.url
        with pytest.raises(PegboardError, match=r"nothing listens at .*; start a server, or mend --url"):
            bench(url, *SMALL)

    def test_one_that_dies_meanwhile(self) -> None:
        with fake_server(first_s=0.05) as fake:
            threading.Thread(target=lambda: _when(lambda: len(fake.seen) > 10, fake.close)).start()
            data = bench(fake, "--num-prompts", "500", "--concurrency", "4", "--output-len", "1", code=1)
            assert data["median"]["stopped"].startswith("the server is gone: nothing listens at ")
            assert data["median"]["unfinished"] > 0
            assert "requests were not sent, or stopped" in data["stderr"]

    def test_one_that_is_too_slow(self) -> None:
        """Of the four requests behind the first, short one and the warm-up two are never answered."""
        with fake_server(hang_from=5) as fake:
            options = ("--num-prompts", "4", "--concurrency", "4", "--timeout", "1.5")
            data = bench(fake, *options, code=1)
            assert (data["median"]["completed"], data["median"]["failed"]) == (2, 2)
            assert "2 x not a byte within 1.5 s (--timeout)" in data["stderr"]

    def test_one_that_is_waited_for(self) -> None:
        with fake_server() as fake:
            fake.starting = 2
            assert bench(fake, *SMALL, "--wait", "30")["median"]["completed"] == 12
            fake.starting = 1
            with pytest.raises(PegboardError, match="status 503: loading; it is starting or stopping"):
                bench(fake, *SMALL)

    def test_ctrl_c_shows_what_there_is(self) -> None:
        with fake_server(first_s=0.01, piece_s=0.01) as fake:
            command = [
                sys.executable,
                "-m",
                "pegboard.core.cli.main",
                "bench",
                "serve",
                "--url",
                fake.url,
                "--json",
                "-",
            ]
            options = ["--num-prompts", "5000", "--concurrency", "2", "--output-len", "3"]
            with subprocess.Popen([*command, *options], stdout=-1, stderr=-1, text=True, cwd="/") as process:
                _when(lambda: len(fake.seen) > 20, lambda: os.kill(process.pid, signal.SIGINT))
                said, told = process.communicate(timeout=60)
            assert process.returncode == 130, told
            run = json.loads(said)["median"]
            assert run["completed"] > 5
            assert (run["failed"], run["unfinished"]) == (0, 5000 - run["completed"])
            assert run["stopped"] == "interrupted"
            assert "Traceback" not in told

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (["--slo", "ttft"], "--slo: 'ttft' is not ttft:MS"),
            (["--slo", "itl:5"], "--slo: 'itl:5' is not"),
            (["--request-rate", "0"], "--request-rate must be above 0"),
            (["--burstiness", "-1"], "--burstiness must be above 0"),
            (["--extra-body", "{"], "--extra-body: this is not JSON"),
            (["--extra-body", "[]"], "--extra-body must be a JSON object"),
            (["--replay", "1"], "--replay is for a --file"),
            (["--workload", "file"], "--workload file and --file go together"),
            (["--find-rate", "x"], "--find-rate: 'x' is not a bound"),
            (["--find-rate", "ttft:p99:5", "--concurrency", "3"], "leave out --concurrency"),
            (["--json", "/no/such/x.json"], "--json: there is no directory /no/such"),
            (["--plot", "/no/such/x"], "--plot: there is no directory /no/such"),
            (["--url", "ftp://x"], "--url: 'ftp://x' is not an address"),
            (["--api-key-file", "/no/such"], "--api-key-file: /no/such: No such file"),
            (["--api", "openai-chat", "--prompt-kind", "tokens"], "--prompt-kind: with --api openai-chat"),
        ],
    )
    def test_options_that_do_not_fit(self, options: list[str], problem: str) -> None:
        with fake_server() as fake, pytest.raises(PegboardError) as caught:
            bench(fake, *options)
        assert problem in str(caught.value)


def _when(condition: Any, act: Any) -> None:
    while not condition():
        time.sleep(0.005)
    act()


class TestFindRate:
    def test_a_capacity_is_found(self, tmp_path: Path) -> None:
        """One request after the other takes 10 ms: no more than 100 per second are ever kept."""
        with fake_server(service_s=0.01) as fake:
            options = ("--num-prompts", "20", "--trial-seconds", "0.5", "--precision", "0.3", "--output-len", "1")
            data = bench(fake, "--find-rate", "ttft:p99:250", *options, "--plot", str(tmp_path / "pictures"))
            (trials,) = data["trials"]
            assert data["kind"] == "find-rate"
            assert data["rate"] == max(one["rate"] for one in trials if not one["why"])
            assert min(one["rate"] for one in trials if one["why"]) <= data["rate"] * 1.3 * 1.001
            # Poisson arrivals of 20 may for once be slower than their rate; three times the capacity they are not.
            assert data["rate"] < 300
            assert data["median"]["ttft_ms"]["p99"] < 250
            names = sorted(one.name for one in (tmp_path / "pictures").iterdir())
            assert names == ["find-rate.png", "serve.png"]

    def test_no_rate_is_kept(self) -> None:
        with fake_server(first_s=0.02) as fake:
            options = ("--num-prompts", "2", "--trial-seconds", "0.01", "--request-rate", "1000", "--output-len", "1")
            data = bench(fake, "--find-rate", "ttft:p50:5", *options, code=1)
            assert (data["rate"], data["median"], data["runs"]) == (None, None, [])
