"""A module cut into blocks has the same costs as the same step annotated by hand."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.errors import CaptureError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Kind
from lightning_piper.search import proposal
from lightning_piper.search.costs.analytic_costs import analytic
from lightning_piper.search.costs.blocks import BlockCut, blocks_of
from lightning_piper.search.costs.chain import copy_of, shortened
from lightning_piper.search.costs.microbatch_check import meets
from lightning_piper.search.program_writer import Written
from lightning_piper.search.space import Space
from lightning_piper.simulate.hardware import Hardware
from tests.groups import marked
from tests.search.nets import GPT, Layer, Module, ResNet, Returning, Towers, images, pairs, tokens

SAMPLES = 4
Made = tuple[L.LightningModule, Any]


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    class HuggingFace(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            special: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
            sizes: dict[str, Any] = {
                "n_embd": 16,
                "n_head": 2,
                "n_layer": 5,
                "vocab_size": 20,
                "n_positions": 8,
            }
            self.model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **special))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
            return loss

    return HuggingFace(), tokens(SAMPLES)


def gpt(layers: int = 5, tied: bool = False) -> Made:
    return Module(GPT(layers, tied)), tokens(SAMPLES)


MODELS: dict[str, tuple[Callable[[], Made], list[str]]] = {
    "gpt": (gpt, ["net.embed", *(f"net.layers.{i}" for i in range(5)), "net.norm", "net.head"]),
    "gpt2": (gpt2, ["wte", "wpe", *(f"h.{i}" for i in range(5)), "ln_f", "lm_head"]),
    "resnet": (
        lambda: (Module(ResNet()), images(SAMPLES)),
        ["net.stem", *(f"net.stage{i}.{k}" for i in (1, 2) for k in (0, 1)), "net.head"],
    ),
    "towers": (lambda: (Towers(), pairs(SAMPLES)), ["first.0", "first.2", "second.0", "second.2"]),
}


def by_hand(module: nn.Module, batch: Any, groups: Any, samples: int) -> list[tuple[int, int]]:
    """For each group of submodules, the bytes that F saves in a compiled program, and how many of them are
    for BW.
    """
    annotated = copy.deepcopy(module)
    piper.annotate_modules(annotated, "PP", groups)
    dag = piper.compile(annotated, batch, [piper.Place(filter={}, devices=[0])]).at(samples).dag
    code = dag.step.at(samples)
    found = [(0, 0)] * len(groups)
    for chunk in dag.of_type(Chunk):
        if chunk.kind == "F":
            values = [value for value in chunk.outputs if value.kind == Kind.SAVED]
            handed = code.split_passes.get((chunk.region, "BI"))
            made = zip(handed[0].outputs, handed[1].outputs, strict=True) if handed else ()
            more = sum(spec.nbytes for out, specs in made if out.kind == Kind.SAVED for spec in specs)
            before = found[chunk.tags["PP"]]
            weights = sum(value.nbytes for value in values if "BW" in value.names)
            found[chunk.tags["PP"]] = (
                before[0] + sum(value.nbytes for value in values),
                before[1] + weights + more,
            )
    return found


@pytest.mark.parametrize("name", marked(MODELS, ["gpt", "resnet"]))
def test_blocks_are_what_a_hand_would_annotate(name: str) -> None:
    make, expected = MODELS[name]
    module, batch = make()
    cut = blocks_of(module, batch)
    assert [full.endswith(short) for full, short in zip(cut.names, expected, strict=True)] == [True] * len(
        expected
    )
    assert cut.groups == tuple((full,) for full in cut.names) and not cut.untagged
    for samples in (1, SAMPLES):
        assert [found[:2] for found in cut.bytes(samples)] == by_hand(module, batch, cut.groups, samples)
    names = {name for params in cut.params for name in params}
    assert names == {name for name, _ in module.named_parameters()} == cut.trains
    for params in cut.params:
        assert all(nbytes == module.get_parameter(n).nbytes for n, nbytes in params.items())
    groups = [*cut.groups[:-2], cut.groups[-1], cut.groups[-2]]
    assert [found[:2] for found in cut.bytes(SAMPLES)] != by_hand(module, batch, groups, SAMPLES)


def test_a_short_model_says_the_same_as_the_whole_one() -> None:
    module, batch = gpt(7)
    short, whole = blocks_of(module, batch), blocks_of(module, batch, short=False)
    assert len(short.step.at(SAMPLES).regions) < len(whole.step.at(SAMPLES).regions)
    for n in (1, 2, SAMPLES):
        assert short.bytes(n) == whole.bytes(n)
    assert (short.names, short.groups, short.params, short.trains) == (
        whole.names,
        whole.groups,
        whole.params,
        whole.trains,
    )


def test_layers_that_differ_are_no_layers_of_one_kind() -> None:
    module, batch = gpt(7)
    layers: Any = module.net.layers
    assert len(shortened(module).left_out) == 4
    layers[4].norm1.eps = 1e-3
    layers[5].up = nn.Linear(16, 64)
    assert sorted(shortened(module).left_out) == ["net.layers.3", "net.layers.6"]
    cut, whole = blocks_of(module, batch), blocks_of(module, batch, short=False)
    assert cut.params == whole.params and "net.layers.5.up.bias" in cut.params[6]
    assert cut.bytes(2) == whole.bytes(2)


def test_a_step_that_counts_its_layers_is_traced_whole() -> None:
    class Counting(GPT):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for i in range(5):
                x = self.layers[i](x)
            return self.head(self.norm(x))

    cut = blocks_of(Module(Counting(5)), tokens(SAMPLES))
    assert len(cut.names) == 8 and len(cut.step.at(SAMPLES).regions) == 8


def test_a_tied_weight_is_in_both_blocks() -> None:
    cut = blocks_of(*gpt(2, tied=True))
    assert "net.embed.weight" in cut.params[0] and "net.embed.weight" in cut.params[-1]
    assert "net.embed.weight" not in blocks_of(*gpt(2)).params[-1]


class Named(Module):
    """A decoder whose embedding has a second name, as in models with a learned prompt of PEFT."""

    def __init__(self) -> None:
        super().__init__(GPT(5))
        self.words = self.net.embed


def test_a_module_with_two_names_is_one_block() -> None:
    cut, plain = blocks_of(Named(), tokens(SAMPLES)), blocks_of(*gpt(5))
    assert cut.groups == plain.groups and cut.groups[0] == ("net.embed",)
    assert "words" in dict(Named().named_modules(remove_duplicate=False))


def test_blocks_to_which_work_comes_back_are_one() -> None:
    batch = (torch.randn(SAMPLES, 4),)
    cut = blocks_of(Returning(True), batch)
    assert cut.groups == (("parts.0",), ("parts.1", "parts.2"), ("parts.3",))
    straight = blocks_of(Returning(False), batch)
    assert straight.groups == (("parts.0",), ("parts.1",), ("parts.2",), ("parts.3",))
    assert straight.untagged == {0} and "scale" in straight.params[0]


def test_all_that_crosses_a_border_counts() -> None:
    """Of two towers, what the first has made crosses the borders within the second."""
    cut = blocks_of(Towers(), pairs(SAMPLES))
    sample = 4 * torch.float32.itemsize
    # Borders: within the first tower, its hidden values; behind it, its result; within the second, both.
    assert [found.output for found in cut.bytes(SAMPLES)] == [SAMPLES * n * sample for n in (2, 1, 3, 0)]


def test_stages_are_programs() -> None:
    module, batch = gpt(4)
    cut = blocks_of(module, batch)
    stages = cut.stages([3, 5])
    annotated = copy.deepcopy(module)
    piper.annotate_modules(annotated, "PP", stages)
    program = [piper.Place(filter={"PP": i}, devices=[i]) for i in range(3)]
    compiled = piper.compile(annotated, batch, program)
    assert compiled.params_on(1) == set(cut.params[3]) | set(cut.params[4])
    for borders in ([1, 1], [0, 3], [3, 99]):
        with pytest.raises(CaptureError, match="Give increasing numbers of blocks"):
            cut.stages(borders)


def state(module: nn.Module) -> list[Any]:
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in module.modules()
    ]
    attributes = [(name, sorted(vars(m))) for name, m in module.named_modules()]
    tensors = [(name, id(x), x._version, x.clone()) for name, x in module.state_dict(keep_vars=True).items()]
    return [
        hooks,
        attributes,
        [id(m) for m in module.modules()],
        [x[:3] for x in tensors],
        [x[3] for x in tensors],
    ]


@pytest.mark.parametrize("name", MODELS)
def test_the_module_stays_as_it_was(name: str) -> None:
    module, batch = MODELS[name][0]()
    before, random = state(module), torch.get_rng_state()
    cut: BlockCut = blocks_of(module, batch)
    cut.bytes(1)
    after = state(module)
    assert before[:4] == after[:4] and all(
        torch.equal(a, b) for a, b in zip(before[4], after[4], strict=True)
    )
    assert torch.equal(random, torch.get_rng_state())
    module.register_forward_hook(lambda *_: None)
    assert state(module)[0] != before[0]


def test_layers_have_shapes_of_their_own() -> None:
    """Layers of several widths are blocks of one list, none of them like another."""
    net = nn.Sequential(nn.Embedding(20, 16), Layer(), Layer(), nn.Linear(16, 20))
    cut = blocks_of(Module(net), tokens(SAMPLES))
    assert cut.names == ("net.0", "net.1", "net.2", "net.3")


def test_a_module_that_cannot_be_copied() -> None:
    module, batch = gpt(2)
    module.source = (i for i in range(3))  # type: ignore[assignment]
    with pytest.raises(
        CaptureError, match=r"Module cannot be copied .TypeError: cannot pickle 'generator' object"
    ):
        blocks_of(module, batch)
    module.later = torch.ones(1, requires_grad=True) * 2  # type: ignore[assignment]  # not the cause
    with pytest.raises(CaptureError, match=r"'generator' object.*Hold the attribute that cannot be copied"):
        copy_of(module)
    module, batch = gpt(2)
    module.head = torch.nn.utils.weight_norm(nn.Linear(4, 4))  # type: ignore[assignment]
    with pytest.raises(
        CaptureError, match=r"because head.weight is a tensor that an operation has made.*parametrizations"
    ):
        copy_of(module)
    module.head = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))  # type: ignore[assignment]
    copy_of(module)


class Hooked(L.LightningModule):
    """A step reads features that the hooks of its layers keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.features: dict[int, torch.Tensor] = {}
        self.layers[0].register_forward_hook(lambda m, x, out: self.keep(0, out))
        self.layers[1].register_forward_hook(lambda m, x, out, *, owner=self: owner.keep(1, out))
        self.layers[2].register_forward_hook(self.hook(self.keep))

    def keep(self, name: int, out: torch.Tensor) -> None:
        self.features[name] = out

    def hook(self, keep: Callable[..., None]) -> Callable[..., None]:
        return lambda m, x, out: keep(2, out)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch).tanh()
        total: Any = sum(self.features[i].square().mean() for i in range(3))
        self.features.clear()
        return total  # type: ignore[no-any-return]


