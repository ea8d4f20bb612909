"""Checkpoints of another optimizer: an error names both optimizers, unless plain torch trains with the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adafactor, Adagrad, Adam, Adamax, AdamW, Muon, Optimizer

import lightning_piper as piper
from tests.strategy.fitting import distance, local, trainer, values
from tests.strategy.models import MLP, make


class Trained(MLP):
    def __init__(self, made: Any = Adam, **options: Any) -> None:
        super().__init__()
        self.made, self.options = made, options

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim == 2]  # Muon accepts no other parameters
        return self.made(matrices, lr=0.01, **self.options)


def fit(strategy: Any, made: Any, epochs: int, path: Path | None = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module, (_, loader) = Trained(made, **options), make("mlp")
    run, _ = trainer(strategy, max_steps=-1, max_epochs=epochs)
    run.fit(module, loader, ckpt_path=path)
    return run, values(module)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    kinds: dict[str, Any] = {"AdamW": (AdamW, {}), "SGD": (SGD, {"momentum": 0.9}), "Muon": (Muon, {})}
    for name, (made, options) in kinds.items():
        run, _ = fit("auto", made, 1, **options)
        run.save_checkpoint(folder / name)
    return {name: folder / name for name in kinds}


BETAS = "amsgrad, betas, capturable, decoupled_weight_decay"


@pytest.mark.parametrize("saved, resumed, missing, options", [
    ("AdamW", SGD, "momentum", f"{BETAS}, eps"),
    ("AdamW", Adagrad, "sum", BETAS),
    ("AdamW", Adamax, "exp_inf", "amsgrad, decoupled_weight_decay, fused"),  # has all options of Adamax
    ("SGD", AdamW, "step", "dampening, momentum, nesterov"),  # raised while the state is loaded
    ("Muon", AdamW, "step", "adjust_lr_fn, momentum, nesterov, ns_coefficients, ns_steps"),
    ("SGD", Muon, "ns_coefficients", "dampening, foreach, fused, maximize"),
])  # fmt: skip
@pytest.mark.parametrize("capture", ["always", "never"])
def test_another_optimizer_is_named(
    saved: str, resumed: Any, missing: str, options: str, capture: Any, paths: dict[str, Path]
) -> None:
    with pytest.raises(KeyError, match=missing):
        fit("auto", resumed, 2, paths[saved])
    says = (
        f"^{resumed.__name__} does not find '{missing}' in the state that it has loaded, because an optimizer with the "
        f"options {options} has saved this state. Resume with the optimizer that saved the checkpoint"
    )
    with pytest.raises(piper.PiperError, match=says):
        fit(local((), capture=capture), resumed, 2, paths[saved])


def test_the_optimizer_that_saved_the_state_resumes(paths: dict[str, Path]) -> None:
    _, plain = fit("auto", AdamW, 2, paths["AdamW"])
    _, found = fit(local(), AdamW, 2, paths["AdamW"])
    assert distance(plain, found) < 1e-5


def test_another_optimizer_that_torch_trains_is_accepted(paths: dict[str, Path]) -> None:
    _, plain = fit("auto", Adam, 2, paths["AdamW"])
    _, found = fit(local(), Adam, 2, paths["AdamW"])
    assert distance(plain, found) < 1e-5


def test_a_key_error_of_the_step_keeps_its_type() -> None:
    class Faulty(Trained):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            del optimizer.param_groups[0]["betas"]
            raise KeyError("betas")

    torch.manual_seed(0)
    run, _ = trainer(local(), max_steps=1)
    with pytest.raises(KeyError, match="betas"):
        run.fit(Faulty(), make("mlp")[1])


def test_an_optimizer_that_cannot_unpack_the_options_is_named(paths: dict[str, Path]) -> None:
    with pytest.raises(TypeError, match="cannot unpack"):
        fit("auto", Adafactor, 2, paths["AdamW"])
    with pytest.raises(
        piper.PiperError, match=r"^Adafactor cannot work with .*\(cannot unpack.*options amsgrad, betas"
    ):
        fit(local(), Adafactor, 2, paths["AdamW"])


class Forgetful(Optimizer):
    """Reads an entry that it never writes. Its groups have an option of the user, as `add_param_group` allows."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([{"params": list(params), "name": "matrices"}], {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for p in self.param_groups[0]["params"]:
            self.state[p]["forgotten"]
        return loss


def test_an_error_of_an_optimizer_without_a_loaded_state_stays() -> None:
    with pytest.raises(KeyError, match="forgotten"):
        fit(local((), capture="never"), Forgetful, 1)
