"""What the step gets for what a metric object gives, which is not known before the step has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from lightning_piper.capture import _torch
from lightning_piper.ir.metric_calls import Computed


class Awaited:
    """May be logged or returned, as it is; any other use is an error, which `refuse` raises.

    Attributes:
        computed: what it stands for.
    """

    computed: Computed
    _refuse_computed: Callable[[Computed], NoReturn]

    def __init__(self, computed: Computed, refuse: Callable[[Computed], NoReturn]) -> None:
        self.__dict__.update(computed=computed, _refuse_computed=refuse)

    def __getitem__(self, key: Any) -> Awaited:
        return Awaited(Computed(self.computed.call, (*self.computed.keys, key)), self._refuse_computed)

    def detach(self) -> Awaited:
        return self

    clone = cpu = item = detach  # what is logged is a number by itself in any case

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse_computed(self.computed)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found: Awaited = next(x for x in _torch.tree_flatten((args, kwargs))[0] if isinstance(x, cls))
        found._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __iter__ = __len__ = __contains__ = __setitem__ = __setattr__ = __array__ = __index__ = __int__ = __float__ = __bool__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __format__ = __str__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = __pow__ = _refuse
    __abs__ = __round__ = __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = _refuse
