"""docs/fidelity.md says what the tests compare, no more and no less."""

from __future__ import annotations

import matrix_page
import pytest
import test_matrix


def test_the_page_is_up_to_date() -> None:
    assert matrix_page.PAGE.read_text(encoding="utf-8") == matrix_page.page(), (
        "run: PYTHONPATH=. python tests/fidelity/matrix_page.py"
    )


def test_a_case_less_is_a_tick_less() -> None:
    cases = [case for case in test_matrix.CASES if case != ("phi3", "dora")]
    whole, less = (matrix_page.kinds_table(test_matrix.FAMILIES, kept) for kept in (test_matrix.CASES, cases))
    assert whole.count("✓") == len(test_matrix.CASES) == less.count("✓") + 1


def test_a_kind_that_nobody_described() -> None:
    with pytest.raises(KeyError, match="brand_new"):
        matrix_page.kinds_table(["llama"], [("llama", "plain"), ("llama", "brand_new")])
