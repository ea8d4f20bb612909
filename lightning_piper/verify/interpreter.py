"""The reference interpreter: runs any training DAG in one process, with all devices simulated.

It visits the nodes in topological order, one by one, and runs the reference semantics of their operations in
plain tensor arithmetic. It does not use plans, streams or schedules. The executor must give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx
import torch

from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Ref
from lightning_piper.ops.base import made_by
from lightning_piper.ops.reference import Reference


def interpret(
    dag: TrainingDAG, tensors: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor], seed: int = 0
) -> Outcome:
    """Run one step, and return its outcome.

    Args:
        dag: Any training DAG, finished or not. Nodes without a device also run.
        tensors: Parameters and buffers by canonical name. They are not changed.
        leaves: The tensors of the global batch.
        seed: The seed of the step's random numbers.

    Raises:
        VerificationError: The DAG has a cycle, devices disagree about a gradient, or an operation does not
            return tensors.
    """
    if not nx.is_directed_acyclic_graph(dag.graph):
        raise VerificationError(
            "the training DAG has a cycle. If you wrote a directive, check the edges that it adds. "
            "Otherwise, report this [PIPER-D008]"
        )
    run = Reference(dag, tensors, leaves, seed)
    readers: dict[Ref, int] = {}
    for node in dag.nodes.values():
        for ref in node.reads:
            readers[ref] = readers.get(ref, 0) + 1
    with torch.no_grad():
        for node_id in nx.lexicographical_topological_sort(dag.graph):
            node = dag.nodes[node_id]
            read = [i for i in range(len(node.outputs)) if (node_id, i) in readers]
            made = made_by(run, node, read)
            for i in read:
                for group_rank in run.group_ranks:
                    run.values[(node_id, i), group_rank] = made[group_rank][i]
            for ref in node.reads:
                readers[ref] -= 1
                if not readers[ref]:
                    for group_rank in run.group_ranks:
                        del run.values[ref, group_rank]
    return Outcome(run.metrics, run.grads, run.buffers, run.results, run.slack, tuple(run.approximate))
