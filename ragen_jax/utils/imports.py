"""Objects that options name by their import path."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ragen_jax.utils.errors import describe_error


def import_object(option: str, path: str) -> Any:
  """The object at an import path 'package.module:name'.

  Args:
    option: name of the option with the path, for errors.
    path: the module, a colon, and the name in it.

  Raises:
    ValueError: the path has another form, the module cannot be imported, or it has no such name.
  """
  module, colon, name = path.partition(':') if isinstance(path, str) else ('', '', '')
  if not (module and colon and name):
    raise ValueError(f"{option}={path!r}; allowed: 'package.module:name'")
  try:
    return functools.reduce(getattr, name.split('.'), importlib.import_module(module))
  except (Exception, SystemExit) as e:
    raise ValueError(
      f'{option}={path!r} cannot be imported ({describe_error(e)}); allowed: what Python can import'
    ) from e


def import_function(option: str, path: str) -> Callable[..., Any]:
  """`import_object` for functions: raises ValueError also if the object cannot be called."""
  function = import_object(option, path)
  if not callable(function):
    raise ValueError(f'{option}={path!r} is {type(function).__name__}; allowed: a function')
  return function
