"""Placeholders for the results of metric objects, which are not known before the step has run."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_piper.capture.proxies.deferred_numbers import text_of_value
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.metric_calls import Derived, Later, MetricResult


class MetricValueProxy:
    """A placeholder for the result of a metric object.

    The step may log or return the placeholder, one of its items, or the result of arithmetic with numbers and
    other such placeholders. Such a result does not have items. Its text is `text_of_value`. Any other
    use raises the error of the constructor's `refuse`.

    Attributes:
        computed: describes the result for which the placeholder stands.
    """

    computed: Later
    _refuse_computed: Callable[[Later], NoReturn]

    def __init__(self, computed: Later, refuse: Callable[[Later], NoReturn]) -> None:
        self.__dict__.update(computed=computed, _refuse_computed=refuse)

    def __getitem__(self, key: Any) -> MetricValueProxy:
        known = self.computed
        if isinstance(known, MetricResult):
            return MetricValueProxy(MetricResult(known.call, (*known.keys, key)), self._refuse_computed)
        return self._refuse()

    def _derived(self, name: str, function: Callable[..., Any], *operands: Any) -> MetricValueProxy:
        """Return a placeholder for the result of `function` on these operands."""
        if not all(type(x) in (MetricValueProxy, bool, int, float) for x in operands):
            self._refuse()
        known = tuple(x.computed if type(x) is MetricValueProxy else x for x in operands)
        return MetricValueProxy(Derived(name, function, known), self._refuse_computed)

    def __str__(self) -> str:
        return text_of_value()

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return text_of_value()

    def detach(self) -> MetricValueProxy:
        return self

    clone = cpu = item = detach  # these methods would not change the logged number

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse_computed(self.computed)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found: MetricValueProxy = next(
            x for x in _torch.tree_flatten((args, kwargs))[0] if isinstance(x, cls)
        )
        found._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __iter__ = __len__ = __contains__ = __setitem__ = __setattr__ = __array__ = __index__ = __int__ = (
        __float__
    ) = __bool__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse


def _binary(name: str, swapped: bool) -> Callable[[MetricValueProxy, Any], MetricValueProxy]:
    function = getattr(operator, name)
    return lambda self, other: self._derived(name, function, *((other, self) if swapped else (self, other)))


def _unary(name: str, function: Callable[..., Any]) -> Callable[..., MetricValueProxy]:
    return lambda self: self._derived(name, function, self)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(MetricValueProxy, f"__{_name}__", _binary(_name, swapped=False))
    setattr(MetricValueProxy, f"__r{_name}__", _binary(_name, swapped=True))
for _name in ("neg", "abs"):
    setattr(MetricValueProxy, f"__{_name}__", _unary(_name, getattr(operator, _name)))
for _name in ("mean", "sum", "max", "min"):
    setattr(MetricValueProxy, _name, _unary(_name, operator.methodcaller(_name)))
