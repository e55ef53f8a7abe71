"""The description for a package index stands alone: see hatch_build.py."""

import pytest

from hatch_build import standalone


@pytest.mark.parametrize(
    ("page", "alone"),
    [
        ("see [the core](swapd/core/README.md#states).", "see the core."),
        ("see [`top`](#top) and [the\npages](docs).", "see `top` and the\npages."),
        ('see <a href="docs/a.md">the page</a>.', "see the page."),
        ("![a bar](docs/top.svg)\n", "\n"),
        ('<img alt="a" src="docs/a.png" width="9">\nText', "Text"),
        (
            '<picture>\n<source srcset="docs/dark.svg">\n<img src="docs/a.svg">\n</picture>\nText',
            "Text",
        ),
    ],
)
def test_a_link_into_the_tree_becomes_its_words(page: str, alone: str) -> None:
    assert standalone(page) == alone


@pytest.mark.parametrize(
    "text",
    [
        "see [vLLM](https://example.org/a).",
        '<a href="https://example.org">x</a> <img src="https://example.org/a.png">',
        "```python\nmodels[0](tokens)\n```",
        "The call `models[name](tokens)` is code, too.",
    ],
)
def test_addresses_and_code_stay(text: str) -> None:
    assert standalone(text) == text
