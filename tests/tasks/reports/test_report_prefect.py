"""The table of iterations, and answers, as Prefect's pages have them."""

from __future__ import annotations

import math

import pytest
from markdown_it import MarkdownIt

from tasks.reports.prefect import answer_line, iteration_rows


def test_the_columns_that_people_look_for_come_first_and_every_row_has_all() -> None:
    start = {"evaluation/accuracy": 0.25, "a/b": 1.0, "seconds/iteration": 30.0}
    first = {"seconds/iteration": 2.00004, "score/mean": 0.5, "kl/reference": math.inf}
    rows = iteration_rows({1: first, 0: start})
    columns = ["iteration", "score/mean", "evaluation/accuracy", "kl/reference", "seconds/iteration", "a/b"]
    assert [list(row) for row in rows] == [columns, columns]
    assert list(rows[0].values()) == [0, None, 0.25, None, 30.0, 1.0]
    assert list(rows[1].values()) == [1, 0.5, None, None, 2.0, None]


@pytest.mark.parametrize(
    ("prompt", "response", "shown"),
    [
        ("1+1=", "2", ["1+1=", "2"]),
        ("a `b`", "``` and ``", ["a `b`", "``` and ``"]),
        ("say", "one\n\n# two\n```\nthree", ["say", "one↵↵# two↵```↵three"]),
        ("*bold* <b>", "`", ["*bold* <b>", "`"]),
        ("say nothing", "", ["say nothing", "''"]),
        ([{"role": "user", "content": "a\rb"}], " \n", ["a↵b", "' \\n'"]),
    ],
)
def test_an_answer_is_one_line_whatever_it_says(prompt: object, response: str, shown: list[str]) -> None:
    """Read by a parser of CommonMark, as one item after which the next one follows."""
    line = answer_line({"prompt": prompt, "response": response, "score": 0.5})
    tokens = MarkdownIt("commonmark").parse(f"# a run\n\n{line}\n- `next`")
    assert [token.type for token in tokens].count("list_item_open") == 2
    inline = next(token for token in tokens if token.type == "inline" and "score" in token.content)
    assert [child.content for child in inline.children or () if child.type == "code_inline"] == shown
