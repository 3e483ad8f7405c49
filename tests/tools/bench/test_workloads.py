"""What is asked, and when: shapes, seeds, arrivals, files."""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.bench.files import FROM_FILE, has_messages, make_workload, read_lines
from pegboard.tools.bench.images import ImageSize
from pegboard.tools.bench.words import WORDS
from pegboard.tools.bench.workloads import Arrivals, Kind, Session, Shape, follow

RANGE = (1000, 10_000)


def sessions(name: str, kind: Kind = Kind.TOKENS, run: int = 0, seed: int = 0, **shape: Any) -> list[Session]:
    return make_workload(name, Shape(**shape), kind, RANGE, seed).sessions(run)


class TestSynthetic:
    def test_lengths(self) -> None:
        found = sessions("random", requests=50, input_len=33, output_len=7)
        assert len(found) == 50
        for one in found:
            (turn,) = one.turns
            assert (len(turn.new), turn.input_len, turn.output_len) == (33, 33, 7)
            assert all(RANGE[0] <= token < RANGE[1] for token in turn.new)  # type: ignore[operator]

    def test_lengths_that_vary(self) -> None:
        turns = [
            one.turns[0] for one in sessions("random", requests=2000, input_len=100, output_len=10, range_ratio=0.5)
        ]
        lengths = np.array([len(turn.new) for turn in turns])
        assert (lengths.min(), lengths.max()) == (50, 150)
        # Uniform over 101 values has a standard deviation of 29.2, so the mean of 2000 lies within 5 of its own.
        assert abs(lengths.mean() - 100) < 5 * 29.2 / math.sqrt(2000)
        assert {turn.output_len for turn in turns} == set(range(5, 16))

    @pytest.mark.parametrize("name", ["random", "shared-prefix", "multi-turn"])
    @pytest.mark.parametrize("kind", list(Kind))
    def test_one_seed_makes_one_workload(self, name: str, kind: Kind) -> None:
        shape = {"requests": 6, "input_len": 20, "prefix_len": 30, "turns": 2, "range_ratio": 0.3}
        assert sessions(name, kind, **shape) == sessions(name, kind, **shape)  # type: ignore[arg-type]
        assert sessions(name, kind, **shape) != sessions(name, kind, seed=1, **shape)  # type: ignore[arg-type]
        assert sessions(name, kind, **shape) != sessions(name, kind, run=1, **shape)  # type: ignore[arg-type]

    def test_pictures_are_new_and_of_their_size(self) -> None:
        shape: dict[str, Any] = {"requests": 4, "input_len": 7, "images": 2, "image_size": ImageSize(96, 64)}
        found = sessions("images", Kind.MESSAGES, **shape)
        assert found == sessions("images", Kind.MESSAGES, **shape)
        addresses = []
        for one in found:
            message = one.turns[0].new[0]
            assert isinstance(message, dict)
            *pictures, text = message["content"]
            assert len(pictures) == 2
            assert (len(text["text"].split()), one.turns[0].input_len) == (7, None)
            addresses += [picture["image_url"]["url"] for picture in pictures]
        assert len(set(addresses)) == 8
        for address in addresses:
            kind, _, data = address.partition(",")
            picture = Image.open(io.BytesIO(base64.b64decode(data)))
            assert (kind, picture.format, picture.size) == ("data:image/jpeg;base64", "JPEG", (96, 64))

    @pytest.mark.parametrize("kind", [Kind.TOKENS, Kind.TEXT])
    def test_pictures_are_asked_about_in_chats_only(self, kind: Kind) -> None:
        with pytest.raises(PegboardError, match="openai-chat"):
            sessions("images", kind, requests=1)

    @pytest.mark.parametrize("text", ["", "100", "0x5", "5x0", "100x100x3", "99999x10", "-1x5", "axb"])
    def test_sizes_that_are_none(self, text: str) -> None:
        with pytest.raises(PegboardError, match="--image-size"):
            ImageSize.parse(text)

    def test_runs_share_no_prefix(self) -> None:
        shape = {"requests": 20, "input_len": 16, "prefix_len": 16}
        first = {tuple(one.turns[0].new[:8]) for one in sessions("shared-prefix", run=0, **shape)}  # type: ignore[arg-type]
        second = {tuple(one.turns[0].new[:8]) for one in sessions("shared-prefix", run=1, **shape)}  # type: ignore[arg-type]
        assert not first & second

    def test_groups_share_their_prefix(self) -> None:
        found = sessions("shared-prefix", requests=30, groups=3, prefix_len=40, input_len=5)
        stems = Counter(tuple(one.turns[0].new[:40]) for one in found)
        assert sorted(stems.values()) == [10, 10, 10]
        assert len({tuple(one.turns[0].new) for one in found}) == 30
        assert all(len(one.turns[0].new) == one.turns[0].input_len == 45 for one in found)

    def test_conversations(self) -> None:
        found = sessions("multi-turn", requests=10, turns=4, input_len=9)
        assert [len(one.turns) for one in found] == [4, 4, 2]
        assert all(len(turn.new) == 9 for one in found for turn in one.turns)

    def test_text_has_a_word_per_token(self) -> None:
        (one,) = sessions("shared-prefix", Kind.TEXT, requests=1, prefix_len=12, input_len=5)
        words = str(one.turns[0].new).split(" ")
        assert words[0] == ""
        assert len(words) - 1 == 17
        assert set(words[1:]) <= set(WORDS)

    def test_messages_have_the_prefix_as_the_systems(self) -> None:
        (one,) = sessions("shared-prefix", Kind.MESSAGES, requests=1, prefix_len=12, input_len=5)
        system, user = one.turns[0].new  # type: ignore[str-unpack]
        assert (system["role"], len(system["content"].split())) == ("system", 12)  # type: ignore[index]
        assert (user["role"], len(user["content"].split())) == ("user", 5)  # type: ignore[index]

    @pytest.mark.parametrize("ratio", [-0.1, 1.0])
    def test_a_ratio_that_is_none(self, ratio: float) -> None:
        with pytest.raises(PegboardError, match="--range-ratio"):
            Shape(range_ratio=ratio)


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) == 256


