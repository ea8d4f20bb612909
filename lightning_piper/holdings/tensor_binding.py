"""Plans work on the tensors to which they were bound, but hooks may replace tensors in the module.
`TensorBinding` copies such changes to the bound tensors, or raises an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_piper.capture import dict_version, storage_id
from lightning_piper.errors import CaptureError
from lightning_piper.holdings.ownership import Ownership


class TensorBinding:
    """The parameters and buffers that the plans are bound to, with their places in the module.

    If a tensor's values were replaced (`p.data = ...`, `self.average = ...`), `follow` copies the new values
    into the bound tensor, and puts the bound tensor back into its place. Parameters cannot be replaced,
    removed or frozen, because the optimizer and the gradients would not follow. Make a new object for each
    distribution of the module.

    `_names`, `_tensors`, `_bound`, `_pointers` and `_trained` are parallel lists: for each tensor its
    canonical name, the tensor itself, its memory, the address of its memory, and `requires_grad`. `_versions`
    has the version of each dict in `_watched`, so that a step can test cheaply whether a tensor or submodule
    was replaced.
    """

    def __init__(self, module: nn.Module, ownership: Ownership) -> None:
        self._entries = [
            (part._parameters if attribute in part._parameters else part._buffers, attribute, name)
            for name, places in ownership.places.items()
            for part, attribute in places
        ]
        self._names = list(ownership.places)
        known = {name: store[attribute] for store, attribute, name in self._entries}
        self._tensors: list[torch.Tensor] = [x for name in self._names if (x := known[name]) is not None]
        self._bound = [x.detach() for x in self._tensors]
        self._stores = list({id(store): store for store, _, _ in self._entries}.values())
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))
        self._trained = [x.requires_grad for x in self._tensors]
        # indices of the placeholders of sharded parameters
        sharded = [
            i
            for i, x in enumerate(self._tensors)
            if x.is_meta and ownership.tensor_map.is_sharded(self._names[i])
        ]
        # (index, id of the storage) of each of these placeholders. A placeholder has no memory with an
        # address, but replacing its data gives it another storage.
        self._sharded = [(i, storage_id(self._tensors[i])) for i in sharded]
        self._names_in = {
            id(store): {name for name, x in store.items() if x is not None} for store in self._stores
        }
        self._module, self._is_whole = module, ownership.tensor_map.is_replicated
        self._is_sharded = ownership.tensor_map.is_sharded
        self._watched = self._all_dicts()
        self._versions = list(map(dict_version, self._watched))

    def _all_dicts(self) -> list[dict[str, Any]]:
        """Return all dicts of submodules and tensors. Empty dicts are included, because tensors may be
        added."""
        return [
            d for part in self._module.modules() for d in (part._modules, part._parameters, part._buffers)
        ]

    def follow(self) -> None:
        """Copy the values of replaced tensors into the bound tensors, and put the bound tensors back into the
        module. Called before each step.

        Raises:
            CaptureError: The module has changed in a way that the plans cannot follow. The error names
                the parameter or buffer.
        """
        try:
            self._follow()
        except CaptureError as error:
            if not self._is_whole:  # The change is lost, so no step can continue after it, captured or not.
                error.late = True
            raise

    def _follow(self) -> None:
        """Do the work of `follow`. The method first compares versions and addresses, because these rarely
        change."""
        if list(map(dict_version, self._watched)) != self._versions:
            self._put_back()
            self._check_parts()
            self._watched = self._all_dicts()
            self._versions = list(map(dict_version, self._watched))
        with torch._C.DisableTorchFunctionSubclass():  # some tensors are placeholders, which are slow
            pointers = list(map(torch.Tensor.data_ptr, self._tensors))
            storages = [storage_id(self._tensors[i]) for i, _ in self._sharded]
        if pointers != self._pointers:
            self._take_over()
        for (i, storage), found in zip(self._sharded, storages, strict=True):
            if found != storage:
                raise CaptureError(
                    f"PiperStrategy: the values of parameter {self._names[i]!r} were replaced (.data = ...), "
                    "but the parameter is sharded, so the change would be lost. Change the shards of this process "
                    "instead: the parameters in trainer.optimizers[0].param_groups [PIPER-S007]"
                )

    def check_trained(self) -> None:
        """Before a training step, check that the captured step trains the same parameters as the module.

        Raises:
            CaptureError: `requires_grad` of a parameter has changed.
        """
        if [x.requires_grad for x in self._tensors] != self._trained:
            name = next(
                n
                for n, x, was in zip(self._names, self._tensors, self._trained, strict=True)
                if x.requires_grad != was
            )
            raise CaptureError(
                f"PiperStrategy: requires_grad of parameter {name!r} changed after Piper captured the step, "
                "so the captured step would ignore the change. Set requires_grad before fit [PIPER-S006]"
            )

    def _put_back(self) -> None:
        """Restore replaced entries of the module. The old tensor of a buffer receives the values of the new
        tensor.

        Raises:
            CaptureError: A tensor was removed, or a parameter was replaced.
        """
        tensors = dict(zip(self._names, self._tensors, strict=True))
        for store, attribute, name in self._entries:
            found, tensor = store.get(attribute), tensors[name]
            if found is tensor:
                continue
            if found is None or isinstance(tensor, nn.Parameter):
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                what, values = "removed" if found is None else "replaced", ""
                if found is not None and not self._is_sharded(name):
                    values = ". To change only its values, change it in place under torch.no_grad()"
                elif found is not None and tensor.requires_grad:
                    values = (
                        ". To change only its values, change the shards of this process: the parameters in "
                        "trainer.optimizers[0].param_groups"
                    )
                raise CaptureError(
                    f"PiperStrategy: {kind} {name!r} was {what} after the first batch. Do this before fit{values}"
                    " [PIPER-S006]"
                )
            self._give(name, found, tensor.detach())
            store[attribute] = tensor  # type: ignore[assignment]

    def _check_parts(self) -> None:
        """Check that no submodule with tensors was added or removed. Submodules without tensors may change.

        Raises:
            CaptureError: A submodule with tensors was added or removed.
        """
        here: set[int] = set()
        for path, part in self._module.named_modules():
            for store in (part._parameters, part._buffers):
                here.add(id(store))
                known = self._names_in.get(id(store), set())
                new = next((name for name, x in store.items() if x is not None and name not in known), None)
                if new is not None:
                    raise CaptureError(
                        f"PiperStrategy: {f'{path}.{new}'.removeprefix('.')!r} was added after the first "
                        "batch, so no device has it. Add it before fit [PIPER-S006]"
                    )
        for store, _, name in self._entries:
            if id(store) not in here:
                raise CaptureError(
                    f"PiperStrategy: the submodule that has {name!r} was removed after the first batch. "
                    "Remove it before fit [PIPER-S006]"
                )

    def _take_over(self) -> None:
        """Copy into the bound memory the values of tensors whose memory was replaced (`tensor.data =
        ...`)."""
        for i, (name, tensor, bound) in enumerate(zip(self._names, self._tensors, self._bound, strict=True)):
            if tensor.data_ptr() != self._pointers[i]:
                self._give(name, tensor.detach(), bound)
                tensor.data = bound

    def _give(self, name: str, found: torch.Tensor, bound: torch.Tensor) -> None:
        """Copy the values of a tensor that has replaced a bound tensor into the bound tensor.

        Raises:
            CaptureError: The new tensor shares memory with another bound tensor, or has another shape, dtype
                or device.
        """
        for other, x in zip(self._names, self._bound, strict=True):
            shared = (
                not x.is_meta
                and x.numel()
                and x.untyped_storage().data_ptr() == found.untyped_storage().data_ptr()
            )
            if shared and other != name:
                raise CaptureError(
                    f"PiperStrategy: {name!r} was given the memory of {other!r} after the first batch, so a "
                    "change of one would change the other. Give it a copy of the memory (.clone()) [PIPER-S006]"
                )
        if (found.shape, found.dtype, found.device) != (bound.shape, bound.dtype, bound.device):
            raise CaptureError(
                f"PiperStrategy: {name!r} was {bound.dtype}{list(bound.shape)} on {bound.device} when the "
                f"step was captured, and was replaced by {found.dtype}{list(found.shape)} on {found.device}. "
                "Give it a tensor of the first shape, dtype and device [PIPER-S006]"
            )
        with torch.no_grad():
            bound.copy_(found)
