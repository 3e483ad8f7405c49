"""Parts of transformers' models that we compute: which are known, that they are right, and what is put back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pegboard.conformance.model_family.base import TOLERANCE
from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.experts import is_experts
from pegboard.plugins.model_transformers.family import probe_prompts, relative_errors
from pegboard.plugins.model_transformers.known import KnownMLP, known_gate, known_mlp, known_norm
from pegboard.plugins.model_transformers.merged import LinearGroup, merge, with_one_input
from pegboard.plugins.model_transformers.network import TransformersNetwork
from pegboard.plugins.model_transformers.replaced import KINDS, Replaced
from pegboard.toolkit import kernels
from pegboard.toolkit.kernels import operations
from pegboard.toolkit.kernels.launch import Launch, observed
from pegboard.toolkit.kernels.operations import SiluGate
from pegboard.toolkit.model.packed import why_not_packed
from tests.plugins.model_transformers.test_experts import experts_of
from tests.plugins.model_transformers.test_served import loaded, probe_run
from tests.plugins.model_transformers.tiny import SERVED, context, save

COUNTS = {
    "llama": (6, 7, 3),
    "gemma2": (6, 13, 3),
    "gpt2": (0, 0, 0),
    "gpt_neox": (0, 0, 0),
    "phi3": (0, 7, 3),
    "olmo2": (6, 13, 3),
    "qwen3": (6, 13, 3),
    "glm4": (3, 13, 3),
    "starcoder2": (3, 0, 0),
    "qwen3_moe": (3, 13, 3),
    "deepseek_v2_lite": (6, 10, 5),
}
"""Groups of linear layers, norms, and gated MLPs or gates of experts, of three layers."""


class Answers(bridge.Handler):
    """A pass in which what is replaced is used."""

    def attend(self, call: bridge.AttentionCall) -> Tensor:
        raise AssertionError("no attention here")


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_replaced(name: str, tmp_path: Path) -> None:
    _, network = loaded(context(save(tmp_path, *SERVED[name])))
    assert network.replaced.counts == dict(zip(KINDS, COUNTS[name], strict=True))


# Norms


class Norm(nn.Module):
    """What most models have, with something else."""

    def __init__(self, formula: Callable[[Tensor, Tensor], Tensor] = torch.mul, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24), requires_grad=False)
        self.eps = eps
        self.formula = formula

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.formula(self.weight, normed)


def test_norms_are_known_by_what_they_compute() -> None:
    for offset, formula in ((0.0, torch.mul), (1.0, lambda weight, x: (weight + 1) * x)):
        known = known_norm(Norm(formula))
        assert known is not None
        assert (known.weight, known.eps, known.offset) == ("weight", 1e-5, offset)


@pytest.mark.parametrize(
    "other",
    [
        Norm(lambda weight, x: weight * x + 0.01),
        Norm(lambda weight, x: weight.abs() * x),
        Norm(lambda weight, x: (weight * x).half()),
        Norm(lambda weight, x: (weight * x)[..., :12]),
        Norm(eps=0.1),
        nn.LayerNorm(24),
        nn.LayerNorm(24, bias=False),
        nn.Linear(24, 24),
    ],
    ids=["shift", "absolute", "half", "cut", "eps", "layer norm", "layer norm without bias", "linear"],
)
def test_other_modules_are_no_norms(other: nn.Module) -> None:
    assert known_norm(other) is None


def test_a_norm_with_a_gate_computes_that_itself() -> None:
    """It is known by what it computes without."""

    class Gated(Norm):
        def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
            normed: Tensor = super().forward(hidden_states)
            return normed if gate is None else normed * F.silu(gate)

    model = Gated()
    x, gate = torch.randn(2, 3, 24)
    expected = model(x, gate)
    assert Replaced(model, ()).counts["norms"] == 1
    with bridge.handled_by(Answers()):
        assert torch.equal(model(x, gate=gate), expected)
        assert not torch.equal(model(x), expected)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_kernel_of_norms(offset: float, interpreted_triton: None) -> None:
    """Of rows one after another, with gaps, and of heads within wider rows, in float32: relative 1e-6."""
    draw = torch.Generator().manual_seed(0)
    weight, wide = (torch.randn(shape, generator=draw) for shape in ((24,), (1, 5, 200)))
    heads = wide[..., 8:104].view(1, 5, 4, 24)
    with kernels.allowed("cpu"):
        for x in (wide[..., :24], wide[0, :, 100:124], heads, heads.transpose(1, 2), wide[0, 0, :24]):
            found = operations.rms_norm(x, weight, 1e-5, offset=offset)
            expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (weight + offset)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            assert found.is_contiguous()


# MLPs


class Mlp(nn.Module):
    """As most models have it, with another formula."""

    wide: nn.Linear
    one: nn.Linear
    two: nn.Linear

    def __init__(self, formula: Callable[[Tensor, Tensor], Tensor], *, merged: bool = False) -> None:
        super().__init__()
        sizes = {"wide": 80} if merged else {"one": 40, "two": 40}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(16, size, bias=False))
        self.back = nn.Linear(40, 16)
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.wide(x).chunk(2, -1) if hasattr(self, "wide") else (self.one(x), self.two(x))
        found: Tensor = self.back(self.formula(one, two))
        return found


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    ("formula", "merged", "expected"),
    [
        (lambda one, two: F.silu(one) * two, False, KnownMLP("one", "two", "back", "silu")),
        (lambda one, two: one * F.silu(two), False, KnownMLP("two", "one", "back", "silu")),
        (lambda one, two: F.gelu(one) * two, False, KnownMLP("one", "two", "back", "gelu")),
        (lambda one, two: tanh_gelu(one) * two, True, KnownMLP("wide", None, "back", "gelu_pytorch_tanh")),
        (lambda one, two: F.relu(one) * two, True, KnownMLP("wide", None, "back", "relu")),
        (lambda one, two: F.silu(one) + two, False, None),
        (lambda one, two: F.silu(one) * two * 0.5, False, None),
        (lambda one, two: F.silu(one).clamp(max=100.0) * two, False, None),
        (lambda one, two: F.silu(one) * two.clamp(-50.0, 50.0), True, None),
        (lambda one, two: two * torch.sigmoid(1.702 * one) * one, False, None),
    ],
)
def test_mlps_are_known_by_what_they_compute(
    formula: Callable[[Tensor, Tensor], Tensor], merged: bool, expected: KnownMLP | None
) -> None:
    assert known_mlp(Mlp(formula, merged=merged)) == expected


def test_nothing_is_drawn_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    assert known_mlp(Mlp(lambda one, two: F.silu(one) * two)) is not None
    made = torch.get_rng_state()
    torch.set_rng_state(before)
    Mlp(lambda one, two: F.silu(one) * two)
    assert torch.equal(made, torch.get_rng_state())


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "kernels"])
def test_mlps_compute_what_they_did(swapped: bool, fused: bool, request: pytest.FixtureRequest) -> None:
    """In any order of gate and up; float32 sums in another order."""
    model = nn.Sequential(
        Mlp((lambda one, two: one * F.silu(two)) if swapped else (lambda one, two: F.silu(one) * two))
    )
    x = torch.randn(1, 5, 16)
    launched: list[str] = []

    def note(launch: Launch) -> bool:
        launched.append(str(getattr(launch.kernel, "__name__", "")))
        return True

    with torch.no_grad():
        expected = model(x)
        replaced = Replaced(model.requires_grad_(False), [("0.one", "0.two")])
        assert list(replaced.counts.values()) == [1, 0, 1]
        assert torch.equal(model(x), expected), "without a batch all is as before"
        if fused:
            request.getfixturevalue("interpreted_triton")
            with kernels.allowed("cpu"), bridge.handled_by(Answers()), observed(note):
                found = model(x)
            assert launched == ["silu_mul_kernel"]
        else:
            with bridge.handled_by(Answers()):
                found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# Gates of experts


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mixtral", SiluGate()), ("gpt_oss", SiluGate(1.702, 7.0, 1.0, interleaved=True)), ("minimax_m2", SiluGate())],
)
def test_gates_are_known_by_what_they_compute(name: str, expected: SiluGate) -> None:
    module = experts_of(name, "eager")
    assert is_experts(module)
    assert known_gate(module) == expected
    for other in (lambda both: both.chunk(2, -1)[0], lambda both: expected(both) * 1.01):
        vars(module)["_apply_gate"] = other
        assert known_gate(module) is None


# Linear layers


class Three(nn.Module):
    """Three linear layers of one input, and a fourth."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear

    def __init__(self, biases: Sequence[bool] = (True, True, True)) -> None:
        super().__init__()
        for name, size, bias in zip(("q", "k", "v"), (8, 4, 4), biases, strict=True):
            setattr(self, name, nn.Linear(6, size, bias=bias))
        self.o = nn.Linear(8, 6)
        self.change = False

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        if self.change:
            x += 1.0
        k, v = self.k(x), self.v(x)
        found: Tensor = self.o(q * torch.cat([k, v], -1))
        return found


