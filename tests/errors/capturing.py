"""Errors at the first batch, when Piper captures the training step."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.compiler import compile_step
from lightning_piper.directives import parse
from tests.errors.case import SPLIT, Case, Cases, batch, net, step

TITLE = "The first batch: capture"
INTRO = """Piper raises these errors when it traces the training step: at the first batch of a `fit`, in `piper.compile` and \
in `piper.verify`. Most rows add a line to the step of this file:

```python
{TRAIN}
```"""


def given(what: str, data: Any) -> Case:
    return Case(what, lambda: capture(net(), data))


def resized() -> None:
    """Run two stages in microbatches, in which the batch's size decides which operations run."""
    step = capture(net('self.log("large", loss) if len(x) > 4 else None'), batch())
    compile_step(step, (piper.Split(**{k: v for k, v in SPLIT.items() if k != "op"}),))


def resized_metric() -> None:
    """Run the same with a list that has a tensor for each sample."""
    line = "from torchmetrics import MeanMetric\n        self.mean = MeanMetric()\n        self.seen, "
    step = capture(net("self.mean.update([row for row in x])", ("self.seen, ", line)), batch())
    compile_step(step, (piper.Split(**{k: v for k, v in SPLIT.items() if k != "op"}),))


def sharing(line: str) -> None:
    """Fit a module with a further line in `__init__`."""
    last = "self.seen, self.plain = [], torch.ones(())"
    capture(net("self.scale.add_(1)", (last, f"{last}; {line}")), batch()).at(8)


def listed(line: str, more: Any, split: bool) -> None:
    """Fit a step whose batches have an item in addition to their two tensors."""
    step = capture(net(line, ("x, y = batch", "x, y, more = batch")), (*batch(4), more))
    compile_step(step, (piper.Split(filter={}, dim_name="MB", num_microbatches=2),) if split else ())


class Meta:
    """An item of a batch besides its tensors."""

    scale = 2.0


def uneven(directive: dict[str, Any]) -> None:
    """Apply a directive to a step whose batch also has a table."""
    step = capture(net("pass", ("x, y = batch", "x, y, table = batch")), (*batch(4), batch(10)[0]))
    compile_step(
        step,
        tuple(parse([{"op": "place", "filter": {}, "devices": directive.get("devices", [0])}, directive])),
    )


def scored(**given: Any) -> None:
    """Call `linear_cross_entropy` with invalid arguments."""
    valid = {"input": torch.ones(3, 8), "linear_weight": torch.ones(10, 8), "target": torch.zeros(3).long()}
    piper.linear_cross_entropy(**{**valid, **given})


