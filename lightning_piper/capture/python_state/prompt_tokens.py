"""Positions of the learned prompts of PEFT, which PEFT keeps in plain tensors beside the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_piper.capture.python_state.state_reads import StateReads


@contextlib.contextmanager
def making_prompt_tokens(module: nn.Module, reads: StateReads) -> Iterator[None]:
    """Within this context, make the positions of each learned prompt of PEFT in the step.

    A `PeftModel` with prompt tuning, prefix tuning or P-tuning keeps the positions 0, 1, ... of its prompt in a dict
    of tensors, `prompt_tokens`, which are not buffers. So every process has them, and no checkpoint does. The step
    instead gets a result of `torch.arange`, which is an operation of the graph. A guard compares the positions before
    each step. The context does not change tensors with other values.

    Args:
        module: The LightningModule.
        reads: Gets the guards.
    """
    with contextlib.ExitStack() as stack:
        for path, part in module.named_modules():
            prompts = vars(part).get("prompt_tokens")
            if not isinstance(prompts, dict) or type(part).__module__.partition(".")[0] != "peft":
                continue
            for name, tokens in list(prompts.items()):
                where = f"{'.'.join(filter(None, ['self', path]))}.prompt_tokens[{name!r}]"
                if _are_positions(tokens):
                    reads.note_value(where, partial(_values, prompts, name))
                    device = next((x.device for x in part.prompt_encoder[name].parameters()), tokens.device)
                    prompts[name] = torch.arange(len(tokens), device=device)
                    stack.callback(prompts.__setitem__, name, tokens)
        yield


def _are_positions(tokens: Any) -> bool:
    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 1 or tokens.dtype != torch.int64:
        return False
    return tokens.device.type != "meta" and _values_of(tokens) == tuple(range(len(tokens)))


def _values(prompts: dict[str, Any], name: str) -> tuple[int, ...] | None:
    """Return the positions of a prompt. None if PEFT has removed the prompt."""
    return _values_of(prompts[name]) if isinstance(prompts.get(name), torch.Tensor) else None


def _values_of(tokens: torch.Tensor) -> tuple[int, ...]:
    return tuple(tokens.tolist())
