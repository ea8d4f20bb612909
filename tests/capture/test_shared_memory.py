"""A write in place into a result also changes the argument whose memory the result shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_piper.capture import capture
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import LOSS
from lightning_piper.ops.build import build_dag
from lightning_piper.verify.interpreter import interpret

Share = Callable[[Tensor], Tensor]
SHARING: dict[str, Share] = {
    "dropout that does not train": lambda x: F.dropout(x, 0.5, False),
    "dropout with probability 0": nn.Dropout(0.0),
    "torch.dropout": lambda x: torch.dropout(x, 0.0, True),
    "feature dropout": lambda x: F.dropout1d(x, 0.0),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5),
    "reshape": lambda x: x.reshape(-1),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(x.dtype),
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "data": lambda x: x.data,
    "chunk": lambda x: x.chunk(2, 1)[1],
}
HIDDEN: dict[str, Share] = {
    "unsafe_chunk": lambda x: x.unsafe_chunk(2, 1)[1],
    "unsafe_split": lambda x: torch.unsafe_split(x, 2, 1)[1],
    "unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [1, 3], 1)[1],
}
COPYING: dict[str, Share] = {
    "clone": lambda x: x.clone(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "nan_to_num": lambda x: x.nan_to_num(),
}


class Net(nn.Module):
    def __init__(self, share: Share) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.share = nn.Linear(4, 4), share

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch + 1
        self.share(x).add_(1)
        return (self.layer(batch) * x).square().mean()


@pytest.mark.parametrize("name", [*SHARING, *COPYING])
def test_a_captured_write_changes_the_argument_as_in_eager_mode(name: str) -> None:
    module, batch = Net((SHARING | COPYING)[name]), torch.rand(4, 4)
    expected, x = module.training_step(batch, 0), batch + 1
    changed = x.clone()
    module.share(changed).add_(1)
    assert torch.equal(changed, x) == (name in COPYING)
    tensors = {key: x.detach() for key, x in module.named_parameters()}
    loss = interpret(build_dag(capture(module, batch)), tensors, [batch]).metrics[LOSS]
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.parametrize("name", HIDDEN)
def test_an_operation_that_hides_the_shared_memory_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=rf"calls {name}\. .* Call (chunk|split) in its place"):
        capture(Net(HIDDEN[name]), torch.rand(4, 4)).at(4)


def test_a_layer_of_torch_may_use_such_operations() -> None:
    module = Net(lambda x: cell(x)[0])
    module.cell = cell = nn.LSTMCell(4, 4)
    assert capture(module, torch.rand(4, 4)).at(4).regions