def merged_three(*biases: bool) -> tuple[Three, list[LinearGroup]]:
    module = Three(biases or (True, True, True)).requires_grad_(False)
    return module, merge(module, [("q", "k", "v")])


def test_linear_layers_of_one_input_are_found() -> None:
    """Once in a pass, by one module: not those that are called twice, or with a copy, or that have two names."""
    module, x, y = Three(), torch.zeros(2, 6), torch.zeros(2, 6)
    given: dict[nn.Module, list[Tensor]] = {module.q: [x], module.k: [x], module.v: [x], module.o: [y]}
    assert with_one_input(module, given) == (("q", "k", "v"), ("o",))
    assert with_one_input(module, {**given, module.v: [y]}) == (("q", "k"), ("v", "o"))
    assert with_one_input(module, {**given, module.k: [x, x]}) == (("q", "v"), ("k",), ("o",))
    assert with_one_input(nn.Sequential(module, module.q), given) == (("0.k", "0.v"), ("0.o",))


def test_merged_layers_compute_once() -> None:
    module, (group,) = merged_three()
    assert module.q.weight.untyped_storage().data_ptr() == module.v.weight.untyped_storage().data_ptr()
    x = torch.randn(1, 3, 6)
    expected = module(x)
    calls: list[int] = []
    group.product.register_forward_hook(lambda *_: calls.append(1))
    with bridge.handled_by(Answers()):
        for count in (1, 2):
            torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-6)
            assert len(calls) == count, "each call of the module computes once, though the input is the same"
    assert torch.equal(module(x), expected)


