"""Models with adapters of peft: they train as with plain Lightning, and their adapters are saved in peft's files."""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file

import lightning_piper as piper
from lightning_piper.errors import CaptureError, PiperError
from lightning_piper.pretrained.model_folder import UNFINISHED
from tests.distributed.processes import launch_trainings
from tests.peft_models import ADAPTERS, Adapted, fitted, save
from tests.pretrained import KINDS, by_transformers, saved

pytest.importorskip("peft")

PROGRAMS = {
    "one device": {},
    "replicas": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "pipeline": {"pp": 2, "microbatches": 2},
    "pipeline and replicas": {"pp": 2, "dp": 2, "microbatches": 2},
    "tensor parallel": {"tp": 2},
    "pipeline and zero3": {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2},
}

FIRST = [
    ("lora", "zero3"),
    ("lora", "pipeline"),
    ("dora", "tensor parallel"),
    ("prompt", "pipeline and replicas"),
]
CASES = [
    pytest.param(kind, name, marks=() if (kind, name) in FIRST else pytest.mark.long)
    for kind in ADAPTERS
    for name in PROGRAMS
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved("llama", tmp_path_factory.mktemp("llama"), torch.float64, sharded=False)


@functools.cache
def by_plain_lightning(kind, source):
    """Return name -> parameter after the training with plain Lightning."""
    module = Adapted(kind, source)
    fitted(module, "auto")
    return {name: x.detach() for name, x in module.named_parameters()}


def by_piper(kind, source, name):
    module = Adapted(kind, source)
    fitted(module, piper.PiperStrategy(**PROGRAMS[name], transport="local"))
    return {name: x.detach() for name, x in module.named_parameters()}


def distance(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float((x - ours[name]).abs().max()) for name, x in theirs.items())


@pytest.mark.filterwarnings("error:.*PIPER")
@pytest.mark.parametrize("kind, name", CASES)
def test_it_trains_as_plain_lightning(source, kind, name):
    wanted, found = by_plain_lightning(kind, source), by_piper(kind, source, name)
    untrained = Adapted(kind, source)
    untrained.configure_model()
    start = {name: x.detach() for name, x in untrained.named_parameters()}
    # Llama's norms calculate in float32, so sums in another order round differently.
    assert distance(wanted, found) < 1e-8 and distance(start, found) > 1e-5
    frozen = [name for name, x in untrained.named_parameters() if not x.requires_grad]
    assert all(torch.equal(start[name], found[name]) for name in frozen)


def initial(kind, source, **options):
    """Return name -> value of the adapters after a training that changes nothing."""
    module = Adapted(kind, source, piper.from_pretrained)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)
    fitted(module, piper.PiperStrategy(**options, transport="local"))
    return {name: x.detach() for name, x in module.named_parameters() if x.requires_grad}


@pytest.mark.parametrize("options", [{"dp": 2, "zero": 3}, {"pp": 2, "microbatches": 2}], ids=str)
def test_new_adapters_on_the_meta_device_begin_as_those_of_peft(source, options):
    plain = Adapted("lora", source)
    plain.configure_model()
    found, wanted = initial("lora", source, **options), dict(plain.named_parameters())
    for name, x in found.items():
        if "lora_B" in name:
            assert not x.any() and not wanted[name].any()
        else:  # a uniform distribution with the bound of PEFT
            largest = float(wanted[name].abs().max())
            assert 0.8 * largest < float(x.abs().max()) < 1.25 * largest


@pytest.mark.parametrize("kind", ["dora", "ia3", "prompt", "prefix", "p-tuning"])
def test_adapters_whose_initial_values_are_lost_are_refused(source, kind):
    with pytest.raises(
        PiperError, match=r"a PEFT adapter on the meta device, and Piper does not know.*\[PIPER-S009\]"
    ):
        initial(kind, source)


def test_adapters_that_are_loaded_onto_the_meta_device_are_refused(tmp_path, source):
    from peft import PeftModel

    plain = Adapted("lora", source)
    plain.configure_model()
    plain.model.save_pretrained(tmp_path)
    module = Adapted("lora", source)
    base = piper.from_pretrained(KINDS["llama"]()[0], source)
    module.model = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    with pytest.raises(
        PiperError, match=r"a PEFT adapter on the meta device, and it was changed there.*\[PIPER-S009\]"
    ):
        fitted(module, piper.PiperStrategy(transport="local"))


