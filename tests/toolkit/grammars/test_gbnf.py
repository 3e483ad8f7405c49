"""GBNF: what is read, what is refused and where, and what is written again means the same."""

from __future__ import annotations

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.grammars.gbnf import (
    ANY,
    Chars,
    Choice,
    Literal,
    Ref,
    Repeat,
    Sequence,
    parse,
    recursive,
    to_gbnf,
    unrolled,
)

WHOLE = """
# A comment, and rules over several lines.
root ::= greeting (", " name){1,2} "!"?   # another
greeting ::=
    "hello"
  | "good" " "+ ("day" | [a-z]*)
name ::= [A-Z] [^\\n"\\]]{2,} . | "\\x41\\u00e9\\U0001F600\\t\\\\\\"" | ""
"""


def test_a_whole_grammar() -> None:
    rules = parse(WHOLE)
    assert list(rules) == ["root", "greeting", "name"]
    assert rules["root"] == Sequence((
        Ref("greeting"),
        Repeat(Sequence((Literal(", "), Ref("name"))), 1, 2),
        Repeat(Literal("!"), 0, 1),
    ))  # fmt: skip
    assert rules["greeting"] == Choice((
        Literal("hello"),
        Sequence((
            Literal("good"),
            Repeat(Literal(" "), 1, None),
            Choice((Literal("day"), Repeat(Chars(((97, 122),)), 0, None))),
        )),
    ))  # fmt: skip
    assert rules["name"] == Choice((
        Sequence((Chars(((65, 90),)), Repeat(Chars(((10, 10), (34, 34), (93, 93)), negated=True), 2, None), ANY)),
        Literal('Aé😀\t\\"'),
        Literal(""),
    ))  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        WHOLE,
        'root ::= ""',
        'root ::= ("ab")* ("a" | "b" "c")+ ([a]?){3} "é"{2} [\\]\\[\\-\\\\^]',
        'root ::= a-b\na-b ::= A_9 | "(" root ")"\nA_9 ::= [^a-c\\x00-\\x1f]',
        'root ::= (((("a"))))',
    ],
)
def test_what_is_written_reads_the_same(text: str) -> None:
    rules = parse(text)
    written = to_gbnf(rules)
    assert to_gbnf(parse(written)) == written
    assert set(parse(written)) == set(rules)


def test_newlines_do_not_end_a_rule() -> None:
    assert parse('root ::= "a"\n  "b"\n| "c"') == parse('root ::= "a" "b" | "c"')


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "no rule 'root'"),
        ('start ::= "a"', "no rule 'root'"),
        ("nonsense", "line 1, column 1: a rule is expected"),
        ('root ::= "a\n"', "line 1, column 12: this text has no end"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is defined twice"),
        ('root ::= ("a"', "')' is missing"),
        ('root ::= "a")', "a rule is expected here"),
        ("root ::= [a-", "no end"),
        ("root ::= []", "an empty class"),
        ("root ::= [z-a]", "a range whose end"),
        ('root ::= "\\q"', "is not an escape"),
        ('root ::= "\\ud800"', "is not an escape, or not a character"),
        ('root ::= "a"{x}', "a repetition is expected"),
        ('root ::= "a"{3,2}', "at least 3 and at most 2"),
        ('root ::= "a"{99999}', "more than 10000"),
        ("root ::= " + "(" * 100, "nested deeper than 64"),
        ("root ::= missing", "names 'missing', which is defined nowhere"),
        ('root ::= "a" = "b"', "is not expected here"),
        ('root ::= "a" root', "root > root: it leads back"),
        ('root ::= x\nx ::= y\ny ::= "(" x ")"', "x > y > x: it leads back"),
        ('root ::= "a" | b\nb ::= "(" b ")"', "b > b: it leads back"),
        ('root ::= [a-z] a{900}\na ::= "x"{900}', "more than 20000 characters"),
        ('root ::= "b" | "a"? ("x"{9000}){9000}', "more than 20000 characters"),
    ],
)
def test_what_is_no_grammar_says_where(text: str, where: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(text)
    assert where in error.value.message
    assert error.value.param == "ebnf"
    assert error.value.status == 400


def test_long_grammars_are_read_in_no_time() -> None:
    """Ten thousand rules in a chain, and one long one: nothing here descends by their number."""
    chain = "\n".join(f"r{i} ::= r{i + 1}" for i in range(500)) + '\nr500 ::= "x"\nroot ::= r0\n'
    assert len(parse(chain)) == 502
    assert parse("root ::= " + " | ".join(f'"w{i}"' for i in range(20_000)))


def test_which_rules_are_recursive() -> None:
    rules = parse('root ::= a b\na ::= "x" | "(" a ")"\nb ::= c\nc ::= "y"\nd ::= d? "z"')
    assert recursive(rules) == {"root", "a"}
    assert recursive(parse('root ::= a\na ::= b b\nb ::= "c"')) == frozenset()


@pytest.mark.parametrize(
    ("rule", "unrolled_to"),
    [
        ('root ::= [a-z] root | "."', 'root ::= [a-z]* "."'),
        ('root ::= "a" ("," root)?', 'root ::= ("a" ",")* "a"'),
        ("root ::= (root)?", None),
        ('root ::= (" " root)?', 'root ::= " "* ""'),
        ('root ::= "a" root | "b" (root | "c") | "d"', 'root ::= ("a" | "b")* ("b" "c" | "d")'),
        ('root ::= "(" root ")" root | "x"', 'root ::= ("(" root ")")* "x"'),
        ('root ::= root "a" | "b"', None),
        ('root ::= root root | "a"', None),
        ('root ::= "(" root ")" | "x"', None),
    ],
)
def test_rules_that_end_with_themselves_are_repetitions(rule: str, unrolled_to: str | None) -> None:
    assert to_gbnf(unrolled(parse(rule))) == to_gbnf(parse(unrolled_to or rule))
