"""The PIPER tab, from the entry point to what a user sees in a browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.profile.board import LIMIT, ROOT, environment, installed, tensorboard
from tests.profile.browser import Browser, found_browser
from tests.profile.page import judged
from tests.profile.recorded import plan, record_demo, record_local, steps, write_large

LARGE = 10_000
ARTIFACTS = ROOT / "build" / "artifacts"
FRAME = (
    "const frame = [...document.querySelectorAll('iframe')].find(f => f.contentWindow && "
    "f.contentWindow.piper);const page = frame && frame.contentDocument, piper = frame && "
    "frame.contentWindow.piper;"
)


class Site(NamedTuple):
    """A running TensorBoard and the runs that it shows."""

    url: str
    demo: Path
    other: Path

    def get(self, path: str, **query: str) -> tuple[int, Any]:
        """The status and the content of the tab's answer."""
        url = f"{self.url}data/plugin/piper/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=LIMIT) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("tab")
    logs = folder / "logs"
    demo = record_demo(logs / "demo")
    _, other = record_local(logs, "other")
    write_large(logs / "large", LARGE)
    (folder / "outside" / "piper").mkdir(parents=True)
    (folder / "outside" / "piper" / "step_1.json").write_text('{"secret": 1}')
    (other / "piper" / "step_99.json").symlink_to(folder / "outside" / "piper" / "step_1.json")
    with tensorboard(logs, installed(folder / "site")) as url:
        yield Site(url, demo, other)


