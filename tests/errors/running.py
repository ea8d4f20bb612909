"""Errors during the training."""

from __future__ import annotations

import torch

from lightning_piper.holdings.gradient_injection import GradientInjection
from tests.errors.case import GROUPS, PLACES, REPLICATE, SPLIT, Case, Cases, Elsewhere, batch, fit, net
from tests.strategy.fitting import Batches

TITLE = "During a step"
INTRO = """These errors occur while the training runs. If an instruction fails, an `ExecutionError` names the device, the node \
and the directive that made it. Over processes, all processes end, and each names the process that failed first."""


def out_of_range() -> None:
    """Fit with tokens that the embedding does not have. A capture does not see them, because it does not see
    values.
    """
    module = net(
        "pass", ("nn.Linear(8, 6)", "nn.Embedding(4, 6)"), ("self.first(x)", "self.first(x).mean(1)")
    )
    x, y = torch.zeros(8, 3, dtype=torch.long), torch.zeros(8, 1)
    fit(module, Batches([(x, y), (x + 9, y)]))


def switched(line: str) -> None:
    module = net(
        "pass",
        ("self.seen,", "self.other = nn.Linear(8, 6)\n        self.seen,"),
        ("torch.ones(()))", "torch.ones(1))"),
        (
            "def configure_optimizers",
            f"def on_train_epoch_start(self):\n        {line}\n\n    def configure_optimizers",
        ),
    )
    fit(module, max_steps=-1, max_epochs=2)


def grouped() -> None:
    added = "self.trainer.optimizers[0].add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]})"
    line = f"def on_train_epoch_end(self):\n        {added}"
    module = net("pass", ("def configure_optimizers", f"{line}\n\n    def configure_optimizers"))
    fit(module, max_steps=-1, max_epochs=2)


def other_shards() -> None:
    module = net("pass", ("F.mse_loss(self.second(h), y)",
                          "F.mse_loss(self.second(h) + (self.first.weight.sum() if y.shape[1] == 2 else 0), "
                          "y)"))  # fmt: skip
    x, y = batch()
    fit(
        module,
        Batches([(x, y), (x, y.repeat(1, 2))]),
        directives=[*GROUPS, {**REPLICATE, "shard_params": True}],
    )


def factors() -> None:
    line = (
        "def backward(self, loss):\n        (loss * (1 + "
        "self.trainer.fit_loop.epoch_loop.batch_idx)).backward()"
    )
    module = net("pass", ("def configure_optimizers", f"{line}\n\n    def configure_optimizers"))
    fit(module, directives=[*GROUPS, SPLIT, REPLICATE], accumulate_grad_batches=2)


def nonlinear() -> None:
    line = "def backward(self, loss):\n        (loss * 0.5).backward()"
    changes = ("def configure_optimizers", f"{line}\n\n    def configure_optimizers")
    fit(net("loss.register_hook(lambda grad: grad.clamp(max=0.3))", changes), directives=PLACES)


def forgotten() -> None:
    line = (
        "def backward(self, loss):\n        loss.backward() if self.trainer.fit_loop.epoch_loop.batch_idx "
        "else None"
    )
    module = net("pass", ("def configure_optimizers", f"{line}\n\n    def configure_optimizers"))
    fit(module, directives=[*GROUPS, SPLIT, REPLICATE], accumulate_grad_batches=2)


def impatient() -> None:
    line = (
        "def on_after_backward(self):\n        getattr(nn.utils, 'clip_grad_norm_')(self.parameters(), 1.0)"
    )
    module = net("pass", ("def configure_optimizers", f"{line}\n\n    def configure_optimizers"))
    fit(module, directives=[*GROUPS, SPLIT, REPLICATE], accumulate_grad_batches=2)


def twice() -> None:
    loss = GradientInjection({"a": torch.zeros(3, requires_grad=True)}, torch.device("cpu")).loss(
        torch.tensor(1.0), {"a": torch.ones(3)}
    )
    loss.backward(retain_graph=True)
    loss.backward()


FAILURES = "tests/strategy/test_failures.py"
UNCAPTURED = "tests/strategy/test_uncaptured_sharded.py::test_what_cannot_be_divided_is_refused_by_all"

