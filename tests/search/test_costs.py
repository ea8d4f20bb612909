"""Operations and bytes of blocks against closed forms, and measurements against the step itself."""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.errors import CaptureError, SimulationError
from lightning_piper.search.accounting import bytes_needed
from lightning_piper.search.costs.analytic_costs import analytic, costs_of
from lightning_piper.search.costs.block_work import written_in_place_of
from lightning_piper.search.costs.blocks import blocks_of
from lightning_piper.search.costs.measurement import measured, seconds_of_passes
from lightning_piper.search.costs.operation_costs import Cost, Counting, seconds
from lightning_piper.search.costs.optimizers import optimizer_of, states_of
from lightning_piper.search.costs.parameters import like
from lightning_piper.search.costs.sequential_run import walk
from lightning_piper.search.proposal import work_of
from lightning_piper.search.space import Space
from lightning_piper.search.stage_costs import CostModel
from lightning_piper.simulate import Link
from lightning_piper.simulate.hardware import Hardware
from tests.moe import Model as Experts
from tests.moe import batch as expert_tokens
from tests.search.nets import GPT, HEADS, SEQ, VOCAB, WIDTH, Module, tokens

SAMPLES = 4
CPU = Hardware.read("cpu")


def flops_of(cut: Any, block: int, samples: int) -> dict[str, int]:
    costs = costs_of(cut.step, samples)
    (region,) = cut.regions[block]
    return {kind: sum(cost.flops for cost in found) for (r, kind), found in costs.items() if r == region}


