"""The first batch: the training step becomes a graph."""

from __future__ import annotations

from typing import Any

from torch import nn

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.compiler import compile_step
from tests.errors.case import SPLIT, Case, Cases, batch, net, step

TITLE = "The first batch: capture"
INTRO = """When the training step is traced: at the first batch of a `fit`, in `piper.compile` and `piper.verify`. All rows \
but the last ones are lines added to the step of this file:

```python
{TRAIN}
```"""


def given(what: str, data: Any) -> Case:
    return Case(what, lambda: capture(net(), data))


def resized() -> None:
    """Two stages in which the batch's size decides what is done, in microbatches."""
    step = capture(net('self.log("large", loss) if len(x) > 4 else None'), batch())
    compile_step(step, (piper.Split(**{k: v for k, v in SPLIT.items() if k != "op"}),))


CASES: Cases = [
    step("a tensor's value is asked for", "loss = loss / loss.item()"),
    step("a tensor decides in `if`", "loss = 2 * loss if loss > 1 else loss"),
    step("a shape depends on values", "loss = loss + h[h > 0].mean()"),
    step("`batch_idx` is read", "loss = loss * (batch_idx + 1)"),
    step("`self.global_step` is read", "loss = loss / (self.global_step + 1)"),
    step("a list of the module grows", "self.seen.append(loss.detach())"),
    step("an attribute of the module changes", "self.last_loss = loss.detach()"),
    step("a buffer is replaced instead of written into", "self.scale = loss.detach()"),
    step("a parameter is changed in place", "self.first.weight.data.clamp_(-1, 1)"),
    step("a tensor that is no buffer", "loss = loss * self.plain"),
    step("one name is logged twice", 'self.log("loss", loss); self.log("loss", 2 * loss)'),
    step("a matrix is logged", 'self.log("hidden", h)'),
    step("something else than a number is logged", 'self.log("kind", "mse")'),
    step("`reduce_fx` cannot be merged over microbatches", 'self.log("loss", loss, reduce_fx=torch.median)'),
    step("the step returns more than the loss", 'return {"loss": loss, "hidden": h}'),
    step("the step returns one loss for each sample", "return (self.second(h) - y).square()"),
    step("the step returns nothing, to skip a batch", "return None"),
    step("the loss depends on no parameter", "return loss.detach()"),
    step("tensors whose shapes do not fit (what the step itself raises stays what it is)", "loss = loss + h @ h"),
    step("a draw from Python's or NumPy's generators", "import random; loss = loss * random.random()"),
    step("a tensor that the step before has kept in an object",
         "keep = self.config; loss = loss + getattr(keep, 'h', h).mean(); keep.h = h.detach()",
         ("self.seen, ", "self.config, self.seen, "), ("= [], torch.ones(())", "= type('Config', (), {})(), [], torch.ones(())")),
    step("a sparse gradient", "loss = loss + self.embed(torch.zeros(len(x), dtype=torch.long)).mean()",
         ("self.seen, ", "self.embed = nn.Embedding(5, 4, sparse=True)\n        self.seen, ")),
    step("`annotate` with a tag that is reserved", "pass", ('annotate("PP", 0)', 'annotate("PASS", 0)')),
    step("`annotate` with an index that is none", "pass", ('annotate("PP", 0)', 'annotate("PP", -1)')),
    Case("`annotate_modules` with a pattern that matches nothing", lambda: piper.annotate_modules(net(), "PP", [["layers.*"]])),
    Case("`annotate_modules` gives one module two indices",
         lambda: piper.annotate_modules(net(), "PP", [["first"], ["first", "second"]])),
    Case("`annotate_modules` with a text in place of a list", lambda: piper.annotate_modules(net(), "PP", ["first", "second"])),  # type: ignore[list-item]
    Case("the module has no training step", lambda: capture(nn.Linear(8, 1), batch())),
    given("the batch holds something that is no tensor", (*batch(), {1, 2})),
    given("tensors of the batch with different numbers of samples", (batch(8)[0], batch(4)[1])),
    given("a batch without samples", batch(0)),
    given("a batch without tensors", {"name": "x"}),
    Case("the step's operations depend on the batch size, in microbatches", resized),
]  # fmt: skip
