"""Nodes -> instructions: the training DAG in one global order, each node on each of its devices."""

from __future__ import annotations

from collections.abc import Callable

from lightning_piper.errors import VerificationError
from lightning_piper.ir import nodes
from lightning_piper.ir.build import reductions
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node, Ref
from lightning_piper.ir.values import Shard
from lightning_piper.plan import instructions as ins
from lightning_piper.plan.acks import Acks
from lightning_piper.plan.device import DevicePlan, about
from lightning_piper.plan.fold import Fold
from lightning_piper.plan.instructions import Read


class Lowering:
    """Attributes:
    plans: the devices' plans as they grow.
    """

    def __init__(self, dag: TrainingDAG) -> None:
        acks = Acks(dag.devices())
        self.plans = {device: DevicePlan(dag, device, acks) for device in dag.devices()}
        self._dag = dag
        self._reductions = reductions(dag.code)
        self._folds: dict[tuple[int, int], Fold] = {}  # (device, node) -> its sum
        self._terms: dict[tuple[int, Ref], list[tuple[Fold, int]]] = {}  # (device, value) -> sums it is a term of
        self._read: set[tuple[int, Ref]] = set()
        self._made: dict[int, list[Ref]] = {device: [] for device in self.plans}  # by the last chunk
        self._received: dict[int, list[Ref]] = {device: [] for device in self.plans}  # terms from other devices, since then
        self._emit: dict[type[Node], Callable[[DevicePlan, Node], None]] = {
            nodes.Chunk: self._chunk, nodes.Send: self._send, nodes.Recv: self._recv, nodes.Accumulate: self._accumulate,
            nodes.Update: self._update, nodes.Result: self._result, nodes.Metrics: self._metrics, nodes.Report: self._report,
            **dict.fromkeys((nodes.AllReduce, nodes.ReduceScatter, nodes.AllGather, nodes.AllToAll), self._collective),
            # These come to be when they are first read, the last two have had their effect.
            **dict.fromkeys((nodes.Cut, nodes.Concat, nodes.Pack, nodes.Parameters, nodes.Barrier), lambda plan, node: None),
        }  # fmt: skip

    def run(self, order: list[Node]) -> None:
        self._survey()
        for node in order:
            emit = self._emit[type(node)]
            for device in node.devices:
                emit(self.plans[device], node)
        for plan in self.plans.values():
            plan.finish()

    def _survey(self) -> None:
        """Who reads what, and what is a term of which sum."""
        for node in self._dag.nodes.values():
            if not node.devices:
                raise VerificationError(f"%{node.id} {node.label} has no device")
            if isinstance(node, nodes.Recv):
                continue  # it reads the channel, not the value
            for device in node.devices:
                self._read.update((device, ref) for ref in node.reads)
                if isinstance(node, nodes.Accumulate):
                    fold = self._folds[device, node.id] = Fold(self.plans[device], node)
                    for i, ref in enumerate(fold.terms):
                        self._terms.setdefault((device, ref), []).append((fold, i))

    def _offer(self, plan: DevicePlan) -> None:
        """Add what the last chunk has made to the sums it is a term of."""
        for ref in self._made[plan.device]:
            for fold, index in self._terms.get((plan.device, ref), ()):
                fold.offer(index)

    def _chunk(self, plan: DevicePlan, node: Node) -> None:
        assert isinstance(node, nodes.Chunk)
        self._offer(plan)  # only now: what the last chunk had to send went first
        reads = [plan.read(ref, node) for ref in node.inputs]
        place: dict[Ref, int] = {}
        state: list[tuple[int, int] | None] = []
        for name, ref in zip(self._dag.interface(node).state, node.state, strict=True):
            if ref is None:
                state.append(None)
                continue
            if ref not in place:
                place[ref] = len(reads)
                reads.append(plan.read(ref, node))
            state.append((place[ref], self._dag.value(ref).names.index(name)))
        params: list[tuple[int, int] | None] = []
        for name, ref in zip(self._dag.interface(node).params, node.params, strict=False):
            if ref is not None and ref not in place:
                place[ref] = len(reads)
                reads.append(plan.read(ref, node))
            params.append(None if ref is None else (place[ref], self._dag.value(ref).names.index(name)))
        refs = [(node.id, i) for i in range(len(node.outputs))]
        writes = tuple(plan.new_slot(ref, "chunk", node.stream) if (plan.device, ref) in self._read else None for ref in refs)
        plan.emit(ins.Run(**about(node), reads=tuple(reads), writes=writes, key=node.key, slice=node.slice,
                          inputs=len(node.inputs), state=tuple(state), params=tuple(params),
                          degrees=self._dag.degrees_of(node.region)))  # fmt: skip
        # What was received before this chunk has had its time to arrive.
        self._made[plan.device] = refs + self._received[plan.device]
        self._received[plan.device] = []

    def _send(self, plan: DevicePlan, node: Node) -> None:
        assert isinstance(node, nodes.Send)
        plan.send(node)

    def _recv(self, plan: DevicePlan, node: Node) -> None:
        ref = (node.id, 0)
        if (plan.device, ref) not in self._read:
            raise VerificationError(f"nobody on device {plan.device} reads what %{node.id} {node.label} receives")
        if (plan.device, ref) in self._terms:
            self._received[plan.device].append(ref)

    def _accumulate(self, plan: DevicePlan, node: Node) -> None:
        plan.bind((node.id, 0), self._folds.pop((plan.device, node.id)).complete())

    def _update(self, plan: DevicePlan, node: Node) -> None:
        value = self._dag.value(node.inputs[0])
        total = Fold(plan, node).complete()
        shard = plan.replica if isinstance(value.placement, Shard) else None
        plan.emit(ins.Deliver(**about(node), reads=(Read(total),), kind=value.kind, names=value.names,
                              source=plan.source(total), bucket=value.bucket, shard=shard))  # fmt: skip

    def _result(self, plan: DevicePlan, node: Node) -> None:
        value, read = self._dag.value(node.inputs[0]), plan.read(node.inputs[0], node)
        plan.emit(ins.Deliver(**about(node), reads=(read,), kind=value.kind, names=value.names, source=plan.source(read.slot)))

    def _metrics(self, plan: DevicePlan, node: Node) -> None:
        assert isinstance(node, nodes.Metrics)
        reads = tuple(plan.read(ref, node) for ref in node.inputs)
        slot = plan.new_slot((node.id, 0), "sum", node.stream)
        weights = tuple(len(part) / self._dag.size for part in node.slices)
        plan.emit(ins.Merge(**about(node), reads=reads, writes=(slot,), metrics=node.metrics, weights=weights,
                            reductions=self._reductions, replica=plan.replica, replicas=self._dag.replicas))  # fmt: skip

    def _collective(self, plan: DevicePlan, node: Node) -> None:
        assert isinstance(node, nodes.AllReduce | nodes.ReduceScatter | nodes.AllGather | nodes.AllToAll)
        plan.collective(node)
        if (plan.device, (node.id, 0)) in self._terms:
            self._received[plan.device].append((node.id, 0))

    def _report(self, plan: DevicePlan, node: Node) -> None:
        own = tuple(plan.read(ref, node) for ref in node.inputs if plan.has(ref))
        if node.inputs and not own:
            raise VerificationError(f"%{node.id} {node.label} has nothing to report on device {plan.device}")
        plan.emit(ins.Report(**about(node), reads=own, reductions=self._reductions, replicas=self._dag.replicas))
