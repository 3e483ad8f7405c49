"""`pegboard train-draft`: whole runs on a tiny model, killed and resumed, and what users are told."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.cli.main import app
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.registry.records import ProviderRecord
from pegboard.core.registry.registry import Registry
from pegboard.tools.train_draft.answers import AnswerFiles, Answering, Stopped
from pegboard.tools.train_draft.data import StateFiles, write_states
from pegboard.tools.train_draft.engines import Engines
from pegboard.tools.train_draft.prompts import HELD_OUT_SHARE, Conversation, Prompts, built_in, from_file
from pegboard.tools.train_draft.run import DraftRun
from pegboard.tools.train_draft.settings import AnswerSettings, TrainSettings
from pegboard.tools.train_draft.states import StateReader
from pegboard.tools.train_draft.target import default_taps, tapping_runner
from pegboard.tools.train_draft.workdir import WorkDir

HIDDEN, VOCAB = 64, 320
SMALL = (
    "--tokens",
    "300",
    "--held-out",
    "3",
    "--max-new-tokens",
    "16",
    "--epochs",
    "2",
    "--batch-tokens",
    "64",
    "--learning-rate",
    "0.004",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(f"model:\n  path: {model}\n  dtype: float32\nmemory:\n  max_total_tokens: 2048\n")
    return path


def train(config: Path, out: Path, *arguments: str) -> Result:
    command = ["train-draft", str(config), "--out", str(out), "--threads", "1", "--fp32", *SMALL, *arguments]
    return CliRunner().invoke(app, command, catch_exceptions=False)


def log(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "work" / "training.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run, and what it said."""
    out = tmp_path_factory.mktemp("trained") / "draft"
    done = train(config, out)
    assert done.exit_code == 0, done.stderr
    return out, done.stderr