@pytest.fixture(scope="module")
def browser(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = found_browser()
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    found = Browser(path, tmp_path_factory.mktemp("browser"))
    try:
        found.open(f"{site.url}#piper")
        found.wait(
            "the tab",
            f"{FRAME} return piper && piper.shown && page.querySelector('#measured').dataset.drawMs",
        )
        yield found
    finally:
        found.close()


def choose(browser: Browser, chooser: str, value: str) -> None:
    browser.run(
        f"(() => {{ {FRAME} const s = page.querySelector('#{chooser}'); s.value = {json.dumps(value)};"
        "s.dispatchEvent(new Event('change')); })()"
    )


def shown(browser: Browser, run: str) -> None:
    """Select a run, and wait until the page shows it."""
    choose(browser, "run", run)
    wanted = f"{FRAME} return page.querySelector('#body').dataset.shown.startsWith({json.dumps(run)} + '\\n')"
    browser.wait(f"run {run}", f"{wanted} && page.querySelector('#measured').dataset.drawMs")


def run_name(site: Site, run: Path) -> str:
    return run.relative_to(site.other.parent).as_posix()


def boxes(browser: Browser, canvas: str) -> int:
    return int(browser.run(f"(() => {{ {FRAME} return page.querySelector('#{canvas}').dataset.boxes }})()"))


def point(browser: Browser, row: int, box: int) -> dict[str, Any]:
    """A box of the measured timeline, and its position on the screen."""
    return browser.run(
        f"(() => {{ {FRAME} const p = piper.charts[1].place({row}, {box});"
        "const f = frame.getBoundingClientRect(), c = piper.charts[1].canvas.getBoundingClientRect();"
        "return {x: f.x + c.x + p.x, y: f.y + c.y + p.y, box: p.box}; })()"
    )


def test_the_timelines_hold_the_recording(browser: Browser, site: Site) -> None:
    shown(browser, run_name(site, site.demo))
    recorded = steps(site.demo)[0]["step"]["boxes"]
    assert boxes(browser, "measured") == len(recorded) > 2 * 2 * 8
    assert boxes(browser, "planned") == len(plan(site.demo)["step"]["boxes"]) > 2 * 2 * 8
    assert sum(kind in ("F", "B") for *_, kind in recorded) == 2 * 2 * 8  # stages, passes, microbatches
    shares = browser.run(f"(() => {{ {FRAME} return page.querySelector('#directives').textContent }})()")
    assert '1 {"op":"place","filter":{"PP":1},"devices":[1]}' in shares
    browser.screenshot(ARTIFACTS / "piper_tab.png")


def test_pointing_at_a_box_tells_what_it_is(browser: Browser, site: Site) -> None:
    shown(browser, run_name(site, site.demo))
    chunks = [box for box in steps(site.demo)[0]["step"]["boxes"] if box[0] == 0]
    index = next(i for i, box in enumerate(chunks) if box[4] == "B")
    found = point(browser, 0, index)
    browser.mouse("mouseMoved", found["x"], found["y"])
    text = browser.wait(
        "the tip", f"{FRAME} const tip = page.querySelector('#tip'); return !tip.hidden && tip.textContent"
    )
    node = plan(site.demo)["nodes"][str(found["box"][3])]
    assert f"%{found['box'][3]} {node['label']} on device 0, stream compute" in text
    assert "tags PP=0" in text and 'made by directive 2: {"op":"split"' in text and "makes " in text
    browser.click(found["x"], found["y"])
    text = browser.wait(
        "the node", f"{FRAME} const node = page.querySelector('#node'); return node && node.textContent"
    )
    edges = plan(site.demo)["edges"]
    for other in [a for a, b, *_ in edges if b == found["box"][3]] + [
        b for a, b, *_ in edges if a == found["box"][3]
    ]:
        assert f"%{other} " in text
    browser.screenshot(ARTIFACTS / "piper_tab_node.png")


def test_runs_can_be_switched_and_compared(browser: Browser, site: Site) -> None:
    shown(browser, "other")
    recorded = steps(site.other)[0]["step"]
    assert boxes(browser, "measured") == len(recorded["boxes"])
    devices = f"{FRAME} return page.querySelectorAll('#devices tbody tr').length"
    assert browser.wait("the table", devices) == 3
    choose(browser, "step", "step_2.json")
    choose(browser, "other-run", run_name(site, site.demo))
    choose(browser, "other-step", "step_3.json")
    wanted = f"other\nstep_2.json\n{run_name(site, site.demo)}\nstep_3.json"
    now = f"page.querySelector('#body').dataset.shown === {json.dumps(wanted)}"
    browser.wait("the comparison", f"{FRAME} return {now} && page.querySelector('#compared')?.dataset.drawMs")
    assert boxes(browser, "compared") == len(steps(site.demo)[0]["step"]["boxes"])
    assert boxes(browser, "planned-other") == len(plan(site.demo)["step"]["boxes"])
    assert "→" in browser.run(f"(() => {{ {FRAME} return page.querySelector('#devices').textContent }})()")
    browser.screenshot(ARTIFACTS / "piper_tab_compare.png")
    check_side_by_side(table(browser), [site.other, site.demo])
    both = [plan(run)["step"]["step_time"] for run in (site.other, site.demo)] + [recorded["step_time"]]
    assert browser.run(f"(() => {{ {FRAME} return piper.view.end }})()") >= max(
        both
    )  # one scale for all of it
    choose(browser, "other-run", "")
    shown(browser, run_name(site, site.demo))
    assert boxes(browser, "measured") == len(steps(site.demo)[0]["step"]["boxes"]) != len(recorded["boxes"])


def table(browser: Browser) -> dict[str, list[str]]:
    """The table that compares two programs: name of a figure -> its cells."""
    rows = (
        "[...page.querySelectorAll('#side-by-side tbody tr')].map(row => [...row.cells].map(cell => "
        "cell.innerText))"
    )
    return {name: cells for name, *cells in browser.run(f"(() => {{ {FRAME} return {rows} }})()")}


def check_side_by_side(found: dict[str, list[str]], runs: list[Path]) -> None:
    """Check the table against the files of both runs: planned, measured and their difference for each, then
    the differences between the runs.
    """

    def value(text: str) -> float:
        number, unit = text.split()[:2]
        return float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6, "B": 1, "KiB": 2**10, "MiB": 2**20}[unit]

    def mean(step: Any, key: str) -> float:
        return sum(figures[key] for figures in step["devices"].values()) / len(step["devices"])

    steps_of = [step for run in runs for step in (plan(run)["step"], steps(run)[0]["step"])]
    wanted = {"step time": [step["step_time"] for step in steps_of]}
    for name, key in {"busy": "busy", "bubble": "bubble", "exposed communication": "exposed"}.items():
        wanted[name] = [mean(step, key) for step in steps_of]
    fixed = [sum(steps(run)[0]["fixed"]["1"].values()) for run in runs for _ in range(2)]
    wanted["memory of device 1"] = [
        x["devices"]["1"]["peak_bytes"] + n for x, n in zip(steps_of, fixed, strict=True)
    ]
    for name, (a, b, c, d) in wanted.items():
        whole = [a, b, b - a, c, d, d - c, c - a, d - b]
        assert [value(text) for text in found[name]] == pytest.approx(whole, rel=0.02, abs=1e-8), (
            name
        )  # the table shows three digits
    assert (
        found["memory of device 2"][3:] == ["-"] * 5 and "-" not in found["memory of device 2"][:3]
    )  # the demo has only two devices


