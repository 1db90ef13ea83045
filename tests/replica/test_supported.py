"""The page on state says what the code says, and every test that it names is there."""

from __future__ import annotations

import re

import pytest

from replica.dtypes import DTYPES
from replica.supported import main, supported_text, with_tables
from replica.tensor_kinds import REFUSALS
from replica.tree import PLAIN_TYPES
from tests.sources import ROOT

PAGE = ROOT / "docs" / "state.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_has_what_the_code_generates(tmp_path, capsys):
    """The tables in the page are those of the code; the command that the page names makes them."""
    assert with_tables(TEXT) == TEXT, "run: python -m replica.supported docs/state.md"
    page = tmp_path / "state.md"
    page.write_text(TEXT.replace("`float32`", "`float33`"), encoding="utf-8")
    main([str(page)])
    assert page.read_text(encoding="utf-8") == TEXT
    main([])
    assert capsys.readouterr().out.strip() == supported_text()
    with pytest.raises(ValueError, match="need a page with"):
        with_tables("# A page without marks\n")


def test_nothing_is_left_out_of_the_tables():
    """Every dtype, every type with an encoder and every refusal stands in the text."""
    text = supported_text()
    assert all(f"`{name}`" in text for name in DTYPES)
    assert all(
        re.search(rf"`(\w+\.)?{kind.__name__.replace('NoneType', 'None')}`", text)
        for kind in PLAIN_TYPES
    )
    assert all(rule.why in text for rule in REFUSALS)


def test_the_pages_cases_name_tests_that_exist():
    """Each test named in the table of cases is a function of some test file."""
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "replica").glob("test_*.py")
    )
    named = re.findall(r"`(test_\w+)`", TEXT)
    assert len(named) > 30
    assert [name for name in named if f"def {name}(" not in sources] == []
