"""A step as one functional graph, and the meaning of the graph's outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_piper.ir.metric_calls import MetricCalls
from lightning_piper.ir.regions import Logged, Output


@dataclass(frozen=True)
class TracedGraph:
    """A step as one functional graph: forward, and in a training step also backward.

    Attributes:
        graph: The functional graph, with torch's descriptors of its placeholders and outputs.
        plain: Kind and names of each value that the traced function returns. In the graph, these are the
            outputs with torch's descriptor `PlainAOTOutput`.
        logs: The `self.log` calls, in order.
        metrics: The step's calls of metric objects.
    """

    graph: torch.fx.Graph
    plain: tuple[Output, ...]
    logs: tuple[Logged, ...]
    metrics: MetricCalls
