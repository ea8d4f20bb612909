"""`split`: microbatches. It partitions the batch and repeats the selected part of the step for each
microbatch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import networkx as nx

from lightning_piper.common.limits import PASSES, is_name, shown
from lightning_piper.common.units import counted
from lightning_piper.directives.base import Contract, Directive, error_at, one_microbatch, register
from lightning_piper.directives.rewrites.transfers import connect, disconnect
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import AGAIN, Filter
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.regions import PassKey, Step
from lightning_piper.ir.values import Kind, Slice, Value
from lightning_piper.ops.arguments import Arguments
from lightning_piper.ops.build import build_dag, chain_state
from lightning_piper.ops.chunk import make_chunk
from lightning_piper.ops.communication.bucket import Pack
from lightning_piper.ops.communication.gather_samples import GatherSamples
from lightning_piper.ops.communication.total import Total
from lightning_piper.ops.host import Store
from lightning_piper.ops.metrics import Metrics
from lightning_piper.ops.samples import Concat, Cut
from lightning_piper.ops.update import Accumulate, Update


@register
@dataclasses.dataclass(frozen=True)
class Split(Directive):
    """Repeat the chunks that `filter` selects for `num_microbatches` parts of the batch.

        F 0:4 -> B 0:4 -> accumulate      --split {} by MB into 2-->      F[MB=0] 0:2 -> B[MB=0] 0:2 -> accumulate
                                                                          F[MB=1] 2:4 -> B[MB=1] 2:4 ---^

    Attributes:
        filter: Selects chunks (default: all chunks). It must select all passes of a region or none. A part of
            the model may be split alone. Then values that enter this part are cut along the batch, and values
            that leave it are joined.
        dim_name: The new tag (default: "MB"). Microbatch i has `dim_name=i`.
        num_microbatches: The number of microbatches. Their sizes differ by one sample of each replica at most,
            and the larger ones come first.
        accept_nonlinear: Whether to split a backward pass that is not linear in the gradient of the loss. For
            example, a hook clamps gradients, or an autograd function adds a gradient of its own. By default
            Piper raises an error. If accepted, the loss of each microbatch has a gradient of 1, and each
            microbatch's gradients are weighted by its share of the samples.

    Gradients become sums over the microbatches, weighted as the loss requires. They are equal up to
    reassociation if no sample's loss depends on other samples.
    """

    op: ClassVar[str] = "split"
    contract: ClassVar[Contract] = "reassociated"

    filter: Filter = dataclasses.field(default_factory=dict, kw_only=True)
    dim_name: str = dataclasses.field(default_factory=lambda: "MB", kw_only=True)
    num_microbatches: int
    _: dataclasses.KW_ONLY
    accept_nonlinear: bool = False

    def check_fields(self) -> None:
        self.check_filter("filter", self.filter)
        if not is_name(self.dim_name) or self.dim_name == "PASS":
            self.refuse(
                "dim_name",
                f"{shown(self.dim_name)} is not usable",
                "give a new tag such as 'MB' [PIPER-D003]",
            )
        if type(self.num_microbatches) is not int or self.num_microbatches < 1:
            self.refuse(
                "num_microbatches",
                f"{shown(self.num_microbatches)} is not a number of microbatches",
                "give an integer >= 1 [PIPER-D003]",
            )
        if self.num_microbatches > PASSES // 2:
            self.refuse(
                "num_microbatches",
                f"{shown(self.num_microbatches)} is too large",
                f"give at most {PASSES // 2} [PIPER-D003]",
            )
        if not isinstance(self.accept_nonlinear, bool):
            self.refuse(
                "accept_nonlinear",
                f"{shown(self.accept_nonlinear)} is not a Boolean",
                "give True or False [PIPER-D003]",
            )

    def apply_forward(self, dag: TrainingDAG, training: TrainingDAG | None) -> None:
        """Keep the batch whole and tag it as the first microbatch, so that it runs on the devices of the
        first microbatch.
        """
        for chunk in self.select(dag, "filter", self.filter):
            dag.change(chunk, tags={**chunk.tags, self.dim_name: 0})

    def apply(self, dag: TrainingDAG) -> None:
        """Repeat the selected chunks for each microbatch, and connect the copies. Chunks that are computed
        from gathered samples are not repeated. Raise an error if the chunks or the batch cannot be split.
        """
        chunks = self._cuttable(dag, self.select(dag, "filter", self.filter))
        if dag.meshes:
            divided = dag.regions[min(dag.meshes)].label
            self.refuse(
                "filter",
                f"an earlier directive already shards the experts of {divided}",
                "move this directive before the shard_experts [PIPER-D007]",
            )
        self._check(dag, chunks)
        if dag.code.undivided is not None and self.num_microbatches > 1:
            self.refuse(
                "num_microbatches",
                f"the batch cannot be split into {self.num_microbatches} microbatches, because {dag.code.undivided.why}",
                f"{_one_microbatch(self)} [PIPER-D012]",
            )
        made = sum(min(self.num_microbatches, len(chunk.slice)) for chunk in chunks)
        if made > PASSES:
            found = f"{self.num_microbatches} microbatches of {len(chunks)} passes are too many"
            self.refuse(
                "num_microbatches",
                found,
                f"give fewer, because a step has at most {PASSES} passes [PIPER-D012]",
            )
        self._repeat(
            dag, chunks, {part: self._microbatches(dag, part) for part in {chunk.slice for chunk in chunks}}
        )

    def _cuttable(self, dag: TrainingDAG, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks that are not computed from gathered samples; empty if `chunks` is empty. Raise an
        error if all of the given chunks are computed from gathered samples.

        Chunks that are computed from gathered samples need all samples at once. They get the tag of the first
        microbatch, so that they run on its devices.
        """
        found = [chunk for chunk in chunks if not dag.regions[chunk.region].joined]
        if chunks and not found:
            self.refuse(
                "filter",
                f"the filter selects only {chunks[0].label}, which is computed from gathered samples",
                "select the regions before gather_samples [PIPER-D013]",
            )
        cut = {dag.regions[chunk.region].label for chunk in found}
        for chunk in chunks:
            if dag.regions[chunk.region].joined:
                dag.change(chunk, tags={**chunk.tags, self.dim_name: 0})
                # The stage has only this chunk. An order may still name further microbatches of the stage.
                if dag.regions[chunk.region].label not in cut:
                    dag.program.absent.setdefault(self.dim_name, set()).update(
                        range(1, self.num_microbatches)
                    )
        return found

    def _repeat(self, dag: TrainingDAG, chunks: list[Chunk], microbatches: dict[Slice, list[Slice]]) -> None:
        """Repeat chunks for each microbatch. `microbatches` maps the slice of a chunk to the slices of its
        microbatches."""
        touched = disconnect(dag, chunks)
        touched += _Rewrite(dag, chunks, microbatches, self).run()
        chain_state(dag)
        connect(dag, [node for node in touched if node.id in dag.nodes] + _buffer_readers(dag))

    def _microbatches(self, dag: TrainingDAG, part: Slice) -> list[Slice]:
        """Return the parts of a slice, one for each microbatch.

        A batch with too few samples is an error, unless it is smaller than the batch for which the program
        was written. Then there are fewer microbatches, and the DAG records the indices that are absent.
        """
        count, replicas = self.num_microbatches, dag.program.replicas
        # Each replica needs an equal part of each microbatch.
        unit = replicas if dag.replicas == 1 and len(part) % replicas == 0 else 1
        units = len(part) // unit
        if units < count:
            if not dag.program.partial:
                self._refuse_few(dag, len(part) * dag.replicas)
            dag.program.absent.setdefault(self.dim_name, set()).update(range(units, count))
            count = units
        small, larger = divmod(units, count)
        sizes = [unit * (small + 1)] * larger + [unit * small] * (count - larger)
        starts = [part.start + sum(sizes[:i]) for i in range(count + 1)]
        return [Slice(a, b) for a, b in itertools.pairwise(starts)]

    def _refuse_few(self, dag: TrainingDAG, samples: int) -> NoReturn:
        """Raise the error for too few samples of all replicas: each replica needs a sample for each microbatch."""
        count, replicas = self.num_microbatches, dag.program.replicas
        found = f"{counted(samples, 'sample')} cannot be split into {counted(count, 'microbatch')}"
        if replicas > 1:
            found += f" for each of {replicas} replicas"
        fixes = []
        if samples >= replicas and samples % replicas == 0:
            fixes.append(f"at most {counted(samples // replicas, 'microbatch')}")
        if replicas > 1:
            fixes.append(
                f"a batch of {count * replicas} samples over all replicas ({count} for each replica)"
            )
        self.refuse("num_microbatches", found, f"give {', or '.join(fixes)} [PIPER-D012]")

    def _check(self, dag: TrainingDAG, chunks: list[Chunk]) -> None:
        """Check that the selected chunks can be split.

        Raises:
            DirectiveError: A chunk is a second forward pass of an earlier `recompute`, or already has the tag
                `dim_name`. An earlier directive offloads what a chunk saves, or has ordered a chunk. The
                filter selects a chunk, but not another chunk of the same region that shares a value with it.
        """
        selected = {chunk.id for chunk in chunks}
        for chunk in chunks:
            if chunk.tags.get("PASS") == AGAIN:
                found = f"{chunk.label} is the second forward pass that directive {chunk.origin} makes"
                self.refuse("filter", found, "move this directive before the recompute [PIPER-D007]")
        for chunk in chunks:
            if self.dim_name in chunk.tags:
                self.refuse(
                    "dim_name",
                    f"{chunk.label} already has {self.dim_name}={chunk.tags[self.dim_name]}",
                    "give a new tag [PIPER-D003]",
                )
            for other in [*dag.users(chunk), *(dag.nodes[ref[0]] for ref in chunk.reads)]:
                if isinstance(other, Chunk) and other.region == chunk.region and other.id not in selected:
                    self.refuse(
                        "filter",
                        f"the filter selects {chunk.label} but not {other.label}",
                        "select both, because the passes of a region are split together [PIPER-D013]",
                    )
            if (
                copy := next((user for user in dag.users(chunk) if isinstance(user, Store)), None)
            ) is not None:
                self.refuse(
                    "filter",
                    f"directive {copy.origin} offloads the values that {chunk.label} saves",
                    "move this directive before the offload [PIPER-D007]",
                )
            if (by := dag.ordered_by(chunk)) is not None:
                self.refuse(
                    "filter",
                    f"{chunk.label} is already ordered by directive {by}",
                    "move this directive before that order [PIPER-D007]",
                )


