"""Run the uncaptured code of a partly captured step as one operation of the graph.

The uncaptured code reads the results of the captured calls, the batch, and the parameters and buffers that
belong to no captured call. The code computes the loss, and autograd runs its backward pass. The capture does
not know the operations of this code. So Piper assumes that the loss of each part of the batch is a mean over
the part's samples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_piper.capture.eager.outer_calls import Key, replacing_outermost
from lightning_piper.capture.eager.write_watch import TensorWriteWatch
from lightning_piper.capture.metrics.metric_objects import metric_objects
from lightning_piper.capture.proxies.batch import BatchSpec
from lightning_piper.capture.proxies.opaque_content import Carried
from lightning_piper.capture.proxies.sample_lists import SampleList
from lightning_piper.capture.python_state.state_reads import History
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.torch_private._torch_communication import without_communication
from lightning_piper.capture.tracing import recorded_logs
from lightning_piper.capture.user_code.replaced_attribute import replaced_entries
from lightning_piper.capture.user_code.step_arguments import SKIPPED, arguments
from lightning_piper.common.limits import kind_of
from lightning_piper.common.units import counted
from lightning_piper.common.user_lines import member, user_line
from lightning_piper.errors import PiperError

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class CallResult:
    """The structure of a captured call's result. With it, Piper makes the object that the uncaptured code
    receives from the tensors of the graph.

    Attributes:
        spec: spec of the result. None if only another captured call reads the result.
        trained: for each tensor of the result, whether the backward pass returns a gradient for it. Empty
            if `spec` is None.
    """

    spec: BatchSpec | None
    trained: tuple[bool, ...] = ()


@dataclass(frozen=True)
class RemainderLog:
    """A `self.log` call in the uncaptured code of a step.

    Attributes:
        name, kwargs: The arguments of the call.
        value: The logged number: a scalar tensor without autograd history, which the log owns.
        samples: Number of samples in the part of the batch that the code ran on.
        own: Whether the code called Lightning's own `log`, such as a `self.log` that it has kept.
    """

    name: str
    value: torch.Tensor
    kwargs: Mapping[str, Any]
    samples: int
    own: bool = False


class EagerRemainder:
    """The uncaptured code of a step, which runs once for each part of the batch.

    `PartlyCaptured` makes it, and its trace puts `forward` and `backward` into the graph. The code that runs
    the step calls `begin` before each step, and reads `logs`, `extras`, `used`, `updated` and `failure` after
    the step.

    Args:
        module: A LightningModule.
        batch_spec: The spec of the step's batches.
        context: Returns a context manager, in which the step runs.
        history: Has the number of the current batch, and the batch's contents other than tensors.
        trained, others: Canonical names of the tensors that the code may read, because they belong to no
            module of a captured call. `trained` are parameters with gradients; `others` are parameters
            without gradients, and buffers.
        names: Each name of a parameter or buffer -> its canonical name.

    Attributes:
        everywhere: Whether every process runs the code, each for its part of the batch.
        captured: Canonical names of the parameters that captured operations read.
        returned: Key of a captured call -> its result. The trace fills this dict.
        logs: The log calls of the current step.
        extras: For each part of the batch on which the step returned a dict: the values of this dict other
            than the loss, and the part's number of samples.
        used: Names of the parameters for which the current step's backward pass computed gradients.
        updated: Names of the metric objects that the code has updated in the current step. None if this
            process has not finished a run of the code in this step.
        failure: The exception that ended the code in the current step. None if there was no exception.
    """

    def __init__(
        self,
        module: nn.Module,
        batch_spec: BatchSpec,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        history: History,
        trained: Sequence[str],
        others: Sequence[str],
        names: Mapping[str, str],
    ) -> None:
        self._module, self._batch_spec, self._context, self._history = module, batch_spec, context, history
        self.trained, self.others, self._names = tuple(trained), tuple(others), names
        self._params = {names[name] for name, _ in module.named_parameters(remove_duplicate=False)}
        self.everywhere = False
        self.captured: set[str] = set()
        self.returned: dict[Key, CallResult] = {}
        self.logs: list[RemainderLog] = []
        self.extras: list[tuple[dict[str, Any], int]] = []
        self.used: set[str] = set()
        self.updated: set[str] | None = None
        self.failure: Exception | None = None

    def begin(self) -> None:
        """Start a step: clear the results of the previous step."""
        self.logs, self.extras, self.used, self.updated, self.failure = [], [], set(), None, None

    def forward(self, trained: Tensors, others: Tensors, dtype: torch.dtype) -> Tensors:
        """Run the user's code. This method implements `REMAINDER`.

        Args:
            trained: the results of captured calls that have gradients, then the parameters `self.trained`.
            others: the results of captured calls without gradients, then `self.others`, then the batch.
            dtype: the dtype of the returned loss.

        Returns:
            The loss as a scalar without autograd history, and an empty tensor for `backward`. The attribute
            `autograd` of the empty tensor holds the loss with its autograd graph, and the inputs of the graph.

        Raises:
            PiperError: the code changes a tensor other than the batch in place, does not repeat a captured
                call, or returns no scalar loss that depends on a parameter. Or it reads a tensor of a module
                whose call is captured (`CapturedValue`), or communicates although not every process runs it.
            Exception: any error of the user's code. It is also stored in `failure`.
        """
        inputs = [x.detach().requires_grad_() for x in trained]
        # `made`: the number of tensors in `trained` that come from captured calls.
        made, versions = len(inputs) - len(self.trained), [x._version for x in (*trained, *others)]
        with torch.enable_grad():
            given_out: list[torch.Tensor] = [_NonLeafIdentity.apply(x) for x in inputs[:made]]  # type: ignore[no-untyped-call]
        flowing, still = iter([*given_out, *inputs[made:]]), iter(others)
        given = {key: self._given(key, found, flowing, still) for key, found in self.returned.items()}
        own = {name: next(flowing) for name in self.trained} | {name: next(still) for name in self.others}
        leaves = [x.clone() for x in still]  # a copy, because the step may change its batch in place
        counts = self._updates()
        try:
            loss = self._run(given, own, leaves)
        except Exception as error:
            self.failure = error
            raise
        self.updated = (self.updated or set()) | {
            name for name, count in self._updates().items() if count != counts.get(name)
        }
        changed = [x._version != version for x, version in zip((*trained, *others), versions, strict=True)]
        self._check_unchanged(
            changed[:made],
            changed[made:][: len(self.trained)],
            changed[len(inputs) : len(changed) - len(leaves)],
        )
        kept = torch.empty(0, dtype=torch.int8, device=inputs[0].device)
        kept.autograd = loss, inputs  # type: ignore[attr-defined]
        return [loss.detach().to(dtype), kept]

    def _run(
        self, given: Mapping[Key, Any], own: Mapping[str, torch.Tensor], leaves: Tensors
    ) -> torch.Tensor:
        """Run the user's `training_step` and return its loss.

        Args:
            given: Key of a captured call -> its result.
            own: Canonical name -> value of the parameters and buffers that the code may read.
            leaves: The tensors of the batch, or of a part of it.
        """
        samples = next((x.shape[0] for x in leaves if x.ndim), 1)
        with (
            torch.enable_grad(),
            self._parameters(own),
            self._logging(samples),
            self._context(),
            self._calls(given),
            self._communication_refused(),
            TensorWriteWatch(own) as watch,
        ):
            step: Any = self._module.training_step
            batch = self._batch_spec.rebuild(leaves, partial(self._carried, leaves, samples))
            loss = self._loss(step(*arguments(step, batch, self._history.batch_idx, None)), samples)
        for name, line in watch.written.items():
            raise self._changes(name, f"{line}: ")
        return loss

    def _updates(self) -> dict[str, int]:
        """Return name of each outermost metric object in the module -> number of its updates so far, with the
        updates of the objects that it contains."""
        found = dict[str, int]()
        for name, metric in metric_objects(self._module).items():
            if not any(name.startswith(f"{outer}.") for outer in found):
                found[name] = sum(getattr(part, "_update_count", 0) for part in metric.modules())
        return found

    def _carried(self, leaves: Tensors, samples: int, item: Carried) -> Any:
        """Return the list or object of the current batch at the position of `item`. Its content may differ
        from the content of `item`, which comes from the captured batch.

        Args:
            leaves: the tensors of the batch, which are put into the list or object.
            samples: the number of samples in `leaves`.

        Raises:
            PiperError: the content is a list with an entry for each sample, and the code runs on a part of
                the batch.
        """
        batch = self._history.batch
        assert batch is not None
        if isinstance(item, SampleList) and batch.size != samples:
            raise PiperError(
                f"batch{item.path} is a list with an entry for each of {batch.size} samples, but the "
                f"uncaptured code of training_step runs on parts of {counted(samples, 'sample')}. Piper does not "
                "split lists. Make the list a tensor in the collate function or, if its entries do not belong to "
                "samples, a dict [PIPER-C009]"
            )
        return batch.contents(leaves)[item.index]

    def backward(self, gradient: torch.Tensor, kept: torch.Tensor, trained: Tensors) -> Tensors:
        """Run autograd on the loss, and return a gradient for each tensor of the argument `trained` of
        `forward`, with zeros for a tensor that the loss does not use. This method implements
        `REMAINDER_BACKWARD`.

        The names of parameters with a gradient are added to `used`. The call frees the autograd graph, so it
        works once for each call of `forward`.

        Args:
            gradient: the gradient of the loss.
            kept: the second result of `forward`.
            trained: not used: `kept` holds these tensors.
        """
        loss, inputs = kept.autograd  # type: ignore[attr-defined]
        del kept.autograd  # type: ignore[attr-defined]
        with self._communication_refused():
            made = torch.autograd.grad(loss, inputs, gradient.to(loss.dtype), allow_unused=True)
        found = zip(self.trained, made[len(inputs) - len(self.trained) :], strict=True)
        self.used |= {name for name, grad in found if grad is not None}
        return [
            torch.zeros_like(x) if grad is None else grad.contiguous()
            for x, grad in zip(inputs, made, strict=True)
        ]

    def _given(
        self, key: Key, found: CallResult, flowing: Iterator[torch.Tensor], still: Iterator[torch.Tensor]
    ) -> Any:
        """Return the object that a captured call returns to the uncaptured code.

        Its tensors are the next ones of `flowing` if they have a gradient, and the next ones of `still` if
        not. If only another captured call reads the result, the object is a `CapturedValue`, and no tensor is
        taken.
        """
        if found.spec is None:
            return captured_value(
                torch.empty(0),
                f"the result of {called(key)}",
                _HANDED,
            )
        return found.spec.rebuild([next(flowing if each else still) for each in found.trained])

    def _check_unchanged(
        self, returned: Sequence[bool], params: Sequence[bool], others: Sequence[bool]
    ) -> None:
        """Check that the code has changed no tensor other than the batch in place.

        Args:
            returned: For each result of a captured call with a gradient, whether the code has changed it.
            params: For each parameter of `self.trained`, whether the code has changed it.
            others: For each result of a captured call without a gradient, and then for each tensor of
                `self.others`, whether the code has changed it.

        Raises:
            PiperError: the code has changed such a tensor.
        """
        names = [name for name, now in zip(self.trained, params, strict=True) if now]
        names += [
            name
            for name, now in zip(self.others, others[len(others) - len(self.others) :], strict=True)
            if now
        ]
        if names:
            raise self._changes(names[0])
        if any(returned) or any(others):
            made = [(key, each) for key, found in self.returned.items() for each in found.trained]
            changed = {True: iter(returned), False: iter(others)}
            key = next(key for key, each in made if next(changed[each]))
            raise PiperError(
                f"training_step changes the result of a captured call in place: the result of {called(key)}. The "
                "backward pass of this call may need the unchanged result. Change a clone of the result "
                "(x = x.clone()) [PIPER-C022]"
            )

    def _changes(self, name: str, where: str = "") -> PiperError:
        """Return the error for a change of a parameter or buffer in uncaptured code."""
        what, fix = (
            ("parameter", "Change it")
            if name in self._params
            else ("buffer", f"{_ANNOTATE} Otherwise change it")
        )
        return PiperError(
            f"{where}training_step changes the {what} {name} in code that runs uncaptured. Piper would repeat the change "
            f"for each microbatch. {fix} in a hook, such as on_train_batch_end [PIPER-C003]"
        )

    def _loss(self, made: Any, samples: int) -> torch.Tensor:
        """Return the loss from the step's return value, as a scalar. If the return value is a dict, add its
        other values to `extras`.

        Raises:
            PiperError: the step returned None, or a loss that is not a tensor of one number, or that does not
                depend on a parameter.
        """
        loss = made.get("loss", made) if isinstance(made, Mapping) else made
        if isinstance(made, Mapping):
            for x in _torch.tree_leaves(dict(made)):
                if isinstance(x, CapturedValue):
                    raise PiperError(f"training_step returns {x.problem[0]} [PIPER-C022]")
            self.extras.append(
                ({key: _detached(value) for key, value in made.items() if key != "loss"}, samples)
            )
        if loss is None:
            raise PiperError(SKIPPED)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            if not isinstance(loss, torch.Tensor):
                what = f"{kind_of(loss)} as its loss. Return a scalar tensor, alone or as {{'loss': loss}}"
            elif loss.numel() != 1:
                what = f"a loss of shape {tuple(loss.shape)}. Return a scalar, such as loss.mean()"
            else:
                what = (
                    "a loss that depends on no parameter with requires_grad=True. Compute it without detach() and "
                    "no_grad()"
                )
            raise PiperError(f"training_step returns {what}, for every microbatch [PIPER-C022]")
        return loss.reshape(())

    @contextlib.contextmanager
    def _calls(self, given: Mapping[Key, Any]) -> Iterator[None]:
        """Within this context, captured calls return their captured results instead of running.

        Args:
            given: key of a captured call -> its result.

        Raises:
            PiperError: at the end of the context, if the step has not made one of the captured calls.
        """
        missing = set(given)

        def handle(key: Key, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
            """Return the result of a captured call. Make any other call. If such a call raises a `PiperError`,
            and the capture has other calls of this module, add a note: the capture saw fewer calls."""
            if key not in given:
                try:
                    return call()
                except PiperError as error:
                    if any(name == key[0] for name, _ in given):
                        error.add_note(_ONCE_MORE.format(called(key)))
                    raise
            missing.discard(key)
            return given[key]

        with replacing_outermost(self._module, handle):
            yield
        if missing:
            raise PiperError(
                f"training_step did not call {called(min(missing))}, but called it during the capture. Call "
                "the same modules in every step. Neither values of tensors nor anything that changes between "
                "steps may decide which modules it calls [PIPER-C022]"
            )

    @contextlib.contextmanager
    def _parameters(self, own: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Within this context, the module has the parameters and buffers in `own`. A `CapturedValue` replaces
        every other parameter or buffer. At the end, the module gets its own tensors back.

        Args:
            own: canonical name -> tensor.

        Raises:
            PiperError: at the end of the context, if the step has assigned another tensor to a parameter or
                buffer, or other memory to a tensor in `own` (`x.data = ...`).
        """
        kept = [(store, name, store[name]) for store, name, _, _ in self._places]
        data = {full: x.data_ptr() for full, x in own.items()}
        try:
            for store, name, full, stand_in in self._places:
                store[name] = own.get(full, stand_in)
            yield
            for store, name, full, stand_in in self._places:
                moved = full in own and own[full].data_ptr() != data[full]
                if moved or store.get(name) is not own.get(full, stand_in):
                    raise self._changes(full)
        finally:
            for store, name, tensor in kept:
                store[name] = tensor

    @functools.cached_property
    def _places(self) -> list[tuple[dict[str, Any], str, str, torch.Tensor | None]]:
        """Where the module stores its parameters and buffers, with one entry for each name.

        Each entry has the dict that stores the tensor (`_parameters` or `_buffers` of a submodule), the key
        in this dict, the canonical name, and a `CapturedValue` that replaces the tensor. The last is None if
        the uncaptured code may read the tensor.
        """
        free, found, stand_ins = {*self.trained, *self.others}, [], dict[str, torch.Tensor]()
        for path, part in self._module.named_modules():
            for store in (part._parameters, part._buffers):
                for name, tensor in store.items():
                    if tensor is None:
                        continue
                    full = self._names[f"{path}.{name}" if path else name]
                    if full not in free and full not in stand_ins:
                        stand_ins[full] = captured_value(tensor, f"{full!r}", _CAPTURED)
                    found.append((store, name, full, stand_ins.get(full)))
        return found

    @contextlib.contextmanager
    def _logging(self, samples: int) -> Iterator[None]:
        """Within this context, `self.log` and Lightning's own `log` add to `logs`. Unless every process runs the
        code, `self.all_gather` and the collective methods of the strategy raise an error.

        Args:
            samples: number of samples in the part of the batch on which the code runs.
        """

        def record(name: str, value: Any, kwargs: Mapping[str, Any], own: bool = True) -> bool:
            """Record a number. Return False for another value, such as a metric object, if every process runs the code."""
            if not recorded_logs.is_number(value):
                if self.everywhere:
                    return False
                raise PiperError(f"{user_line()}: {_problem_of_log(name, value, False)} [PIPER-C022]")
            if not isinstance(value, torch.Tensor):
                # Lightning also converts numbers to the default dtype.
                value = torch.tensor(value, dtype=torch.get_default_dtype())
            value = value.detach().reshape(()).clone()
            self.logs.append(RemainderLog(name, value, kwargs, samples, own))
            return True

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if args and recorded_logs.is_number(value):
                raise PiperError(f"{user_line()}: {_problem_of_log(name, value, True)} [PIPER-C022]")
            if not record(name, value, kwargs, own=False):
                cls: Any = type(self._module)
                cls.log(self._module, name, value, *args, **kwargs)

        def own_log(results: Callable[[], Any], own: bool) -> Any:
            if not own and not self.everywhere:
                raise recorded_logs.refusal("training_step", own)
            return recorded_logs.RecordedResults(results(), record) if own else results()

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise _communicates()

        strategy = getattr(getattr(self._module, "_trainer", None), "strategy", None)
        together = dict.fromkeys(("all_gather", "barrier", "broadcast", "reduce"), refuse)
        stand_ins: list[tuple[Any, dict[str, Any]]] = [(self._module, {"log": log})]
        if not self.everywhere:
            stand_ins += [
                (self._module, {"all_gather": refuse}),
                *([] if strategy is None else [(strategy, together)]),
            ]
        with contextlib.ExitStack() as stack:
            for owner, members in stand_ins:
                stack.enter_context(replaced_entries(vars(owner), members))
            stack.enter_context(recorded_logs.replacing_results(self._module, own_log))
            yield

    def _communication_refused(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, collectives of torch raise an error, because the code would wait for processes
        that do not run it. If every process runs the code, the context has no effect."""
        return (
            contextlib.nullcontext()
            if self.everywhere
            else without_communication(_communicates, lambda: None)
        )


def _problem_of_log(name: str, value: Any, number: bool) -> str:
    """Return why uncaptured code cannot log a value, or if it can (`number`), its positional arguments."""
    if number:
        return (
            f"self.log({name!r}) gets positional arguments after the value, in code that runs uncaptured. Pass them "
            "by name, such as prog_bar=True"
        )
    if isinstance(value, torch.Tensor):
        return f"self.log({name!r}) gets a tensor of shape {tuple(value.shape)}. Log a single number"
    metric = isinstance(value, nn.Module)
    return (
        f"self.log({name!r}) gets {kind_of(value)}, in code that runs uncaptured. "
        f"{'Log this object in a hook, such as on_train_batch_end' if metric else 'Log a number'}"
    )


_ANNOTATE = (
    "If a submodule changes it, such as a batch norm, annotate the submodule (piper.annotate_modules), and call it "
    "before the code that cannot be captured."
)


def called(key: Key) -> str:
    """Return the call of a module for a message, such as `self.encoder(...)`."""
    return f"{member(key[0])}(...)" if key[0] else "self(...)"


def _communicates() -> PiperError:
    """Return the error for code that communicates, with the running line of the user's code."""
    return PiperError(
        f"{user_line()}: training_step communicates with other processes, but Piper has captured only its "
        "module calls. Its other code runs only in the processes of one stage, so the other processes would "
        "not answer. Communicate in a hook, such as on_train_batch_end [PIPER-C010]"
    )


class _NonLeafIdentity(torch.autograd.Function):
    """The identity, with a result that is not a leaf. For an in-place change of a leaf, torch raises an error
    before `_check_unchanged` can raise a clearer error."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


_CAPTURED = (
    "belongs to a module whose call is captured and may be on another stage. Read it in the forward method "
    "of that module, and return the value that you need"
)
_ONCE_MORE = (
    "this happens in {}. During the capture, training_step called this module fewer times before the line that "
    "cannot be captured. Make all calls of the module before that line, and the same number for every batch"
)
_HANDED = (
    "was passed to another captured call and may be on another stage. Return the value that you need from the "
    "last captured call, too"
)


def _detached(nested: Any) -> Any:
    """Return nested values in which tensors are detached. The tensors share memory with the given ones."""
    return _torch.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, nested)


class CapturedValue(torch.Tensor):
    """A tensor without values, which uncaptured code must not read. All torch functions raise a `PiperError`
    for it, except `numel`, `size`, `dim`, `is_floating_point`, and getters of attributes that are not tensors.

    Attributes:
        problem: a tuple of one text: which value this is, and why the code must not read it.
    """

    problem: tuple[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that return the shape or the kind of dtype, and getters of attributes other than tensors.
        Raise a `PiperError` for all other functions."""
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ == "__get__" or func.__name__ in ("numel", "size", "dim", "is_floating_point"):
                answer = func(*args, **(kwargs or {}))
                if not isinstance(answer, torch.Tensor):  # an attribute such as `data` is a tensor
                    return answer
        found = next(
            (x for x in _torch.tree_flatten((args, kwargs))[0] if isinstance(x, CapturedValue)), None
        )
        raise PiperError(
            f"{user_line()}: training_step reads "
            f"{found.problem[0] if found is not None else 'a captured value'} [PIPER-C022]"
        )


def captured_value(like: torch.Tensor, what: str, why: str) -> torch.Tensor:
    """Return a `CapturedValue` with the shape and dtype of `like`, without data.

    Args:
        what, why: parts of the error's text: "training_step reads `what`, which `why`".
    """
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.empty_like(like, device="meta", requires_grad=like.requires_grad).as_subclass(
            CapturedValue
        )
    made.problem = (f"{what}, which {why}",)
    return made
