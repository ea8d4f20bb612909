"""The text that a process prints when an error of the package ends it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.errors import CaptureError, DirectiveError, PiperError, VerificationError
from lightning_piper.processes.tracebacks import (
    HINT,
    LONGEST,
    VARIABLE,
    is_of_users_code,
    line,
    print_short_tracebacks,
    short_traceback,
)
from tests.pages import Pair, samples


def raised(error: Exception, cause: Exception | None = None) -> TracebackType | None:
    try:
        raise error from cause
    except Exception as caught:
        return caught.__traceback__


def in_torch() -> Exception:
    """An error that torch raises in a call of this file."""
    try:
        torch.nn.Linear(2, 3)(torch.ones(5))
    except RuntimeError as error:
        return error
    raise AssertionError


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv(VARIABLE, raising=False)


def failed_fit() -> PiperError:
    """The error of a fit whose program names stages that the module does not have. It is raised deep inside
    of Lightning.
    """
    strategy = piper.PiperStrategy([piper.Place(filter={"LAYER": 0}, devices=[0])], transport="local")
    with pytest.raises(DirectiveError, match="matches nothing") as caught:
        fit(Pair(), strategy)
    return caught.value


def fit(module: L.LightningModule, strategy: piper.PiperStrategy) -> None:
    trainer = L.Trainer(
        devices=1,
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        max_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(*samples())))


class Raises(Pair):
    """Its hook raises an error, itself or in torch."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def on_train_batch_end(self, *args: object) -> None:
        if self.error is not None:
            raise self.error
        torch.nn.Linear(2, 3)(torch.ones(5))


@pytest.mark.parametrize(("error", "frames"), [(ValueError("no such label"), 3), (None, 4)])
def test_an_error_of_the_users_code_is_short(
    error: Exception | None, frames: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        fit(Raises(error), piper.PiperStrategy(transport="local"))
    found = caught.value
    assert "".join(traceback.format_exception(found)).count('  File "') > 10
    capsys.readouterr()
    sys.excepthook(type(found), found, found.__traceback__)
    shown = capsys.readouterr().err
    lines = [each for each in shown.splitlines() if each.startswith('  File "')]
    assert len(lines) == frames and HINT in shown and f"{type(found).__name__}: {found}\n" in shown
    assert [__file__ in each for each in lines] == [True, True, True, False][:frames]
    assert "on_train_batch_end" in lines[2]
    where = f"rank 1: {__file__}:{lines[2].split('line ')[1].split(',')[0]}: {type(found).__name__}: "
    assert line(found, 1, found.__traceback__).startswith(where)


def test_an_error_inside_of_the_package_is_printed_whole() -> None:
    """Such an error is a fault of the package, whose frames say where it is."""
    with pytest.raises(AttributeError) as caught:
        short_traceback(None, None)  # type: ignore[arg-type]
    assert not is_of_users_code(caught.value, caught.value.__traceback__)


def test_a_failed_fit_prints_the_users_lines_and_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    error = failed_fit()
    whole = traceback.format_exception(error)
    assert "".join(whole).count('  File "') > 10  # code that catches the error has all frames
    capsys.readouterr()
    sys.excepthook(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert shown.count('  File "') == 2 and __file__ in shown and "trainer.fit(module, " in shown
    assert HINT in shown and f"lightning_piper.errors.DirectiveError: {error}\n" in shown


def test_with_the_variable_the_whole_traceback_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "full")
    failed_fit()
    assert sys.excepthook is sys.__excepthook__


def test_a_hook_of_another_package_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", print)
    print_short_tracebacks(0, one_line=False)
    assert sys.excepthook is print


@pytest.fixture
def default_group() -> Iterator[None]:
    """A process group, for which torch wraps the current `sys.excepthook` in its own."""
    before = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert sys.excepthook is not before
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("default_group")
def test_errors_are_short_in_a_process_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    error, other = PiperError("no"), in_torch()
    print_short_tracebacks(0, one_line=True)
    sys.excepthook(type(error), error, raised(error))
    assert capsys.readouterr().err.startswith("rank 0: " + __file__)
    sys.excepthook(type(other), other, other.__traceback__)  # as torch's hook prints it
    assert capsys.readouterr().err.startswith("[rank0]: Traceback")


def test_a_hook_of_another_package_stays_in_a_process_of_a_group(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(sys, "excepthook", print)
    request.getfixturevalue("default_group")
    hook = sys.excepthook
    print_short_tracebacks(0, one_line=True)
    assert sys.excepthook is hook


@pytest.mark.parametrize("one_line", [False, True])
def test_errors_of_other_code_are_printed_by_python(
    one_line: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error = in_torch()
    print_short_tracebacks(1, one_line)
    sys.excepthook(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    sys.__excepthook__(type(error), error, error.__traceback__)
    assert shown == capsys.readouterr().err and __file__ in shown


def test_causes_and_notes_are_printed() -> None:
    cause = in_torch()
    error = VerificationError("the plans deadlock: 0\n1")
    error.add_note("a note\nof two lines")
    shown = short_traceback(error, raised(error, cause))
    first, second = shown.split("\nThe above exception was the direct cause of the following exception:\n\n")
    assert f"RuntimeError: {cause}\n" in first and "raise error from cause" in second
    assert second.endswith(f"VerificationError: the plans deadlock: 0\n1\na note\nof two lines\n{HINT}")


def test_a_cause_keeps_the_users_line_and_the_one_that_raised_it() -> None:
    cause, error = in_torch(), PiperError("no")
    shown = short_traceback(error, raised(error, cause))
    frames = [each for each in shown.splitlines() if each.startswith('  File "')]
    assert len(traceback.extract_tb(cause.__traceback__)) > 2
    assert [__file__ in each for each in frames] == [True, False, True]


def test_a_suppressed_cause_stays_suppressed() -> None:
    error = PiperError("no")
    try:
        try:
            raise ValueError("internal")
        except ValueError:
            raise error from None
    except PiperError as caught:
        assert "internal" not in short_traceback(error, caught.__traceback__)
    try:
        try:
            raise ValueError("internal")
        except ValueError:
            raise PiperError("no")  # noqa: B904
    except PiperError as caught:
        assert "ValueError: internal" in short_traceback(caught, caught.__traceback__)


def test_an_error_in_one_line() -> None:
    error = CaptureError("the batch is empty\nand more [PIPER-C009]")
    error.add_note("The first process to fail was rank 0: no")
    where = raised.__code__.co_firstlineno + 2
    assert line(error, 3, raised(error)) == (
        f"rank 3: {__file__}:{where}: CaptureError: the batch is empty and more [PIPER-C009] "
        "The first process to fail was rank 0: no"
    )
    assert line(PiperError("x"), 1, None) == "rank 1: PiperError: x"
    cut = line(PiperError("x" * 2000), 1, None)
    assert cut.endswith("x ...") and len(cut) < LONGEST + 50
