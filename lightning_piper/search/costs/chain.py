"""The modules of a model that run one after another, between which a pipeline may be cut.

`links` replaces a module by its children if it is a list of modules, contains such a list, or contains most
of the parameters. The modules that remain are the links of a chain: a layer, an embedding, a norm, a head. If
layers of one kind repeat, `shortened` makes a model with a few layers of each kind, which is cheaper to
trace. The trace of these layers also describes the equal layers that the copy lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_piper.annotate import repeated_blocks
from lightning_piper.common.module_copies import FinalizedModule, copy_module
from lightning_piper.errors import CaptureError
from lightning_piper.ir.values import TensorSpec

# Number of layers of a kind that a shortened model keeps. The first layer may do additional work. The last
# two layers must be equal.
OF_EACH_KIND = 3

_PLAIN = (int, float, str, bool, tuple, type(None))
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class LeftOut:
    """The position and the kind of a layer that the copy lacks. Both fields have names in the copy.

    Attributes:
        after: The last layer of the copy that is before this layer in the module.
        like: Two layers of the copy that have the kind of this layer. Their computations must be equal.
    """

    after: str
    like: tuple[str, str]


@dataclass(frozen=True)
class Shortened:
    """A copy of a module with fewer layers. It shares its tensors with the module.

    Attributes:
        module: The copy.
        names: Name of a layer in the copy -> its name in the module, if they differ.
        left_out: Name in the module -> layer that the copy lacks, in the order of their lists.
    """

    module: nn.Module
    names: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)

    def original(self, name: str) -> str:
        """Return the module's name for a parameter or submodule of the copy."""
        for here, there in self.names.items():
            if name == here or name.startswith(f"{here}."):
                return there + name.removeprefix(here)
        return name


def links(module: nn.Module) -> list[str]:
    """Return the names of the modules that form the chain of a model, in the order of `named_children`.

    Only modules with parameters count. No link is inside of another link. A module with several names counts under
    its first name, as in `named_modules`.
    """
    first = {name for name, _ in module.named_modules()}
    repeated = {id(block) for block in repeated_blocks(module).values()}
    inside = {id(x) for name, block in repeated_blocks(module).items() for x in block.modules()}
    total = sum(p.numel() for p in module.parameters())

    def opens(part: nn.Module) -> bool:
        """Return whether the links are inside of this module. If not, the module itself is a link."""
        children = [child for child in part.children() if _has_parameters(child)]
        if id(part) in repeated or not children:
            return False
        if isinstance(part, _LISTS) or any(
            isinstance(x, _LISTS) and id(x) not in inside for x in part.modules()
        ):
            return True
        most = 2 * sum(p.numel() for p in part.parameters()) > total
        return most and sum(p.numel() for p in part.parameters(recurse=False)) == 0

    def found(part: nn.Module, name: str) -> Iterator[str]:
        """Yield the names of the links inside of `part`, whose name is `name`."""
        for key, child in part.named_children():
            inner = f"{name}.{key}" if name else key
            if inner not in first or not _has_parameters(child):
                continue
            if opens(child):
                yield from found(child, inner)
            else:
                yield inner

    return list(found(module, ""))


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def copy_of(module: nn.Module) -> nn.Module:
    """Return a copy that shares its parameters and buffers, and its Trainer or Fabric, with the module.

    Raises:
        CaptureError: The module cannot be copied, or it or a submodule defines `__del__`.
    """
    kept: list[Any] = [*module.parameters(), *module.buffers()]
    owners = {
        (name, attribute): vars(part)[attribute]
        for name, part in module.named_modules()
        for attribute in ("_trainer", "_fabric")
        if vars(part).get(attribute) is not None
    }
    try:
        copied = copy_module(module, (*kept, *owners.values()))
        for (name, attribute), owner in owners.items():  # a copied LightningModule is without its trainer
            vars(copied.get_submodule(name))[attribute] = owner
        return copied
    except FinalizedModule as error:
        raise CaptureError(
            f"{error}, which Piper makes to find the blocks of the module. Move __del__ to an object that the module "
            "holds [PIPER-C024]"
        ) from error
    except Exception as error:
        found = f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error})"
        if "deepcopy protocol" in str(error) and (computed := _computed_tensor(module)) is not None:
            raise CaptureError(
                f"{found}, because {computed} is a tensor that an operation has made. Compute it in the step. "
                "In place of torch.nn.utils.weight_norm or spectral_norm, use the function of this name in "
                "torch.nn.utils.parametrizations [PIPER-C024]"
            ) from error
        raise CaptureError(
            f"{found}, and Piper cuts a copy into stages. Hold the attribute that cannot be copied in an object whose "
            "class defines __deepcopy__ [PIPER-C024]"
        ) from error


