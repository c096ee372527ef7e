# SPDX-License-Identifier: Apache-2.0
"""The page of the Python API lists every public name, and the examples in docstrings run."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest

import vllm_steer
import vllm_steer.client
from tests.repo.tree import read

NAMES = [name for name in vllm_steer.__all__ if name != "__version__"]


def test_page_lists_every_public_name() -> None:
    """Catches a public name that the reference omits, and an entry for a name that is not public."""
    listed = re.findall(r"^::: [\w.]*\.(\w+)$", read("docs/reference/api.md"), re.MULTILINE)
    assert sorted(listed) == sorted({*NAMES, *vllm_steer.client.__all__})


def test_dir_lists_names_that_are_imported_on_first_use() -> None:
    """Catches completion in a notebook that shows no public name."""
    assert set(vllm_steer.__all__) <= set(dir(vllm_steer))


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    """Catches a public name without an example, an example that is not valid Python, or one with another result.

    Examples that need an engine or a server are compiled only.
    """
    documented = getattr(vllm_steer, name)
    text = inspect.cleandoc(documented.__doc__)
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert test.examples
    for example in test.examples:
        compile(example.source, name, "single")
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(test).failed == 0