def refuse_nonlinear(program: Sequence[Directive], dag: TrainingDAG) -> None:
    """Raise an error if a finished program splits a nonlinear backward pass without `accept_nonlinear`.

    Nonlinear means: not linear in the gradient of the loss.

    Raises:
        DirectiveError: The program does so. The message names the split.
    """
    parts = {(chunk.key, chunk.slice) for chunk in dag.of_type(Chunk)}
    if dag.code.nonlinear is None or len(parts) == len({key for key, _ in parts}):
        return
    for index, directive in enumerate(program):
        if isinstance(directive, Split) and directive.num_microbatches > 1 and not directive.accept_nonlinear:
            accepted = _one_microbatch(directive)
            accepted = accepted[0].upper() + accepted[1:]
            if directive.written_for is None:
                accepted += ", or accept the difference (accept_nonlinear=True)"
            raise error_at(
                index,
                directive,
                f"({directive.op}): field 'num_microbatches': the gradients of {directive.num_microbatches} "
                "microbatches may not add up to the gradients of the whole batch, because the backward pass is not "
                f"linear in the gradient of the loss: {dag.code.nonlinear}. {accepted} [PIPER-D014]",
            )


def _one_microbatch(split: Split) -> str:
    """Return how to make a split leave the batch whole, as text for messages."""
    if split.written_for is None:
        return "use one microbatch"
    return one_microbatch(split.written_for)


