"""Every Python block of the pages runs, in the order of its page, and prints what is shown below it.

What a block takes for granted (a module, a batch) stands in `BEFORE`; `AFTER` does with what it made what a
reader would. A program is compiled. Trainings are run locally: all devices in one process. Some pages have
tests of their own (`ELSEWHERE`).
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch

import lightning_piper as piper
from lightning_piper.directives import base
from lightning_piper.ops import base as operations
from tests.pages import LocalStrategy, Pair, local_trainer, samples
from tests.tutorial import alike

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"docs/tutorial.md", "docs/cli.md", "docs/errors.md", "docs/howto/local_sgd.md"}
LONG = {"docs/howto/memory.md", "docs/search.md"}
PAGES = sorted(str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```\n(?P<printed>.*?)^```)?", re.DOTALL | re.MULTILINE
)
ONE_OF = "# one of these lines\n"

COMMON = """
import dataclasses, json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
import lightning as L, torch, torch.nn.functional as F
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning_piper as piper
from lightning_piper import PiperStrategy
from tests.pages import Layers, Pair, samples

module, batch, program = Pair(), samples(), piper.schedules.one_f_one_b(2, 4)
strategy = piper.PiperStrategy(directives=program)
loader = DataLoader(TensorDataset(*batch), batch_size=16)
"""
MIXTURE = "from tests.moe import Model as Mixture, batch as tokens; module, batch = Mixture(), tokens(8)"
LAYERS = "module, program = Layers(6, 'LAYER'), [piper.Split(filter={}, dim_name='MB', num_microbatches=2)]"
SCORED = """
from tests import packed
module, batch, program = packed.packed(), next(iter(DataLoader(packed.Rows(), batch_size=8))), []
"""
PLACED = "piper.compile(module, batch, [piper.Place(filter={}, devices=[0, 1]), eval(code)])"
ORDERED = "piper.compile(module, batch, piper.schedules.gpipe(2, 2)[:3] + [eval(code)])"
SAVED = """
import shutil
shutil.rmtree("checkpoints", ignore_errors=True)
L.Trainer(devices=1, strategy=PiperStrategy(checkpoint="sharded"), callbacks=[ModelCheckpoint("checkpoints", save_last=True)]).fit(
    module, loader)
"""

BEFORE = {
    "docs/checkpoints.md 0": SAVED,
    "docs/checkpoints.md 1": "import torch.distributed.checkpoint as dcp",
    "docs/concepts.md 0": "self, x = SimpleNamespace(encoder=nn.Linear(4, 4)), torch.ones(2, 4)",
    "docs/concepts.md 1": "model = Layers(4)",
    "docs/directives.md 7": MIXTURE,
    "docs/directives.md 9": "module, batch = Layers(2), samples()",
    "docs/directives.md 10": LAYERS,
    "docs/directives.md 11": SCORED,
    "docs/directives.md 12": LAYERS + "; batch = samples()",
    "docs/directives.md 13": LAYERS + "; program += [piper.Offload(filter={'LAYER': '*'})]",
    "docs/directives.md 14": "module = Pair()",
    "docs/howto/pretrained.md 0": """
pytest.importorskip("transformers", minversion="5.0")
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)).save_pretrained("weights")
loader = DataLoader(torch.randint(32, (16, 8)), batch_size=4)
""",
    "docs/howto/profile.md 1": """
from lightning.pytorch.loggers import CSVLogger
L.Trainer(devices=2, strategy=strategy, max_epochs=5, logger=CSVLogger(".", name="lightning_logs")).fit(module, loader)
""",
    "docs/howto/recompute.md 2": "module, batch = Net(), torch.zeros(1024, 256)",
    "docs/howto/guard.md 1": """
Path("spikes").mkdir()
spike = {"loss": 9.0, "median": 1.0, "norm": 2.0, "batch": batch, "batch_idx": 3}
torch.save(spike, "spikes/step=412-batch=3-replica=0.pt")
""",
    "docs/howto/middle_of_epoch.md 0": "dataset = TensorDataset(*batch)",
    "docs/howto/middle_of_epoch.md 1": """
pytest.importorskip("datasets"), pytest.importorskip("torchdata")
from datasets import Dataset
stream = Dataset.from_dict({"x": range(8)}).to_iterable_dataset(num_shards=2)
trainer = L.Trainer(strategy=PiperStrategy())
""",
    "docs/howto/resume.md 2": "strategy = piper.PiperStrategy(directives=program)",
    "docs/schedules.md 0": "module = Layers(4, 'PP')",
    "docs/experts.md 0": """
