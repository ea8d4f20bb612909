"""`linear_cross_entropy`: the numbers of torch's cross entropy on one device, and those of one device under every
program."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader, DistributedSampler

import lightning_piper as piper
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.values import Sharded
from lightning_piper.placements import chunked_scores, proof
from lightning_piper.placements.rule import R, Rule
from tests import packed
from tests.distributed.processes import launch_trainings
from tests.groups import marked
from tests.packed import DIM, IGNORED, SAMPLES, Batch, Packed, Rows, fit

CLASSES = 14  # two ranks can shard them
OPTIONS = [
    (bias, reduction, smoothing)
    for bias in (False, True)
    for reduction in ("mean", "sum", "none")
    for smoothing in (0.0, 0.1)
]


def given(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    """Return hidden values, weight and bias, and targets of which one is ignored."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 7, 16), (50, 16), *([(50,)] if bias else [])]
    target = torch.randint(50, (3, 7), generator=draw)
    target[0, 2] = IGNORED
    return [
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ], target


@pytest.mark.parametrize("bias, reduction, smoothing", OPTIONS)
@pytest.mark.parametrize("chunk", [None, 4, 21])
def test_value_and_gradients_are_those_of_torch(bias, reduction, smoothing, chunk):
    tensors, target = given(bias=bias)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    scores = F.linear(*tensors)
    meant = F.cross_entropy(scores.flatten(0, 1), target.flatten(), **options)
    hidden, weight, *rest = tensors
    found = piper.linear_cross_entropy(
        hidden, weight, target, linear_bias=rest[0] if rest else None, chunk=chunk, **options
    )
    meant = meant.view(found.shape)
    assert torch.allclose(found, meant, rtol=1e-14, atol=1e-14)
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(x, tensors, gradient) for x in (found, meant)), strict=True):
        assert torch.allclose(one, other, rtol=1e-13, atol=1e-14)


def test_other_rows_are_ignored_than_those_of_another_index():
    (hidden, weight, _), target = given()
    found = [piper.linear_cross_entropy(hidden, weight, target % 50, ignore_index=i) for i in (-100, 3)]
    assert found[0] != found[1]


def test_nothing_counts():
    (hidden, weight, _), target = given()
    assert piper.linear_cross_entropy(hidden, weight, target * 0 + IGNORED).isnan()


def test_half_precision_is_as_near_as_torch():
    """Torch rounds the scores' logarithms to bfloat16. Chunks of rows add no error to that."""
    (hidden, weight, bias), target = given(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]

    def results(function: Any, tensors: list[Tensor]) -> list[Tensor]:
        loss = function(*tensors)
        return [x.double() for x in (loss, *torch.autograd.grad(loss, tensors))]

    def whole(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w, b).flatten(0, 1), target.flatten())

    def chunks(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return piper.linear_cross_entropy(h, w, target, linear_bias=b, chunk=2)

    meant = results(whole, exact)
    torchs, ours = results(whole, [hidden, weight, bias]), results(chunks, [hidden, weight, bias])
    for exact_value, torch_value, own in zip(meant, torchs, ours, strict=True):
        assert (own - exact_value).abs().max() <= (torch_value - exact_value).abs().max() * 1.5


def test_autocast_makes_the_products_in_its_dtype():
    (hidden, weight, _), target = given(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = piper.linear_cross_entropy(hidden, weight, target)
    meant = piper.linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), target)
    assert found.dtype is torch.float32 and torch.equal(found, meant)


