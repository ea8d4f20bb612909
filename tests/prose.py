"""Count what can be counted of plain English in docstrings and comments: `python -m tests.prose PATH...`
lists the findings.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONGEST = 35  # words of a sentence


class Text(NamedTuple):
    """A docstring, or consecutive comment lines."""

    line: int
    text: str


class Finding(NamedTuple):
    """A sentence that breaks a rule."""

    line: int
    rule: str
    sentence: str


# The rules by their names, each with the pattern of the sentences that break it. Code in backticks does not
# count.
RULES: dict[str, re.Pattern[str]] = {
    "'because', not ', for'": re.compile(
        r"[,;] for (?!example\b|instance\b|each\b|every\b|all\b|which\b|both\b)"
    ),
    "'not a', 'does not have'": re.compile(
        r"(?<!\bthere )\b(is|are|was|were|be) no\b(?! longer\b| more\b)|\b(has|have|had) none of\b"
        r"|\b(has|have|had) not (a|an|the|any|its|their|yet a)\b",
        re.IGNORECASE,
    ),
    "'after', not 'behind'": re.compile(r"\bbehind\b", re.IGNORECASE),
    "name the actor": re.compile(
        r"\b(is|are|was|were|be|being) (refused|told|found out|asked|meant)\b", re.IGNORECASE
    ),
    "a noun, not a pronoun": re.compile(
        r"\b(that|those) of\b|\b(?<!all )the (rest|others)\b(?! of)|\banother one\b|\b(are|is|were) alike\b"
        r"|(?:^|[.;:,] )[Ww]hat (?!if\b|follows\b|[^.]*\?)",
    ),
    "no archaic idiom": re.compile(
        r"\bforth and back\b|\bat hand\b|\bin vain\b|\bgoes round\b|\banew\b|\bsuch as (it is|they "
        r"are)\b|\bas (it is|they are)\b|\bof (one|its|their)'?s? own accord\b|\bby "
        r"(its|one)self\b|\b(is|are) at (work|rest)\b|\bto the letter\b",
        re.IGNORECASE,
    ),
    "American spelling": re.compile(
        r"(colour|behaviour|neighbour|favour|honour|labell|signall|misspelt|licence|judgement)\w*|\bcentre|\bgrey\b"
        r"|(optim|initial|serial|normal|recogn|organ|synchron|general|special|minim|maxim|token|quant|material)"
        r"is(e|ed|es|ing|ation)\b",
        re.IGNORECASE,
    ),
    "one number": re.compile(r"[a-z]\((s|es)\)"),
    "a word of the field": re.compile(
        r"\brehears\w+|\bhands? (on|out)\b|\bkept back\b|\breckons? with\b|\bknows? of\b|\bsamples "
        r"meet\b|\bin pieces\b|\b(room|rooms|border|borders)\b|\bstand-ins?\b|\bstands? in for\b",
        re.IGNORECASE,
    ),
}
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`'\"(\[])|\n\s*\n|\n\s*(?=[-*|] |\d+\. )")
CODE = re.compile(r"``.*?``|`[^`]*`|^\s*>>>.*$|^\s*\.\.\. .*$|https?://\S+|\|.*\|$", re.MULTILINE | re.DOTALL)
TOOLS = re.compile(r"(noqa|type:|fmt:|mypy:|ruff:|pragma)")


def texts(source: str) -> Iterator[Text]:
    """The docstrings and comments of a file's source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield Text(first.lineno, first.value.value)
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("#! ")
        if token.type != tokenize.COMMENT or TOOLS.match(text):
            continue
        line, alone = token.start[0], token.line[: token.start[1]].strip() == ""
        if block and not (alone and block[-1][0] == line - 1):
            yield _joined(block)
            block = []
        block.append((line, text))
        if not alone:  # a comment at the end of a line does not go on in the next one
            yield _joined(block)
            block = []
    if block:
        yield _joined(block)


def _joined(block: list[tuple[int, str]]) -> Text:
    return Text(block[0][0], "\n".join(text for _, text in block))


def sentences(text: str) -> list[str]:
    """The sentences of a text, with code replaced by `x`. Tables and code blocks do not count."""
    plain = CODE.sub(lambda match: "`x`" if "\n" not in match.group() else "", _without_blocks(text))
    return [" ".join(part.split()) for part in SENTENCE_END.split(plain) if part and part.strip()]


def _without_blocks(text: str) -> str:
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"::\n(\n|[ \t]{4,}.*\n?)+", ".\n\n", text)


def findings(source: str) -> list[Finding]:
    """The sentences in a file's docstrings and comments that break a rule."""
    found = []
    for text in texts(source):
        for sentence in sentences(text.text):
            found += [
                Finding(text.line, rule, sentence)
                for rule, pattern in RULES.items()
                if pattern.search(sentence)
            ]
            if len(sentence.split()) > LONGEST:
                found.append(Finding(text.line, f"at most {LONGEST} words", sentence))
    return sorted(found)


def files(paths: list[str]) -> list[Path]:
    """The Python files among paths and below them."""
    return sorted(
        file for path in map(Path, paths) for file in ([path] if path.suffix == ".py" else path.rglob("*.py"))
    )


def main(paths: list[str]) -> int:
    """Print the findings, one on a line. The exit status is 1 if there are any."""
    found = [
        (path, finding) for path in files(paths) for finding in findings(path.read_text(encoding="utf-8"))
    ]
    for path, finding in found:
        print(f"{path}:{finding.line}: {finding.rule}: {finding.sentence}")
    print(f"{len(found)} found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