k, tokens = 2, torch.randn(6, 4)
self = SimpleNamespace(router=nn.Linear(4, 3), num_experts=3, experts=lambda rows, sizes: rows)
""",
    "docs/experts.md 2": """
pytest.importorskip("transformers")
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
config = Qwen3MoeConfig(vocab_size=32, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
                        moe_intermediate_size=8, intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8)
""",
    "docs/experts.md 3": MIXTURE,
    "docs/howto/directive.md 1": "from examples.custom_directive import Checkpoint",
    "docs/howto/directive.md 2": "from tests.ops.test_node_between import Clone",
    "docs/howto/machines.md 1": "batch = samples(64)",
    "docs/howto/operation.md 0": "from lightning_piper.ir import Node; from lightning_piper.ir.nodes import "
    "IssuePriority",
    "docs/howto/operation.md 1": "from typing import ClassVar; from lightning_piper import ops",
    "docs/howto/operation.md 2": """
from hypothesis import strategies as st
from examples.compressed_reduce import Compress
from lightning_piper.testing import directive_suite
""",
    "docs/howto/resume.md 4": SAVED,
    "docs/howto/schedule.md 0": "module, durations = Layers(4, 'PP'), {'F': 1, 'B': 2, 'BI': 1, 'BW': 1}",
    "docs/howto/verify.md 0": "Net, batch, program = Pair, samples, lambda: piper.schedules.one_f_one_b(2, "
    "4)",
    "docs/howto/zero.md 1": "from tests.strategy.test_muon import Words, batches; "
    "module, batch = Words((16, 16), lambda: True), batches(1)[0]",
    "docs/losses.md 0": "token_losses, mask, count = torch.ones(4, 3), torch.ones(4, 3), torch.tensor(12.0)",
    "docs/losses.md 2": "directives = program",
    "docs/schedules.md 1": "module, _ = Pair(), piper.schedules.to_csv(piper.schedules.gpipe(2, 2), "
    "'schedule.csv')",
    "docs/search.md 0": "module = Layers(4)",
    "docs/migrate.md 1": "pytest.importorskip('transformers')",
    "docs/search.md 1": "pytest.importorskip('transformers')",
    "docs/strategy.md 3": """
config, GPT, build = 4, Layers, None
""",
    "docs/uncaptured.md 0": "gan = module",
    "docs/verification.md 0": """
torch.manual_seed(1)
x = torch.randn(32, 16)
module, batch = Pair(), (x, x.sum(dim=1, keepdim=True))
""",
}
AFTER = {
    "docs/howto/directive.md 2": """
dag = piper.compile(module, batch, program).dag
for ref in [(node.id, i) for node in dag.of_type(piper.ir.Chunk) for i in range(len(node.outputs))]:
    readers = dag.readers(ref)
    insert_after(dag, ref)
    assert [type(reader) for reader in dag.readers(ref)] == [Clone] and dag.readers((max(dag.nodes), 0)) == readers
""",
    "docs/howto/operation.md 1": """
class Cloned(piper.Directive):
    op, contract = "cloned", "bitwise"
    def apply(self, dag):
        for ref in [(chunk.id, i) for chunk in list(dag.of_type(piper.ir.Chunk)) for i in range(len(chunk.outputs))]:
            readers, node = dag.readers(ref), dag.nodes[ref[0]]
            new = dag.add(Clone(inputs=(ref,), outputs=(dag.value(ref),), devices=node.devices))
            for reader in readers:
                dag.substitute(reader, ref, (new.id, 0))
assert str(piper.verify(module, batch, [*program, Cloned()])).endswith("verified")
L.Trainer(devices=2, max_steps=2, strategy=piper.PiperStrategy([*program, Cloned()])).fit(module, loader)
""",
    "docs/howto/schedule.md 1": """
from lightning_piper.schedules.searched_schedules import SEARCHED
assert str(piper.verify(module, samples(), gpipe_in_waves(4, 4))).endswith("verified")
assert SEARCHED.pop("gpipe_in_waves")
""",
    "docs/directives.md 4": PLACED,
    "docs/directives.md 5": PLACED,
    "docs/directives.md 6": PLACED,
    "docs/directives.md 14": ORDERED,
    "docs/directives.md 15": ORDERED,
    "docs/losses.md 1": """
Pair.training_step = training_step
assert str(piper.verify(module, samples(), piper.schedules.one_f_one_b(2, 4))).endswith("verified")
""",
    "docs/losses.md 3": PLACED,
    "docs/howto/verify.md 0": "test_the_program_computes_what_one_device_computes()",
    "docs/howto/profile.md 1": """
