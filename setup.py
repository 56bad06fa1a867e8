# SPDX-License-Identifier: Apache-2.0
"""A shim for tools that want a setup.py; everything is in pyproject.toml."""

from setuptools import setup

setup()
