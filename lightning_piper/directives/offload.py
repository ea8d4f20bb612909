"""`offload`: keep in host memory what forward passes save for backward passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import networkx as nx

from lightning_piper.common.limits import integer, shown
from lightning_piper.directives.base import Contract, Directive, register
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import AGAIN, FETCH, STORE, Filter, describe
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.values import Kind, Slice
from lightning_piper.ops.host import Fetch, Store
from lightning_piper.ops.update import Update

AHEAD = 64  # maximum of `ahead`, in chunks


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload(Directive):
    """Copy what forward passes save for backward passes to host memory, and copy it back in time.

        F -> saved -> B      --offload-->      F -> saved -> store      fetch -> saved -> B

    Attributes:
        filter: Selects chunks. Piper immediately stores values that selected forward passes save. It also stores
            inputs of these passes that a later pass of the same region and slice reads again, such as the inputs
            of recomputed regions. If PASS names BI, values that BI saves for BW are also stored.
        ahead: When to fetch a value. A number n: n chunks of the same device before the first chunk that
            reads the value. A filter: before the chunks of the same device that the filter selects.
        saved: Whether to store what forward passes save.
        states: Whether the optimizer states of the selected regions' parameters stay on the host outside of
            the update.
        store_stream, fetch_stream: Logical streams of the copies.

    Piper applies this directive after `split`, `recompute` and the directives that shard tensors or experts. On
    CUDA the host memory is pinned, and copies overlap other work. On a CPU they take the time of a copy. The bits
    do not change.

    Source: Rhu et al., vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network
    Design, 2016.
    """

    op: ClassVar[str] = "offload"
    contract: ClassVar[Contract] = "bitwise"

    filter: Filter = dataclasses.field(default_factory=dict)
    ahead: int | Filter = 1
    saved: bool = True
    states: bool = False
    store_stream: str = "store"
    fetch_stream: str = "fetch"

    def check_fields(self) -> None:
        self.check_filter("filter", self.filter)
        for name in ("saved", "states"):
            if not isinstance(value := getattr(self, name), bool):
                self.refuse(name, f"{shown(value)} is not a Boolean", "give True or False [PIPER-D015]")
        if not (self.saved or self.states):
            self.refuse(
                "saved",
                "saved=False with states=False moves nothing",
                "give True for at least one of them [PIPER-D015]",
            )
        self.check_stream("store_stream", "store")
        self.check_stream("fetch_stream", "fetch")
        if isinstance(self.ahead, Mapping):
            self.check_filter("ahead", self.ahead)
        elif (number := integer(self.ahead)) is None or not 0 <= number <= AHEAD:
            self.refuse(
                "ahead",
                f"{shown(self.ahead)} is not usable",
                f"give a number of chunks from 0 to {AHEAD} [PIPER-D003]",
            )

    def apply_forward(self, dag: TrainingDAG, training: TrainingDAG | None) -> None:
        """Do nothing, because a step without backward passes saves nothing."""

    def apply(self, dag: TrainingDAG) -> None:
        chunks = self.select(dag, "filter", self.filter)
        if not chunks:
            return  # the step does not have the pass, or a smaller batch does not have the microbatch
        if self.states:
            self._keep_states(dag, chunks)
        if self.saved:
            self._keep_saved(dag, chunks)

    def _keep_states(self, dag: TrainingDAG, chunks: list[Chunk]) -> None:
        """Keep the optimizer states of the chunks' trained parameters on the host. Raise an error if the
        chunks do not have trained parameters."""
        updated = {
            name for update in dag.of_type(Update) for ref in update.inputs for name in dag.value(ref).names
        }
        names = {name for chunk in chunks for name in dag.interface(chunk).params} & updated
        if not names:
            self.refuse(
                "states",
                f"the selected passes (such as {chunks[0].label}) have no trained parameters",
                "select regions that train parameters [PIPER-D015]",
            )
        dag.hosted |= names

    def _keep_saved(self, dag: TrainingDAG, chunks: list[Chunk]) -> None:
        """Store the values that the selected chunks save on the host, and fetch these values for the later
        passes that read them. Raise an error if there are no such values, or if `ahead` fetches a value too
        early."""
        # (region, slice) -> all its passes but the first forward pass
        later: dict[tuple[int, Slice], list[Chunk]] = {}
        for chunk in dag.of_type(Chunk):
            if not _is_first(chunk):
                later.setdefault((chunk.region, chunk.slice), []).append(chunk)
        named = self.filter.get("PASS")
        halves = "BI" in (named if isinstance(named, list | tuple) else [named])
        stores: dict[Ref, Node] = {}
        for chunk in chunks:
            if _is_first(chunk) or (halves and chunk.kind == "BI"):
                for ref, readers in _kept(dag, chunk, later.get((chunk.region, chunk.slice), ())).items():
                    if ref not in stores:
                        stores[ref] = self._store(dag, chunk, ref)
                    self._fetch(dag, stores[ref], ref, readers)
        if not stores:
            # A store has the tags of the chunk for which an offload made it, except for PASS.
            selected = [{**chunk.tags, "PASS": STORE} for chunk in chunks]
            for store in dag.of_type(Store):
                if store.tags in selected:
                    self.refuse(
                        "filter",
                        f"directive {store.origin} already offloads the values that the selected passes save",
                        f"{'give saved=False' if self.states else 'offload each region only once'} [PIPER-D015]",
                    )
            if recomputed := [chunk for chunk in chunks if self._is_recomputed(dag, chunk)]:
                found = (
                    f"an earlier recompute repeats the selected passes (such as {recomputed[0].label}), so they save "
                    "nothing for a backward pass, and none of them reads an activation of another region"
                )
                advice = "give saved=False" if self.states else "remove this directive"
                self.refuse("filter", found, f"{advice} [PIPER-D015]")
            found = f"the selected passes (such as {chunks[0].label}) save nothing for a backward pass"
            advice = "remove this directive, or select forward passes that save values"
            self.refuse("filter", found, f"{'give saved=False' if self.states else advice} [PIPER-D015]")
        if isinstance(self.ahead, Mapping) and not nx.is_directed_acyclic_graph(dag.graph):
            found = f"{describe(self.ahead)} selects a chunk that runs before the values to fetch have been stored"
            self.refuse("ahead", found, "give a number of chunks instead, such as ahead=1 [PIPER-D015]")

    @staticmethod
    def _is_recomputed(dag: TrainingDAG, chunk: Chunk) -> bool:
        """Return whether a second forward pass repeats the chunk."""
        same = (chunk.region, chunk.slice)
        return _is_first(chunk) and any(
            other.tags.get("PASS") == AGAIN and (other.region, other.slice) == same
            for other in dag.of_type(Chunk)
        )

    def _store(self, dag: TrainingDAG, chunk: Chunk, ref: Ref) -> Node:
        store = dag.add(Store(inputs=(ref,), stream=self.store_stream, **_about(dag, chunk, ref, STORE)))
        if ref[0] != chunk.id:
            # The chunk reads `ref`. If `ref` is a received value, the chunk waits for the message, so that the
            # store stream does not have to wait.
            dag.order(chunk, store, dag.origin)
        return store

    def _fetch(self, dag: TrainingDAG, store: Node, ref: Ref, readers: list[Chunk]) -> None:
        """Add a fetch of a stored value, which the readers read instead of `ref`. If `ahead` is a filter, the
        fetch comes before the chunks of the same device that the filter selects."""
        ahead = 1 if isinstance(self.ahead, Mapping) else self.ahead
        fetch = Fetch(
            inputs=((store.id, 0),),
            stream=self.fetch_stream,
            ahead=ahead,
            **_about(dag, readers[0], ref, FETCH),
        )
        dag.add(fetch)
        for reader in readers:
            dag.substitute(reader, ref, (fetch.id, 0))
        if isinstance(self.ahead, Mapping):
            for other in self.select(dag, "ahead", self.ahead):
                if other.devices == fetch.devices and other not in readers:
                    dag.order(fetch, other, dag.origin)


def _is_first(chunk: Chunk) -> bool:
    """Return whether the chunk is a forward pass, but not a recomputed one."""
    return chunk.kind == "F" and chunk.tags.get("PASS") != AGAIN


def _kept(dag: TrainingDAG, chunk: Chunk, later: Iterable[Chunk]) -> dict[Ref, list[Chunk]]:
    """Return value -> its readers in `later`, for each value to offload: one that the chunk saves, or an
    activation that the chunk reads. Values without elements are left out.
    """
    kept: dict[Ref, list[Chunk]] = {}
    for reader in later:
        for ref in dict.fromkeys(reader.inputs):
            value = dag.value(ref)
            own = ref[0] == chunk.id and value.kind == Kind.SAVED
            if (own or (ref in chunk.inputs and value.kind == Kind.ACTIVATION)) and any(
                spec.numel for spec in value.tensors
            ):
                kept.setdefault(ref, []).append(reader)
    return kept


def _about(dag: TrainingDAG, chunk: Chunk, ref: Ref, what: str) -> dict[str, Any]:
    """Return the fields of a store or fetch of a value for a chunk. `what` is its tag PASS."""
    return {
        "outputs": (dag.value(ref),),
        "tags": {**chunk.tags, "PASS": what},
        "devices": chunk.devices,
        "placed_by": chunk.placed_by,
    }
