"""Hugging Face models of which each process reads only the weights that it holds.

    class Tuned(L.LightningModule):
        def configure_model(self):
            if self.model is None:
                self.model = piper.from_pretrained(LlamaForCausalLM, "weights")

The model is built on the meta device. When the strategy distributes it, each process reads from the
safetensors files the stages, shards and tensor slices that it holds.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_piper.checkpoint.locations import is_remote
from lightning_piper.checkpoint.safetensors_files import StoredTensor, stored_tensors
from lightning_piper.common.limits import shown
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialization import PRETRAINED, Pretrained, mark_stored, named_tensors

MOST = 20  # number of names that a message lists at most


def from_pretrained(model_class: Any, path: str | os.PathLike[str], **options: Any) -> Any:
    """Build a `transformers` model on the meta device, with its weights to be read from safetensors files.

    `PiperStrategy` reads the weights when it distributes the module. Each process reads what it holds. As
    with transformers, the model is in evaluation mode: call `train()` to use dropout.

    Args:
        model_class: A model class such as `LlamaForCausalLM`, or an auto class such as
            `AutoModelForCausalLM`.
        path: A folder with `config.json` and `model.safetensors`, or shards of it with an index.
        options: Changes of the configuration, such as `num_labels=3`; also `dtype` and
            `attn_implementation`. Without `dtype`, the model has the dtype of its configuration.

    Returns:
        The model. Parameters that the files do not have and that are not in the base model, such as the head
        of a new classifier, get initial values from the model, and a warning names them.

    Raises:
        PiperError: `transformers` is missing, or the files are missing or damaged. The files do not have a
            parameter of the base model, have it in another shape, or have a tensor that the base model does
            not have. Transformers would convert the weights. An option, or the model, is not supported.
    """
    if is_remote(path) or "://" in os.fspath(path):
        raise PiperError(
            f"piper.from_pretrained: {os.fspath(path)} is an address, but Piper reads weights from a local folder only. "
            "Give the path of a folder that each process sees [PIPER-K008]"
        )
    folder = Path(os.path.abspath(path))
    model = _built(model_class, folder, options)
    stored, renamed = _renamed(model, stored_tensors(folder))
    others, tied = _differences(model, stored)
    if renamed or others or tied:
        raise _misfit(model, folder, renamed, others, [[stored[name] for name in names] for names in tied])
    model.__dict__[PRETRAINED] = Pretrained("_init_weights")
    mark_stored(model, stored)
    return model.eval()


def _misfit(
    model: Any, folder: Path, renamed: list[str], others: list[str], tied: list[list[StoredTensor]]
) -> PiperError:
    """Return the error for files that do not fit a model.

    Args:
        renamed: Descriptions of tensors that transformers would convert, or that have one name in the model.
        others: Descriptions of names and shapes that differ.
        tied: The tensors in the files that are one tensor in the model, for each such tensor.
    """
    name = type(model).__name__
    ties = [
        f"the model ties tensors that the files have separately, {_names(each.key for each in tensors)}"
        for tensors in tied
    ]
    if others:
        advice = "Give the class and the configuration of the saved weights"
    elif any(not torch.equal(x.whole(), tensors[0].whole()) for tensors in tied for x in tensors[1:]):
        advice = "Pass tie_word_embeddings=False, because these tensors have different values"
    else:
        advice = (
            f"Load them with {name}.from_pretrained of transformers, save the model with "
            "save_pretrained(other_folder, save_original_format=False), and give that folder"
        )
    return PiperError(
        f"piper.from_pretrained: the weights in {folder} do not fit {name}: "
        f"{'; '.join([*renamed, *others, *ties])}. {advice} [PIPER-K009]"
    )


def _built(model_class: Any, folder: Path, options: dict[str, Any]) -> Any:
    """Return the model on the meta device, without values.

    Raises:
        PiperError: transformers is missing, the configuration cannot be read, or an option or the model is
            not supported.
    """
    require_transformers("from_pretrained")
    from transformers import GenerationConfig

    if not (hasattr(model_class, "from_config") or hasattr(model_class, "_from_config")):
        raise PiperError(
            f"piper.from_pretrained: {shown(model_class)} is not a model class of transformers. Give one, such as "
            "AutoModelForCausalLM [PIPER-K009]"
        )
    if "subfolder" in options:
        raise PiperError(
            f"piper.from_pretrained: subfolder={options['subfolder']!r} is not supported. Give the path "
            f"{str(folder / str(options['subfolder']))!r} [PIPER-K009]"
        )
    # `given` are arguments of the model's constructor. The other options change the configuration.
    given = {key: options.pop(key) for key in ("dtype", "attn_implementation") if key in options}
    if (dtype := _dtype(options.pop("torch_dtype", given.pop("dtype", None)))) is not None:
        given["dtype"] = dtype
    config = _configuration(model_class, folder, options)
    if "dtype" not in given and config.dtype is None:
        dtypes = [each.dtype for each in stored_tensors(folder).values() if each.dtype.is_floating_point]
        given["dtype"] = dtypes[0] if dtypes else torch.float32
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model = build(config, **given)
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    if kept and model.dtype in (torch.float16, torch.bfloat16):
        raise PiperError(
            f"piper.from_pretrained: transformers keeps {_names(kept)} of {type(model).__name__} in float32, "
            "which is not supported. Pass dtype=torch.float32 [PIPER-K009]"
        )
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _dtype(given: Any) -> torch.dtype | None:
    """Return the dtype that a user gave as a dtype or by name ("bfloat16"). Return None for None and "auto",
    because then the configuration or the weights decide it.

    Raises:
        PiperError: `given` is not a floating-point dtype.
    """
    if given is None or given == "auto":
        return None
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PiperError(
            f"piper.from_pretrained: dtype={given!r} is not a floating-point dtype. Give one such as "
            "torch.bfloat16 [PIPER-K009]"
        )
    return dtype


def require_transformers(caller: str) -> None:
    """Check that transformers is installed, in a release that this package works with.

    Args:
        caller: Name of the public function that needs transformers.

    Raises:
        PiperError: transformers is missing or too old.
    """
    try:
        from transformers.core_model_loading import rename_source_key  # noqa: F401  since transformers 5
    except ImportError as error:
        raise PiperError(
            f"piper.{caller} needs transformers 5 or later, which cannot be imported: {error}. Install it: "
            "pip install 'transformers>=5' [PIPER-K010]"
        ) from error


def _configuration(model_class: Any, folder: Path, options: dict[str, Any]) -> Any:
    """Return the configuration in a folder, with the changes in `options`.

    Raises:
        PiperError: The configuration is missing or damaged, lacks an option, or describes quantized weights.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise PiperError(
            f"piper.from_pretrained: {folder} does not have a config.json. Give the folder of a model that "
            "save_pretrained has written, or that huggingface_hub.snapshot_download has returned [PIPER-K008]"
        )
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    try:
        config, unused = config_class.from_pretrained(folder, return_unused_kwargs=True, **options)
    except (OSError, ValueError) as error:  # the file is damaged, or names an unknown kind of model
        if "trust_remote_code" in str(error):
            raise PiperError(
                f"piper.from_pretrained: the model in {folder} needs Python code from its folder, which Piper does not run. "
                f"Import the class of the model, and give it instead of {model_class.__name__} [PIPER-K008]"
            ) from error
        cause = " ".join(str(error).split()).rstrip(".")
        raise PiperError(
            f"piper.from_pretrained: transformers cannot read {folder / 'config.json'}: {cause}. Give a folder that "
            "transformers.AutoConfig.from_pretrained can read [PIPER-K008]"
        ) from error
    if unused:
        raise PiperError(
            f"piper.from_pretrained: {type(config).__name__} does not have {_names(unused)}. Remove these "
            "arguments [PIPER-K009]"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise PiperError(
            f"piper.from_pretrained: the weights in {folder} are quantized, which is not supported. Give "
            "weights in a floating-point dtype [PIPER-K009]"
        )
    return config


def _renamed(model: Any, tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return name in the model -> tensor in the files, and descriptions of what is wrong with the names.

    Transformers renames tensors of older files, and converts some: it stacks experts, for example. A range of
    a converted tensor is not a range of the file, so conversions are not supported.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, StoredTensor] = {}
    converted, twice = [], []
    for key in sorted(tensors):
        name, conversion = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # the model has this name already, so no renaming applies
            name, conversion = rename_source_key(key, [], [], prefix, state)
        if conversion is not None:
            converted.append(key)
        elif name in found:
            twice.append(f"{found[name].key} and {key}")
        else:
            found[name] = tensors[key]
    problems = []
    if converted:
        problems.append(f"transformers converts {_names(converted)}, which is not supported")
    if twice:
        problems.append(f"two tensors are for one parameter, {_names(twice)}")
    return found, problems


def _differences(model: Any, stored: dict[str, StoredTensor]) -> tuple[list[str], list[list[str]]]:
    """Return how the files and the model differ in the names and shapes of tensors, and the names in the files that
    are of one tensor in the model.

    If only names outside of the base model differ, warn and return empty lists. Tensors that the model does
    not have are removed from `stored`.
    """
    persistent = model.state_dict()
    ids = {name: id(tensor) for name, tensor in named_tensors(model)}
    missing, unexpected = _missing(model, stored, ids), _unexpected(model, stored)
    strange = _of_base(unexpected, stored, model.base_model_prefix)
    for name in stored.keys() - persistent.keys():
        del stored[name]
    shapes = [
        f"{name} ({list(value.shape)} in the files, {list(persistent[name].shape)} in the model)"
        for name, value in stored.items()
        if value.shape != persistent[name].shape
    ]
    tied: dict[int, list[str]] = {}
    for name in stored:
        tied.setdefault(ids[name], []).append(name)
    base = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    wrong = {
        "they do not have": [name for name in missing if name.startswith(base)],
        "the model does not have": strange,
        "shapes differ of": shapes,
    }
    apart = [names for names in tied.values() if len(names) > 1]
    new, unused = [name for name in missing if not name.startswith(base)], set(unexpected) - set(strange)
    if not any(wrong.values()) and not apart and (new or unused):
        _warn(model, new, sorted(unused))
    return [f"{what} {_names(names)}" for what, names in wrong.items() if names], apart


def _missing(model: Any, stored: Mapping[str, StoredTensor], ids: Mapping[str, int]) -> list[str]:
    """Return the names in the model for which neither the files nor a tied tensor has a value, without names
    that transformers ignores."""
    persistent = model.state_dict()
    available = {ids[name] for name in stored if name in persistent}
    missing = [name for name in persistent if ids[name] not in available]
    return _without(missing, model._keys_to_ignore_on_load_missing)


def _unexpected(model: Any, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Return the names in the files that the model does not have, without names that transformers ignores."""
    persistent = model.state_dict()
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    unexpected = [name for name in stored if name not in persistent]
    return _without(unexpected, [*ignored, r"(^|\.)position_ids$"])


def _of_base(names: Iterable[str], stored: Mapping[str, StoredTensor], prefix: str) -> list[str]:
    """Return the names whose tensors are of the base model. If no name in the files has the base model's
    prefix, the files are of a base model without a head, and all names are returned."""
    has_head = any(each.key.startswith(f"{prefix}.") for each in stored.values())
    return [name for name in names if not has_head or stored[name].key.startswith(f"{prefix}.")]


def _without(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    return [name for name in names if not any(re.search(each, name) for each in patterns or ())]


def _warn(model: Any, new: list[str], unused: list[str]) -> None:
    """Warn of parameters that the files do not have, and of tensors that the model does not use."""
    parts = []
    if new:
        parts.append(f"the files do not have {_names(new)}, which get initial values and must be trained")
    if unused:
        parts.append(f"the model does not use {_names(unused)}")
    warnings.warn(
        f"piper.from_pretrained({type(model).__name__}): {'; '.join(parts)} [PIPER-W026]", stacklevel=4
    )


def _names(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - MOST} more" if len(every) > MOST else ""
    return ", ".join(every[:MOST]) + more