def test_an_output_is_handed_out_once() -> None:
    """What is called twice with one tensor is computed twice: it may have changed."""
    module, _ = merged_three()
    x = torch.randn(1, 3, 6)
    with bridge.handled_by(Answers()):
        first = module.q(x)
        x += 1.0
        torch.testing.assert_close(module.q(x), F.linear(x, module.q.weight, module.q.bias))
        assert not torch.equal(module.q(x), first)


def test_an_input_that_changes_between_is_what_the_probe_is_for() -> None:
    """The first layer's call computes the others' outputs: a module that changes its input between is put back."""
    module, _ = merged_three()
    module.change = True
    x = torch.randn(1, 3, 6)
    expected = module(x.clone())
    with bridge.handled_by(Answers()):
        assert not torch.allclose(module(x.clone()), expected)


def test_layers_with_and_without_biases_are_not_merged() -> None:
    module, groups = merged_three(True, False, True)
    assert [group.linears for group in groups] == [(module.q, module.v)]
    x = torch.randn(1, 3, 6)
    expected = module(x)
    with bridge.handled_by(Answers()):
        torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-6)


def test_tied_weights_stay() -> None:
    module = Three().requires_grad_(False)
    module.k.weight = module.v.weight
    assert merge(module, [("q", "k", "v")]) == []