def test_a_run_that_is_deleted_while_it_is_compared(browser: Browser, site: Site) -> None:
    gone = site.other.parent / "gone"
    write_large(gone, 80)
    shown(browser, "other")
    choose(browser, "other-run", "gone")  # known after the next look
    shown(browser, "other")
    choose(browser, "other-run", "gone")
    browser.wait("the comparison", f"{FRAME} return page.querySelector('#compared')?.dataset.boxes === '80'")
    assert table(browser)["memory of device 7"][:3] == ["-"] * 3
    shutil.rmtree(gone)
    choose(browser, "other-run", "gone")
    left = f"{FRAME} return !page.querySelector('#other-run').value && !page.querySelector('#compared')"
    browser.wait("the other alone", f"{left} && page.querySelector('#measured')?.dataset.drawMs")
    assert all(
        "gone" not in key for key in browser.run(f"(() => {{ {FRAME} return [...piper.cache.keys()] }})()")
    )


def test_zooming_shows_less_in_more_detail(browser: Browser, site: Site) -> None:
    shown(browser, run_name(site, site.demo))
    found = point(browser, 0, 3)
    before = browser.run(f"(() => {{ {FRAME} return {{...piper.view}} }})()")
    browser.mouse("mouseWheel", found["x"], found["y"], deltaX=0, deltaY=-800)
    view = browser.wait("the zoom", f"{FRAME} return piper.view.end < {before['end']} && {{...piper.view}}")
    assert view["end"] - view["start"] < 0.5 * (before["end"] - before["start"])
    assert view["start"] < (found["box"][1] + found["box"][2]) / 2 < view["end"]


def test_ten_thousand_boxes_are_drawn_about_as_fast_as_rectangles(browser: Browser) -> None:
    """Compared with bare rectangles of four colors, as many, drawn by turns: how fast the machine is does
    not matter.
    """
    shown(browser, "large")
    assert boxes(browser, "measured") == LARGE
    # Reading a pixel back makes the browser finish its drawing; without it the time would be that of queuing
    # it.
    times = browser.run(
        f"(() => {{ {FRAME} const bare = document.createElement('canvas'); bare.width = 800; bare.height = "
        "400;const context = bare.getContext('2d'), times = [];const timed = work => { const t = "
        "performance.now(); work(); return performance.now() - t; };const rectangles = () => { for (let k = "
        f"0; k < {2 * LARGE}; k++) {{context.fillStyle = ['#123', '#456', '#789', '#abc'][k % 4]; "
        "context.fillRect(k % 800, k % 400, 3, 12); }context.getImageData(0, 0, 1, 1); };const drawn = () => "
        "{ for (const c of piper.charts) { c.draw(); c.canvas.getContext('2d').getImageData(0, 0, 1, 1); } "
        "};for (let i = 0; i < 30; i++) { piper.view.end *= 0.97; times.push([timed(drawn), "
        "timed(rectangles)]); } return times; })()"
    )
    drawn, bare = map(min, zip(*times, strict=True))
    print(f"{LARGE} boxes: {drawn / 2:.1f} ms a frame, bare rectangles {bare / 2:.1f} ms")
    assert drawn < 4 * bare  # measured: 0.9


def test_the_page_has_no_errors(browser: Browser) -> None:
    browser.run("1")  # takes in what the page has said so far
    assert [problem for problem in browser.problems if "plugin/piper" in problem] == []


def test_the_page_takes_what_is_recorded(site: Site, tmp_path: Path) -> None:
    pairs = [
        (json.dumps(step), json.dumps(plan(run)))
        for run in (site.demo, site.other)
        for step in steps(run)[:2]
    ]
    assert judged(pairs, tmp_path) == ["drawn"] * 4


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("other", "../plan.json"),
        ("other", "../../../outside/piper/step_1.json"),
        ("../outside", "step_1.json"),
        ("other", "/etc/passwd"),
        ("", "plan.json"),
        ("other", "trace_2.json"),
        ("other", "step_99.json"),
        ("/", "etc/passwd"),
    ],
)
def test_what_is_not_a_recording_in_the_log_directory_is_refused(site: Site, run: str, name: str) -> None:
    assert "other" in site.get("runs")[1]
    status, content = site.get("file", run=run, name=name)
    assert status == 404 and "secret" not in content
    assert (
        json.loads(content)["error"]
        == f"there is no recording {name!r} of a run {run!r} in the log directory"
    )


