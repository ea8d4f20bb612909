"""Draws training steps as source text: statements over Python state of many kinds, and hooks that change it
between the steps.
"""

from __future__ import annotations

import itertools
import linecache
import textwrap
import types
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

# How a number is kept: how it is made, read, and written.
PLACES = {
    "attribute": ("self.n0 = {}", "self.n0", "self.n0 = {}"),
    "submodule": ("self.second.n1 = {}", "self.second.n1", "self.second.n1 = {}"),
    "object": ("self.box.n2 = {}", "self.box.n2", "self.box.n2 = {}"),
    "slots": ("self.slots.n3 = {}", "self.slots.n3", "self.slots.n3 = {}"),
    "list": ("self.items[0] = {}", "self.items[0]", "self.items[0] = {}"),
    "dict": ("self.table['k'] = {}", "self.table['k']", "self.table['k'] = {}"),
    "namespace": ("self.space.n4 = {}", "self.space.n4", "self.space.n4 = {}"),
    "global": ("globals()['N5'] = {}", "N5", "globals()['N5'] = {}"),
    "class": ("Config.n6 = {}", "Config.n6", "Config.n6 = {}"),
    "closure": ("write_cell({})", "read_cell()", "write_cell({})"),
    "tuple": ("self.pair = ({}, 1)", "self.pair[0]", "self.pair = ({}, 1)"),
    "method": ("self.box.n7 = {}", "self.box.twice() / 2", "self.box.n7 = {}"),
}
COUNTERS = ("batch_idx", "self.global_step", "self.current_epoch", "self.trainer.global_step")
ARITHMETIC = ("{0}", "{0} * 0.5 + 1", "1 - {0} / 8", "math.cos({0})", "min(1.0, {0} / 3)", "abs({0}) ** 0.5",
    "round({0})",
              "{0} % 2", "{0} // 2", "float({0})", "int({0})", "max({0}, 1)", "-{0}")  # fmt: skip
TENSOR = ("h = h * ({0})", "h = h + ({0})", "h = ({0}) - h", "h = h / (1.5 + abs({0}))",
    "h = torch.where(h > ({0}), h, 0.5 * h)",
          "h = h.clamp(max=1.0 + abs({0}))", "h = torch.lerp(h, h.tanh(), {0})",
          "h = h + torch.full((WIDTH,), float({0}))",
          "h = h * torch.tensor([{0}] * WIDTH)", "h = h.add(h.tanh(), alpha={0})",
          "h = h + torch.arange(WIDTH) * ({0})",
          "h = h + self.second.bias.sum() * ({0})")  # fmt: skip
BRANCH = ("if ({0}) > 1:\n    h = h.tanh()", "h = h.tanh() if ({0}) % 2 == 0 else h",
          "for _ in range(int(abs({0})) % 3):\n    h = h.tanh()",
          "h = h * (2 if self.flag else 1)", "h = getattr(torch, self.name)(h)", "h = self.act(h)",
          "h = helper(h)",
          "h = h * self.scale", "h = h + self.target(h).detach()", "h = h if self.extra is None else h + "
                                                                   "self.extra",
          "self.log(f'n', {0})", "h = self.layers[int(abs({0})) % 2](h)",
          "h = self.by_name[self.name](h)")  # fmt: skip
LOSS = (
    "loss = loss * (1 + abs({0}))",
    "loss = loss + ({0}) * h.pow(2).mean()",
    "self.log('scaled', loss * ({0}))",
    "pass",
)
CHANGES = (
    "self.flag = not self.flag", "self.name = {'tanh': 'sigmoid', 'sigmoid': 'tanh'}[self.name]",
    "self.act = [nn.Tanh(), nn.Sigmoid(), nn.LeakyReLU(0.1 * i)][i % 3]",
    "globals()['helper'] = [torch.tanh, torch.sigmoid][i % 2]",
    "self.scale = self.scale * 1.25", "self.scale.mul_(1.5)", "self.target.weight.data = "
                                                              "self.target.weight.data * 0.9",
    "self.target.weight.data.add_(0.1)", "self.extra = [None, 0.5, 1][i % 3]",
    "self.act.negative_slope = 0.1 * i",
    "self.layers[0].forward = torch.tanh", "self.items.append(i)", "self.unread = i",
)  # fmt: skip
VALUES = (
    "{0} + 1",
    "{0} * 1.5",
    "i",
    "i % 2",
    "0.5 + i",
    "[1, 1.0, True, 2][i % 4]",
    "3 if i == 2 else 0.25",
    "{0}",
)

