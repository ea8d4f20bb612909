"""Find the blocks of a module without annotations, and their bytes. A stage may begin with any block.

Example:

    cut = blocks_of(module, batch)
    piper.annotate_modules(module, "PP", cut.stages([3, 5]))  # blocks 0-2, blocks 3-4, blocks from 5 on
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_piper.annotate import annotate_modules
from lightning_piper.capture import CapturedStep, capture
from lightning_piper.common.limits import shown
from lightning_piper.directives import ChunkLoss, Directive
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import StepCode
from lightning_piper.ir.values import Kind
from lightning_piper.search.costs.chain import Shortened, copy_of, links, shortened

TAG = "BLOCK"

Groups = tuple[tuple[str, ...], ...]


class Bytes(NamedTuple):
    """The bytes that a block saves and outputs. The fields are the fields of `Work` with the same names."""

    saved: int
    saved_for_weights: int
    output: int


@dataclass(frozen=True)
class BlockCut:
    """A cut of a training step into a chain of blocks.

    Attributes:
        names: Names of the blocks, in the order in which the forward pass runs them.
        groups: For each block, the names of its modules. No module is inside of another module. A block
            without modules is work of the step itself.
        regions: For each block, the indices of its regions in `step`. Equal blocks share regions.
        params: For each block, name of a parameter that it uses -> bytes.
        routed: For each block, the parameters between `dispatch` and `combine`, which devices may shard.
        trains: Names of the parameters that get gradients.
        untagged: Indices of the blocks with work on parameters outside of all modules in `groups`. This work
            is in regions without the tag.
        renamed: Parameter of `step` -> names of the parameters that it represents.
        step: The captured step, cut into blocks by the tag `TAG`. It may have fewer layers than the module.
        module: The module from which `step` was captured: a copy that shares the module's tensors.
        first: Directives with which `step` was captured. The program of the blocks begins with them.
    """

    names: tuple[str, ...]
    groups: Groups
    regions: tuple[tuple[int, ...], ...]
    params: tuple[Mapping[str, int], ...]
    routed: tuple[frozenset[str], ...]
    trains: frozenset[str]
    untagged: frozenset[int]
    renamed: Mapping[str, frozenset[str]]
    step: CapturedStep
    module: nn.Module
    first: tuple[Directive, ...] = ()

    def stages(self, borders: Sequence[int]) -> list[list[str]]:
        """Return, for each stage, the names of its modules, as groups for `annotate_modules`. Stages begin
        with block 0 and with each block in `borders`.

        Raises:
            CaptureError: The numbers do not rise, or are out of range.
        """
        ends = [0, *borders, len(self.names)]
        if any(a >= b for a, b in itertools.pairwise(ends)):
            most = len(self.names) - 1
            fix = (
                f"Give increasing numbers of blocks from 1 to {most}"
                if most
                else "Give [], because there is one block"
            )
            raise CaptureError(f"stages({shown(borders)}) is not usable. {fix} [PIPER-C024]")
        return [[name for group in self.groups[a:b] for name in group] for a, b in itertools.pairwise(ends)]

    def refuses(self, samples: int) -> Exception | None:
        """Return the error of a trace with this number of samples; None if the trace succeeds."""
        return refusal(self.step, samples)

    def chunked(self) -> BlockCut | None:
        """Return the cut of the step under `ChunkLoss`, which computes the scores of losses in chunks of rows. None
        if the step has no such loss."""
        step = self.step.chunking_losses(0)
        return None if refusal(step, step.size) else replace(self, step=step, first=(ChunkLoss(),))

    def bytes(self, samples: int) -> tuple[Bytes, ...]:
        """Return the bytes that each block saves and outputs with a microbatch of this many samples."""
        return bytes_of(self.step.at(samples), self.regions)

    def all_named(self, params: Iterable[str]) -> frozenset[str]:
        """Return the names of the module's parameters that these parameters of `step` represent."""
        return frozenset(name for param in params for name in self.renamed.get(param, ()))

    def sent(self, samples: int) -> tuple[int, ...]:
        """Return, for each block, the bytes of the rows that a forward pass sends to experts and gets
        back."""
        code = self.step.at(samples)
        return tuple(sum(_sent(code, region) for region in regions) for regions in self.regions)


