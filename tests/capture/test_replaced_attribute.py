"""An attribute that is replaced within a context is as before at the end: own or inherited, also after an
error.
"""

from __future__ import annotations

import math
import threading

import pytest
import torch

from lightning_piper.capture.user_code.replaced_attribute import checked_calls, replaced_attribute


class Base:
    @classmethod
    def name(cls) -> str:
        return cls.__name__


class Derived(Base):
    pass


def test_a_function_of_a_module_returns() -> None:
    own = math.sqrt
    with replaced_attribute(math, "sqrt", abs):
        assert math.sqrt(-4) == 4
    assert math.sqrt is own


def test_an_own_class_method_returns_as_it_was() -> None:
    stored = vars(Base)["name"]
    with replaced_attribute(Base, "name", lambda: "other"):
        assert Base.name() == "other"
    assert vars(Base)["name"] is stored and Derived.name() == "Derived"


def test_what_is_inherited_is_inherited_again_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), replaced_attribute(Derived, "name", lambda: "other"):
        assert Derived.name() == "other" and Base.name() == "Base"
        raise ZeroDivisionError
    assert "name" not in vars(Derived) and Derived.name() == "Derived"
    before = dict(vars(torch.Tensor))
    with replaced_attribute(torch.Tensor, "expand", abs):
        pass
    assert dict(vars(torch.Tensor)) == before


def test_calls_are_checked_in_one_thread_only() -> None:
    def refuse(*args: float) -> None:
        raise ValueError(args)

    found: list[float] = []
    other = threading.Thread(target=lambda: found.append(math.sqrt(4)))
    with checked_calls(math, "sqrt", refuse):
        with pytest.raises(ValueError, match="9"):
            math.sqrt(9)
        other.start()
        other.join()
    assert found == [2] and math.sqrt(9) == 3