SOURCE = """
import math
from types import SimpleNamespace
import lightning as L
import torch
from torch import nn
import lightning_piper as piper

WIDTH = 3
N5 = 1.0
helper = torch.tanh

class Config:
    n6 = 1.0

class Box:
    n7 = 1.0
    def twice(self):
        return 2 * self.n7

class Slots:
    __slots__ = ("n3",)

def cell():
    value = 1.0
    def read():
        return value
    def write(new):
        nonlocal value
        value = new
    return read, write

read_cell, write_cell = cell()

class Drawn(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList([nn.Identity(), nn.Tanh()])
        self.by_name = nn.ModuleDict({{"tanh": nn.Tanh(), "sigmoid": nn.Sigmoid()}})
        self.register_buffer("scale", torch.ones(WIDTH))
        self.flag, self.name, self.act, self.extra = True, "tanh", nn.LeakyReLU(0.2), None
        self.box, self.slots, self.space, self.items, self.table = Box(), Slots(), SimpleNamespace(), [0], {{}}
{made}

    def training_step(self, batch, batch_idx):
        with piper.annotate("PP", 0):
            h = self.first(batch["x"])
{front}
        with piper.annotate("PP", 1):
{back}
            loss = self.second(h).pow(2).mean()
{loss}
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, batch, i):
{start}

    def on_train_batch_end(self, outputs, batch, i):
{end}

    def on_train_epoch_start(self):
        i = self.current_epoch
{epoch}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)
"""
_numbers = itertools.count()


@dataclass(frozen=True)
class Drawn:
    """Attributes:
    text: source of the module.
    batches: of each epoch, with names or numbers beside the tensors.
    microbatches: how many.
    """

    text: str
    batches: tuple[Any, ...]
    microbatches: int

    def module(self) -> Any:
        """A new one, in a Python module of its own, in double precision."""
        file = f"/drawn/step{next(_numbers)}.py"
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(True), file)
        space = types.ModuleType(file.removesuffix(".py").rpartition("/")[2])
        exec(compile(self.text, file, "exec"), vars(space))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return space.Drawn().double()  # type: ignore[attr-defined]


@st.composite
def drawn_steps(draw: Any) -> Drawn:
    names = draw(st.lists(st.sampled_from(sorted(PLACES)), min_size=1, max_size=3, unique=True))
    reads = [PLACES[name][1] for name in names]
    beside = draw(st.sampled_from(["", "names", "number"]))

    def number() -> str:
        source = draw(
            st.sampled_from([*reads, *reads, *COUNTERS, *(["batch['number']"] if beside == "number" else [])])
        )
        return str(draw(st.sampled_from(ARITHMETIC)).format(source))

    def statements(kinds: tuple[str, ...], most: int, indent: int) -> str:
        found = [draw(st.sampled_from(kinds)).format(number()) for _ in range(draw(st.integers(0, most)))]
        return _block(found, indent)

    def changes(most: int) -> str:
        found = []
        for _ in range(draw(st.integers(0, most))):
            name = draw(st.sampled_from(names))
            value = draw(st.sampled_from(VALUES)).format(PLACES[name][1])
            found.append(
                draw(st.sampled_from([PLACES[name][2].format(value), draw(st.sampled_from(CHANGES))]))
            )
        return _block(found, 8)

    text = SOURCE.format(
        made=_block(
            [PLACES[name][0].format(draw(st.sampled_from(["1", "0.5", "2.0", "0"]))) for name in names], 8
        ),
        front=statements(TENSOR + BRANCH[:2], 1, 12),
        back=statements(TENSOR + BRANCH, 3, 12),
        loss=statements(LOSS, 1, 12),
        start=changes(1),
        end=changes(3),
        epoch=changes(1),
    )
    generator = torch.Generator().manual_seed(1)
    batches = []
    for i in range(draw(st.sampled_from([5, 5, 3]))):
        batch: dict[str, Any] = {"x": torch.randn(4, 2, generator=generator, dtype=torch.float64)}
        if beside == "names":
            batch["names"] = ["a", "b", "c", f"d{i}"]
        elif beside == "number":
            batch["number"] = i // 2
        batches.append(batch)
    return Drawn(text, tuple(batches), draw(st.sampled_from([1, 2])))


def _block(lines: list[str], indent: int) -> str:
    return textwrap.indent("\n".join(lines) or "pass", " " * indent)
