"""Chunks: one pass of one region for one slice of the batch. The node is `ir.nodes.Chunk`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from lightning_piper.accelerators import seeded
from lightning_piper.common.units import counted
from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Ref
from lightning_piper.ir.regions import Output, PassKey
from lightning_piper.ir.seeds import chunk_seed
from lightning_piper.ir.sharded_values import is_summed, others_of
from lightning_piper.ir.values import Kind, Partial, Placement, Replicated, Slice, Value
from lightning_piper.ops.base import Binding, Bound, Operation, Planning, about, register_operation
from lightning_piper.ops.communication import all_to_all
from lightning_piper.ops.communication.gather_samples import read_as_exchanged
from lightning_piper.ops.communication.redistribute import read_as_wanted
from lightning_piper.ops.communication.total import placement_of_terms, read_as_total
from lightning_piper.ops.facts import Facts, Origin, names_of, slices_of, specs_of
from lightning_piper.ops.instruction import Instruction
from lightning_piper.ops.reference import Bundle, Made, Reference
from lightning_piper.ops.weights import check_reader, implied, share_of

TensorSource = tuple[int, int]  # (index of a bundle in `reads`, tensor in the bundle)


def make_chunk(
    dag: TrainingDAG,
    key: PassKey,
    part: Slice,
    inputs: tuple[Ref, ...],
    tags: dict[str, int | str],
    outputs: tuple[Value, ...] | None = None,
    **more: object,
) -> Chunk:
    """Return a chunk for `part` of the batch, without adding it to the DAG. `more` has further fields of the chunk.

    Args:
        outputs: The outputs of another chunk of this pass with the same number of samples (default: new outputs with the
            specs of the code).
    """
    if outputs is None:
        outputs = outputs_of(dag, key, part, late=True)
    state = (None,) * len(dag.code.interface_of(key).state)
    return Chunk(
        region=key[0],
        kind=key[1],
        slice=part,
        inputs=inputs,
        outputs=outputs,
        tags=tags,
        state=state,
        **more,  # type: ignore[arg-type]
    )


def outputs_of(dag: TrainingDAG, key: PassKey, part: Slice, late: bool = False) -> tuple[Value, ...]:
    """Return the outputs of a pass for a slice of the batch; with `late`, with `LateSpecs`."""
    interface = dag.code.interface_of(key)
    specs = dag.late_specs(key, part) if late else dag.code_for(key, part).outputs
    return tuple(
        Value(out.kind, out.names, tensors, held(dag, out), others=others_of(dag, key, i))
        for i, (out, tensors) in enumerate(zip(interface.outputs, specs, strict=True))
    )


def held(dag: TrainingDAG, output: Output) -> Placement:
    """Return the placement of an output along `DATA`.

    Each replica has its own term of a parameter's gradient, of a sum over the batch, and of the gradient of
    gathered rows: `Partial` if there are several replicas. A gradient that is also summed over members is
    `Partial` even with one replica. All other outputs are replicated.
    """
    if is_summed(dag, output):
        return Partial()
    terms = output.kind == Kind.GRAD or output.partial or output.exchange == "scatter"
    return placement_of_terms(dag) if terms else Replicated()


@dataclass(frozen=True, kw_only=True)
class Run(Instruction):
    """An instruction that runs a chunk's code.

    Attributes:
        key: Region and pass.
        slice: The samples.
        inputs: Number of `reads` that are the chunk's inputs. Later reads are buffers that an earlier chunk
            changed, and gathered parameters.
        state: For each buffer in `Interface.state`, where its value is (index in `reads`, tensor in the
            bundle), or None for the module's own buffer.
        params: The same for each parameter in `Interface.params`, or None for the device's own copy. Empty:
            every parameter is the device's own copy.
        seeds: The same for the gradient of each term in `Interface.seeds`. A number is the term's weight.
        degrees: The numbers of parts of parameters, as in `ir.regions.Step.at`, if this region's parameters
            are divided. Otherwise empty.
        member: Whether the code is for one member of an axis (`ir.regions.Step.member`).
        whole: Number of samples in the whole batch, if the chunk computes from gathered samples; otherwise
            None.
    """

    op: ClassVar[str] = "run"
    key: PassKey
    slice: Slice
    inputs: int
    state: tuple[TensorSource | None, ...] = ()
    params: tuple[TensorSource | None, ...] = ()
    seeds: tuple[TensorSource | float, ...] = ()
    degrees: tuple[int, ...] = ()
    member: bool = False
    whole: int | None = None

    @property
    def samples(self) -> int:
        """The number of samples for which the chunk's code is made."""
        return len(self.slice) if self.whole is None else self.whole

    def details(self) -> list[str]:
        return [self.label, str(self.slice), *super().details()]