@pytest.mark.parametrize("samples", [1, SAMPLES])
def test_a_layer_takes_two_for_each_weight_and_token(samples: int) -> None:
    """And attention 4 for each pair of tokens and each channel; in BI twice as many, and half as many to make
    its weights anew.
    """
    cut = blocks_of(Module(GPT(5)), tokens(SAMPLES))
    weights = 12 * WIDTH**2  # of one layer's matrices
    products, attention = 2 * weights * samples * SEQ, 4 * samples * SEQ**2 * WIDTH
    expected = {"F": products + attention, "BI": products + 5 * attention // 2, "BW": products}
    for block in (1, 3, 5):
        found = flops_of(cut, block, samples)
        assert {kind: found[kind] for kind in expected} == expected
        assert found["B"] == expected["BI"] + expected["BW"]
    assert flops_of(cut, 0, samples)["F"] == 0
    assert flops_of(cut, 7, samples)["F"] == 2 * 20 * WIDTH * samples * SEQ != expected["F"]


def test_bytes_are_those_of_operands_and_results() -> None:
    x, w = torch.ones(3, 4), torch.ones(4, 5)
    with Counting() as counting:
        x.t().contiguous()
        x @ w
        x + torch.ones(1).expand(3, 4)
        x.add_(1)
    found = [
        (cost.name, cost.nbytes)
        for cost in counting.costs
        if "ones" not in cost.name and "fill" not in cost.name
    ]
    assert found == [
        ("aten.clone.default", 2 * 48),
        ("aten.mm.default", 4 * (12 + 20 + 15)),
        ("aten.add.Tensor", 4 * (12 + 1 + 12)),
        ("aten.add_.Tensor", 48),
    ]
    assert counting.costs[1].flops == 0 or counting.costs[1].name == "aten.mm.default"


def test_chunks_of_scores_cost_their_products() -> None:
    """One product in the forward pass, and three in the backward pass, which computes the scores again."""
    hidden, weight = (torch.ones(shape).requires_grad_() for shape in [(2, 3, 4), (5, 4)])
    with Counting() as counting:
        piper.linear_cross_entropy(hidden, weight, torch.zeros(2, 3, dtype=torch.long)).backward()
    assert [cost.flops for cost in counting.costs if cost.flops] == [2 * 6 * 4 * 5, 3 * 2 * 6 * 4 * 5]


def test_time_is_the_longer_of_arithmetic_and_memory() -> None:
    cost = Cost("mm", 1000, torch.float32, 100)
    slow = Hardware("slow", 1, {"float32": 10.0}, 10.0, CPU.links, CPU.host, 1)
    assert seconds([cost, cost], slow) == 200.0
    assert seconds([cost._replace(flops=0)], slow) == 10.0
    assert seconds([cost], Hardware("half", 1, {"float32": 10.0}, 10.0, CPU.links, CPU.host, 1, 0.5)) == 200.0
    with pytest.raises(
        SimulationError,
        match=r"hardware .slow. has no speed for bfloat16, only for float32\.",
    ):
        seconds([cost._replace(dtype=torch.bfloat16)], slow)


def test_works_on_the_meta_device() -> None:
    """The same figures, and the module's parameters stay without data."""
    real = Module(GPT(5))
    with torch.device("meta"):
        empty = Module(GPT(5))
    one, other = (analytic(module, tokens(SAMPLES), CPU, samples=(1, SAMPLES)) for module in (empty, real))
    assert one == other
    assert all(p.is_meta for p in empty.parameters())
    with pytest.raises(CaptureError, match=r"without data\. Give tensors with data, or calculate the costs"):
        measured(empty, tokens(SAMPLES))


def test_members_of_a_tensor_axis() -> None:
    """The two halves of a layer are divided; each ends in a sum of what the residual stream has."""
    found = analytic(Module(GPT(5)), tokens(SAMPLES), CPU, samples=(SAMPLES,), tensor=(2, 4))
    layer = found.blocks[3]
    assert {name.rpartition(".")[0].removeprefix("net.layers.2.") for name in layer.divided} == {
        "qkv",
        "proj",
        "up",
        "down",
    }
    stream = SAMPLES * SEQ * WIDTH * 4
    assert layer.work[SAMPLES, 1].output == stream and layer.work[SAMPLES, 1].exchanged == 0
    assert layer.work[SAMPLES, 2].exchanged == 2 * stream
    assert layer.work[SAMPLES, 2].saved < layer.work[SAMPLES, 1].saved
    assert layer.work[SAMPLES, 2].forward < layer.work[SAMPLES, 1].forward
    assert not [key for key in layer.work if key[1] == 4], (
        "there are two heads: attention cannot be divided by four"
    )


class Routed(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = Inner()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.inner(self.first(batch[0]))
        return self.last(x).square().mean()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = piper.dispatch(x.transpose(0, 1))
        return piper.combine(torch.bmm(rows, self.weight)).transpose(0, 1)


def test_rows_that_are_sent() -> None:
    found = analytic(Routed(), (torch.randn(SAMPLES, 2, 8),), CPU, tensor=())
    assert [block.name for block in found.blocks] == ["first", "inner", "last"]
    assert [block.routed for block in found.blocks] == [0, 2 * 2 * 8 * 4, 0]
    assert found.blocks[1].experts == {"inner.weight"}


def test_rows_cross_the_link_once_to_the_experts_and_once_back() -> None:
    module, batch, link = Experts(), expert_tokens(8), Link(latency=2, bandwidth=64)
    hardware = replace(CPU, links=((2, link),))
    space = Space(analytic(module, batch, hardware, tensor=()), hardware, 2, 10**12)
    layouts = [layout for layout in space.layouts() if layout.replicas == 2 and layout.microbatches == 1]
    whole, divided = (
        CostModel(space).costs(layout) for layout in sorted(layouts, key=lambda each: each.routed)
    )
    dag = piper.compile(module, batch, [piper.Place([0, 1]), piper.Replicate(), piper.ShardExperts()]).dag
    labels = [node.label for node in dag.nodes.values()]
    exchanges = labels.count("alltoall.dispatch") + labels.count("alltoall.combine")
    rows = 320 * 4  # bytes of the rows of a replica in one block; half of them stay where they are
    wanted = exchanges * link.time(rows, 2)
    added = divided.forward[-1] + divided.inputs[-1] - whole.forward[-1] - whole.inputs[-1]
    assert exchanges == 8 and added == pytest.approx(wanted)


def test_passes_one_after_another_are_the_step() -> None:
    """Gradients that passes make where they are measured are those of the step, whether B is split or not. In
    float64: sums in another order differ by few bits.
    """
    module, batch = Module(GPT(3)).double(), tokens(SAMPLES)
    loss = module.training_step(batch, 0)
    loss.backward()  # type: ignore[no-untyped-call]
    cut = blocks_of(module, batch)
    code = cut.step.at(SAMPLES)
    tensors = {name: p.detach() for name, p in cut.module.named_parameters()}
    for split in (False, True):
        grads: dict[str, Tensor] = {}

        def run(key: Any, of_pass: Any, args: Any, grads: dict[str, Tensor] = grads) -> Any:
            made = of_pass.run(args)
            flat = iter(made)
            for output, specs in zip(code.interface_of(key).outputs, of_pass.outputs, strict=True):
                bundle = [next(flat) for _ in specs]
                if output.kind == "grad":
                    for name, x in zip(output.names, bundle, strict=True):
                        grads[name] = grads.get(name, 0) + x
            return made

        with torch.no_grad():
            walk(code, tensors, batch, run, split=split)
        assert grads.keys() == {name for name, _ in module.named_parameters()}
        for name, p in module.named_parameters():
            assert p.grad is not None
            assert float((grads[name] - p.grad).abs().max()) <= 1e-14 * max(1.0, float(p.grad.abs().max()))
            assert float((2 * grads[name] - p.grad).abs().max()) > 1e-9


def test_parameters_that_do_not_train_are_not_updated() -> None:
    """And of two blocks with a parameter in common the first one updates it; both add gradients to it."""
    frozen, tied = Module(GPT(3)), Module(GPT(3, tied=True))
    frozen.net.head.requires_grad_(False)
    modules = (Module(GPT(3)), frozen, tied)
    whole, still, shared = (
        analytic(module, tokens(SAMPLES), CPU, samples=(SAMPLES,), tensor=()).blocks for module in modules
    )
    assert still[-1].updated == still[-1].added == 0 < whole[-1].added < whole[-1].updated
    assert shared[-1].updated == 0 < shared[-1].added == whole[-1].added


def test_an_optimizer_like_another_one() -> None:
    params = [nn.Parameter(torch.ones(3))]
    made = like(torch.optim.SGD(params, lr=0.25, momentum=0.5))([nn.Parameter(torch.ones(2))])
    assert type(made) is torch.optim.SGD and made.defaults["lr"] == 0.25 and made.defaults["momentum"] == 0.5
    assert type(like(torch.optim.AdamW(params))([nn.Parameter(torch.ones(2))])) is torch.optim.AdamW

    class Odd(torch.optim.SGD):
        def __init__(self, first: Any, second: int) -> None:
            super().__init__(first, lr=second)

    assert type(like(Odd(params, 1))([nn.Parameter(torch.ones(2))])) is torch.optim.AdamW


def _on(module: nn.Module, make: Any) -> Any:
    """The module, with a `configure_optimizers` that calls `make` with its parameters."""
    module.configure_optimizers = lambda: make(module.parameters())  # type: ignore[assignment]
    return module


STATES: dict[str, tuple[Any, float]] = {
    "sgd": (lambda params: torch.optim.SGD(params, lr=0.1), 0.0),
    "momentum": (lambda params: [torch.optim.SGD(params, lr=0.1, momentum=0.9)], 1.0),
    "adam": (lambda params: {"optimizer": torch.optim.Adam(params), "lr_scheduler": None}, 2.0),
    "amsgrad": (lambda params: ([torch.optim.AdamW(params, amsgrad=True)], []), 3.0),
    "none": (lambda params: None, 2.0),
    "two": (lambda params: [torch.optim.SGD([p], lr=0.1) for p in params], 2.0),
    "one of a closure": (lambda params: torch.optim.LBFGS(params), 2.0),
    "asks a Trainer": (lambda params: None.steps, 2.0),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_states_are_those_of_the_optimizer(kind: str, device: str) -> None:
    """Adam's two bytes for each of parameters, where it cannot be known."""
    make, expected = STATES[kind]
    with torch.device(device):
        module = _on(Module(GPT(1)), make)
    assert states_of(optimizer_of(module), module) == expected


def test_a_search_counts_the_states_of_the_module_s_optimizer() -> None:
    """Measured and calculated."""
    for states, make in (
        (1.0, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        (2.0, torch.optim.AdamW),
    ):
        module = _on(Module(GPT(1)), make)
        cut = blocks_of(module, tokens(SAMPLES))
        assert [work_of(module, tokens(SAMPLES), on, [SAMPLES], cut).states for on in (CPU, None)] == [
            states,
            states,
        ]


def test_states_of_parameters_that_are_trained() -> None:
    """Of half-precision parameters with states in float32, of two groups, and of parameters that nothing
    trains.
    """
    module = nn.Sequential(
        nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False), nn.Linear(100, 300, bias=False)
    )
    first, second, last = module.parameters()
    last.requires_grad_(False)
    groups = [{"params": [first], "momentum": 0.9}, {"params": [second, last]}]
    assert states_of(torch.optim.SGD(groups, lr=0.1), module) == 0.5
    assert states_of(torch.optim.AdamW([first]), module) == 1.0

    class Master(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"master": p.detach().float(), "step": torch.zeros(())}

    module.bfloat16()
    assert states_of(Master([first, second]), module) == 2.0


class Layers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


def test_a_plan_keeps_no_states_of_what_is_frozen() -> None:
    """Also where replicas have shards of it: a third of three layers, in padded shards of two."""
    module = Layers()
    module.net[1].requires_grad_(False)
    program = [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], shard_params=True),
    ]
    compiled = piper.compile(module, torch.ones(4, 8), program)
    without, states = (bytes_needed(compiled, x) for x in (0, 2))
    assert {device: states[device] - without[device] for device in states} == dict.fromkeys(
        (0, 1), 2 * 2 * 8 * 8 * 4 // 2
    )


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_a_pass_writes_into_their_buckets(tied: bool) -> None:
    """Products of matrices are; those of tables, norms and of what two blocks use are copied."""
    cut = blocks_of(Module(GPT(3, tied)), tokens(SAMPLES))
    written = cut.all_named(written_in_place_of(cut.step.at(SAMPLES)))
    layers = {f"net.layers.{k}.{name}.weight" for k in range(3) for name in ("qkv", "proj", "up", "down")}
    assert written == layers | (set() if tied else {"net.head.weight"})
    blocks = analytic(Module(GPT(3, tied)), tokens(SAMPLES), CPU, samples=(1,), tensor=()).blocks
    assert blocks[0].packed_one_microbatch == blocks[0].packed > 0
    assert 0 < blocks[1].packed_one_microbatch < blocks[1].packed / 4


def test_what_is_zero_in_gradients_is_seen() -> None:
    """Rows of a table that the batch does not use."""
    cut, batch = blocks_of(Module(GPT(3)), tokens(SAMPLES)), tokens(SAMPLES)
    _, zeros = seconds_of_passes(cut, batch, SAMPLES, 1, time.perf_counter)
    used = len(batch[0].unique())
    assert used < VOCAB
    assert zeros["net.embed.weight"] == pytest.approx(1 - used / VOCAB)
    assert max(share for name, share in zeros.items() if name != "net.embed.weight") < 0.01


def test_zeros_of_a_tied_parameter_are_those_of_the_sum() -> None:
    """The head gives every row of the table a gradient."""
    cut, batch = blocks_of(Module(GPT(3, tied=True)), tokens(SAMPLES)), tokens(SAMPLES)
    _, zeros = seconds_of_passes(cut, batch, SAMPLES, 1, time.perf_counter)
    (name,) = (name for name, names in cut.renamed.items() if "net.embed.weight" in names)
    assert zeros[name] < 0.01


class Rectified(L.LightningModule):
    """Equal layers. Half of the channels of `dead` are always negative, so their weights get no gradients."""

    def __init__(self, dead: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()) for _ in range(4)))
        for i, layer in enumerate(self.net):
            nn.init.constant_(layer[0].weight, 0.1)
            if i == dead:
                nn.init.constant_(layer[0].weight[:4], -0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


@pytest.mark.parametrize("dead", range(4))
def test_each_of_several_equal_layers_has_its_own_zeros(dead: int) -> None:
    batch = torch.ones(SAMPLES, 8)
    cut = blocks_of(Rectified(dead), batch, short=False)
    _, zeros = seconds_of_passes(cut, [batch], SAMPLES, 1, time.perf_counter)
    # The layer after `dead` reads zeros, so half of the columns of its gradient are zero.
    expected = {f"net.{i}.0.weight": 0.5 * (i in (dead, dead + 1)) for i in range(4)}
    assert zeros == pytest.approx(expected)


def test_what_is_measured() -> None:
    module, batch = Module(GPT(5)), tokens(SAMPLES)
    found = measured(module, batch, samples=(1, SAMPLES), calls=1)
    for block, other in zip(
        found.blocks, analytic(module, batch, CPU, samples=(1, SAMPLES), tensor=()).blocks, strict=True
    ):
        assert (block.name, block.params, block.work.keys()) == (other.name, other.params, other.work.keys())
        assert (
            (block.added > 0)
            == (block.packed > 0)
            == (other.added > 0)
            == bool(block.params)
            == (block.updated > 0)
        )
        for key, work in block.work.items():
            assert (
                work[3:7] == other.work[key][3:7]
                and work.forward > 0
                and work.backward_input + work.backward_weights > 0
            )
            assert all(x > 0 for x, y in zip(work[:3], other.work[key][:3], strict=True) if y > 0)
    assert found.blocks[1].work == found.blocks[4].work, "layers that compute the same are one measurement"
    assert Fraction(found.blocks[1].work[1, 1].saved) * SAMPLES != found.blocks[0].work[SAMPLES, 1].saved
    with pytest.raises(CaptureError, match="the batch has only 4 samples"):
        measured(module, batch, samples=(5,))
    with pytest.raises(CaptureError, match=r"samples=\(0,\) is not usable. Give a list of integers >= 1"):
        measured(module, batch, samples=(0,))


class Relative(nn.Module):
    """Attention with a table of positions for each head, as in T5. All samples and all layers share the
    table.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, HEADS)
        self.layers = nn.ModuleList(RelativeLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, places = self.embed(tokens), torch.arange(SEQ)
        bias = self.table((places[:, None] - places).abs()).permute(2, 0, 1)[None]
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x)


class RelativeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (each(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = (q @ k.mT + bias).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


def test_members_that_want_more_samples() -> None:
    """A sum over samples is none where there is one, so members would exchange the table's gradient
    elsewhere.
    """
    found = analytic(Module(Relative()), tokens(SAMPLES), CPU, samples=(1, 2, SAMPLES), tensor=(2,))
    assert found.least == 1 and found.least_divided == {2: 2}
    assert {key for key in found.blocks[0].work} == {(1, 1), (2, 1), (SAMPLES, 1), (2, 2), (SAMPLES, 2)}
    least: dict[int, int] = {}
    for layout in Space(found, CPU, 2, 2**30).layouts():
        samples = SAMPLES // layout.replicas // layout.microbatches
        least[layout.tensor] = min(samples, least.get(layout.tensor, SAMPLES))
    assert least == {1: 1, 2: 2}
