"""Writes a Hugging Face model, or its adapters, from the processes that hold it, in the files that `transformers`
and `peft` read.

    trainer.fit(module)
    piper.save_pretrained(trainer, "tuned")

Each process writes the tensors that it holds into one safetensors file. If processes hold shards of a tensor,
one of them receives the whole tensor while it writes the tensor. So no process needs memory for the whole
model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_piper.checkpoint.locations import is_remote
from lightning_piper.checkpoint.safetensors_writer import NAMES, SafetensorsWriter
from lightning_piper.errors import PiperError
from lightning_piper.holdings.distributed_marks import parts_of
from lightning_piper.holdings.materialization import named_tensors
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.pretrained.loading import require_transformers
from lightning_piper.pretrained.model_folder import ModelFolder
from lightning_piper.processes.world import RANK_ZERO, World, together
from lightning_piper.strategy import PiperStrategy
from lightning_piper.strategy.phases import Ended, Idle


def save_pretrained(trainer: Any, path: str | os.PathLike[str], model: Any = None) -> None:
    """Write the `transformers` model of a Trainer's module into a folder that `from_pretrained` reads.

    This is the model's own `save_pretrained` for a model that is distributed over processes. Collective: call
    it on all processes, in a hook such as `on_train_end` or `on_fit_end`, or after the fit. Each process
    writes tensors that it holds, and no process gets the whole model.

    If the model has adapters of `peft`, only the adapters are written, as `peft` does. Rank 0 writes them, and
    gets no other tensors.

    Args:
        trainer: The Trainer with `PiperStrategy`.
        path: The folder, which all processes share. Rank 0's path is used. Other files in the folder stay,
            such as a tokenizer's files. An earlier model in the folder can be loaded until all files of the
            new one are complete.
        model: The model, if the LightningModule has several, such as `module.encoder`. It may be a `PeftModel`.

    Raises:
        PiperError: On every process, if any process cannot write; or the LightningModule does not have such a
            model; or the model has no values yet, or quantized weights that are not the frozen base of adapters.
    """
    strategy, module = _run_of(trainer)
    run, world = strategy.world, strategy.program_world
    if run.size == world.size:
        _save_model(trainer, module, path, model, world)
        return

    def work() -> None:
        if RANK_ZERO in world.members:  # the other local replicas of local SGD have models of their own
            _save_model(trainer, module, path, model, world)

    together(run, "piper.save_pretrained", work)


def _save_model(
    trainer: Any, module: nn.Module, path: str | os.PathLike[str], model: Any, world: World
) -> None:
    """Write the model on the processes of one program. Collective over these processes."""
    found = _model_of(module, model)
    parts = _parts_of(trainer, module, found)
    folder = world.broadcast(os.fspath(path))
    if is_remote(folder) or "://" in folder:
        raise PiperError(
            f"piper.save_pretrained: {folder} is a remote address. Give a folder that all processes share"
            " [PIPER-K011]"
        )
    save = _save_adapters if _has_adapters(found) else _save
    save(found, Path(os.path.abspath(folder)), parts, world)


def _run_of(trainer: Any) -> tuple[PiperStrategy, nn.Module]:
    """Return the strategy of a Trainer, and its module.

    Raises:
        PiperError: transformers is missing, the Trainer does not have PiperStrategy, or it does not have a
            module yet.
    """
    require_transformers("save_pretrained")
    strategy = getattr(trainer, "strategy", None)
    if not isinstance(strategy, PiperStrategy):
        kind = type(trainer if strategy is None else strategy).__name__
        raise PiperError(
            f"piper.save_pretrained: the first argument must be a Trainer with PiperStrategy, but {kind} was "
            "found. With another strategy, call the model's own save_pretrained [PIPER-K011]"
        )
    module = strategy.lightning_module
    if module is None:
        raise PiperError(
            "piper.save_pretrained: the Trainer does not have a module yet. Save in a hook, or after the fit"
            " [PIPER-K011]"
        )
    return strategy, module


def _model_of(module: nn.Module, model: Any) -> Any:
    """Return the model to save. It may be a `PeftModel`, which has a model of transformers inside.

    Raises:
        PiperError: The module does not have the model, or has several; or the model cannot be saved.
    """
    from transformers import PreTrainedModel

    models = {
        path: part
        for path, part in module.named_modules()
        if isinstance(part, PreTrainedModel) or _is_peft_model(part)
    }
    # models that are not a part of another model, such as the base model of a classifier
    outer = [path for path in models if not any(path.startswith(f"{other}.") for other in models)]
    if model is None and len(outer) == 1:
        model = models[outer[0]]
    if model is None:
        if not outer:
            raise PiperError(
                f"piper.save_pretrained: {type(module).__name__} has no model of transformers. Save the module with "
                "trainer.save_checkpoint [PIPER-K011]"
            )
        raise PiperError(
            f"piper.save_pretrained: {type(module).__name__} has several models of transformers "
            f"({', '.join(outer)}). Pass the model to save, such as model=module.{outer[0]} [PIPER-K011]"
        )
    if all(part is not model for part in models.values()):
        raise PiperError(
            f"piper.save_pretrained: {type(model).__name__} is not a model of transformers inside of the "
            f"Trainer's {type(module).__name__}. Pass a submodule of the module that is a model of transformers"
            " [PIPER-K011]"
        )
    if _has_adapters(model):
        return model
    if any(map(_is_peft, model.modules())):
        raise PiperError(
            f"piper.save_pretrained: {type(model).__name__} is the base model of adapters of PEFT. Pass the "
            "PeftModel around it, which saves the adapters [PIPER-K011]"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise PiperError(
            f"piper.save_pretrained: the weights of {type(model).__name__} are quantized, which is not supported. "
            "Use weights in a floating-point dtype [PIPER-K011]"
        )
    return model


def _is_peft(part: nn.Module) -> bool:
    return any(each.__module__.partition(".")[0] == "peft" for each in type(part).__mro__)


def _is_peft_model(part: nn.Module) -> bool:
    return _is_peft(part) and hasattr(part, "save_pretrained")


def _has_adapters(model: nn.Module) -> bool:
    """Return whether the model's own `save_pretrained` writes adapters of PEFT."""
    return _is_peft_model(model) or getattr(model, "_hf_peft_config_loaded", False)