def _computed_tensor(module: nn.Module) -> str | None:
    """Return the name of an attribute that is a tensor with a history of gradients, which Python cannot copy."""
    return next(
        (
            f"{name}.{attribute}".removeprefix(".")
            for name, part in module.named_modules()
            for attribute, value in vars(part).items()
            if isinstance(value, torch.Tensor) and not value.is_leaf
        ),
        None,
    )


def shortened(module: nn.Module) -> Shortened:
    """Return a copy with at most `OF_EACH_KIND` layers of each kind in each list of repeated blocks. A list
    in which a layer has several names keeps all layers. The module is not changed.

    Raises:
        CaptureError: The module cannot be copied.
    """
    made = copy_of(module)
    names: dict[str, str] = {}
    left_out: dict[str, LeftOut] = {}
    blocks = repeated_blocks(made)
    for name in dict.fromkeys(block.rpartition(".")[0] for block in blocks):
        parent = made.get_submodule(name)
        prefix = f"{name}." if name else ""
        if (
            len({*parent._modules.values()}) < len(parent._modules)
            or prefix + next(iter(parent._modules)) not in blocks
        ):
            continue  # a layer has several names in the model, so keep all layers of this list
        counts = _counts(dict(parent.named_children()))
        kinds: dict[str, list[str]] = {}  # kind -> names of its layers in the copy
        keep: list[tuple[str, nn.Module]] = []
        for key, child in parent.named_children():
            of_kind = kinds.setdefault(_kind(child, counts), [])
            if len(of_kind) < OF_EACH_KIND:
                of_kind.append(f"{prefix}{len(keep)}")
                keep.append((key, child))
            else:
                left_out[prefix + key] = LeftOut(f"{prefix}{len(keep) - 1}", (of_kind[-2], of_kind[-1]))
        names |= {f"{prefix}{i}": prefix + key for i, (key, _) in enumerate(keep) if str(i) != key}
        parent._modules = {str(i): child for i, (_, child) in enumerate(keep)}
    return Shortened(made, names, left_out)


def _kind(module: nn.Module, counts: Collection[tuple[str, str]]) -> str:
    """Return a key of a layer: the classes, tensors and plain attributes of its modules. Layers with equal
    keys are of one kind, and are expected to have equal computations.

    The key does not contain the attributes in `counts`, which number the layers.
    """
    return "\n".join(
        f"{name} {type(part).__qualname__} {part.training} {part.extra_repr()} {_tensors(part)} "
        f"{sorted((attr, repr(v)) for attr, v in _plain(part).items() if (name, attr) not in counts)}"
        for name, part in module.named_modules()
    )


def _counts(layers: Mapping[str, nn.Module]) -> set[tuple[str, str]]:
    """Return the attributes that number the layers, as (name of a part of the layer, attribute).

    The value of such an attribute equals the layer's index in every layer.
    """
    found = [
        {
            (name, attr)
            for name, part in layer.named_modules()
            for attr, v in _plain(part).items()
            if repr(v) == key
        }
        for key, layer in layers.items()
    ]
    return set.intersection(*found)


def _plain(part: nn.Module) -> dict[str, Any]:
    """Return the attributes with plain Python values, except `training`."""
    return {attr: v for attr, v in vars(part).items() if attr != "training" and type(v) in _PLAIN}


def _tensors(part: nn.Module) -> list[tuple[str, str, bool]]:
    """Return (name, spec as text, whether it requires gradients) of a module's own parameters and buffers."""
    own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    return [(name, f"{TensorSpec.of(x)}", x.requires_grad) for name, x in own]