def test_recordings_are_listed_and_served(site: Site) -> None:
    status, content = site.get("runs")
    runs = {run["name"]: [step["number"] for step in run["steps"]] for run in json.loads(content)["runs"]}
    assert status == 200 and runs == {run_name(site, site.demo): [3, 4], "large": [0], "other": [2, 3]}
    status, content = site.get("file", run="other", name="step_2.json")
    assert status == 200 and json.loads(content) == steps(site.other)[0]


def test_starting_tensorboard_imports_neither_torch_nor_lightning(tmp_path: Path) -> None:
    code = """
        import sys
        from tensorboard import default
        from tensorboard.plugins.base_plugin import TBContext
        found = [plugin for plugin in default.get_dynamic_plugins() if plugin.__name__ == "PiperLoader"]
        tab = found[0]().load(TBContext(logdir=sys.argv[1]))
        assert tab.plugin_name == "piper" and "/index.js" in tab.get_plugin_apps(), tab
        print([name for name in ("torch", "lightning", "lightning_piper", "numpy") if name in sys.modules])
    """
    done = python(code, str(tmp_path), paths=installed(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] in ("[]", "['numpy']")


def test_a_fault_of_the_tab_does_not_stop_tensorboard(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules["lightning_piper_tensorboard.tab"] = None  # so that its import fails
        from tensorboard import default
        for plugin in default.get_dynamic_plugins():
            print(plugin.__name__, plugin().load(None) if plugin.__name__ == "PiperLoader" else "")
    """
    done = python(code, paths=installed(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert "PiperLoader None" in done.stdout and "the PIPER tab is not available" in done.stderr


def python(code: str, *args: str, paths: list[str]) -> subprocess.CompletedProcess[str]:
    from textwrap import dedent

    env = environment(paths)
    return subprocess.run(
        [sys.executable, "-c", dedent(code), *args], env=env, capture_output=True, text=True, timeout=LIMIT
    )


def test_log_directories_by_name() -> None:
    sys.path.insert(0, os.fspath(ROOT / "lightning_piper" / "profile" / "plugin"))
    try:
        from lightning_piper_tensorboard.scan import roots_of
    finally:
        sys.path.pop(0)
    assert roots_of("", "a:/x,b:/y/z") == {"a": Path("/x"), "b": Path("/y/z")}
    assert roots_of("/logs", None) == {"": Path("/logs")}
    assert roots_of(None, None) == {}


# The numbers in a recording of two processes


def test_recorded_times_fill_the_step(site: Site) -> None:
    rows, apart = plan(site.demo)["rows"], []
    for record in steps(site.demo):
        step, of_rows = record["step"], []
        for row, (device, stream) in enumerate(rows):
            if stream != "compute":
                continue
            boxes = [box for box in step["boxes"] if box[0] == row]
            outside = (
                min(start for _, start, *_ in boxes) + step["step_time"] - max(end for _, _, end, *_ in boxes)
            )
            covered = sum(end - start for _, start, end, *_ in boxes)
            of_rows.append(abs((covered + outside) / step["step_time"] - 1))
            by_kind = step["devices"][str(device)]
            assert sum(end - start for _, start, end, _, kind in boxes if kind == "wait") == pytest.approx(
                by_kind["exposed"], rel=0.01
            )
            assert by_kind["busy"] + by_kind["exposed"] + by_kind["bubble"] == pytest.approx(
                step["step_time"], rel=0.01
            )
        apart.append(max(of_rows))
    # Whatever else runs on the machine may stop a process between two instructions, and no box has that time.
    assert min(apart) < 0.01, apart


def test_the_simulator_predicts_the_recorded_step_time(site: Site) -> None:
    records = steps(site.demo)
    # Whatever else runs on the machine may stop a process in the middle of a step, which no simulation
    # predicts.
    assert min(abs(r["planned_step_time"] / r["step"]["step_time"] - 1) for r in records) < 0.1
    for record in records:
        chunks = [
            record["durations"][f"%{box[3]}"] for box in record["step"]["boxes"] if box[4] in ("F", "B")
        ]
        # Not because everything ran one after the other, nor all at once.
        assert max(chunks) < record["planned_step_time"] < sum(chunks)
