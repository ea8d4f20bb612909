"""Build the training DAG of a captured step before any directive: one device, one microbatch."""

from __future__ import annotations

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk, Ref
from lightning_piper.ir.regions import PassKey, Step
from lightning_piper.ir.values import Kind, Slice
from lightning_piper.ops.arguments import Arguments
from lightning_piper.ops.chunk import make_chunk
from lightning_piper.ops.communication.gather_samples import GatherSamples, ScatterSamples
from lightning_piper.ops.communication.total import Total
from lightning_piper.ops.metrics import Metrics, StepReport, first_log, metrics_value
from lightning_piper.ops.results import Result
from lightning_piper.ops.update import Accumulate, Update


def build_dag(step: Step, size: int | None = None) -> TrainingDAG:
    """Return the DAG of a batch of `size` samples (default: the captured size). No node has a device yet.

    A batch smaller than the captured one counts as partial.
    """
    dag = empty_dag(step, size)
    fill(dag)
    return dag


def empty_dag(step: Step, size: int | None = None) -> TrainingDAG:
    """Return a DAG without nodes for a batch of `size` samples."""
    return TrainingDAG(
        step, step.size if size is None else size, partial=size is not None and size < step.size
    )


def fill(dag: TrainingDAG) -> None:
    """Add the nodes of the captured step to an empty DAG."""
    code = dag.code
    whole = Slice(0, dag.size)
    chunks: dict[PassKey, Chunk] = {}
    # output of a pass -> its sum or exchange over the whole batch
    totals: dict[tuple[int, str, int], Ref] = {}
    forward = [(r.index, "F") for r in code.regions if (r.index, "F") in code.interfaces]
    backward = [(r.index, "B") for r in reversed(code.regions) if (r.index, "B") in code.interfaces]
    for key in forward + backward:
        inputs = tuple(totals.get(ref, (chunks[ref[:2]].id, ref[2])) for ref in code.interfaces[key].inputs)
        tags: dict[str, int | str] = {**code.regions[key[0]].tags, "PASS": key[1]}
        chunks[key] = chunk = dag.add(make_chunk(dag, key, whole, inputs, tags))
        for i, output in enumerate(code.interfaces[key].outputs):
            if output.partial:
                totals[(*key, i)] = _total(dag, chunk, i)
            elif output.exchange:
                totals[(*key, i)] = _exchange(dag, chunk, i, output.exchange)
    _gradients(dag, chunks)
    chain_state(dag)
    _report(dag, chunks)
    _results(dag, chunks)


def _total(dag: TrainingDAG, chunk: Chunk, i: int) -> Ref:
    """Add the sum over the whole batch of output i of a chunk."""
    total = Total(
        inputs=((chunk.id, i),),
        outputs=(chunk.outputs[i],),
        tags=_own_tags(chunk),
        stream="total",
        mesh=Mesh.flat(1),
    )
    return (dag.add(total).id, 0)


def _exchange(dag: TrainingDAG, chunk: Chunk, i: int, way: str) -> Ref:
    """Add the gather or scatter of samples of output i of a chunk."""
    kind = GatherSamples if way == "gather" else ScatterSamples
    made = kind(
        inputs=((chunk.id, i),),
        outputs=(chunk.outputs[i],),
        tags=_own_tags(chunk),
        stream="samples",
        mesh=Mesh.flat(1),
    )
    return (dag.add(made).id, 0)


def _gradients(dag: TrainingDAG, chunks: dict[PassKey, Chunk]) -> None:
    """Add a sum of gradients (`Accumulate`) for each gradient output of a chunk. Add an `Update` for each
    bundle of parameters. The update of a tied parameter reads the sums of all regions that use it."""
    bundles: dict[tuple[str, ...], list[Ref]] = {}
    for chunk in chunks.values():
        for i, value in enumerate(chunk.outputs):
            if value.kind == Kind.GRAD:
                total = dag.add(Accumulate(inputs=((chunk.id, i),), outputs=(value,), tags=_own_tags(chunk)))
                bundles.setdefault(value.names, []).append((total.id, 0))
    for totals in bundles.values():
        tags = dag.nodes[totals[0][0]].tags if len(totals) == 1 else {}
        dag.add(Update(inputs=tuple(totals), tags=tags))


