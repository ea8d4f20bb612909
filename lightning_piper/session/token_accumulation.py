"""Gradient accumulation by token count: each batch has the weight that it would have as a part of one large
batch.

Lightning computes the mean of the batches' losses, so a token of a batch with few tokens counts more. Here
batch b, whose loss has the denominator D_b, has the weight D_b / S, where S is the sum of all denominators. S
is not known before the last batch. So Piper accumulates the gradients of each batch times D_b / D_1, and
multiplies the total by D_1 / S at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.ir.regions import LOSS
from lightning_piper.ir.terms import Term, Weighing
from lightning_piper.ir.values import Kind, Slice
from lightning_piper.processes.world import World


class TokenAccumulation:
    """The weights of the batches of successive accumulations. Collective.

    Args:
        ownership: The module's tensors on the processes.
        local: Whether this process has the batches of all replicas.
    """

    def __init__(self, world: World, ownership: Ownership, local: bool) -> None:
        self._world, self._ownership, self._local = world, ownership, local
        self._first: float | None = None  # denominator of the accumulation's first batch; None before it
        self._total = 0.0  # sum of the denominators of the accumulation's batches so far

    def weigh(
        self, compiled: Compiled, leaves: Sequence[torch.Tensor], last: bool
    ) -> tuple[float, float | None]:
        """Return the factor on the gradients of the next batch, and the factor on the sum of the gradients.
        The second factor is None before the last batch of an accumulation, and for a loss that is a sum. The
        factor is NaN if the denominators of all batches are 0, because the mean over no tokens is NaN.

        Args:
            compiled: The program of the step.
            leaves: The batch's tensors, as this process has drawn them.
            last: Whether the batch is the last one of an accumulation.

        Raises:
            PiperError: The loss has terms with different denominators, or its gradients cannot be weighted.
        """
        term = _only_term(compiled)
        if term.weighing == Weighing.SUM:
            return 1.0, None
        here = self._denominator(compiled, term, leaves)
        self._first, self._total = (here or 1.0) if self._first is None else self._first, self._total + here
        factor = here / self._first
        if not last:
            return factor, None
        closing = self._first / self._total if self._total else float("nan")
        self._first, self._total = None, 0.0
        return factor, closing

    def _denominator(self, compiled: Compiled, term: Term, leaves: Sequence[torch.Tensor]) -> float:
        """Return the denominator of a batch's loss over all replicas: the number of samples, or a count that
        the step computes from the batch. Collective."""
        if term.denominator is None:
            return float(compiled.dag.size)
        size = compiled.dag.size if self._local else compiled.dag.local_batch_size
        code = compiled.step.at(size).terms[_place(compiled)].denominator
        assert code is not None
        counts = torch.zeros(code.width, dtype=torch.float64)
        if self._local or self._counts(code.buffers):
            buffers = {name: self._ownership.owned_buffers[name].detach() for name in code.buffers}
            counts = code.counted(leaves, buffers, Slice(0, size)).cpu()
        if self._world.size > 1:
            dist.all_reduce(counts, group=self._world.host_group)
        return float(code.of(counts.unbind(0)))

    def _counts(self, buffers: tuple[str, ...]) -> bool:
        """Return whether this process counts the denominator of its replica: it is the replica's first
        process that holds the buffers."""
        held, world = self._ownership.tensor_map.held, self._world
        ranks = [rank for rank in range(world.size) if world.replicas[rank] == world.replica]
        having = [rank for rank in ranks if all(held(name, rank) is not None for name in buffers)]
        return having[:1] == [world.rank]


def _place(compiled: Compiled) -> int:
    """Return the index of the loss's term among the step's terms."""
    outputs = [
        out
        for interface in compiled.dag.code.interfaces.values()
        for out in interface.outputs
        if out.kind == Kind.LOSS
    ]
    return outputs[0].term or 0


def _only_term(compiled: Compiled) -> Term:
    """Return the only term of the step's loss.

    Raises:
        PiperError: The loss has several terms, or its gradients cannot be weighted.
    """
    outputs = [
        out
        for interface in compiled.dag.code.interfaces.values()
        for out in interface.outputs
        if out.kind == Kind.LOSS
    ]
    terms = [compiled.dag.code.terms[out.term or 0] for out in outputs]
    if compiled.dag.code.nonlinear is not None:
        raise PiperError(
            'PiperStrategy(accumulate="tokens") scales the gradient of each batch\'s loss, but the backward '
            "pass of "
            f"this step is not linear in this gradient: {compiled.dag.code.nonlinear}. Use "
            'accumulate="batches" [PIPER-S001]'
        )
    if len(terms) > 1:
        shown = ", ".join(term.label for term in terms)
        raise PiperError(
            f'PiperStrategy(accumulate="tokens"): {LOSS} is a sum of terms with different denominators '
            f"({shown}), so "
            "no single factor for a batch is right for all terms. Give all terms one denominator "
            "[PIPER-S001]"
        )
    if compiled.dag.mean_of_replicas:
        raise PiperError(
            'PiperStrategy(accumulate="tokens") with replicate(average="replicas"): each replica divides by '
            "its own "
            'number of tokens. Use average="batch" [PIPER-S001]'
        )
    return terms[0]