def test_hooks_of_a_copy_use_the_copy() -> None:
    """Hooks with a closure kept the features in the module itself, so the step of a copy failed with a KeyError."""
    module = Hooked()
    module.register_forward_hook(module.hook(print))  # uses no object that is copied
    assert len(blocks_of(module, torch.ones(4, 4)).names) == 3 and not module.features
    copied: Any = copy_of(module)
    for layer in copied.layers:
        layer(torch.ones(4, 4))
    assert list(copied.features) == [0, 1, 2] and not module.features
    hooks = [[*x._forward_hooks.values()] for x in (module, copied, module.layers[0], copied.layers[0])]
    assert hooks[0] == hooks[1] and hooks[2] != hooks[3]


class Apart(L.LightningModule):
    """A module with parameters of its own at the beginning of its step, and if `ends`, also at its end."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.scale, self.shift, self.ends = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4)), ends
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch * self.scale
        for layer in self.layers[:3]:
            x = layer(x).tanh()
        x = x + self.shift if self.ends else x
        return self.layers[3](x).square().mean()


@pytest.mark.parametrize("ends", [False, True])
def test_what_no_tag_divides_is_one_block(ends):
    """Work outside of all submodules is in one stage: borders lie before it or behind it."""
    cut = blocks_of(Apart(ends), torch.zeros(SAMPLES, 4))
    whole = [tuple(f"layers.{i}" for i in range(3)), ("layers.3",)]
    assert cut.groups == (tuple(whole) if ends else tuple((f"layers.{i}",) for i in range(4)))
    assert cut.untagged == {0}


class Squares(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss


def test_a_step_that_one_sample_does_not_have():
    """A batch norm refuses it: so microbatches have more."""
    module, batch = Squares(), torch.zeros(SAMPLES, 4)
    workload = analytic(module, batch, Hardware.read("cpu"), [1, 2, 4])
    assert workload.least == 2 and {samples for samples, _ in workload.blocks[0].work} == {2, 4}
    apart = dataclasses.replace(workload, meets=False)
    microbatches = {layout.microbatches for layout in Space(apart, Hardware.read("cpu"), 1, 2**30).layouts()}
    assert microbatches == {1, 2}
    with pytest.raises(ValueError, match="more than 1 value"):
        analytic(module, batch, Hardware.read("cpu"), [1])


class Distances(Squares):
    """A step with an operation that compares each sample with every other, for which the search has no rule."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        made = self.net[0](batch)
        return torch.cdist(made, made).mean()