def test_a_frozen_weight_gets_no_gradient_and_costs_none():
    (hidden, weight, bias), target = given()
    made: list[list[bool]] = []
    backward = torch.ops.lightning_piper.chunked_scores_backward.default

    class Wanted(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is backward:
                made.append(list(args[-1]))
            return func(*args, **(kwargs or {}))

    with Wanted():
        piper.linear_cross_entropy(hidden, weight.detach(), target, linear_bias=bias).backward()
    assert made == [[True, False, True]]


@pytest.mark.parametrize("bias", [False, True])
def test_operations_pass_torchs_checks(bias):
    (hidden, weight, *rest), target = given(bias=bias)
    b, index = rest[0] if rest else None, target % 50
    torch.library.opcheck(chunked_scores._chunked_scores, (hidden, weight, b, index, 4))
    inputs = [hidden, weight, *rest]
    assert torch.autograd.gradcheck(
        lambda h, w, *b: piper.linear_cross_entropy(h, w, target, linear_bias=b[0] if b else None, chunk=3),
        inputs,
    )


class Sizes(_torch.TorchDispatchMode):
    """Records the largest number of elements of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [x for x in _torch.tree_leaves(made) if isinstance(x, Tensor)]
        self.largest = max(self.largest, *(x.numel() for x in tensors), 0)
        return made


@pytest.mark.parametrize("chunk", [4, 40])
def test_scores_exist_for_one_chunk(chunk):
    hidden, weight, target = torch.randn(40, 4), torch.randn(500, 4), torch.randint(500, (40,))
    sums = chunked_scores._chunked_scores._init_fn(hidden, weight, None, target, chunk)[1]
    ones = torch.ones(40)
    with Sizes() as sizes:
        chunked_scores._chunked_scores._init_fn(hidden, weight, None, target, chunk)
        chunked_scores._chunked_scores_backward._init_fn(
            -ones, ones, hidden, weight, None, target, sums, None, chunk, [True, True, False]
        )
    assert sizes.largest == max(chunk * 500, weight.numel())


# Under every program


class Chunked(Packed):
    """A decoder with the loss in chunks; `whole`: with torch's cross entropy.

    `form`: "plain", "bias", "flat" (rows without a dimension of samples), "smooth" or "transposed" (`whole` only).
    """

    def __init__(self, form: str, whole: bool = False) -> None:
        super().__init__()
        self.form, self.whole = form, whole
        self.head = nn.Linear(DIM, CLASSES, bias=form in ("bias", "smooth"))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden, target = self.hidden(batch), batch["labels"]
        smoothing = 0.1 if self.form == "smooth" else 0.0
        if self.form == "transposed":
            return F.cross_entropy(self.head(hidden).mT, target, ignore_index=IGNORED)
        if self.whole:
            scores = self.head(hidden).flatten(0, 1)
            return F.cross_entropy(scores, target.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)
        if self.form == "flat":
            hidden, target = hidden.flatten(0, 1), target.flatten()
        head = self.head
        return piper.linear_cross_entropy(
            hidden, head.weight, target, linear_bias=head.bias, label_smoothing=smoothing, chunk=5
        )


def module(form: str, whole: bool = False) -> Chunked:
    torch.manual_seed(0)
    return Chunked(form, whole).double()


@functools.cache
def alone(form: str) -> Chunked:
    one = module(form, whole=True)
    fit(one)
    return one


def of_head(values: Any = None) -> dict[str, Any]:
    """Return a program in which two devices shard the classes, and with `values` also the values between
    layers."""
    return {
        "directives": [
            piper.Place(filter={}, devices=[0, 1], axes=("tp",)),
            piper.ShardWeights(filter={}, devices=[0, 1], params={"head.weight": 0}, values=values),
        ]
    }


PROGRAMS = {
    **packed.PROGRAMS,
    "classes": of_head(),
    "classes, sequences": of_head({"*": 1}),
    "dp2 tp2, 2 microbatches": {"dp": 2, "tp": 2, "microbatches": 2},
}
FORMS = ("plain", "bias", "flat", "smooth")
CASES = [(form, program) for form in FORMS for program in PROGRAMS]
QUICK = [("plain", "pp2"), ("bias", "classes")]


@pytest.mark.filterwarnings("error:.*PIPER")
@pytest.mark.parametrize("form, program", marked(CASES, QUICK))
def test_training_is_that_of_one_device(form, program):
    own = module(form)
    fit(own, piper.PiperStrategy(**PROGRAMS[program], transport="local"))
    one = alone(form)
    assert own.losses == pytest.approx(one.losses, rel=0, abs=1e-12) and one.losses[0] != one.losses[-1]
    for name, x in own.state_dict().items():
        assert torch.allclose(x, one.state_dict()[name], rtol=0, atol=1e-12), name


def chunked(program: dict[str, Any]) -> dict[str, Any]:
    """Return the program with losses in chunks, which Piper finds in the step."""
    if "directives" in program:
        return {"directives": [*program["directives"], piper.ChunkLoss(chunk=5)]}
    return {**program, "chunk_loss": True}


FOUND = [(form, program) for form in ("plain", "bias", "transposed") for program in PROGRAMS]


@pytest.mark.filterwarnings("error:.*PIPER")
@pytest.mark.parametrize(
    "form, program", marked(FOUND, [("plain", "pp2"), ("bias", "ring"), ("transposed", "classes")])
)
def test_a_found_loss_trains_as_on_one_device(form, program):
    own = module(form, whole=True)
    fit(own, piper.PiperStrategy(**chunked(PROGRAMS[program]), transport="local"))
    one = alone(form)
    assert own.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    for name, x in own.state_dict().items():
        assert torch.allclose(x, one.state_dict()[name], rtol=0, atol=1e-12), name


class Step(L.LightningModule):
    """A head of 30 classes, and one of several losses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed = kind, nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30, bias="bias" in kind)
        if kind == "frozen":
            self.head.requires_grad_(False)
        if kind == "adapter":
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 30, bias=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, target = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=self.kind == "autocast"):
            scores = self.head(self.embed(tokens).tanh())
        if self.kind == "adapter":
            scores = scores + 2.0 * self.up(self.down(self.embed(tokens).tanh()))
        rows = scores.flatten(0, 1), target.flatten()
        match self.kind:
            case "shifted":  # as in transformers
                return F.cross_entropy(
                    scores[:, :-1].contiguous().view(-1, 30), target[:, 1:].contiguous().view(-1)
                )
            case "summed":
                return F.cross_entropy(*rows, reduction="sum", ignore_index=0)
            case "weighted":
                return (F.cross_entropy(*rows, reduction="none") * target.flatten()).mean()
            case "accuracy":
                self.log("accuracy", (rows[0].argmax(-1) == rows[1]).double().mean())
            case "smooth":
                return F.cross_entropy(*rows, label_smoothing=0.1)
            case "class weights":
                return F.cross_entropy(*rows, weight=torch.ones(30, dtype=scores.dtype))
            case "penalty":
                return F.cross_entropy(*rows) + 1e-4 * scores.logsumexp(-1).square().mean()
            case "transposed" | "transposed bias":
                return F.cross_entropy(scores.transpose(1, 2), target)
            case "transposed sum":
                return F.cross_entropy(scores.mT, target, reduction="sum", ignore_index=0)
            case "transposed rows":
                return (F.cross_entropy(scores.mT, target, reduction="none") * target).mean()
            case "transposed shifted":
                return F.cross_entropy(scores[:, :-1].transpose(1, 2).float(), target[:, 1:])
            case "image":
                picture = scores.unflatten(1, (2, 3)).permute(0, 3, 1, 2)
                return F.cross_entropy(picture, target.unflatten(1, (2, 3)))
            case "last position":
                return F.cross_entropy(scores[:, -1], target[:, 0])
            case "positions as classes":
                return F.cross_entropy(scores, target[:, :1].expand(-1, 30).clamp(0, 5))
        return F.cross_entropy(rows[0].to(torch.float32) if self.kind == "autocast" else rows[0], rows[1])