class Permuted(Adapted):
    """A learned prompt whose positions the user changes before the first batch, or after it."""

    def __init__(self, source, after):
        super().__init__("prompt", source)
        self.after = after

    def permute(self):
        self.model.prompt_tokens["default"].copy_(torch.arange(4).flip(0))

    def on_fit_start(self):
        if not self.after:
            self.permute()

    def on_train_batch_end(self, *args):
        if self.after:
            self.permute()


@pytest.mark.parametrize("after", [False, True])
def test_other_positions_of_a_prompt_are_a_tensor_that_is_not_a_buffer(source, after):
    with pytest.raises(CaptureError, match="neither in the batch nor a parameter or buffer"):
        fitted(Permuted(source, after), piper.PiperStrategy(**PROGRAMS["pipeline"], transport="local"))


def test_the_model_keeps_its_own_positions(source):
    module = Adapted("prompt", source)
    module.configure_model()
    before = module.model.prompt_tokens["default"]
    fitted(module, piper.PiperStrategy(transport="local"))
    assert module.model.prompt_tokens == {"default": before}  # the same tensor
    assert torch.equal(before, torch.arange(4))


@pytest.mark.parametrize(
    "kind, name",
    [
        ("lora", "zero3"),
        pytest.param("dora", "pipeline", marks=pytest.mark.long),
        pytest.param("prompt", "zero3", marks=pytest.mark.long),
        pytest.param("prompt", "pipeline", marks=pytest.mark.long),
        pytest.param("prefix", "tensor parallel", marks=pytest.mark.long),
        pytest.param("lora and head", "tensor parallel", marks=pytest.mark.long),
    ],
)
def test_processes_save_adapters_that_peft_loads(tmp_path, source, kind, name):
    from peft import PeftModel

    read = piper.from_pretrained if kind in ("lora", "lora and head") else by_transformers
    launch_trainings(2, save, tmp_path / "run", kind, source, tmp_path, PROGRAMS[name], read)
    state = torch.load(tmp_path / "plain.ckpt", weights_only=False)["state_dict"]
    whole = Adapted(kind, source)
    whole.configure_model()
    start = {name: x.clone() for name, x in whole.state_dict().items()}
    whole.load_state_dict(state)
    whole.model.save_pretrained(tmp_path / "theirs")
    names = {each.name for each in (tmp_path / "theirs").iterdir()}
    assert {each.name for each in (tmp_path / "adapters").iterdir()} == names
    ours, theirs = (
        load_file(tmp_path / each / "adapter_model.safetensors") for each in ("adapters", "theirs")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], x) for key, x in theirs.items())
    assert distance(start, whole.state_dict()) > 1e-5
    base = by_transformers(KINDS["llama"]()[0], source)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapters").double()
    tokens = torch.arange(12).view(2, 6)
    trained = whole.model(input_ids=tokens).logits
    rounding = (
        1e-7 if whole.model.active_peft_config.is_prompt_learning else 0
    )  # peft reads prompts as float32
    assert float((loaded(input_ids=tokens).logits - trained).abs().max()) <= rounding
    whole.load_state_dict(start)
    assert float((whole.model(input_ids=tokens).logits - trained).abs().max()) > 1e-6


def test_an_interrupted_save_leaves_the_earlier_adapters(tmp_path, source, monkeypatch):
    module = Adapted("lora", source)
    trainer = fitted(module, piper.PiperStrategy(transport="local"))
    piper.save_pretrained(trainer, tmp_path)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    with torch.no_grad():
        for x in module.parameters():
            x.mul_(2)
    from peft import PeftModel

    def fail(*args, **options):
        (tmp_path / UNFINISHED / "adapter_config.json").write_text("{")
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(PeftModel, "save_pretrained", fail)
        with pytest.raises(PiperError, match="the disk is full"):
            piper.save_pretrained(trainer, tmp_path)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    piper.save_pretrained(trainer, tmp_path)
    changed = {each.name for each in tmp_path.iterdir() if each.read_bytes() != before[each.name]}
    assert changed == {"adapter_model.safetensors"}
