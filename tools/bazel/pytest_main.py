"""Runs pytest on its arguments, as a py_test."""

import sys

import pytest

sys.exit(pytest.main(["-n", "0", "-p", "no:cacheprovider", *sys.argv[1:]]))