def _parts_of(trainer: Any, module: nn.Module, model: nn.Module) -> Ownership | None:
    """Return the distribution of the module over processes; None if every process has the whole module.

    Raises:
        PiperError: No process has the model's values, or the run has failed. Or a sharded parameter was changed, which
            no shard has followed.
    """
    parts = parts_of(module)
    if parts is not None and not parts.ended and isinstance(trainer.strategy.phase, Idle | Ended):
        raise PiperError(
            "piper.save_pretrained: the previous run failed and left the module distributed over processes that "
            "may have ended. Load a checkpoint, and save the model after a fit with it [PIPER-S010]"
        )
    if parts is None and any(tensor.is_meta for _, tensor in named_tensors(model)):
        raise PiperError(
            "piper.save_pretrained: the model is on the meta device and has no values before the first step "
            "of a run. Save after the first step [PIPER-S009]"
        )
    if parts is None or parts.whole:
        return None
    parts.check_unwritten()
    return parts


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that one process writes.

    Attributes:
        key: The tensor's name in the files.
        tensor: The model's tensor. It may be a placeholder.
        rank: The process that writes the tensor.
        name: The tensor's canonical name in the LightningModule, if it is distributed; otherwise empty.
    """

    key: str
    tensor: torch.Tensor
    rank: int
    name: str

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.dtype.itemsize


def _outputs(model: Any, parts: Ownership | None) -> list[SavedTensor]:
    """Return all tensors to write, in the same order on every process. Tensors with larger elements come
    first, so that each tensor in a file begins at a multiple of its element size.

    A canonical holder writes a tensor, so the files have the values that a checkpoint has. Of several
    canonical holders, the holder with the fewest bytes so far writes the tensor. Rank 0 writes the tensors
    that are not distributed.
    """
    keys, tensors = _keys(model), dict(named_tensors(model))
    canonical = {} if parts is None else _canonical_names(model, parts)
    written: dict[int, int] = {}  # rank -> number of bytes that it is to write so far
    found = []
    for name in sorted(keys, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        holders: Sequence[int] = [RANK_ZERO]
        if parts is not None and name in canonical:
            holders = sorted(parts.tensor_map.canonical_holders(canonical[name]))
        rank = min(holders, key=lambda rank: written.get(rank, 0))
        found.append(SavedTensor(keys[name], tensors[name], rank, canonical.get(name, "")))
        written[rank] = written.get(rank, 0) + found[-1].nbytes
    return found


def _keys(model: Any) -> dict[str, str]:
    """Return name in the model -> name in the files, with one name for tied tensors.

    The names are those that `save_pretrained` of transformers writes. If it would also convert values, such
    as stacked experts, the names stay, as with `save_original_format=False`.

    Raises:
        PiperError: A value cannot be in such a file, or tensors are tied in a way that transformers does not
            know.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    tensors, ignored = dict(named_tensors(model)), model._keys_to_ignore_on_save or ()
    names = [name for name in model.state_dict() if name not in ignored]
    for name in names:
        if name not in tensors or tensors[name].dtype not in NAMES:
            found, advice = (
                (
                    f"has the dtype {tensors[name].dtype}, which Piper does not write",
                    "Store it as real numbers (torch.view_as_real)"
                    if tensors[name].dtype.is_complex
                    else "Convert it to a dtype such as float32 or int64",
                )
                if name in tensors
                else (
                    "is in state_dict(), but is neither a parameter nor a buffer",
                    "Remove it from state_dict(), or register it as a buffer",
                )
            )
            raise PiperError(
                f"piper.save_pretrained: {name!r} of {type(model).__name__} {found}. {advice} [PIPER-K011]"
            )
    # Tensors on the meta device, whose ids show what transformers renames and what it converts.
    state = {
        name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in names
    }
    try:
        state = remove_tied_weights_from_state_dict(state, model)
    except RuntimeError as error:
        raise PiperError(
            f"piper.save_pretrained: {type(model).__name__} has tied tensors that its class does not declare: "
            f"{error}. Name them in the class's _tied_weights_keys [PIPER-K011]"
        ) from error
    renamed = {id(tensor): key for key, tensor in revert_weight_conversion(model, dict(state)).items()}
    if renamed.keys() == {id(tensor) for tensor in state.values()}:
        return {name: renamed[id(tensor)] for name, tensor in state.items()}
    return {name: name for name in state}