class TestHead:
    """What is in DIR in the end."""

    def test_the_layout_is_specforges(self, trained: tuple[Path, str]) -> None:
        out, _ = trained
        about = json.loads((out / "config.json").read_text())
        drafts = about["draft_vocab_size"]
        assert about["architectures"] == ["LlamaForCausalLMEagle3"]
        assert about["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        assert (about["hidden_size"], about["vocab_size"], about["num_hidden_layers"]) == (HIDDEN, VOCAB, 1)
        stored = load_file(str(out / "model.safetensors"))
        layer = {
            "input_layernorm": (64,), "hidden_norm": (64,), "post_attention_layernorm": (64,),
            "self_attn.q_proj": (64, 128), "self_attn.k_proj": (32, 128), "self_attn.v_proj": (32, 128),
            "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64),
            "mlp.down_proj": (64, 128),
        }  # fmt: skip
        expected: dict[str, tuple[int, ...]] = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
        expected |= {"fc.weight": (64, 192), "norm.weight": (64,), "lm_head.weight": (drafts, 64)}
        assert {name: tuple(one.shape) for name, one in stored.items() if name not in ("d2t", "t2d")} == expected
        assert {one.dtype for name, one in stored.items() if name in expected} == {torch.bfloat16}
        assert (stored["d2t"].dtype, stored["t2d"].dtype) == (torch.int64, torch.bool)
        assert stored["t2d"].shape == (VOCAB,)
        ids = stored["d2t"] + torch.arange(drafts)
        assert ids.tolist() == stored["t2d"].nonzero().flatten().tolist()
        said = {token for one in AnswerFiles(WorkDir(out)) for answer in one.answers for token in answer.answer}
        assert set(ids.tolist()) == said

    def test_it_has_learnt(self, trained: tuple[Path, str]) -> None:
        losses = [one["loss"] for one in log(trained[0])]
        part = len(losses) // 4
        assert sum(losses[-part:]) < 0.9 * sum(losses[:part])

    def test_the_engine_gains_what_the_states_say(self, trained: tuple[Path, str]) -> None:
        out, told = trained
        by_states, chain, tree = (
            re.findall(r"accept length [^)]*\)", line) for line in told.splitlines() if "on held-out prompts" in line
        )
        assert by_states == chain
        assert len(tree) == 1
        card = (out / "README.md").read_text()
        assert f"drafts {json.loads((out / 'config.json').read_text())['draft_vocab_size']} of" in card
        assert f"| a chain of 3, by the engine | {chain[0].split()[2]} |" in card

    def test_a_finished_run_is_left_as_it_is(self, config: Path, trained: tuple[Path, str]) -> None:
        out, _ = trained
        before = (out / "model.safetensors").read_bytes()
        done = train(config, out)
        assert done.exit_code == 0
        assert (out / "model.safetensors").read_bytes() == before


class Killed(BaseException):
    """Like SIGKILL at a place where the run asks whether to stop."""


class Fuse:
    """Kills after so many questions."""

    def __init__(self, questions: int) -> None:
        self._left = questions

    def __call__(self) -> bool:
        self._left -= 1
        if self._left < 0:
            raise Killed
        return False


def job(config: Path, out: Path, stopped: Callable[[], bool]) -> None:
    """Run as `train` does, with a checkpoint after each batch."""
    prompts = built_in(0, 3)
    settings = AnswerSettings(str(yaml_model(config)), prompts.digest, tokens=300, held_out=3, max_new_tokens=16)
    training = TrainSettings(epochs=2, batch_tokens=64, learning_rate=0.004)
    folder = WorkDir(out)
    with folder.held(overwrite=False):
        folder.settle_answers(settings, None)
        folder.settle_training(training)
        DraftRun(
            folder, Engines((config,), ()), settings, training, prompts, None, stopped,
            threads=1, bf16=False, save_every=0.0,
        ).go()  # fmt: skip


def yaml_model(config: Path) -> str:
    return config.read_text().split("path: ")[1].splitlines()[0]


def test_killed_and_resumed_it_is_the_same(config: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    """At some places of each stage, one after another."""
    out, kills = tmp_path / "draft", 0
    for questions in (7, 60, 45, 5, 9, 100, 3):
        try:
            job(config, out, Fuse(questions))
        except Killed:
            kills += 1
            # What a kill in the middle of writing leaves behind counts for nothing.
            (out / "work" / "states").mkdir(exist_ok=True)
            (out / "work" / "states" / ".00000.safetensors.new").write_bytes(b"half")
    job(config, out, lambda: False)
    assert kills >= 4
    assert (out / "model.safetensors").read_bytes() == (trained[0] / "model.safetensors").read_bytes()
    assert [one["step"] for one in log(out)] == [one["step"] for one in log(trained[0])]


def test_stopped_it_keeps_the_batches_that_are_done(config: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "draft"
    shutil.copytree(trained[0], out)
    for name in ("checkpoint.safetensors", "training.jsonl"):
        (out / "work" / name).unlink()
    asked = iter(range(100))
    with pytest.raises(Stopped):
        job(config, out, lambda: next(asked) == 5)
    assert [one["step"] for one in log(out)] == [1, 2, 3, 4, 5]
    asked = iter(range(100))
    with pytest.raises(Stopped):
        job(config, out, lambda: next(asked) == 3)
    assert [one["step"] for one in log(out)] == list(range(1, 9))


MARKS = ("answers/held-out.json", "answers/00000.json", "states/held-out.safetensors", "training.jsonl")
"""Files of a run, in the order in which they come."""


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_signals(number: signal.Signals, config: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    """The command itself, ended in one stage after another."""
    out = tmp_path / "draft"
    command = [sys.executable, "-m", "pegboard", "train-draft", str(config), "--out", str(out), "--threads", "1"]
    codes = []
    for mark in (*MARKS, None):
        running = subprocess.Popen(
            [*command, "--fp32", *SMALL], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while mark is not None and running.poll() is None and not (out / "work" / mark).exists():
            time.sleep(0.002)
        if mark is not None:
            running.send_signal(number)
        told = running.communicate(timeout=120)[1]
        codes.append(running.returncode)
        assert (codes[-1] == 130) == ("the same command goes on from here" in told), told
    assert codes[-1] == 0
    assert len([code for code in codes if code in (-signal.SIGKILL, 130)]) >= 2
    assert (out / "model.safetensors").read_bytes() == (trained[0] / "model.safetensors").read_bytes()


class TestSettings:
    """A run is never mixed with another one."""

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            (("--tokens", "400"), "--tokens is 400 and was 300"),
            (("--taps", "1,2,3"), "--taps is [1, 2, 3] and was None"),
            (("--seed", "1"), "the prompts (--prompts, --seed) are others, --seed is 1 and was 0"),
            (("--epochs", "3"), "--epochs is 3 and was 2"),
            (("--greedy-share", "1"), "--greedy-share is 1.0 and was 0.5"),
        ],
    )
    def test_other_settings_are_refused(
        self, changed: tuple[str, ...], message: str, config: Path, trained: tuple[Path, str]
    ) -> None:
        with pytest.raises(PegboardError, match=re.escape(f"holds a run with other settings: {message}")):
            train(config, trained[0], *changed)

    def test_another_training_takes_the_same_data(
        self, config: Path, trained: tuple[Path, str], tmp_path: Path
    ) -> None:
        out = tmp_path / "more" / "draft"
        done = train(config, out, "--data", str(trained[0]), "--train-tokens", "100", "--draft-vocab", "20")
        assert done.exit_code == 0, done.stderr
        assert not (out / "work" / "answers").exists()
        assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 20
        with pytest.raises(PegboardError, match=r"--train-tokens must be at most \d+"):
            train(config, tmp_path / "draft", "--data", str(trained[0]), "--train-tokens", "100000")

    def test_overwrite_starts_anew(self, config: Path, tmp_path: Path) -> None:
        out = tmp_path / "draft"
        (out / "work").mkdir(parents=True)
        for name in ("work/lock", "work/answers.json", "model.safetensors"):
            (out / name).write_text("{}")
        with WorkDir(out).held(overwrite=True):
            assert sorted(path.name for path in out.rglob("*")) == ["lock", "work"]


class TestRefusals:
    """What users are told, before anything is generated."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--set", "model.path=/nowhere"), "/nowhere"),
            (("--taps", "1,x,3"), "--taps must be numbers"),
            (("--taps", "0,1,2"), "--taps must be 3 places from 1 to 3 in ascending order, got 0,1,2"),
            (("--taps", "1,3"), "--taps must be 3 places"),
            (("--prompts", "/no/such"), "--prompts: there is no file /no/such"),
            (("--held-out", "100000"), "--held-out must be at most"),
            (("--data", "/nowhere"), "--data: /nowhere has no finished answers"),
            (("--tokens", "900000000000"), "--out: states take about"),
        ],
    )
    def test_options(self, arguments: tuple[str, ...], message: str, config: Path, tmp_path: Path) -> None:
        with pytest.raises(PegboardError) as caught:
            train(config, tmp_path / "draft", *arguments)
        assert message in str(caught.value)

    def test_directories_that_are_not_a_runs(self, config: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(PegboardError, match="is not a directory"):
            train(config, tmp_path / "file")
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "thesis.txt").write_text("x")
        with pytest.raises(PegboardError, match="is not empty, and what is in it is not a run of train-draft"):
            train(config, tmp_path / "full", "--overwrite")
        with (
            WorkDir(tmp_path / "held").held(overwrite=False),
            pytest.raises(PegboardError, match="another run is writing to"),
        ):
            train(config, tmp_path / "held")

    def test_files_that_were_tampered_with(self, config: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
        out = tmp_path / "draft"
        shutil.copytree(trained[0], out)
        (out / "work" / "answers" / "00000.json").write_text("[]")
        with pytest.raises(PegboardError, match=r"00000\.json cannot be read: .*--overwrite starts anew"):
            train(config, out)
        (out / "work" / "training.json").write_text("{")
        with pytest.raises(PegboardError, match=r"training\.json cannot be read"):
            train(config, out)


class TestPrompts:
    """Prompts of our own, and of files."""

    def test_ours_are_distinct_and_held_out_topics_are_others(self) -> None:
        prompts = built_in(0, 300)
        assert len(prompts.train) > 4000
        everything = [*prompts.train, *prompts.held_out]
        assert len(set(everything)) == len(everything)
        assert prompts == built_in(0, 300) != built_in(1, 300)
        assert built_in(0, 20).train == prompts.train
        # No topic of a held-out prompt is asked about in training: what fills a template's gap differs.
        text = "\n".join(message for ((_, message),) in prompts.train)
        asked = [re.fullmatch(r"Write a haiku about (.*)\.", message) for ((_, message),) in prompts.held_out]
        topics = [one[1] for one in asked if one]
        assert topics
        assert not [topic for topic in topics if f"Write a haiku about {topic}." in text or f"is {topic}?" in text]
        assert HELD_OUT_SHARE < 0.2

    def test_those_of_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        lines: list[object] = [{"prompt": f"Say {i % 5}."} for i in range(9)]
        lines.append({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        prompts = from_file(path, 0, 2)
        assert (len(prompts.train), len(prompts.held_out)) == (4, 2)
        assert set(prompts.train) | set(prompts.held_out) == {
            *((("user", f"Say {i}."),) for i in range(5)),
            (("system", "Be brief."), ("user", "Hi")),
        }
        with pytest.raises(PegboardError, match="has 6 different prompts, and --held-out 6 leaves none to train on"):
            from_file(path, 0, 6)
        path.write_text('{"prompt": [1]}\n{"text": "a"}\n')
        with pytest.raises(PegboardError, match=r"2 lines are wrong:\n  .*:1: token ids .*\n  .*:2: "):
            from_file(path, 0, 1)


def test_states_are_the_models(config: Path, model: Path) -> None:
    """Against transformers: inputs of layers, and the likeliest successors; in passes that a small pool makes short."""
    from transformers import AutoModelForCausalLM

    from pegboard.tools.train_draft.answers import Answer

    answers = [Answer(list(range(3, 3 + 7 * i)), list(range(100, 100 + 5 * i))) for i in range(1, 9)]
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    pages = ("memory.page_size=16", "memory.max_total_tokens=112")
    with Engines((config,), pages).open() as engine:
        reader = StateReader(engine, (1, 2, 2))
        found = list(reader.read(answers))
        embedded = reader.embed(torch.tensor([5, 300]))
        with pytest.raises(PegboardError, match=r"memory.max_total_tokens: the KV pool holds 112 tokens"):
            list(reader.read([Answer(list(range(3, 203)), [1])]))
    for answer, one in zip(answers, found, strict=True):
        assert one.ids.tolist() == answer.prompt + answer.answer
        with torch.no_grad():
            expected = reference(one.ids[None], output_hidden_states=True)
        states = torch.cat([expected.hidden_states[layer][0] for layer in (1, 2, 2)], dim=1)
        torch.testing.assert_close(one.taps, states.bfloat16(), atol=0.02, rtol=0.02)
        shares = expected.logits[0, len(answer.prompt) - 1 : -1].softmax(-1)
        torch.testing.assert_close(one.shares, shares.gather(1, one.tops.long()), atol=1e-4, rtol=1e-3)
        assert (one.shares[:, 0] >= shares.max(-1).values - 1e-4).all()
        assert one.tops.shape == (len(answer.answer), 64)
    torch.testing.assert_close(embedded, reference.model.embed_tokens.weight[[5, 300]].detach().bfloat16())


def test_a_runner_that_shows_states_is_found() -> None:
    registry = Registry.discover()

    def without(*names: str) -> Callable[[ProviderRecord], frozenset[str]]:
        return lambda record: record.provides - ({"taps"} if record.name in names else set())

    chosen = {"runner": ["layered"], "model_family": ["dense"]}
    assert tapping_runner(registry, without(), chosen) is None
    assert tapping_runner(registry, without("layered"), chosen) == "cpu_native"
    # One that reads the weights itself needs nothing of the family.
    assert tapping_runner(registry, without("dense"), chosen) == "cpu_native"
    assert tapping_runner(registry, without("dense"), {**chosen, "runner": ["cpu_native"]}) is None
    with pytest.raises(PegboardError, match=r"the model family 'dense' cannot show .* choose another model.use"):
        tapping_runner(registry, without("dense", "cpu_native"), chosen)


def test_prompts_that_cannot_be_answered_are_left_out(config: Path, tmp_path: Path) -> None:
    long, short = (("user", "again " * 2000),), (("user", "Hi"),)
    settings = AnswerSettings("", "", tokens=1, max_new_tokens=8, streams=2)

    def answered(train: tuple[Conversation, ...], held_out: Conversation) -> AnswerFiles:
        files = AnswerFiles(WorkDir(tmp_path / str(len(list(tmp_path.iterdir())))))
        prompts = Prompts(train, (held_out,))
        Answering(engine, settings, prompts, files, lambda: False, lambda done, said="": None).go()
        return files

    with Engines((config,), ()).open() as engine:
        files = answered((long, short), short)
        assert [(one.asked, len(one.answers)) for one in files] == [(1, 0), (1, 1)]
        states = StateFiles(WorkDir(tmp_path / "0"))
        write_states(
            StateReader(engine, (1, 2, 3)), files, states, files.names(), lambda: False, lambda done, said="": None
        )
        assert [len(states.open(name)) for name in files.names()] == [0, 1]
        with pytest.raises(PegboardError, match=r"none of the prompts could be answered: the prompt has \d+ tokens"):
            answered((long,), short)
        with pytest.raises(PegboardError, match="none of the held-out prompts could be answered"):
            answered((short,), long)


def test_default_taps() -> None:
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(7) == (2, 3, 4)
    for layers in range(1, 7):
        assert all(1 <= place <= layers for place in default_taps(layers))