# Static rule


def check(facts: Facts, node: Chunk) -> Iterable[str]:
    """The chunk must read its own samples of the values that its pass reads according to the capture.

    Exceptions are sums over the batch, and values whose shape does not depend on the batch size.
    """
    dag, interface = facts.dag, facts.dag.interface(node)
    weight = Fraction(1) if node.kind == "F" else facts.share(node.slice)
    for i in range(len(node.outputs)):
        facts.origins[node.id, i] = dag.code.whole(*node.key, i)
        facts.parts[node.id, i] = {node.slice: weight}
    if len(node.inputs) != len(interface.inputs) or len(node.outputs) != len(interface.outputs):
        yield (
            f"{facts.at(node)} has {counted(len(node.inputs), 'input')} and "
            f"{counted(len(node.outputs), 'output')}, but its region has "
            f"{len(interface.inputs)} and {len(interface.outputs)}"
        )
        return
    for ref, wanted in zip(node.inputs, interface.inputs, strict=True):
        if facts.origins.get(ref) != wanted:
            yield (
                f"{facts.at(node)} reads {facts.named(ref)}, but its region reads {facts.pass_of(wanted)}: let it "
                f"read {facts.pass_of(wanted)}"
            )
            continue
        yield from read_as_total(facts, node, ref, wanted)
        yield from read_as_exchanged(facts, node, ref, wanted)
        yield from read_as_wanted(facts, node, ref, wanted)
        if (
            list(facts.parts[ref]) != [node.slice]
            and not _is_total(facts, wanted)
            and not _enters_whole(facts, ref, wanted, node.slice)
        ):
            found = slices_of(facts.parts[ref])
            yield (
                f"{facts.at(node)} works on samples {node.slice} but reads {facts.named(ref)} of samples "
                f"{found}"
            )
    yield from _outputs(facts, node)
    if dag.regions[node.region].joined and node.slice != Slice(0, dag.local_batch_size):
        yield (
            f"{facts.at(node)} works on samples {node.slice}, but it reads gathered samples, so it must "
            "work on all samples at once"
        )
    yield from _state(facts, node)
    yield from _params(facts, node)
    yield from check_reader(
        facts, node, node.weights, [(term, node.slice) for term in interface.seeds], seed=True
    )
    yield from all_to_all.exchanged(facts, node)


def _outputs(facts: Facts, node: Chunk) -> Iterable[str]:
    """The outputs must equal the outputs of the pass for this number of samples. So microbatches of one size with
    equal outputs need one proof."""
    dag, found = facts.dag, False
    sound = facts.outputs.setdefault((node.key, len(node.slice)), [])
    if node.outputs in sound:
        return
    interface, wanted = dag.interface(node), dag.late_specs(node.key, node.slice)
    for i, (value, specs, made) in enumerate(zip(node.outputs, wanted, interface.outputs, strict=True)):
        if value.tensors != specs:
            found = True
            says, makes = specs_of(value.tensors), specs_of(specs)
            yield (
                f"{facts.at(node)} declares {value.label} as {says}, but for samples {node.slice} its code makes {makes}"
            )
        placement, others = held(dag, made), others_of(dag, node.key, i)
        if (value.kind, value.names, value.placement, value.bucket, value.others) != (
            made.kind,
            made.names,
            placement,
            None,
            others,
        ):
            found = True
            yield (
                f"{facts.at(node)} declares {value.label} as {value.placement}, but its code makes "
                f"{made.kind}:{names_of(made.names)} {placement}"
            )
    if not found:
        sound.append(node.outputs)


