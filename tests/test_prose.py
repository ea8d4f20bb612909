"""The rules of plain English that `make lint` counts find what breaks them."""

from __future__ import annotations

import pytest

from tests.prose import LONGEST, RULES, findings, sentences

BROKEN = {
    "'because', not ', for'": "It waits, for the buffer is full.",
    "'not a', 'does not have'": "This is no parameter.",
    "'after', not 'behind'": "It stands behind the chunk.",
    "name the actor": "The step is refused.",
    "a noun, not a pronoun": "The size is that of the batch.",
    "no archaic idiom": "The trace begins anew.",
    "American spelling": "The behaviour changes.",
    "one number": "It has 2 device(s).",
    "a word of the field": "The rank hands on its value.",
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_found(rule: str) -> None:
    text = BROKEN[rule]
    for source in (f'"""{text}"""', f"x = 1  # {text}", f"# Before.\n# {text}\n"):
        assert [(each.rule, each.sentence) for each in findings(source)] == [(rule, text)]
    assert not findings(f"x = '{text}'") and not findings(f'"""Says `{text}`"""')


def test_a_long_sentence_is_found() -> None:
    text = " ".join(["word"] * LONGEST)
    assert not findings(f'"""{text}."""')
    (found,) = findings(f'"""{text} word."""')
    assert found.rule == f"at most {LONGEST} words"


def test_sentences_end_where_readers_end_them() -> None:
    assert sentences("One. Two: `a. B`\n\nThree\n- four\n- five") == [
        "One.",
        "Two:",
        "`x`",
        "Three",
        "- four",
        "- five",
    ]
