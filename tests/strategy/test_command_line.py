"""LightningCLI: the strategy from arguments and from YAML files, and the errors for wrong ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

import lightning_piper as piper
from lightning_piper.directives import to_json
from tests.strategy import command_line
from tests.strategy.command_line import DEFAULTS, PROGRAM, Net, WithDirectives
from tests.strategy.fitting import same, values

ROOT = Path(__file__).parents[2]
LOCAL = "--trainer.strategy.transport=local"
(YAML,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "strategy.md").read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a program, with a file that is no program, and with configurations."""
    (tmp_path / "program.json").write_text(json.dumps(to_json(PROGRAM)))
    (tmp_path / "broken.json").write_text('[\n  {"op": "place",\n   "filter": {}, "devices" [0]}\n]\n')
    (tmp_path / "config.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPER_DIRECTIVES", raising=False)
    return tmp_path


def cli(*args: str, module: type[Net] = Net) -> LightningCLI:
    return LightningCLI(
        module,
        args=list(args),
        run=False,
        trainer_defaults=DEFAULTS,
        seed_everything_default=1,
        save_config_callback=None,
    )


def fitted(*args: str, module: type[Net] = Net) -> dict[str, torch.Tensor]:
    made = cli(*args, module=module)
    assert isinstance(made.trainer.strategy, piper.PiperStrategy)
    made.trainer.fit(made.model)
    return values(made.model)


GIVEN = {
    "short name": ("--trainer.strategy=PiperStrategy", "--trainer.strategy.directives=program.json", LOCAL),
    "full name": (
        "--trainer.strategy=lightning_piper.PiperStrategy",
        "--trainer.strategy.directives=program.json",
        LOCAL,
    ),
    "a list": (
        "--trainer.strategy=PiperStrategy",
        f"--trainer.strategy.directives={json.dumps(to_json(PROGRAM))}",
        LOCAL,
    ),
    "an object with a version": (
        "--trainer.strategy=PiperStrategy",
        f"--trainer.strategy.directives={json.dumps({'version': 1, 'directives': to_json(PROGRAM)})}",
        LOCAL,
    ),
    "an argument over YAML": (
        "--config=config.yaml",
        "--trainer.devices=1",
        "--trainer.strategy.directives=program.json",
        LOCAL,
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_program_is_given(name: str) -> None:
    strategy = cli(*GIVEN[name]).trainer.strategy
    assert isinstance(strategy, piper.PiperStrategy)
    assert strategy._program == PROGRAM and strategy._local


def test_the_configuration_in_the_documentation() -> None:
    made = cli("--config=config.yaml")
    strategy = made.trainer.strategy
    assert isinstance(strategy, piper.PiperStrategy) and made.trainer.num_devices == 2
    assert strategy._program == PROGRAM[:3]
    assert strategy._timeout == timedelta(minutes=10) and strategy._profile == piper.Schedule(
        wait=10, active=3
    )


def test_the_module_and_the_environment_name_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`strategy="piper"` over processes takes no arguments; here all devices are in one process."""
    wanted = fitted(*GIVEN["short name"])
    local = ("--trainer.strategy=PiperStrategy", LOCAL)
    assert same(wanted, fitted(*local, module=WithDirectives))
    assert "not used" not in caplog.text
    other = piper.schedules.gpipe(stages=2, microbatches=2)
    Path("other.json").write_text(json.dumps(to_json(other)))
    monkeypatch.setenv("PIPER_DIRECTIVES", "other.json")
    assert cli("--trainer.strategy=piper").trainer.strategy._program == other  # type: ignore[attr-defined]
    found = fitted(*local, module=WithDirectives)
    said = (
        "ignores piper_directives of WithDirectives: the directives of the strategy or of PIPER_DIRECTIVES "
        "take precedence"
    )
    assert said in caplog.text
    assert not same(wanted, found)  # two microbatches are added up in another order than four
    assert same(wanted, fitted(*GIVEN["short name"], module=WithDirectives))  # the argument comes before both


@pytest.mark.parametrize("args, message", [
    ([f"--trainer.strategy.directives={json.dumps([{'op': 'place', 'filter': {}, 'device': [0]}])}"],
     "directive 0 (place): field 'device' is unknown. Give one of filter, devices, axes, stream"),
    (["--trainer.strategy.directives=none.json"], "directives file 'none.json' does not exist"),
    (["--trainer.strategy.directives=broken.json"],
     "directives file 'broken.json' cannot be read as JSON: Expecting ':' delimiter: line 3 column 28"),
])  # fmt: skip
def test_a_wrong_program_is_an_error(args: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        cli("--trainer.strategy=PiperStrategy", *args)
    assert message in str(error.value)


@pytest.mark.parametrize("arg, message", [
    ("--trainer.strategy.verify=sometimes", "sometimes"),
    ("--trainer.strategy.program=program.json", "Option 'program' is not accepted"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(arg: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--trainer.strategy=PiperStrategy", arg)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "path, where", [("none.json", "does not exist"), ("broken.json", "line 3 column 28")]
)
def test_wrong_files_say_who_named_them(path: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Net):
        piper_directives = path

    with pytest.raises(
        piper.DirectiveError, match=rf"Wrong\.piper_directives: directives file '{path}'.*{where}"
    ):
        fitted("--trainer.strategy=PiperStrategy", LOCAL, module=Wrong)
    monkeypatch.setenv("PIPER_DIRECTIVES", path)
    with pytest.raises(
        piper.DirectiveError,
        match=rf"environment variable PIPER_DIRECTIVES: directives file '{path}'.*{where}",
    ):
        piper.PiperStrategy()


STRATEGIES = {  # the arguments in the file -> the same program
    "degrees": ({"pp": 2, "microbatches": 4}, PROGRAM),
    "a name": ({"directives": "zero1", "dp": 2}, piper.parallel(dp=2, zero=1)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_file_trains_its_program(name: str, folder: Path) -> None:
    arguments, program = STRATEGIES[name]
    found = []
    for given in arguments, {"directives": to_json(program)}:
        init = {**given, "transport": "local"}
        strategy = {"class_path": "lightning_piper.PiperStrategy", "init_args": init}
        (folder / "strategy.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
        found.append(fitted("--config=strategy.yaml"))
    assert same(*found)
    assert not same(values(Net()), found[0])  # it was trained


@pytest.mark.long
def test_two_processes_from_a_configuration(folder: Path) -> None:
    """`python script.py fit --config ...` starts the second process by itself; both end with what one process
    computes.
    """
    config: dict[str, Any] = {
        "class_path": "lightning_piper.PiperStrategy",
        "init_args": {"directives": "program.json"},
    }
    (folder / "two.yaml").write_text(json.dumps({"trainer": {"devices": 2, "strategy": config}}))
    command = [sys.executable, command_line.__file__, "fit", "--config", "two.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = fitted(*GIVEN["short name"])
    for rank in range(2):
        assert same(wanted, torch.load(folder / f"values_{rank}.pt", weights_only=True))
    assert not same(wanted, values(Net()))  # it was trained