CASES: Cases = [
    step("a tensor decides in `if`", "loss = 2 * loss if loss > 1 else loss"),
    step("a number from a tensor (`.item()`) decides in `if`", "loss = 2 * loss if loss.item() > 1 else "
                                                               "loss"),
    step("a tensor's value is an index or a number of loop "
         "iterations", "loss = loss + h[int(y.sum())].mean()"),
    step("a tensor's value is in the name of a logged value", "self.log(f'loss {loss.item()}', loss)"),
    step("a tensor's value is the `batch_size` of a logged value", "self.log('loss', loss, batch_size=int(y.sum()))"),
    step("a text of a tensor's value is used", "loss = loss * len(str(loss.item()))"),
    step("a shape depends on values", "loss = loss + h[h > 0].mean()"),
    step("random numbers are drawn in Python", "import random; loss = loss * random.random()"),
    step("a `torch.Generator` is given", "loss = loss * torch.rand((), generator=torch.Generator())"),
    step("the step reads the gradient of the previous step", "loss = loss if self.first.weight.grad is None "
                                                             "else 2 * loss"),
    step("the values of a parameter are replaced", "self.first.weight.data = 0.9 * self.first.weight.data"),
    step("a list of the module grows", "self.seen.append(loss.detach())"),
    step("a file is written", "open('losses.txt', 'a').write('step')"),
    step("an attribute of the module changes", "self.last_loss = loss.detach()"),
    step("a buffer is replaced instead of written into", "self.scale = loss.detach()"),
    step("a parameter is changed in place", "self.first.weight.data.clamp_(-1, 1)"),
    step("an attribute is a tensor but not a buffer", "loss = loss * self.plain"),
    step("one name is logged twice", 'self.log("loss", loss); self.log("loss", 2 * loss)'),
    step("a matrix is logged", 'self.log("hidden", h)'),
    step("a logged value is not a number", 'self.log("kind", "mse")'),
    step("a metric object is not an attribute of the module", "self.seen[0].update(loss.detach())",
         ("self.seen, ", "from torchmetrics import MeanMetric\n        self.seen, "),
         ("= [], torch.ones(())", "= [MeanMetric()], torch.ones(())")),
    step("the step computes with the value of a metric object", "loss = loss * self.mean(h)",
         ("self.seen, ", "from torchmetrics import MeanMetric\n        self.mean = MeanMetric()\n        "
                         "self.seen, ")),
    step("`reduce_fx` cannot be merged over microbatches", 'self.log("loss", loss, reduce_fx=torch.median)'),
    step("the step returns more than the loss", 'return {"loss": loss, "hidden": h}'),
    step("the step returns one loss for each sample", "return (self.second(h) - y).square()"),
    step("the step returns None, to skip a batch", "return None"),
    step("the loss does not depend on a parameter", "return loss.detach()"),
    step("tensors whose shapes do not fit (errors of the step itself stay unchanged)", "loss = loss + h @ h"),
    step("a sparse gradient", "loss = loss + self.embed(torch.zeros(len(x), dtype=torch.long)).mean()",
         ("self.seen, ", "self.embed = nn.Embedding(5, 4, sparse=True)\n        self.seen, ")),
    step("a sparse buffer", "pass",
         ("self.seen, ", 'self.register_buffer("graph", torch.eye(4).to_sparse())\n        self.seen, ')),
    step("`annotate` with a tag that is reserved", "pass", ('annotate("PP", 0)', 'annotate("PASS", 0)')),
    step("`annotate` with an invalid index", "pass", ('annotate("PP", 0)', 'annotate("PP", -1)')),
    Case("`annotate_modules` with a pattern that does not match a module",
         lambda: piper.annotate_modules(net(), "PP", [["layers.*"]])),
    Case("`annotate_modules` gives one module two indices",
         lambda: piper.annotate_modules(net(), "PP", [["first"], ["first", "second"]])),
    Case("`annotate_modules` with text instead of a list",
         lambda: piper.annotate_modules(net(), "PP", ["first", "second"])),  # type: ignore[list-item]
    Case("the module does not have a `training_step`", lambda: capture(nn.Linear(8, 1), batch())),
    given("the batch holds a sparse tensor", (*batch(), batch()[0].to_sparse())),
    Case("an object of the batch, `more`, is read: `loss = loss * more.scale`",
         lambda: listed("loss = loss * more.scale", Meta(), False)),
    Case("something that the batch carries is changed: "
         "`more.append(1)`", lambda: listed("more.append(1)", [1, 2, 3, 4], False)),
    Case("a numpy array of the batch, `more`, is computed with: `loss = loss + more.mean()`",
         lambda: listed("loss = loss + more.mean()", batch(4)[0].numpy(), False)),
    Case("two parameters in one memory: `self.second.bias.data = self.first.bias.data[:1]` in `__init__`",
         lambda: sharing("self.second.bias.data = self.first.bias.data[:1]")),
    Case("a buffer in the memory of a parameter: `self.register_buffer('bias', self.first.bias.data)` in "
         "`__init__`",
         lambda: sharing("self.register_buffer('bias', self.first.bias.data)")),
    Case("a buffer in the memory of one that the step changes: `self.register_buffer('view', "
         "self.scale.view(1))`",
         lambda: sharing("self.register_buffer('view', self.scale.view(1))")),
    Case("in microbatches, a list with one entry for each sample, `more`, is read: `loss = loss * "
         "torch.tensor(more).mean()`",
         lambda: listed("loss = loss * torch.tensor(more).mean()", [1.0, 2.0, 3.0, 4.0], True)),
    Case("the same with entries that are objects, without microbatches: `loss = loss * more[0].scale`",
         lambda: listed("loss = loss * more[0].scale", [Meta()] * 4, False)),
    Case("in microbatches, a list is read that may hold samples, or parts of all samples: `loss = loss * "
         "more[0]['w'].mean()`",
         lambda: listed("loss = loss * more[0]['w'].mean()", [{"w": batch(4)[0]} for _ in range(4)], True)),
    Case("tensors of the batch with different numbers of samples, in microbatches", lambda: uneven(SPLIT)),
    Case("the same with replicas whose batches come from one process",
         lambda: uneven({"op": "replicate", "filter": {}, "devices": [0, 1]})),
    given("a batch without samples", batch(0)),
    Case("the step's operations depend on the batch size, in microbatches", resized),
    Case("a metric object gets more tensors of more samples, in microbatches", resized_metric),
    Case("`linear_cross_entropy` of tensors that do not fit", lambda: scored(input=torch.ones(2, 3, 8))),
    Case("`chunk_loss` of a step without a cross entropy of a linear layer",
         lambda: compile_step(capture(net("pass"), batch()), (piper.ChunkLoss(),))),
    Case("`linear_cross_entropy` of probabilities", lambda: scored(target=torch.ones(3, 10))),
    Case("`linear_cross_entropy` of a module instead of its weight",
         lambda: scored(linear_weight=nn.Linear(8, 10))),
    Case("`linear_cross_entropy` of several dtypes", lambda: scored(input=torch.ones(3, 8).double())),
    *(Case(f"`linear_cross_entropy` with `{name}={value!r}`", functools.partial(scored, **{name: value}))
      for name, value in [("reduction", "batchmean"), ("ignore_index", None), ("label_smoothing", 2), ("chunk", 0)]),
]  # fmt: skip
