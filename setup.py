"""Entry for setuptools; everything it needs stands in pyproject.toml."""

from setuptools import setup

setup()
