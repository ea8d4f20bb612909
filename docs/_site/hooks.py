"""What the site has besides the pages in docs/: the README as its first page, other files beside it, and the examples as pages.

All are read when the site is built, so that nothing is written twice. Links that point out of docs/ are led to these pages.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BESIDE = {"README": "index", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog", "SECURITY": "security"}
LOADED = re.compile(
    r"""<(?:script|img|link(?![^>]*rel="?canonical))[^>]+(?:src|href)=["']?(?:https?:)?//[^>]+>"""
)


def on_files(files: Files, config: Any) -> Files:
    pages = {f"{page}.md": _beside(name) for name, page in BESIDE.items()} | {
        "examples/benchmarks.md": _benchmarks(),
        "examples/found.md": _found(),
    }
    pages |= {
        f"examples/{path.relative_to(ROOT / 'examples').with_suffix('')}.md": _code(path)
        for path in sorted((ROOT / "examples").rglob("*.py"))
        if path.parent.name != "found"
    }
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        pages |= _notebook(path)
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Pages link to files where they lie in the repository; in the site these are pages."""
    markdown = re.sub(r"\]\(\.\./benchmarks/(\w+\.py)?\)", "](examples/benchmarks.md)", markdown)
    markdown = re.sub(
        rf"\]\(\.\./({'|'.join(BESIDE)})\.md\)", lambda found: f"]({BESIDE[found[1]]}.md)", markdown
    )
    markdown = re.sub(r"\]\(\.\./examples/found/(\w+)\.py\)", r"](examples/found.md#\1)", markdown)
    return re.sub(r"\]\(((?:\.\./)*)\.\./examples/([\w/]+)\.(?:py|ipynb)\)", r"](\1examples/\2.md)", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from the network: {found[0]}")
    return output


def _beside(name: str) -> str:
    """A file at the top of the repository as a page beside those of docs/."""
    text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"\[docs/([\w./]+\.md)\]", r"[\1]", text)
    text = re.sub(rf"\]\(({'|'.join(BESIDE)})\.md\)", lambda found: f"]({BESIDE[found[1]]}.md)", text)
    text = text.replace("[CITATION.cff](CITATION.cff)", "CITATION.cff")
    text = text.replace("](howto/)", "](howto/schedule.md)").replace("[docs/howto/]", "[How to]")
    return text.replace("](examples/)", "](examples.md)").replace(
        "](benchmarks/)", "](examples/benchmarks.md)"
    )


def _code(path: Path) -> str:
    """A file of Python, after what its docstring says."""
    source = path.read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or path.stem
    title = doc.splitlines()[0]
    return f"# {path.name}\n\n{title}\n\n```python\n{source}```\n"


def _notebook(path: Path) -> dict[str, str]:
    """A notebook's cells with what they print, and its pictures as files beside it."""
    pages, parts = {}, []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(f"```\n{''.join(output['text']).rstrip()}\n```")
            elif "image/svg+xml" in output["data"]:
                picture = f"{path.stem}_{len(pages)}.svg"
                pages[f"examples/{picture}"] = "".join(output["data"]["image/svg+xml"])
                parts.append(f"![what the cell draws]({picture})")
    return pages | {f"examples/{path.stem}.md": "\n\n".join(parts) + "\n"}


def _benchmarks() -> str:
    """What each benchmark measures, from its docstring."""
    parts = [
        "# Benchmarks\n\n`make bench` runs all of them, each is a script of its own. What they measure:\n"
    ]
    for path in sorted((ROOT / "benchmarks").glob("[!_]*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        parts.append(f"## {path.stem}\n\n{doc}\n")
    return "\n".join(parts)


def _found() -> str:
    """The scripts that show bugs of other packages."""
    parts = ["# Scripts that show bugs of other packages\n"]
    for path in sorted((ROOT / "examples" / "found").glob("*.py")):
        parts.append(f"## {path.stem}\n\n```python\n{path.read_text(encoding='utf-8')}```\n")
    return "\n".join(parts)
