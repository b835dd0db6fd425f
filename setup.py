"""The packages; everything else about the build is in pyproject.toml.

The folder `configs` becomes `ragen_jax.configs`, so that shipped configs can be loaded by name from an installation and
site-packages gets no top-level package named `configs`.
"""

from setuptools import find_packages, setup

setup(
  packages=[*find_packages(include=['ragen_jax', 'ragen_jax.*']), 'ragen_jax.configs'],
  package_dir={'ragen_jax.configs': 'configs'},
)
