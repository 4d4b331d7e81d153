"""The pages of the reference are what the code makes of them."""

from __future__ import annotations

import pytest

from tests.harness import reference_docs


@pytest.mark.parametrize("name", reference_docs.PAGES)
def test_a_reference_page_equals_what_the_code_makes(name: str) -> None:
    assert (reference_docs.DOCS / name).read_text() == reference_docs.page(name), "run `make docs`"