def refusal(step: CapturedStep, samples: int) -> Exception | None:
    """Return the error of a trace with this number of samples; None if the trace succeeds.

    User code may raise any error. For example, a batch norm rejects a batch of one sample.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            step.at(samples)
    except Exception as error:
        return error
    return None


def blocks_of(module: nn.Module, batch: Any, short: bool = True) -> BlockCut:
    """Find the blocks of a module's training step. The module is neither changed nor run.

    Args:
        module: A LightningModule. Its parameters may be on the meta device.
        batch: The batch of one step.
        short: Trace a copy with fewer layers if layers are equal. If this fails, all layers are traced.

    Raises:
        CaptureError: The step cannot be captured.
    """
    with torch.random.fork_rng(devices=[]):
        if short and (made := shortened(module)).left_out:
            try:
                return _cut(made, batch)
            except Exception:
                # The step's code depends on the number of layers, or layers differ after all. So trace all
                # layers.
                pass
        return _cut(Shortened(copy_of(module)), batch)


def _cut(made: Shortened, batch: Any) -> BlockCut:
    """Cut the step into blocks. Several modules of the chain become one block if their regions cannot be
    separated."""
    groups: Groups = tuple((name,) for name in links(made.module))
    while True:
        annotated = copy_of(made.module)
        if groups:
            annotate_modules(annotated, TAG, groups)
        step = capture(annotated, batch, _device_of(annotated))
        code = step.at(step.size)
        runs = _runs(code)
        if all(len(run.tags) <= 1 for run in runs):
            break
        groups = tuple(tuple(name for tag in run.tags for name in groups[tag]) for run in runs)
    blocks = [_ChainBlock(groups[run.tags[0]] if run.tags else (), run) for run in runs]
    return _assembled(made, step, annotated, _with_all_layers(made, blocks, code))


def _device_of(module: nn.Module) -> str:
    """Return the device type of the first parameter; "cpu" without parameters or on the meta device."""
    kind = next((p.device.type for p in module.parameters()), "cpu")
    return "cpu" if kind == "meta" else kind


@dataclass(frozen=True)
class _RegionRun:
    """A run of consecutive regions that must be in one block.

    Attributes:
        tags: Indices of the groups of modules to which the regions belong.
        regions: Indices of the regions.
        untagged: Whether some regions belong to no group.
    """

    tags: tuple[int, ...]
    regions: tuple[int, ...]
    untagged: bool


def _runs(code: StepCode) -> list[_RegionRun]:
    """Return the runs of regions of a step.

    If work returns to modules that ran before, all regions in between are one run. Untagged work belongs to
    the run before it. All untagged work must be in one stage, so everything from the first to the last
    untagged region is also one run.
    """
    tags = [region.tags.get(TAG) for region in code.regions]
    last = {tag: i for i, tag in enumerate(tags)}
    runs: list[_RegionRun] = []
    start, until = 0, -1  # the first region of the current run, and a region that this run must contain
    for i, tag in enumerate(tags):
        named = any(x is not None for x in tags[start:i])
        if i > until and tag is not None and named:
            runs.append(_run(tags, start, i))
            start = i
        until = max(until, i if tag is None else last[tag])
    runs.append(_run(tags, start, len(tags)))
    apart = [i for i, run in enumerate(runs) if run.untagged]
    if len(apart) > 1:
        begin, end = apart[0], apart[-1]
        runs[begin : end + 1] = [_run(tags, runs[begin].regions[0], runs[end].regions[-1] + 1)]
    return runs


def _run(tags: Sequence[int | None], start: int, stop: int) -> _RegionRun:
    """Return the regions from `start` to `stop` (exclusive) as one run. `tags` has the tag of each region of
    the step."""
    here = tags[start:stop]
    return _RegionRun(
        tuple(dict.fromkeys(tag for tag in here if tag is not None)), tuple(range(start, stop)), None in here
    )


@dataclass(frozen=True)
class _ChainBlock:
    """A block of the chain.

    Attributes:
        group: Names of the block's modules in the copy, or the name of the layer that the copy lacks.
        run: The block's regions.
        renamed: If the block is a layer that the copy lacks: its name, and the name of the equal layer in the
            copy. Otherwise None.
    """

    group: tuple[str, ...]
    run: _RegionRun
    renamed: tuple[str, str] | None = None


class _DifferentLayers(Exception):
    """A shortened module does not show how its missing layers run. `blocks_of` then traces all layers."""


def _with_all_layers(made: Shortened, blocks: Sequence[_ChainBlock], code: StepCode) -> list[_ChainBlock]:
    """Return the chain with all layers of the original module. A layer that the copy lacks gets the regions
    of an equal layer.

    Raises:
        _DifferentLayers: A layer is not a block of its own, or layers that should be equal differ.
    """
    by_name = {block.group[0]: block for block in blocks if len(block.group) == 1}
    more: dict[str, list[_ChainBlock]] = {}
    texts: dict[str, str] = {}
    for name, layer in made.left_out.items():
        if not {layer.after, *layer.like} <= by_name.keys():
            raise _DifferentLayers("a layer shares operations with another layer")
        for like in layer.like:
            texts.setdefault(like, "\n".join(text_of(code, region) for region in by_name[like].run.regions))
        if len({texts[like] for like in layer.like}) > 1:
            raise _DifferentLayers("layers of one class have different computations")
        like = layer.like[-1]
        more.setdefault(layer.after, []).append(_ChainBlock((name,), by_name[like].run, (name, like)))
    return [x for block in blocks for x in (block, *more.get(block.group[0] if block.group else "", ()))]


def text_of(code: StepCode, region: int) -> str:
    """Return the operations of a region's F and B as text. Layers with equal computations have equal
    texts."""
    lines: list[str] = []
    for kind in ("F", "B"):
        if (region, kind) not in code.interfaces:
            continue
        names = {node: f"%{i}" for i, node in enumerate(code.code[region, kind].graph.nodes)}
        for node in names:
            args = torch.fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            lines.append(f"{kind} {node.op} {'' if node.op == 'placeholder' else node.target} {args!r}")
        lines += [str(tensor) for bundle in code.code[region, kind].outputs for tensor in bundle]
    return "\n".join(lines)


def _assembled(
    made: Shortened, step: CapturedStep, annotated: nn.Module, blocks: Sequence[_ChainBlock]
) -> BlockCut:
    """Return the cut into these blocks. It has the names of the original module, not the names of the
    shortened copy."""
    code = step.at(step.size)

    def name_of(block: _ChainBlock, name: str) -> str:
        if block.renamed is not None and name.startswith(f"{block.renamed[1]}."):
            return block.renamed[0] + name.removeprefix(block.renamed[1])
        return made.original(name)

    params: list[dict[str, int]] = []
    routed: list[frozenset[str]] = []
    renamed: dict[str, set[str]] = {}
    for block in blocks:
        own = {n for r in block.run.regions for kind in "FB" for n in _params(code, (r, kind))}
        parts = {n for r in block.run.regions if r in code.routed for n in code.routed[r].params}
        params.append({name_of(block, n): step.params[n].spec.nbytes for n in step.params if n in own})
        routed.append(frozenset(name_of(block, n) for n in parts))
        for n in own:
            renamed.setdefault(n, set()).add(name_of(block, n))
    groups = tuple(
        (block.renamed[0],) if block.renamed else tuple(made.original(name) for name in block.group)
        for block in blocks
    )
    return BlockCut(
        names=tuple(group[0] if group else "training_step" for group in groups),
        groups=groups,
        regions=tuple(block.run.regions for block in blocks),
        params=tuple(params),
        routed=tuple(routed),
        trains=frozenset(x for n, found in renamed.items() if step.params[n].requires_grad for x in found),
        renamed={n: frozenset(found) for n, found in renamed.items()},
        untagged=frozenset(i for i, block in enumerate(blocks) if block.run.untagged),
        step=step,
        module=annotated,
    )


def _params(code: StepCode, key: tuple[int, str]) -> tuple[str, ...]:
    return code.interfaces[key].params if key in code.interfaces else ()


# Bytes of blocks


def bytes_of(code: StepCode, blocks: Sequence[tuple[int, ...]]) -> tuple[Bytes, ...]:
    """Return the bytes that each block saves and outputs.

    A value that is in several bundles counts in each bundle. The output of a block contains everything that
    later blocks read from this block or from blocks before it.

    Args:
        blocks: The regions of each block.
    """
    crossing = _crossing(code)
    found = []
    for regions in blocks:
        saved = [
            (out.names, n) for r in regions for out, n in _outputs(code, (r, "F")) if out.kind == Kind.SAVED
        ]
        made = [n for r in regions for out, n in _outputs(code, (r, "BI")) if out.kind == Kind.SAVED]
        for_weights = sum(n for names, n in saved if "BW" in names) + sum(made)
        found.append(Bytes(sum(n for _, n in saved), for_weights, crossing[regions[-1]]))
    return tuple(found)


def _outputs(code: StepCode, key: tuple[int, str]) -> Iterator[tuple[Any, int]]:
    """Yield (output, bytes) of a pass; nothing if the region does not have the pass."""
    if key not in code.interfaces and key not in code.split_passes:
        return
    made = zip(code.interface_of(key).outputs, code.code_of(key).outputs, strict=True)
    yield from ((out, sum(spec.nbytes for spec in specs)) for out, specs in made)


def _crossing(code: StepCode) -> list[int]:
    """Return, for each region, the bytes of the outputs that the forward passes of later regions read from
    this region or from earlier regions.
    """
    last: dict[tuple[int, int], int] = {}  # (region, output) -> the last region that reads it
    for (region, kind), interface in code.interfaces.items():
        for source, _, index in interface.inputs if kind == "F" else ():
            last[source, index] = max(region, last.get((source, index), 0))
    change = [0] * (len(code.regions) + 1)
    for (source, index), reader in last.items():
        nbytes = sum(spec.nbytes for spec in code.code[source, "F"].outputs[index])
        change[source] += nbytes
        change[reader] -= nbytes
    return list(itertools.accumulate(change))[:-1]


def _sent(code: StepCode, region: int) -> int:
    """Return the bytes of the rows that the forward pass of a region exchanges with experts; 0 if the region
    does not exchange rows."""
    if region not in code.routed:
        return 0
    interface, made = code.interfaces[region, "F"], code.code[region, "F"].outputs
    given = [code.code[source, kind].outputs[index] for source, kind, index in interface.inputs]
    ways = [*zip(interface.arrives, given, strict=True), *zip(interface.leaves, made, strict=True)]
    return sum(spec.nbytes for way, specs in ways if way in ("dispatch", "combine") for spec in specs)