CASES: Cases = [
    Case("an operation fails on the values of a batch (here: a token that the embedding does not "
         "have)", out_of_range),
    Case("a NaN in a gradient, under `Trainer(detect_anomaly=True)`",
         lambda: fit(net("pass", ("torch.tanh(self.first(x))", "torch.sqrt(0 * self.first(x))")),
             detect_anomaly=True)),
    Case("a gradient is NaN before an update",
         lambda: fit(net("pass", ("torch.tanh(self.first(x))", "torch.sqrt(0 * self.first(x))")))),
    Case("a hook takes a parameter away (pruning)",
         lambda: switched("torch.nn.utils.prune.l1_unstructured(self.first, 'weight', 0.5) if "
                          "self.current_epoch else None")),
    Case("a hook gives two parameters the same memory",
         lambda: switched("self.first.weight.data = self.other.weight.data if self.current_epoch else "
                          "self.first.weight.data")),
    Case("a hook replaces a buffer by one with a different shape",
         lambda: switched("self.scale = torch.ones(1 + self.current_epoch)")),
    Case("the step takes the next value of an iterator",
         lambda: fit(net("loss = loss * next(self.n)", ("self.seen,", "self.n = iter(range(1, 9))\n        "
                                                                      "self.seen,")))),
    Case("the step depends on something that a capture cannot see (here: a file)",
         lambda: fit(net("loss = loss * self.n.read(1)[0]",
                         ("self.seen,", "self.n = __import__('tempfile').TemporaryFile()\n        "
                                        "self.n.write(bytes(range(1, 99)))\n        self.n.seek(0)\n"
                                        "        self.seen,")))),
    Case("a parameter group is added after the first batch", grouped),
    Case("a parameter is frozen after the capture",
        lambda: switched("self.first.requires_grad_(self.current_epoch "
                                                                     "== 0)")),
    Case("with the layout of a later batch, a stage uses different sharded parameters", other_shards),
    Case("`backward` runs twice on the same loss", twice),
    Case("different factors on the losses of one gradient accumulation", factors),
    Case("a factor in `backward`, where the backward pass is not linear in the gradient of the "
         "loss", nonlinear),
    Case("`backward` is left out for a batch of a gradient accumulation", forgotten),
    Case("a later batch is too small for the replicas",
         lambda: fit(data=Batches([batch(8), batch(3)]), directives=[*GROUPS, REPLICATE])),
    Case("a later batch does not have samples",
        lambda: fit(data=Batches([batch(8), batch(0)]), directives=PLACES)),
    Elsewhere("a hook changes a sharded parameter in place", "parameter 'first.0.weight' was changed in "
                                                             "place",
              "PiperError", "tests/strategy/test_options.py::test_parameters_in_pieces_changed_in_place"),
    Elsewhere("a callback replaces `strategy.optimizers` after the first batch",
              "a callback or hook replaced strategy.optimizers after the first batch", "PiperError",
              "tests/strategy/test_options.py::test_refusals"),
    Elsewhere("an optimizer whose `state_dict` has a form of its own, with an uncaptured step and shards",
              "OwnForm.state_dict() does not have 'state' and 'param_groups'", "PiperError", UNCAPTURED),
    Elsewhere("a parameter in two optimizers, with shards", "parameter 'net.0.weight' is in several "
                                                            "optimizers", "PiperError",
              UNCAPTURED),
    Elsewhere("an optimizer that runs its closure twice in an uncaptured step, with shards",
              "runs its closure twice in a step. At the second call, each process "
              "has", "PiperError", UNCAPTURED),
    Elsewhere("an optimizer that does not run the closure that it is given, with shards",
              "step has not called the closure that it was given", "PiperError", UNCAPTURED),
    Elsewhere("a parameter group is added within an uncaptured step, with shards",
              "the optimizer's parameter groups have changed since "
              "on_train_batch_start", "PiperError", UNCAPTURED),
    Case("a hook calls torch for the norm of gradients in the middle of an accumulation", impatient),
    Elsewhere("a hook calls torch for the norm of some gradients, over processes",
              "got only some of the gradients that a process "
              "has", "PiperError", "tests/strategy/test_options.py::test_refusals"),
    Elsewhere("a hook calls torch for norms of different groups in each process",
              "clip_grad_norm_ or get_total_norm with gradients of different parameter groups", "PiperError",
              "tests/strategy/test_options.py::test_refusals"),
    Elsewhere("a learning rate is changed in one process",
              "'lr' of the optimizer's parameter group 1 is 0.05 on rank 0, and 0.06 on rank 1", "PiperError",
              "tests/strategy/test_options.py::test_refusals"),
    Elsewhere("`backward` multiplies the loss by a different factor in one process",
              "the factor with which backward multiplied the last loss is 2.0 on rank 0, and 3.0 on rank "
              "1", "PiperError",
              "tests/strategy/test_options.py::test_refusals"),
    Elsewhere("stages draw different batches", "drew different batches (different values) in training batch "
                                               "0", "PiperError",
              "tests/strategy/test_fit_processes.py::test_processes_refuse_together"),
    Elsewhere("a batch with different shapes in one process",
              "the processes drew different batches (different shapes or dtypes) in training batch 3",
              "PiperError", f"{FAILURES}::test_batches_of_other_shapes"),
    Elsewhere("fewer samples in one replica, with microbatches",
              "the replicas drew batches that do not fit together in training batch 3", "PiperError",
              f"{FAILURES}::test_batches_of_other_shapes_in_one_replica"),
    Elsewhere("replicas have batches of different lengths, for which the step has different regions",
              "the replicas drew batches of different shapes, and their steps run different "
              "regions", "PiperError",
              "tests/strategy/test_lengths.py::test_replicas_may_have_batches_of_other_lengths"),
    Elsewhere("replicas have different numbers or strings in their batches",
              "do not fit together in training batch 0 of this fit (batch[2]['k']: 0 and 1)",
              "PiperError",
              "tests/strategy/test_replicate.py::test_refusals"),
    Elsewhere("an exception on one rank, as the other ranks report it",
              "The first process to fail was rank 1: ValueError: something of the user's", "ExecutionError",
              f"{FAILURES}::test_an_error_is_known_to_the_other_process"),
    Elsewhere("a process that failed but did not end",
              "ends, because it would wait forever: the first process to fail was rank 0: "
              "ValueError", "on stderr",
              f"{FAILURES}::test_a_failed_process_that_lives_on_does_not_keep_the_other_waiting"),
    Elsewhere("a process is killed, as the other processes report it",
              "The first process to fail was rank 1: it ended without an error message", "ExecutionError",
              f"{FAILURES}::test_a_process_that_dies_ends_the_other"),
    Elsewhere("a process hangs, as the other processes report it after the `timeout`",
              "The first process to fail was rank 0: it hangs, or takes longer than the timeout of "
              "communication:",
              "ExecutionError",
              f"{FAILURES}::test_a_process_that_hangs_ends_the_other_at_the_timeout"),
]  # fmt: skip