def _buffer_readers(dag: TrainingDAG) -> list[Node]:
    """Return the nodes that `chain_state` connects, on any device."""
    return [
        node
        for node in dag.nodes.values()
        if isinstance(node, Update) or (isinstance(node, Chunk) and any(node.state))
    ]


class _Rewrite:
    """The state of one application of a split.

    Attributes:
        copies: Id of a repeated node -> its copies, one for each microbatch.
        cuts: (value, microbatch, devices) -> the microbatch's part of a value that is not split.
        joined: (value, devices) -> the value joined from all copies.
        outputs: (pass, number of samples) -> the outputs of its copies, which share one tuple.
    """

    def __init__(
        self, dag: TrainingDAG, chunks: list[Chunk], microbatches: dict[Slice, list[Slice]], directive: Split
    ) -> None:
        self.dag, self.chunks, self.microbatches, self.directive = dag, chunks, microbatches, directive
        self.copies: dict[int, list[Any]] = {}
        self.cuts: dict[tuple[Ref, int, tuple[int, ...]], Ref] = {}
        self.joined: dict[tuple[Ref, tuple[int, ...]], Ref] = {}
        self.outputs: dict[tuple[PassKey, int], tuple[Value, ...]] = {}

    def run(self) -> list[Node]:
        """Repeat the chunks, connect their readers to the copies, and remove the originals.

        Returns:
            The nodes that may now read values of other devices: the copies of the chunks, the readers of
            their values, and the new nodes that cut or join values.
        """
        touched: list[Node] = []
        repeated: list[Node] = []
        turn = {i: n for n, i in enumerate(nx.lexicographical_topological_sort(self.dag.graph))}
        # In this order, each chunk is repeated after the chunks whose outputs it reads.
        for chunk in sorted(self.chunks, key=lambda chunk: turn[chunk.id]):
            repeated += self._repeat_gathers(chunk)
            self.copies[chunk.id] = copies = [
                self._copy(chunk, i, part) for i, part in enumerate(self.microbatches[chunk.slice])
            ]
            touched += copies
            repeated += [chunk, *self._repeat_reductions(chunk)]
        outside = {
            user.id: user for node in repeated for user in self.dag.users(node) if user.id not in self.copies
        }
        for user in outside.values():
            self._read_copies(user)
            touched.append(user)
        self.dag.remove(repeated)
        touched += [self.dag.nodes[ref[0]] for ref in (*self.cuts.values(), *self.joined.values())]
        return touched

    def _repeat_gathers(self, chunk: Chunk) -> list[Node]:
        """Repeat the gathers of a chunk's parameters for each copy of the chunk, if they belong to this one
        use. Return the repeated nodes.
        """
        gathers = [
            self.dag.nodes[i] for i in dict.fromkeys(ref[0] for ref in chunk.params if ref is not None)
        ]
        repeated = [g for g in gathers if self.dag.nodes[g.inputs[0][0]].per_use and g.id not in self.copies]
        for gather in repeated:
            self.copies[gather.id] = [
                self.dag.add(
                    dataclasses.replace(gather, id=-1, tags={**gather.tags, self.directive.dim_name: i})
                )
                for i in range(len(self.microbatches[chunk.slice]))
            ]
        return repeated

    def _repeat_reductions(self, chunk: Chunk) -> list[Node]:
        """Repeat the packs of this chunk's gradients, and the sums over replicas that read a pack. Returns
        the repeated nodes.
        """
        repeated: list[Node] = []
        makers: list[Node] = [chunk]
        while makers:
            maker = makers.pop()
            for user in self.dag.users(maker):
                if isinstance(user, Pack) or (user.sums and isinstance(maker, Pack)):
                    sources = self.copies[maker.id]
                    self.copies[user.id] = [
                        self.dag.add(
                            dataclasses.replace(user, id=-1, inputs=((source.id, user.inputs[0][1]),))
                        )
                        for source in sources
                    ]
                    repeated.append(user)
                    makers.append(user)
        return repeated

    def _copy(self, chunk: Chunk, i: int, part: Slice) -> Chunk:
        """Add the copy of a chunk for microbatch i, which consists of the samples `part`."""
        inputs = tuple(self._input(ref, i, chunk, part) for ref in chunk.inputs)
        tags = {**chunk.tags, self.directive.dim_name: i}
        params = tuple(
            (self.copies[ref[0]][i].id, 0) if ref and ref[0] in self.copies else ref for ref in chunk.params
        )
        copy = make_chunk(
            self.dag,
            chunk.key,
            part,
            inputs,
            tags,
            outputs=self.outputs.get((chunk.key, len(part))),
            devices=chunk.devices,
            stream=chunk.stream,
            placed_by=chunk.placed_by,
            params=params,
        )
        self.outputs[chunk.key, len(part)] = copy.outputs
        return self.dag.add(copy)

    def _input(self, ref: Ref, i: int, chunk: Chunk, part: Slice) -> Ref:
        """Return the value that copy i of a chunk reads instead of `ref`.

        If the node of `ref` is repeated, this is the output of its copy i. Otherwise it is the microbatch's
        part of `ref`, or `ref` itself if the shape of `ref` does not depend on the number of samples.
        """
        if ref[0] in self.copies:
            return (self.copies[ref[0]][i].id, ref[1])
        key = (ref, i, chunk.devices)
        if key not in self.cuts:
            dim = self._batch_dim(ref, chunk.slice, part)
            if dim is None:
                return ref
            start, stop = (edge - chunk.slice.start for edge in (part.start, part.stop))
            narrowed = dataclasses.replace(self.dag.value(ref), tensors=self.dag.specs_of(ref, len(part)))
            node = Cut(
                inputs=(ref,),
                outputs=(narrowed,),
                tags=chunk.tags,
                devices=chunk.devices,
                placed_by=chunk.placed_by,
                dim=dim,
                start=start,
                stop=stop,
            )
            self.cuts[key] = (self.dag.add(node).id, 0)
        return self.cuts[key]

    def _read_copies(self, user: Node) -> None:
        """Make a node that is not split read the copies instead of the originals. Raise an error if the node
        is of a kind that cannot read copies."""
        new: list[Ref] = []
        metrics: list[int] = []
        terms: list[int] = []
        slices: list[Slice] = []
        for index, ref in enumerate(user.inputs):
            if ref[0] not in self.copies:
                refs = [ref]
            elif isinstance(user, Accumulate | Metrics | Concat | Arguments | Total | GatherSamples):
                refs = [(copy.id, ref[1]) for copy in self.copies[ref[0]]]
            elif isinstance(user, Chunk | Cut):
                refs = [self._join(ref, user)]
            elif isinstance(user, Update):  # for buffers, whose last value `chain_state` connects
                refs = [(self.copies[ref[0]][-1].id, ref[1])]
            else:
                by = "" if user.origin is None else f", made by directive {user.origin},"
                found = (
                    f"{user.label} %{user.id}{by} reads {self.dag.nodes[ref[0]].label}, but cannot be "
                    "repeated for microbatches"
                )
                self.directive.refuse(
                    "filter", found, "move this directive before the directive that makes it [PIPER-D007]"
                )
            if isinstance(user, Metrics):
                metrics += [user.metrics[index]] * len(refs)
                terms += [user.terms[index]] * len(refs)
                slices += (
                    [user.slices[index]] if refs == [ref] else [copy.slice for copy in self.copies[ref[0]]]
                )
            new += refs
        if isinstance(user, Metrics):
            self.dag.change(user, metrics=tuple(metrics), terms=tuple(terms), slices=tuple(slices))
        if isinstance(user, Chunk):
            self.dag.rewire(user, inputs=tuple(new), state=(None,) * len(user.state))
        else:
            self.dag.rewire(user, inputs=tuple(new))
        if isinstance(user, Accumulate):
            self.dag.change(user, outputs=(self.dag.value(new[0]),))

    def _join(self, ref: Ref, user: Chunk | Cut) -> Ref:
        """Return the value that joins the copies of `ref`, on the devices of its reader `user`. Raise an
        error if an activation does not have a batch dimension."""
        key = (ref, user.devices)
        if key not in self.joined:
            source = self.dag.nodes[ref[0]]
            assert isinstance(source, Chunk)
            copies = self.copies[ref[0]]
            dim = self._batch_dim(ref, source.slice, copies[0].slice)
            value = self.dag.value(ref)
            shared: dict[str, Any] = {
                "inputs": tuple((copy.id, ref[1]) for copy in copies),
                "outputs": (value,),
                "tags": user.tags,
                "devices": user.devices,
                "placed_by": user.placed_by,
            }
            node: Node
            if dim is not None:
                node = Concat(dim=dim, **shared)
            elif value.kind == Kind.COTANGENT:  # the gradient of a value that is the same for all samples
                node = Accumulate(**shared)
            else:
                self.directive.refuse(
                    "filter",
                    f"{source.label} is selected, {user.label} is not, and the value between them has no dimension of "
                    "samples along which Piper could join the microbatches",
                    "select all chunks, with the filter {} [PIPER-D012]",
                )
            self.joined[key] = (self.dag.add(node).id, 0)
        return self.joined[key]

    def _batch_dim(self, ref: Ref, whole: Slice, part: Slice) -> int | None:
        """Return the dimension of a value whose size is the number of samples; None if the shape does not
        depend on that number. The shapes for the samples `whole` and for the samples `part` show the
        dimension. Raise an error if several dimensions differ, or if their sizes are not the numbers of
        samples."""
        if len(whole) == len(part):
            part = Slice(part.start, part.stop - 1) if len(part) > 1 else Slice(part.start, part.stop + 1)
        a, b = (self.dag.specs_of(ref, size)[0].shape for size in (len(whole), len(part)))
        dims = [d for d, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        if len(dims) > 1 or (dims and (a[dims[0]], b[dims[0]]) != (len(whole), len(part))):
            self.directive.refuse(
                "filter",
                f"a value between selected and other regions has shape {list(a)} for {len(whole)} samples and {list(b)} "
                f"for {len(part)}, which does not show which rows belong to which sample",
                "select all regions, with the filter {} [PIPER-D012]",
            )
        return dims[0] if dims else None


def accumulating(step: Step, slices: Sequence[Slice]) -> TrainingDAG:
    """Return the DAG of one device that accumulates over `slices`, which partition the batch of `step`."""
    dag = build_dag(step)
    whole = Slice(0, dag.size)
    if list(slices) != [whole]:
        one = Split(filter={}, dim_name="MB", num_microbatches=len(slices))
        one._repeat(dag, one._cuttable(dag, list(dag.of_type(Chunk))), {whole: list(slices)})
    return dag