def _canonical_names(model: Any, parts: Ownership) -> dict[str, str]:
    """Return name in the model -> canonical name in the LightningModule. Tensors that are not distributed are
    absent."""
    canonical = {
        (id(part), attribute): name for name, places in parts.places.items() for part, attribute in places
    }
    found = {}
    for name, _ in named_tensors(model):
        path, _, attribute = name.rpartition(".")
        whole = canonical.get((id(model.get_submodule(path)), attribute))
        if whole in parts.tensor_map.holder_groups:
            found[name] = whole
    return found


def _save(model: Any, path: Path, parts: Ownership | None, world: World) -> None:
    """Write a model into a folder. Collective. If any process fails, all processes raise its error, and the
    earlier model stays, unless `ModelFolder.finish` failed."""
    folder, doing = ModelFolder(path), f"saving {path}"
    outputs = _outputs(model, parts)
    ranks = sorted({each.rank for each in outputs}) or [RANK_ZERO]
    writers: list[SafetensorsWriter] = []

    def begin() -> list[str]:
        return folder.begin(model, len(ranks)) if world.is_rank_zero else []

    def open_file() -> None:
        if world.rank in files:
            own = {each.key: each.tensor for each in outputs if each.rank == world.rank}
            writers.append(SafetensorsWriter(folder.unfinished() / files[world.rank], own))

    def finish() -> None:
        """On rank 0, let the complete files replace the earlier model."""
        if world.is_rank_zero:
            total = {
                "total_parameters": sum(each.numel() for each in model.parameters()),
                "total_size": sum(each.nbytes for each in outputs),
            }
            folder.finish(
                {name: sizes[rank] for rank, name in files.items()},
                {each.key: files[each.rank] for each in outputs},
                total,
            )

    try:
        names = together(world, doing, begin)[RANK_ZERO]
        files = dict(zip(ranks, names, strict=True))
        together(world, doing, open_file)
        for each in outputs:
            _write(each, parts, writers, world.rank)
        sizes = together(world, doing, lambda: writers[0].close() if writers else 0)
        together(world, doing, finish)
    except BaseException:
        if world.is_rank_zero:
            folder.discard()
        raise


def _write(
    output: SavedTensor, parts: Ownership | None, writers: Sequence[SafetensorsWriter], rank: int
) -> None:
    """Write a tensor on the process `output.rank`. Collective if the tensor is distributed, because the other
    holders send their shards to that process."""
    if parts is None or not output.name:
        if rank == output.rank:
            writers[0].add(output.tensor)
        return
    with parts.whole_on(output.name, output.rank) as tensor:
        if tensor is not None:
            writers[0].add(tensor)


def _save_adapters(model: Any, path: Path, parts: Ownership | None, world: World) -> None:
    """Write the adapters of a model into a folder, on rank 0. Collective. If any process fails, all processes
    raise its error, and the earlier adapters stay."""
    folder = ModelFolder(path)

    def write() -> None:
        if world.is_rank_zero:
            folder.discard()
            unfinished = folder.unfinished()
            if (card := path / "README.md").exists():  # peft changes the model card that is there
                shutil.copy(card, unfinished)
            model.save_pretrained(unfinished)
            folder.finish_adapters()

    try:
        with contextlib.ExitStack() as whole:
            if parts is not None:
                canonical = _canonical_names(model, parts)
                for name in _adapter_tensors(model):
                    if name in canonical:
                        whole.enter_context(parts.whole_on(canonical[name], RANK_ZERO))
            together(world, f"saving {path}", write)
    except BaseException:
        if world.is_rank_zero:
            folder.discard()
        raise


def _adapter_tensors(model: Any) -> list[str]:
    """Return the names of the model's tensors that its adapters need: the trained tensors, and the tensors that
    peft writes."""
    from peft import get_peft_model_state_dict

    tensors = dict(named_tensors(model))
    found = {id(x) for x in tensors.values() if x.requires_grad}
    for name, config in model.peft_config.items():
        if config.is_prompt_learning:
            found |= {id(x) for x in model.prompt_encoder[name].parameters()}
        else:
            found |= {id(x) for x in get_peft_model_state_dict(model, dict(tensors), name).values()}
    return [name for name, tensor in tensors.items() if id(tensor) in found]