@pytest.mark.parametrize(
    ("so_far", "answer", "new", "together"),
    [
        ([1, 2], [3], [4], [1, 2, 3, 4]),
        (" a b", " c", " d", " a b c d"),
        (
            [{"role": "user", "content": "a"}],
            "b",
            [{"role": "user", "content": "c"}],
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ],
        ),
    ],
)
def test_turns_hold_all_before_them(so_far: Any, answer: Any, new: Any, together: Any) -> None:
    assert follow(so_far, answer, new) == together


class TestArrivals:
    COUNT = 20_000

    def gaps(self, burstiness: float = 1.0, rate: float = 4.0) -> Any:
        times = Arrivals(rate, burstiness).times(self.COUNT, seed=3)
        assert times[0] == 0
        return np.diff(times)

    @pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
    def test_mean_and_spread(self, burstiness: float) -> None:
        """A gamma distribution's mean is 1/rate, and its coefficient of variation 1/sqrt(burstiness)."""
        gaps = self.gaps(burstiness)
        variation = 1 / math.sqrt(burstiness)
        assert gaps.mean() == pytest.approx(0.25, abs=5 * 0.25 * variation / math.sqrt(self.COUNT))
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)

    def test_a_poisson_process(self) -> None:
        """Gaps are exponential, by Kolmogorov and Smirnov's distance; counts per second vary as much as their mean."""
        gaps = np.sort(self.gaps())
        distance = np.abs(np.arange(gaps.size) / gaps.size - (1 - np.exp(-4.0 * gaps))).max()
        assert distance < 1.95 / math.sqrt(gaps.size)  # what chance exceeds once in a thousand
        counts = np.bincount(np.cumsum(self.gaps()).astype(int))[:-1]
        assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)

    def test_all_at_once(self) -> None:
        assert Arrivals().times(4, seed=0) == [0, 0, 0, 0]

    def test_a_rate_scales_the_same_gaps(self) -> None:
        slow, fast = Arrivals(2.0).times(50, 0), Arrivals(5.0).times(80, 0)
        assert [at * 2.0 for at in slow] == pytest.approx([at * 5.0 for at in fast[:50]])

    def test_runs_have_their_own(self) -> None:
        assert Arrivals(2.0).times(5, 0, 0) == Arrivals(2.0).times(5, 0, 0) != Arrivals(2.0).times(5, 0, 1)


