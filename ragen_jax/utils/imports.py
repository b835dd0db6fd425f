"""Imports: of objects that options name, and of packages without what they import for nothing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from ragen_jax.utils.errors import describe_error


def import_object(option: str, path: str) -> Any:
  """The object at an import path 'package.module:name', or in a file 'folder/file.py:name'; errors name the `option`.

  Raises ValueError if the path has another form, the module cannot be imported, or it has no such name.
  """
  module, colon, name = path.partition(':') if isinstance(path, str) else ('', '', '')
  if not (module and colon and name):
    raise ValueError(f"{option}={path!r}; allowed: 'package.module:name' or 'file.py:name'")
  try:
    found = _load_file(module) if module.endswith('.py') else importlib.import_module(module)
    return functools.reduce(getattr, name.split('.'), found)
  except (Exception, SystemExit) as e:
    raise ValueError(
      f'{option}={path!r} cannot be imported ({describe_error(e)}); allowed: what Python can import'
    ) from e


def _load_file(path: str) -> types.ModuleType:
  """The module in a file; a file is run once."""
  name = f'ragen_jax_file_{pathlib.Path(path).resolve()}'
  if name in sys.modules:
    return sys.modules[name]
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  try:
    spec.loader.exec_module(module)
  except BaseException:
    del sys.modules[name]
    raise
  return module


def import_function(option: str, path: str) -> Callable[..., Any]:
  """`import_object` for functions: raises ValueError also if the object cannot be called."""
  function = import_object(option, path)
  if not callable(function):
    raise ValueError(f'{option}={path!r} is {type(function).__name__}; allowed: a function')
  return function


@contextlib.contextmanager
def hidden(*modules: str) -> Iterator[None]:
  """Within it, an import of one of the modules fails as if it were not installed, unless it was imported before."""
  new = [name for name in modules if name not in sys.modules]
  sys.modules.update(dict.fromkeys(new))
  try:
    yield
  finally:
    for name in new:
      del sys.modules[name]