def _is_total(facts: Facts, wanted: Origin) -> bool:
    return facts.dag.code.interface_of(wanted[:2]).outputs[wanted[2]].partial


def _enters_whole(facts: Facts, ref: Ref, origin: Origin, part: Slice) -> bool:
    """Return whether a chunk may read a forward value that a chunk for a larger part of the batch made.

    The chunk may read it if the other chunk is a forward pass of a slice that contains `part`, and the shape
    of the value does not depend on the batch size.
    """
    dag = facts.dag
    if origin[1] != "F" or not any(
        whole.start <= part.start and part.stop <= whole.stop for whole in facts.parts[ref]
    ):
        return False
    specs = dag.code.code[origin[0], origin[1]].outputs[origin[2]]
    other = dag.step.at(max(1, dag.size // 2)).code[origin[0], origin[1]].outputs[origin[2]]
    return [s.shape for s in specs] == [s.shape for s in other] and dag.size > 1


def _state(facts: Facts, node: Chunk) -> Iterable[str]:
    """A buffer must pass from slice to slice, unless it changes only once in a step."""
    for name, ref in zip(facts.dag.interface(node).state, node.state, strict=True):
        if not facts.dag.code.goes_on(name):
            if ref is not None:
                yield (
                    f"{facts.at(node)} reads buffer {name} from {facts.named(ref)}, but this buffer changes once in a "
                    "step, for all samples: let the node read the buffer as it is before the step"
                )
        elif ref is None:
            if node.slice.start:
                yield (
                    f"{facts.at(node)} reads buffer {name} as it was before the step, not as the samples "
                    f"before {node.slice.start} left it"
                )
        elif name not in facts.dag.value(ref).names or max(facts.parts[ref]).stop != node.slice.start:
            where = f"the slice that ends at {node.slice.start}"
            yield f"{facts.at(node)} reads buffer {name} from {facts.named(ref)}, not from {where}"


def _params(facts: Facts, node: Chunk) -> Iterable[str]:
    """Parameters must come from a gather of the bucket that contains them."""
    names = facts.dag.interface(node).params
    if len(node.params) not in (0, len(names)):
        yield (
            f"{facts.at(node)} has {counted(len(node.params), 'source')} of parameters, but its region reads "
            f"{counted(len(names), 'parameter')}"
        )
        return
    for name, ref in zip(names, node.params, strict=False):
        if ref is None:
            continue
        value = facts.dag.value(ref)
        if value.kind != Kind.PARAM or value.bucket is None or name not in value.names:
            yield f"{facts.at(node)} reads parameter {name} from {facts.named(ref)}, which does not hold {name}"
        elif not isinstance(value.placement, Replicated):
            yield f"{facts.at(node)} reads parameter {name} from a shard: gather it first"


# Reference semantics


def interpret(run: Reference, chunk: Chunk) -> Made:
    return [_run(run, chunk, replica) for replica in run.group_ranks]


def _run(run: Reference, chunk: Chunk, replica: int) -> list[Bundle]:
    """Return the outputs of a chunk on one replica."""
    dag, interface = run.dag, run.dag.interface(chunk)
    args = [x for bundle in run.inputs(chunk, replica) for x in bundle]
    args += _read_params(run, chunk, replica)
    args += [run.tensors[name] for name in interface.buffers]
    for name, ref in zip(interface.state, chunk.state, strict=True):
        old = run.tensors[name] if ref is None else run.values[ref, replica][dag.value(ref).names.index(name)]
        args.append(old)
    samples = run.samples_of(replica, chunk.slice)
    for leaf in interface.batch:
        cut = dag.code.samples(leaf, samples)
        args.append(run.leaves[leaf] if cut is None else run.leaves[leaf][cut.start : cut.stop])
    # A backward pass may have no argument but gradients of the loss. Then use the device of the batch.
    device = (args or run.leaves)[0].device
    for term, ref in zip(interface.seeds, chunk.weights or (None,) * len(interface.seeds), strict=True):
        args.append(
            _seed(run, chunk, term, replica).to(device) if ref is None else run.values[ref, replica][0]
        )
    code = dag.code_of(chunk)
    if interface.random:
        first = 0 if dag.regions[chunk.region].joined else samples.start - chunk.slice.start
        with seeded(chunk_seed(run.seed, chunk, first), device):
            flat = iter(code.run(args))
    else:
        flat = iter(code.run(args))
    return [[next(flat) for _ in specs] for specs in code.outputs]


def _read_params(run: Reference, chunk: Chunk, replica: int) -> Bundle:
    """Return the parameters of a chunk on one replica, from the module's tensors or from gathers."""
    names = run.dag.interface(chunk).params
    found = []
    for name, ref in zip(names, chunk.params or (None,) * len(names), strict=True):
        if ref is None:
            # Use the whole parameter, even if it is divided, because only gathers output parts.
            found.append(run.tensors[name])
        else:
            bucket = run.dag.value(ref).bucket
            assert bucket is not None
            found.append(bucket.views(run.values[ref, replica][0])[bucket.names.index(name)])
    return found


def _seed(run: Reference, chunk: Chunk, term: int, replica: int) -> torch.Tensor:
    """Return the gradient of a loss term that no node of the DAG computes."""
    slices = run.kept.setdefault(("slices", chunk.region), [])
    if not slices:
        slices += sorted(
            {c.slice for c in run.dag.of_type(Chunk) if c.region == chunk.region and c.kind[0] == "B"}
        )
    return implied(run, term, chunk.slice, slices, replica).to(run.dag.code.loss_dtype)


# Plans


def lower(plan: Planning, node: Chunk) -> None:
    """Emit the instruction that runs the chunk. It reads the chunk's inputs, then changed buffers and
    gathered parameters, then gradients of loss terms that nodes compute. Raise an error if a term has no
    weight."""
    plan.offer_chunk_outputs()  # here the sends of the previous chunk's outputs are in the plan already
    dag, interface = plan.dag, plan.dag.interface(node)
    reads = [plan.read(ref, node) for ref in node.inputs]
    index_of: dict[Ref, int] = {}
    found: list[list[TensorSource | None]] = [[], []]
    for names, refs, sources in (
        (interface.state, node.state, found[0]),
        (interface.params, node.params, found[1]),
    ):
        for name, ref in zip(names, refs, strict=False):
            if ref is not None and ref not in index_of:
                index_of[ref] = len(reads)
                reads.append(plan.read(ref, node))
            sources.append(None if ref is None else (index_of[ref], dag.value(ref).names.index(name)))
    seeds: list[TensorSource | float] = []
    for term, ref in zip(interface.seeds, node.weights or (None,) * len(interface.seeds), strict=True):
        if ref is None:
            share = share_of(dag, term, node.slice)
            if share is None:
                found_no = (
                    "but no node makes the weight. If you wrote a directive, complete the DAG in `apply`. "
                    "Otherwise, report this"
                )
                raise VerificationError(
                    f"%{node.id} {node.label} weighs {dag.code.terms[term].label}, {found_no} [PIPER-V002]"
                )
            seeds.append(share)
        else:
            seeds.append((len(reads), 0))
            reads.append(plan.read(ref, node))
    made = [(node.id, i) for i in range(len(node.outputs))]
    writes = tuple(plan.new_slot(ref, "chunk", node.stream) if plan.is_read(ref) else None for ref in made)
    plan.emit(
        Run(
            **about(node),
            reads=tuple(reads),
            writes=writes,
            key=node.key,
            slice=node.slice,
            inputs=len(node.inputs),
            state=tuple(found[0]),
            params=tuple(found[1]),
            seeds=tuple(seeds),
            degrees=dag.degrees_of(node.region),
            member=bool(dag.member_axes),
            whole=dag.size if dag.regions[node.region].joined else None,
        )
    )
    plan.chunk_made(made)


# Runtime


def bind_run(instruction: Run, on: Binding) -> Bound:
    bound: Bound = on.chunks.bind(instruction)
    return bound


register_operation(Operation(Chunk, check, interpret, lower, bind={Run: bind_run}, alike=True))