class TestFiles:
    def load(self, tmp_path: Path, text: str, kind: Kind = Kind.TEXT, **shape: Any) -> list[Session]:
        path = tmp_path / "a.jsonl"
        path.write_text(text, "utf-8")
        lines = read_lines(path)
        shape = {"requests": len(lines), **shape}
        return make_workload(FROM_FILE, Shape(**shape), kind, RANGE, 0, lines).sessions()

    @pytest.mark.parametrize(
        ("line", "prompt", "length"),
        [
            ({"prompt": "a b", "output_len": 3}, "a b", 3),
            ({"prompt": [5, 6]}, [5, 6], 128),
            ({"text": "x", "sampling_params": {"max_new_tokens": 4}}, "x", 4),
            ({"input_ids": [7]}, [7], 128),
            ({"body": {"prompt": "q", "max_tokens": 9}, "custom_id": "1"}, "q", 9),
            (
                {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "one two three"}]},
                "Hi",
                4,
            ),
            ({"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"}]}, "Hi", 128),
        ],
    )
    def test_forms(self, tmp_path: Path, line: Any, prompt: Any, length: int) -> None:
        (session,) = self.load(tmp_path, json.dumps(line))
        assert (session.turns[0].new, session.turns[0].output_len) == (prompt, length)

    def test_messages(self, tmp_path: Path) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        text = json.dumps({"messages": messages}) + "\n\n" + json.dumps({"prompt": "plain"})
        first, second = self.load(tmp_path, text, Kind.MESSAGES)
        assert first.turns[0].new == messages
        assert second.turns[0].new == [{"role": "user", "content": "plain"}]
        assert has_messages([(1, {"messages": []})])
        assert has_messages([(1, {"body": {"messages": []}})])
        assert not has_messages([(1, {"prompt": ""})])

    def test_a_list_in_one_file(self, tmp_path: Path) -> None:
        assert [one.turns[0].new for one in self.load(tmp_path, '[{"prompt": "a"},\n {"prompt": "b"}]')] == ["a", "b"]

    def test_times(self, tmp_path: Path) -> None:
        found = self.load(tmp_path, '{"prompt": "a", "timestamp": 1.5}\n{"prompt": "b"}')
        assert [one.at for one in found] == [1.5, None]

    def test_more_than_it_has(self, tmp_path: Path) -> None:
        found = self.load(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}', requests=5)
        assert [one.turns[0].new for one in found] == ["a", "b", "a", "b", "a"]
        assert len(self.load(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}', requests=1)) == 1

    @pytest.mark.parametrize("kind", [Kind.TOKENS, Kind.TEXT, Kind.MESSAGES])
    def test_traces_share_what_their_ids_say(self, tmp_path: Path, kind: Kind) -> None:
        trace = [
            {"input_length": 1100, "output_length": 5, "hash_ids": [1, 2]},
            {"input_length": 1100, "output_length": 5, "hash_ids": [1, 3]},
            {"input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        ]
        found = self.load(tmp_path, "\n".join(map(json.dumps, trace)), kind)
        parts = []
        for one in found:
            new: Any = one.turns[0].new
            parts.append(new if kind is Kind.TOKENS else (new if kind is Kind.TEXT else new[0]["content"]).split())
        a, b, c = parts
        assert (len(a), len(b), len(c)) == (1100, 1100, 600)
        assert a[:512] == b[:512] == c[:512]
        assert a[512:1024] != b[512:1024]
        assert c[512:600] == a[512:600]
        assert a[1024:] != b[1024:]

    @pytest.mark.parametrize(
        ("text", "kind", "problem"),
        [
            ("", Kind.TEXT, "has no requests"),
            ("{", Kind.TEXT, ":1: this is not JSON"),
            ('{"prompt": "a"}\n[1]', Kind.TEXT, ":2: this is not a JSON object"),
            ("[1]", Kind.TEXT, ":1: this is not a JSON object"),
            ("[", Kind.TEXT, "is not JSON"),
            ("{}", Kind.TEXT, "line 1: there is no prompt"),
            ('{"prompt": ""}', Kind.TEXT, "line 1: the prompt is empty"),
            ('{"prompt": ["a"]}', Kind.TEXT, "line 1: a prompt is text"),
            ('{"prompt": 5}', Kind.TEXT, "line 1: TypeError"),
            ('{"prompt": "a", "output_len": "x"}', Kind.TEXT, "line 1: ValueError"),
            ('{"prompt": "a", "output_len": -1}', Kind.TEXT, "line 1: an answer of -1 tokens"),
            ('{"prompt": [1]}', Kind.MESSAGES, "line 1: token ids are no messages"),
            ('{"messages": [{"role": "user"}]}', Kind.TEXT, "line 1: these are messages"),
            ('{"conversations": [{"from": "gpt", "value": "a"}]}', Kind.TEXT, "line 1: a conversation without a"),
        ],
    )
    def test_what_is_wrong_is_told(self, tmp_path: Path, text: str, kind: Kind, problem: str) -> None:
        with pytest.raises(PegboardError) as caught:
            self.load(tmp_path, text, kind)
        assert problem in str(caught.value)

    def test_there_is_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(PegboardError, match="No such file"):
            read_lines(tmp_path / "a")
