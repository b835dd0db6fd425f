"""The scripts of benchmarks/ and tools/, which are no packages, as modules."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

from tests.support.paths import ROOT


@contextlib.contextmanager
def benchmark(name: str, folder: str = 'benchmarks') -> Iterator[ModuleType]:
  """FOLDER/NAME.py as a module; it can be imported by its name meanwhile."""
  spec = importlib.util.spec_from_file_location(name, ROOT / folder / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # dataclasses look their module up
  try:
    spec.loader.exec_module(module)
    yield module
  finally:
    del sys.modules[name]