def step(kind: str) -> tuple[Step, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    target = torch.randint(30, (4, 6))
    target[0, 2] = {"weighted": 1, "summed": 0, "transposed sum": 0, "transposed rows": 1}.get(kind, IGNORED)
    made = Step(kind) if kind == "autocast" else Step(kind).double()
    return made, (torch.randint(30, (4, 6)), target)


def operations(compiled: Any) -> list[Any]:
    return [node for code in compiled.step.at(4).code.values() for node in code.graph.nodes]


KINDS = ("plain", "bias", "frozen", "shifted", "summed", "weighted", "autocast", "last position", "image",
    "transposed", "transposed bias", "transposed sum", "transposed rows", "transposed shifted")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_is_found_and_verified(kind):
    own, batch = step(kind)
    program = [piper.ChunkLoss(chunk=4), *piper.parallel(dp=2)]
    assert piper.verify(own, batch, program).verdict == "verified"
    found = [node.target for node in operations(piper.compile(own, batch, program))]
    assert chunked_scores.SCORES_OF in found and chunked_scores.SCORES_BACKWARD in found
    assert torch.ops.aten._log_softmax.default not in found


@pytest.mark.parametrize(
    "kind", ["accuracy", "smooth", "class weights", "penalty", "positions as classes", "adapter"]
)
def test_a_loss_of_another_form_is_an_error(kind):
    own, batch = step(kind)
    with pytest.raises(
        piper.CaptureError, match=r"chunk_loss: training_step has no loss that the directive can.*PIPER-D026"
    ):
        piper.compile(own, batch, [piper.ChunkLoss()])


def test_a_wrong_replacement_is_not_verified(monkeypatch):
    """The loss divides by the rows of a chunk."""
    original = chunked_scores._log_sum
    monkeypatch.setattr(chunked_scores, "_log_sum", lambda scores: original(scores) / len(scores))
    own, batch = step("plain")
    assert piper.verify(own, batch, [piper.ChunkLoss(chunk=4)]).verdict != "verified"


def fit_all(rank: int, programs: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Train on two processes, and save the weights: program -> the losses of the steps."""
    found: dict[str, Any] = {}
    for name in programs:
        own = module("bias")
        loader = None
        if name == "zero3":  # each replica draws its half of the batch
            sampler = DistributedSampler(Rows(), num_replicas=2, rank=rank, shuffle=False)
            loader = DataLoader(Rows(), batch_size=SAMPLES // 2, sampler=sampler)
        trainer = fit(own, piper.PiperStrategy(**PROGRAMS[name]), devices=2, loader=loader)
        trainer.save_checkpoint(folder / f"{name}.ckpt", weights_only=True)
        found[name] = own.losses
    return found


@pytest.mark.long
def test_processes_train_as_one_device(tmp_path):
    programs = ("zero3", "pp2", "classes", "ring")
    ranks = launch_trainings(2, fit_all, tmp_path, programs, tmp_path)
    one = alone("bias")
    for name in programs:
        weights = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        torch.testing.assert_close(weights, dict(one.state_dict()), rtol=0, atol=1e-12, msg=name)
        assert name == "zero3" or all(
            losses[name] == pytest.approx(one.losses, rel=0, abs=1e-12) for losses in ranks
        )


@pytest.mark.parametrize("values", [None, {"*": 1}])
def test_ranks_compute_the_scores_of_their_classes_only(values):
    (batch,) = [{name: x[None].repeat(8, *(1,) * x.ndim) for name, x in Rows(1).rows[0].items()}]
    compiled = piper.compile(module("plain"), batch, of_head(values)["directives"])
    graphs = [code.graph for code in compiled.step.member.at(8).code.values()]
    seen = {
        node.target: node.args
        for graph in graphs
        for node in graph.nodes
        if node.target in chunked_scores.CHUNKED
    }
    assert seen.keys() == {chunked_scores.SCORES_OF_PART, chunked_scores.SCORES_BACKWARD}
    assert seen[chunked_scores.SCORES_OF_PART][1].meta["val"].shape == (1, CLASSES // 2, DIM)


def test_search_of_shards_finds_the_classes():
    batch = {name: x[None].repeat(8, *(1,) * x.ndim) for name, x in Rows(1).rows[0].items()}
    *_, shard = piper.tensor_parallel(module("bias"), batch, 2)
    assert shard.params["head.weight"] == 0


# Negative controls


class WrongCount(Chunked):
    """The loss divides by the number of rows of all chunks, instead of the rows that count."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses = piper.linear_cross_entropy(
            self.hidden(batch), self.head.weight, batch["labels"], reduction="sum", chunk=5
        )
        return losses / batch["labels"].numel()


def test_a_wrong_denominator_shows():
    torch.manual_seed(0)
    wrong = WrongCount("plain").double()
    fit(wrong, piper.PiperStrategy(**PROGRAMS["pp2"], transport="local"))
    assert abs(wrong.losses[0] - alone("plain").losses[0]) > 1e-2


def test_microbatches_weigh_by_their_rows_that_count():
    """With equal weights for parts, as DDP has them, the numbers differ."""
    own = module("plain")
    equal = [piper.Place(devices=[0, 1]), piper.Replicate(devices=[0, 1], average="replicas")]
    fit(own, piper.PiperStrategy(equal, transport="local"))
    assert abs(own.losses[0] - alone("plain").losses[0]) > 1e-4


SHARDED = Sharded(0)
WRONG = {
    "scores": Rule((R, SHARDED, R), (R, R)),  # the targets of other ranks
    "scores of classes": Rule((R, SHARDED, R, SHARDED), (R, SHARDED)),  # the targets of other ranks
    "gradients": Rule(
        (R, R, R, SHARDED, R, R, SHARDED), (R, SHARDED, R)
    ),  # each rank's term of hidden's gradient
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refuted(name):
    def functions(h: Tensor, w: Tensor, i: Tensor) -> Any:
        ids, ops, rows = torch.arange(8), torch.ops.lightning_piper, h[:, 0]
        return (
            ops.chunked_scores(h, w, None, i, 5),
            ops.chunked_scores_part(h, w.view(2, 4, 16), None, i, ids, 5, 8),
            ops.chunked_scores_backward(rows, rows, h, w, None, i, rows, ids, 5, [True, True, False]),
        )

    inputs = torch.randn(12, 16), torch.randn(8, 16), torch.randint(8, (12,))
    graph = make_fx(functions, tracing_mode="fake")(*inputs).graph
    nodes = [node for node in graph.nodes if node.target in chunked_scores.CHUNKED]
    node = dict(zip(WRONG, nodes, strict=True))[name]
    for rule in chunked_scores.CHUNKED[node.target](node):
        proof.prove(node, rule, 2)
    with pytest.raises(piper.VerificationError, match=r"the rule of .* is wrong"):
        proof.prove(node, WRONG[name], 2)


def test_a_chunk_left_out_shows(monkeypatch):
    original = chunked_scores._ranges
    monkeypatch.setattr(chunked_scores, "_ranges", lambda *args: list(original(*args))[:-1])
    (hidden, weight, _), target = given()
    found = piper.linear_cross_entropy(hidden, weight, target, chunk=4)
    assert not torch.allclose(found, F.cross_entropy(F.linear(hidden, weight).mT, target))


def test_a_target_that_is_no_class_is_an_error():
    """Also if each rank has only some of the classes."""
    hidden, weight = torch.randn(4, 8), torch.randn(6, 8)
    for target in (torch.tensor([0, 6, 1, 2]), torch.tensor([0, -1, 1, 2])):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
            piper.linear_cross_entropy(hidden, weight, target)
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
            part = torch.ops.lightning_piper.chunked_scores_part
            part(hidden, weight[None, 3:], None, target, torch.arange(3, 6), 0, 6)
