"""Marks of tests."""

import pytest


def slow(*values):
    """A case of ``parametrize`` that runs with --slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