class Rows(Squares):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net[0](batch).square().mean()
        return loss


@pytest.mark.parametrize("kind, meet", [(Squares, True), (Distances, True), (Rows, False)])
def test_samples_that_meet_are_not_cut_apart(kind, meet):
    """By its operations, and by running it in two halves: there is one microbatch then, and replicas."""
    module, batch = kind(), torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    cut = blocks_of(module, batch)
    assert meets(cut) == meets(cut, [batch]) == meet
    layouts = list(
        Space(
            analytic(module, batch, Hardware.read("cpu"), [2, 4], cut=cut), Hardware.read("cpu"), 2, 2**30
        ).layouts()
    )
    assert (max(layout.microbatches for layout in layouts) == 1) == meet
    assert max(layout.replicas for layout in layouts) == 2


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_the_execution_of_a_program_says(microbatches):
    """The statistics of a batch norm are those of a microbatch: no proposal says that they are one
    device's.
    """
    batch = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    split = [piper.Split(filter={}, dim_name="MB", num_microbatches=microbatches)]
    written = Written((), (piper.Place(filter={}, devices=[0]), *split), 1)
    _, verdict = proposal._checked(written, Squares(), batch, "run", 2.0)
    assert verdict.startswith("verified except") if microbatches > 1 else verdict == ""