def _own_tags(chunk: Chunk) -> dict[str, int | str]:
    return {k: v for k, v in chunk.tags.items() if k != "PASS"}


def chain_state(dag: TrainingDAG) -> None:
    """Connect the buffers that the step changes: each slice's forward reads the previous slice's values.

    This equals gradient accumulation over microbatches on one device. The last value goes to an `Update`. If
    `StepCode.goes_on` is false for a buffer, each slice reads the buffer's value from before the step.
    """
    readers: dict[str, list[Chunk]] = {}
    writers: dict[str, list[tuple[Slice, Ref]]] = {}  # buffer -> the values that slices leave
    for chunk in dag.of_type(Chunk):
        for name in filter(dag.code.goes_on, dag.interface(chunk).state):
            readers.setdefault(name, []).append(chunk)
        for i, value in enumerate(chunk.outputs):
            if value.kind == Kind.BUFFER:
                for name in value.names:
                    writers.setdefault(name, []).append((chunk.slice, (chunk.id, i)))
    sources: dict[int, dict[str, Ref]] = {}  # id of a chunk -> buffer -> the value of the slice before it
    for name, refs in writers.items():
        refs.sort()
        waiting = sorted(readers.get(name, ()), key=lambda c: c.slice)
        k = 0
        for chunk in waiting:
            while k < len(refs) and refs[k][0] < chunk.slice:
                k += 1
            if k:
                sources.setdefault(chunk.id, {})[name] = refs[k - 1][1]
    for chunk_id, by_name in sources.items():
        reader = dag.nodes[chunk_id]
        assert isinstance(reader, Chunk)
        dag.rewire(reader, state=tuple(by_name.get(name) for name in dag.interface(reader).state))
    _final_buffers(dag, {refs[-1][1] for refs in writers.values()})


def _final_buffers(dag: TrainingDAG, last: set[Ref]) -> None:
    """Let each buffer's `Update` read the buffer's last value. `last` has one value for each changed buffer."""
    updates: dict[tuple[str, ...], list[Update]] = {}
    for update in dag.of_type(Update):
        if dag.value(update.inputs[0]).kind == Kind.BUFFER:
            updates.setdefault(dag.value(update.inputs[0]).names, []).append(update)
    for ref in sorted(last):
        for update in updates.get(dag.value(ref).names, ()):
            dag.rewire(update, inputs=(ref,))
        if dag.value(ref).names not in updates:
            source = dag.nodes[ref[0]]
            assert isinstance(source, Chunk)
            dag.add(Update(inputs=(ref,), tags=_own_tags(source)))


def _report(dag: TrainingDAG, chunks: dict[PassKey, Chunk]) -> None:
    """Add a node for the loss and logged values of each chunk, and the report that reads these nodes."""
    vector = metrics_value(dag)
    names = vector.names
    parts: list[Ref] = []
    for chunk in chunks.values():
        scalars = [(i, v) for i, v in enumerate(chunk.outputs) if v.kind in (Kind.LOSS, Kind.LOG)]
        if scalars:
            metrics = tuple(
                0 if v.kind == Kind.LOSS else names.index(v.names[0], first_log(dag.code)) for _, v in scalars
            )
            node = Metrics(
                inputs=tuple((chunk.id, i) for i, _ in scalars),
                outputs=(vector,),
                tags=_own_tags(chunk),
                metrics=metrics,
                terms=_terms(dag, chunk),
                slices=(chunk.slice,) * len(scalars),
            )
            parts.append((dag.add(node).id, 0))
    dag.add(StepReport(inputs=tuple(parts)))


def _terms(dag: TrainingDAG, chunk: Chunk) -> tuple[int, ...]:
    """Return the indices of the terms of the loss and logged values that a chunk makes."""
    return tuple(out.term for out in dag.interface(chunk).outputs if out.term is not None)


def _results(dag: TrainingDAG, chunks: dict[PassKey, Chunk]) -> None:
    for chunk in chunks.values():
        for i, value in enumerate(chunk.outputs):
            if value.kind == Kind.RESULT:
                dag.add(Result(inputs=((chunk.id, i),), tags=_own_tags(chunk)))
            elif value.kind == Kind.ARGUMENT:
                dag.add(Arguments(inputs=((chunk.id, i),), tags=_own_tags(chunk)))
