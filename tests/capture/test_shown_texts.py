"""A text of a value that is not known yet may only be printed or logged."""

from __future__ import annotations

import csv
import io
import logging
import pprint
import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from lightning_piper.capture.proxies.deferred_numbers import LATER, deferred
from lightning_piper.errors import CaptureError

logger = logging.getLogger(__name__)
seen: list[Any] = []


class Module(L.LightningModule):
    """A module whose `print` does not need a Trainer."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        print(*args, **kwargs)


module = Module()


def printed(x: Any) -> None:
    print("value", x, f"{x:.2f} of", [x], *[x], sep=" ")


def printed_elements(x: Any) -> None:
    print([str(v) for v in [x]], " ".join(f"<{v}>" for v in [x]), " ".join(map(str, [x])))


def printed_on_lines(x: Any) -> None:
    print(
        "value"
        f"{x}",
        file=sys.stderr,
    )  # fmt: skip


def printed_by_module(x: Any) -> None:
    module.print("a" + str(x), "%s" % x, "{}".format(x))  # noqa: UP031, UP032


def logged(x: Any) -> None:
    logger.warning("value %s", x)
    logging.warning(f"value {x!r}")


def variable(x: Any) -> None:
    text = f"value {x}"
    text += f" and {x}"
    if seen:
        logger.info(text)
    else:
        print(text)


def measured(x: Any) -> int:
    return len(str(x))


def measured_and_printed(x: Any) -> None:
    print(len(repr(x)))


def measured_variable(x: Any) -> int:
    text = f"value {x}"
    print(text)
    return len(text)


def global_variable(x: Any) -> None:
    global seen
    seen = f"{x}"  # type: ignore[assignment]


def appended(x: Any) -> None:
    seen.append(f"{x}")


def compared(x: Any) -> bool:
    return "1" in f"{x}"


def returned(x: Any) -> str:
    return " ".join(map(str, [x]))


def printed_to_a_file(x: Any) -> None:
    print(x, file=io.StringIO())


def condition(x: Any) -> None:
    print("one" if str(x) else "other")


def written(x: Any) -> None:
    csv.writer(io.StringIO()).writerow([x])


def formatted(x: Any) -> str:
    return pprint.pformat([x])


def raised(x: Any) -> None:
    raise ValueError(f"value {x}")


@pytest.mark.parametrize(
    "show", [printed, printed_elements, printed_on_lines, printed_by_module, logged, variable]
)
def test_texts_that_are_shown(show: Callable[[Any], Any], capfd: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    show(deferred(torch.tensor(1.5)))
    out, err = capfd.readouterr()
    assert LATER in out + err + caplog.text


@pytest.mark.parametrize(
    "use",
    [
        measured,
        measured_and_printed,
        measured_variable,
        global_variable,
        appended,
        compared,
        returned,
        printed_to_a_file,
        condition,
        written,
        formatted,
        raised,
    ],
)
def test_texts_that_are_used(use: Callable[[Any], Any]) -> None:
    with pytest.raises(
        CaptureError, match=r"test_shown_texts.py:\d+ .*makes a text of the value of a tensor"
    ):
        use(deferred(torch.tensor(1.5)))
    assert seen == []


def test_the_code_of_a_text_has_a_source() -> None:
    names: dict[str, Any] = {"x": deferred(torch.tensor(1.5))}
    with pytest.raises(CaptureError, match="makes a text of the value of a tensor"):
        exec("print(x)", names)
