"""Language models that generate texts in validation, test and prediction steps: Hugging Face's `generate`, and
loops over the tokens of a GPT.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper.errors import PiperError
from lightning_piper.processes import failure
from lightning_piper.session import available_memory
from tests.pretrained import KINDS, STAGES, VOCABULARY
from tests.strategy.fitting import QUIET

PROGRAMS: dict[str, dict[str, Any]] = {
    "replicas": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3},
    "pp2": {"pp": 2},
    "tp2": {"tp": 2},
    "pp2 dp2": {"pp": 2, "dp": 2},
}
END = 30  # the token at which a text ends; the models often choose it
PROMPT, NEW = 4, 12  # tokens of a prompt, and the largest number of tokens after it


class Writer(L.LightningModule):
    """A module that writes texts in its evaluation steps.

    Attributes:
        written: Name of the step -> for each batch on this process, its index, its prompts and its texts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: Any = defaultdict(list)

    def generate(self, prompts: Tensor, batch_idx: int) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def write(self, step: str, batch: Tensor, batch_idx: int) -> Tensor:
        texts = self.generate(batch, batch_idx)
        self.written[step].append((batch_idx, batch, texts))
        return texts

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        texts = self.write("sanity" if self.trainer.sanity_checking else "validation", batch, batch_idx)
        self.log("length", texts.shape[1], sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.write("test", batch, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.write("predict", batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class HuggingFace(Writer):
    """Calls `generate` of a model of `tests.pretrained.KINDS`, with `options`, after it has seeded torch by the
    index of the batch."""

    options: ClassVar[dict[str, Any]] = {}
    kind = "llama"

    def __init__(self) -> None:
        super().__init__()
        model_class, config_class, sizes = KINDS[self.kind]()
        wide = {"initializer_factor": 3.0} if self.kind == "t5" else {"initializer_range": 0.7}
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.model = model_class(config_class(vocab_size=VOCABULARY, **wide, **sizes)).double()
        if self.kind in STAGES:
            piper.annotate_modules(self, "PP", STAGES[self.kind])

    def generate(self, prompts: Tensor, batch_idx: int) -> Tensor:
        torch.manual_seed(batch_idx)
        mask = torch.ones_like(prompts)
        ends = {"max_new_tokens": NEW, "eos_token_id": END, "pad_token_id": 0}
        texts: Tensor = self.model.generate(prompts, attention_mask=mask, **ends, **self.options)
        return texts

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss


class Greedy(HuggingFace):
    options: ClassVar[dict[str, Any]] = {"do_sample": False}


class Sampling(HuggingFace):
    options: ClassVar[dict[str, Any]] = {"do_sample": True, "top_k": 20, "temperature": 1.5}


class BeamSearch(HuggingFace):
    options: ClassVar[dict[str, Any]] = {"do_sample": False, "num_beams": 3}


class StaticCache(HuggingFace):
    options: ClassVar[dict[str, Any]] = {"do_sample": False, "cache_implementation": "static"}


class Gpt2(Sampling):
    kind = "gpt2"


class SomeBatches(Greedy):
    """Generates for each second batch."""

    def generate(self, prompts: Tensor, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            return super().generate(prompts, batch_idx)
        logits: Tensor = self.model(input_ids=prompts, use_cache=False).logits
        return logits.argmax(-1)


class OneRank(Sampling):
    """Generates on rank 0 only."""

    def generate(self, prompts: Tensor, batch_idx: int) -> Tensor:
        return super().generate(prompts, batch_idx) if self.trainer.is_global_zero else prompts


class InHooks(Sampling):
    """Its validation step is captured. Hooks generate, on rank 0 only if `one_rank` is set."""

    one_rank = False

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("length", self.loss(batch))

    def hook(self, name: str) -> None:
        with piper.whole_module(self):
            if self.trainer.is_global_zero or not self.one_rank:
                self.eval()
                self.write(name, prompts(2).to(self.device), 0)

    def on_validation_epoch_end(self) -> None:
        self.hook("sanity" if self.trainer.sanity_checking else "validation")

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.hook("epoch")

    def on_train_end(self) -> None:
        self.hook("end")


class InHooksOfOneRank(InHooks):
    one_rank = True


class FromFiles(Sampling):
    """Reads its model from a folder: with `read`, on the meta device until a process holds a tensor."""

    def __init__(self, folder: Path, read: Callable[..., Any]) -> None:
        Writer.__init__(self)
        self.folder, self.read = folder, read
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.read(KINDS[self.kind]()[0], self.folder)
            piper.annotate_modules(self, "PP", STAGES[self.kind])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (nn.Linear(16, n) for n in (48, 16, 16, 16))

    def forward(self, x: Tensor, past: list[Tensor]) -> Tensor:
        """`past` has the keys and values of earlier tokens, if there are any. The block puts new ones there."""
        q, k, v = (
            part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        if past:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=not past)
        past[:] = k, v
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Loop(Writer):
    """A GPT in two stages, and a loop that appends the most probable token."""

    cached, end = False, 24

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embed, self.positions = nn.Embedding(VOCABULARY, 16), nn.Embedding(PROMPT + NEW, 16)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, VOCABULARY, bias=False))
        self.double()

    def forward(self, tokens: Tensor, past: Any = None) -> Tensor:
        past = [[], []] if past is None else past
        start = past[0][0].shape[2] if past[0] else 0
        with piper.annotate("PP", 0):
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
            x = self.blocks[0](self.embed(tokens) + self.positions(positions), past[0])
        with piper.annotate("PP", 1):
            logits: Tensor = self.head(self.blocks[1](x, past[1]))
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def chosen(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1, keepdim=True)

    def ended(self, tokens: Tensor) -> bool:
        return False

    def generate(self, prompts: Tensor, batch_idx: int) -> Tensor:
        tokens, past = prompts, [[], []] if self.cached else None
        for i in range(NEW):
            logits = self(tokens[:, -1:] if self.cached and i else tokens, past)[:, -1]
            tokens = torch.cat([tokens, self.chosen(logits)], 1)
            if self.ended(tokens):
                break
        return tokens


class Misuse(Loop):
    """A captured validation, after which a hook uses `whole_module` wrongly, as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("length", self.loss(batch))

    def on_train_epoch_end(self) -> None:
        if self.kind == "one rank" and not self.trainer.is_global_zero:
            return
        with (
            mock.patch.object(
                available_memory, "_free", return_value=0 if self.kind == "memory" else 1 << 30
            ),
            piper.whole_module(self.head if self.kind == "submodule" else self),  # type: ignore[arg-type]
            torch.no_grad(),
        ):
            if self.kind in ("changes", "restores"):
                self.head[1].weight.mul_(2)
            if self.kind == "changes data" and not self.trainer.is_global_zero:
                self.head[1].weight.data *= 2
            if self.kind == "restores":  # the control
                self.head[1].weight.div_(2)
            if self.kind in ("backward", "reads gradients"):
                with torch.enable_grad():
                    penalty, params = self.head[1].weight.square().sum(), [self.head[1].weight]
                    penalty.backward() if self.kind == "backward" else torch.autograd.grad(penalty, params)


class CachedLoop(Loop):
    """Keeps keys and values, so that each pass computes one token."""

    cached = True


class LoopUntilEnd(Loop):
    def ended(self, tokens: Tensor) -> bool:
        return bool((tokens[:, PROMPT:] == self.end).any(1).all())


class SamplingLoop(LoopUntilEnd):
    """Draws tokens, after it has seeded torch by the index of the batch."""

    def chosen(self, logits: Tensor) -> Tensor:
        return torch.multinomial((logits / 3).softmax(-1), 1)

    def generate(self, prompts: Tensor, batch_idx: int) -> Tensor:
        torch.manual_seed(batch_idx)
        return super().generate(prompts, batch_idx)


WRITERS: dict[str, Callable[[], Writer]] = {
    each.__name__: each
    for each in (
        *(Greedy, Sampling, BeamSearch, StaticCache, Gpt2, SomeBatches, OneRank),
        *(InHooks, InHooksOfOneRank),
        *(Loop, CachedLoop, LoopUntilEnd, SamplingLoop),
    )
}


def prompts(count: int, seed: int = 1) -> Any:
    return torch.randint(6, VOCABULARY, (count, PROMPT), generator=torch.Generator().manual_seed(seed))


def run(
    module: Writer, strategy: Any = "auto", devices: int = 1, replicas: int = 1, **options: Any
) -> dict[str, Any]:
    """Train for two steps, with a sanity check before and a validation after them; then test and predict.

    Returns:
        `module.written`; what the validation logged, as "length"; and the predictions, as "returned".
    """
    trainer = L.Trainer(
        **QUIET,  # type: ignore[arg-type]
        accelerator="cpu",
        devices=devices,
        max_epochs=2,
        check_val_every_n_epoch=2,
        strategy=strategy,
        **{"num_sanity_val_steps": 1, **options},
    )
    evaluated = DataLoader(prompts(8), batch_size=2)
    # Both steps have all samples, because Lightning shuffles the training samples of replicas.
    trainer.fit(module, DataLoader(prompts(8, 2), batch_size=8 // replicas), evaluated)
    length = trainer.callback_metrics["length"].item()
    trainer.test(module, evaluated)
    returned = trainer.predict(module, evaluated)
    return {**module.written, "length": length, "returned": returned}


def write(rank: int, devices: int, writers: list[str], program: str) -> dict[Any, Any]:
    """Return name of the writer -> result of `run` under the program."""
    degrees = PROGRAMS[program]
    return {
        name: run(WRITERS[name](), piper.PiperStrategy(**degrees), devices, degrees.get("dp", 1))
        for name in writers
    }


def write_from_files(rank: int, folder: Path, program: str) -> dict[Any, Any]:
    """Return what a module from files predicts without a fit, as "predicted"; `run` of another such module, as
    "run"; and the parameters that had values before the fit, after the sanity check, as "kept"."""
    degrees, devices = PROGRAMS[program], 2
    module = FromFiles(folder, piper.from_pretrained)
    trainer = L.Trainer(**QUIET, accelerator="cpu", devices=devices, strategy=piper.PiperStrategy(**degrees))
    predicted = trainer.predict(module, DataLoader(prompts(8), batch_size=2))
    other, kept = FromFiles(folder, piper.from_pretrained), []

    def begin() -> None:
        kept.extend(name for name, x in other.named_parameters() if not x.is_meta)

    other.on_train_start = begin  # type: ignore[method-assign]
    found = run(other, piper.PiperStrategy(**degrees), devices, degrees.get("dp", 1))
    return {"predicted": (predicted, dict(module.written)), "run": found, "kept": kept}


def write_lengths(rank: int, writer: str, program: str, batches: int) -> dict[Any, Any]:
    """Return the lengths of the texts that this process writes in a validation of some batches for each replica,
    and what the validation logged, as "logged"."""
    degrees = PROGRAMS[program]
    module, devices = WRITERS[writer](), degrees.get("dp", 1) * degrees.get("pp", 1)
    trainer = L.Trainer(
        **QUIET, accelerator="cpu", devices=devices, max_steps=1, strategy=piper.PiperStrategy(**degrees)
    )
    texts = DataLoader(prompts(batches * degrees.get("dp", 1)), batch_size=1)
    trainer.fit(module, DataLoader(prompts(8), batch_size=4), texts)
    lengths = [each.shape[1] for _, _, each in module.written["validation"]]
    return {"lengths": lengths, "logged": trainer.callback_metrics["length"].item()}


def misuse(rank: int, kinds: list[str], seconds: float = failure.ALONE) -> dict[Any, Any]:
    """Return kind of `Misuse` -> the error. After `seconds`, a process that waits alone in a call is an error."""
    failure.ALONE, failure.EVERY = seconds, min(seconds, failure.EVERY)
    found: dict[Any, Any] = {}
    for kind in kinds:
        try:
            run(Misuse(kind), piper.PiperStrategy(pp=2), 2)
        except (PiperError, RuntimeError) as error:
            found[kind] = str(error)
    return found


def refuse(rank: int) -> dict[Any, Any]:
    """Return whether there is a sanity check before the fit -> the error of a validation step that ends at a
    token, without memory for the whole module."""
    found: dict[Any, Any] = {}
    for sanity in (True, False):
        with mock.patch.object(available_memory, "_free", return_value=0):
            try:
                run(LoopUntilEnd(), piper.PiperStrategy(pp=2), 2, num_sanity_val_steps=int(sanity))
            except PiperError as error:
                found[sanity] = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return found