# In a model


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "qwen3", "phi3"])
def test_logits_by_kernels(name: str, tmp_path: Path, interpreted_triton: None) -> None:
    """With norms and activations by kernels, too."""
    ctx = context(save(tmp_path, *SERVED[name]))
    family, network = loaded(ctx)
    prompts = [prompt[:9] for prompt in probe_prompts(family.spec)]
    names: set[str] = set()

    def note(launch: Launch) -> bool:
        names.add(str(getattr(launch.kernel, "__name__", "")))
        return True

    with kernels.allowed("cpu"), observed(note):
        found = probe_run(network, family.spec, ctx).logits(prompts)
    for prompt, ours in zip(prompts, found, strict=True):
        assert float(relative_errors(ours, network.reference_logits(prompt)).max()) < TOLERANCE
    assert names == {"rms_norm_kernel", *(["silu_mul_kernel"] if name != "gemma2" else [])}


def spoiled(network: TransformersNetwork, kind: str) -> None:
    """Make one part of a kind compute something else."""
    if kind == "linear layers":
        network.replaced.groups[1].product.register_forward_hook(lambda _, __, out: out * 1.1)
    else:
        vars(network.model.model.layers[1].mlp)["forward"].act = torch.tanh


@pytest.mark.parametrize(("kind", "left"), [("gated MLPs", (6, 7, 0)), ("linear layers", (0, 0, 0))])
def test_what_is_wrong_is_put_back(
    kind: str, left: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One kind after the other, until the probe passes."""
    ctx = context(save(tmp_path, *SERVED["llama"]))
    family, network = loaded(ctx)
    spoiled(network, kind)
    with caplog.at_level(logging.WARNING):
        family.probe(network, probe_run(network, family.spec, ctx))
    assert tuple(network.replaced.counts.values()) == left
    told = [one.getMessage() for one in caplog.records if "of transformers are used, and not ours" in one.getMessage()]
    assert len(told) == sum(count == 0 for count in left)
    assert told[0].startswith("LlamaForCausalLM: the gated MLPs of transformers")


def test_what_is_wrong_without_us_is_refused(tmp_path: Path) -> None:
    ctx = context(save(tmp_path, *SERVED["llama"]))
    family, network = loaded(ctx)
    layers = network.model.model.layers
    handle = layers[1].register_forward_hook(lambda _, __, out: out * 1.5 if bridge.is_handled() else out)
    with pytest.raises(ModelError, match="gives wrong logits on paged attention"):
        family.probe(network, probe_run(network, family.spec, ctx))
    handle.remove()


def test_weights_of_merged_layers_are_replaced_and_given_back(tmp_path: Path) -> None:
    """They are views of one matrix, by the names of the checkpoint."""
    ctx = context(save(tmp_path, *SERVED["qwen2"]))
    _, network = loaded(ctx)
    store = network.weights()
    name = "model.layers.1.self_attn.k_proj"
    group = next(one for one in network.replaced.groups if network.model.get_submodule(name) in one.linears)
    taken = store.release()
    assert taken >= sum(tensor.nbytes for tensor in network.model.parameters())
    assert group.product.weight.untyped_storage().nbytes() == 0
    draw = torch.Generator().manual_seed(3)
    tensors = {key: torch.randn(spec.shape, generator=draw) * 0.2 for key, spec in store.expected().items()}
    store.begin(tensors.keys())
    for key, tensor in tensors.items():
        store.put(key, tensor)
    store.finish()
    assert torch.equal(group.product.weight[16 * 2 : 16 * 3], tensors[f"{name}.weight"])
    with torch.inference_mode(), bridge.handled_by(Answers()):
        x = torch.randn(1, 2, 32, generator=draw)
        found = network.model.get_submodule(name)(x)
    expected = F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(why_not_packed(torch.bfloat16, torch.device("cpu")) is not None, reason="oneDNN has no bfloat16")
class TestPacked:
    """Weights in bfloat16, which oneDNN packs on a CPU."""

    def packed(self, directory: Path, name: str) -> TransformersNetwork:
        ctx = context(save(directory, *SERVED[name]), torch.bfloat16)
        family, network = loaded(ctx)
        family.probe(network, probe_run(network, family.spec, ctx))
        return network

    def test_all_but_those_that_are_not_called(self, tmp_path: Path) -> None:
        """Tied heads stay, and what attention reads."""
        network = self.packed(tmp_path / "a", "qwen2")
        assert [len(group.linears) for group in network.replaced.groups] == [3, 1, 2, 1] * 3 + [1]
        assert all(group.product.packed for group in network.replaced.groups)
        assert network.model.model.layers[0].mlp.up_proj.weight.numel() == 0
        latent = self.packed(tmp_path / "b", "minicpm3")
        assert latent.model.model.layers[0].self_attn.kv_b_proj.weight.numel() > 0
        tied = self.packed(tmp_path / "c", "gemma2")
        assert tied.model.lm_head.weight.numel() > 0

    def test_logits_stay_the_same(self, tmp_path: Path) -> None:
        network = self.packed(tmp_path, "qwen3")
        prompt = [5, 9, 7, 3]
        found = network.reference_logits(prompt)
        network.replaced.unpack()
        assert torch.equal(network.reference_logits(prompt), found)

    def test_weights_are_replaced(self, tmp_path: Path) -> None:
        """All of a product, one part of it, and none."""
        network = self.packed(tmp_path, "qwen2")
        store, prompt = network.weights(), [5, 9, 7]
        before, part = network.reference_logits(prompt), "model.layers.1.self_attn.{}_proj.weight"
        for names in ("q", "qkv"):
            old = {one: store.read(part.format(one), 10**6) for one in names}
            for factor in (2.0, 1.0):
                store.begin([part.format(one) for one in names])
                for one, tensor in old.items():
                    store.put(part.format(one), (tensor * factor).view(store.expected()[part.format(one)].shape))
                store.finish()
                assert torch.equal(network.reference_logits(prompt), before) == (factor == 1.0)
                assert all(group.product.packed for group in network.replaced.groups)

    def test_memory_is_given_back(self, tmp_path: Path) -> None:
        network = self.packed(tmp_path, "qwen2")
        store, prompt = network.weights(), [5, 9, 7]
        before = network.reference_logits(prompt)
        tensors = {name: store.read(name, 10**6).view(spec.shape) for name, spec in store.expected().items()}
        assert store.release() >= sum(tensor.nbytes for tensor in tensors.values())
        store.begin(tensors.keys())
        for name, tensor in tensors.items():
            store.put(name, tensor)
        store.finish()
        assert torch.equal(network.reference_logits(prompt), before)
        assert all(group.product.packed for group in network.replaced.groups)

    def test_what_cannot_be_packed_is_not(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A module that reads a weight by itself."""
        ctx = context(save(tmp_path, *SERVED["llama"]), torch.bfloat16)
        family, network = loaded(ctx)
        norm = network.model.model.norm
        weight = network.model.model.layers[1].mlp.up_proj.weight
        norm.register_forward_hook(lambda _, __, out: out + 0 * weight.view(48, 32)[0])
        with caplog.at_level(logging.WARNING):
            family.probe(network, probe_run(network, family.spec, ctx))
        assert not any(group.product.packed for group in network.replaced.groups)
        assert "LlamaForCausalLM: weights are not packed" in caplog.text
        assert network.replaced.counts == dict(zip(KINDS, COUNTS["llama"], strict=True))
