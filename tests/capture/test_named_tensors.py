"""Parameters and buffers that are not dense tensors: the error names them, and the step that it advises
trains.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture.steps.named_tensors import named_tensors
from tests.strategy.fitting import Batches, local, trainer

DENSE = torch.eye(4).roll(1, 0) + torch.eye(4)


@pytest.mark.parametrize(
    "kind, tensor",
    [
        ("torch.sparse_coo", DENSE.to_sparse()),
        ("torch.sparse_csr", DENSE.to_sparse_csr()),
        ("torch.sparse_bsr", DENSE.to_sparse_bsr((1, 1))),
        ("torch._mkldnn", DENSE.to_mkldnn()),
        ("quantized", torch.quantize_per_tensor(DENSE, 0.5, 0, torch.qint8)),
        ("nested", torch.nested.nested_tensor([DENSE, DENSE[:2]])),
    ],
)
def test_a_tensor_that_is_not_dense(kind, tensor):
    module = nn.Linear(4, 4)
    module.register_buffer("graph", tensor)
    with pytest.raises(
        piper.PiperError, match=rf"buffer 'graph' is not a dense tensor \({kind}\).*[Rr]egister"
    ):
        named_tensors(module)
    module.graph = DENSE
    assert "graph" in named_tensors(module)[1]


class Graph(L.LightningModule):
    """A graph network whose edges are in two dense buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sparse = DENSE.double().to_sparse().coalesce()
        self.register_buffer("indices", sparse.indices())
        self.register_buffer("values", sparse.values())
        self.first, self.second = nn.Linear(3, 5).double(), nn.Linear(5, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        graph = torch.sparse_coo_tensor(self.indices, self.values, (4, 4))
        with piper.annotate("PP", 0):
            h = torch.tanh(self.first(torch.stack([torch.sparse.mm(graph, x) for x in batch])))
        with piper.annotate("PP", 1):
            return self.second(h).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_sparse_matrix_that_the_step_makes():
    batches = Batches(
        torch.randn(3, 4, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    trained = []
    for strategy in (local(piper.schedules.one_f_one_b(stages=2, microbatches=1)), "auto"):
        trained.append(Graph())
        trainer(strategy)[0].fit(trained[-1], batches)
    one, other = (x.state_dict() for x in trained)
    assert all(float((one[name] - other[name]).abs().max()) < 1e-15 for name in one)
    assert float((one["first.weight"] - Graph().first.weight).abs().max()) > 1e-3