from lightning_piper.simulate import simulate
other = piper.compile(module, batch, piper.schedules.gpipe(2, 4))
assert simulate(other.dag, other.plans, json.loads(Path("durations.json").read_text())).step_time > 0
""",
    "docs/migrate.md 0": "L.Trainer(devices=4, strategy=strategy).fit(module, loader)",
    "docs/migrate.md 1": "piper.compile(Model(), torch.zeros(4, 8, dtype=torch.long), piper.parallel(dp=2, "
    "zero=3))",
    "docs/profile.md 0": "L.Trainer(devices=2, strategy=strategy).fit(module, loader)",
}
SMALLER = {
    "docs/checkpoints.md 3": [("s3://", "memory://"), ('"piper"', "piper.PiperStrategy()")],
    "docs/checkpoints.md 4": [("s3://", "memory://")],
    "docs/migrate.md 1": [("use_cache=False", "use_cache=False, n_layer=1, n_embd=8, n_head=2")],
    "docs/search.md 1": [("use_cache=False", "use_cache=False, n_layer=1, n_embd=8, n_head=2")],
    "docs/howto/middle_of_epoch.md 0": [
        ("steps=1000", "steps=1"),
        ("=1000.", "=1."),
        ('"piper"', "PiperStrategy()"),
    ],
    "docs/howto/resume.md 0": [("1000", "2")],
    "docs/howto/resume.md 1": [("1000", "2")],
    "docs/howto/resume.md 3": [("spares=1", "")],  # processes have spares
}


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Return each block's name, its code, and the output below it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        (f"{page} {i}", found["code"], found["printed"] or "") for i, found in enumerate(BLOCK.finditer(text))
    ]


def follow(page: str, names: dict[str, Any]) -> None:
    """Run a page's blocks in these names.

    Raises:
        AssertionError: one prints something else than stands below it.
    """
    for name, code, shown in blocks(page):
        for of_the_page, smaller in SMALLER.get(name, []):
            code = code.replace(of_the_page, smaller)
        for part in code.splitlines()[1:] if code.startswith(ONE_OF) else [code]:
            exec(BEFORE.get(name, ""), names)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                try:
                    exec(compile(part, name, "exec"), names)
                except piper.PiperError as error:  # the last line of the traceback is below the block
                    print(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
                    if not shown:
                        raise
            assert not shown or alike(out.getvalue().strip(), shown.strip()), (name, out.getvalue())
            if re.search(r"^program\b", part, re.MULTILINE):
                piper.compile(names["module"], names["batch"], names["program"])
        exec(AFTER.get(name, ""), {**names, "code": code})


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(base, "_registry", dict(base._registry))
    for package in (L, L.pytorch):
        monkeypatch.setattr(package, "Trainer", local_trainer(L.Trainer))
    monkeypatch.setattr(piper, "PiperStrategy", LocalStrategy)
    monkeypatch.setattr(Pair, "training_step", Pair.training_step)  # docs/losses.md gives it another one
    monkeypatch.setitem(sys.modules, "net", SimpleNamespace(Net=Pair, data=samples))
    made: dict[str, Any] = {"__name__": "tests.pages", "pytest": pytest}
    exec(COMMON, made)
    with contextlib.ExitStack() as registered:  # a page's operation is known only in its test
        for registry in (operations.OPERATIONS, operations.BINDERS, operations.INSTRUCTIONS):
            registered.enter_context(mock.patch.dict(registry))
        yield made
    torch.use_deterministic_algorithms(False)


def marked(page: str) -> Any:
    return pytest.param(page, marks=pytest.mark.long) if page in LONG else page


@pytest.mark.filterwarnings("ignore:.*recorded no step")  # the pages' fits have only two steps
@pytest.mark.parametrize("page", [marked(page) for page in PAGES if page not in ELSEWHERE and blocks(page)])
def test_the_blocks_run(page: str, names: dict[str, Any]) -> None:
    follow(page, names)


def test_what_is_given_is_for_a_block() -> None:
    there = {name for page in PAGES for name, _, _ in blocks(page)}
    assert {*BEFORE, *AFTER, *SMALLER} <= there


@pytest.mark.parametrize(
    "page, wrong", [("docs/losses.md", "accumulate=tokens"), ("README.md", "equal within bitwise")]
)
def test_a_page_that_is_wrong_is_noticed(
    page: str, wrong: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = blocks(page)[:3]
    broken = [
        (name, code.replace('accumulate="tokens"', wrong), shown.replace("bitwise equal", wrong))
        for name, code, shown in right
    ]
    monkeypatch.setitem(globals(), "blocks", lambda page: broken)
    with pytest.raises((AssertionError, NameError)):
        follow(page, names)
