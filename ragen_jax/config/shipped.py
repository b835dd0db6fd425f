"""The shipped configs by name, in a checkout and in an installed package.

In a checkout they are the folder `configs` beside the package; `pip install` puts this folder into the package.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator

# Files of the folder that are not configs; other configs import them.
_PARTS = ('__init__', 'environments')


def directory() -> str:
  """The folder with the shipped configs."""
  package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  inside = os.path.join(package, 'configs')
  return inside if os.path.isdir(inside) else os.path.join(os.path.dirname(package), 'configs')


def names() -> list[str]:
  """The names of the shipped configs, such as 'frozenlake_ppo'."""
  stems = (os.path.splitext(file) for file in os.listdir(directory()))
  return sorted(stem for stem, ending in stems if ending == '.py' and stem not in _PARTS)


def find_file(name_or_path: str) -> str | None:
  """The file of a config: the path itself if the file exists, else the shipped config of this name, else None."""
  if os.path.isfile(name_or_path):
    return name_or_path
  return os.path.join(directory(), f'{name_or_path}.py') if name_or_path in names() else None


def suggest(path: str) -> str:
  """The end of an error about a missing file: shipped configs with a similar name, or the names of all."""
  name = os.path.splitext(os.path.basename(path))[0]
  close = [x for x in names() if name and x.startswith(name)] or difflib.get_close_matches(name, names(), n=1)
  return f'did you mean {" or ".join(close)}?' if close else f'shipped configs are {", ".join(names())}'


@contextlib.contextmanager
def importable(path: str) -> Iterator[None]:
  """Lets the config file at `path` import shipped configs: `from configs import frozenlake_ppo`.

  In a checkout this is an ordinary import. In an installed package, the context makes `configs` importable: always for
  a shipped file, because a folder `configs` of the user may be on the path too, and for other files only if there is no
  such folder.
  """
  folder = directory()
  is_shipped = os.path.realpath(os.path.dirname(path)) == os.path.realpath(folder)
  found = _places_of_configs()
  if os.path.realpath(folder) in found or (found and not is_shipped):
    yield
    return
  others = _forget_configs()
  file = os.path.join(folder, '__init__.py')
  spec = importlib.util.spec_from_file_location('configs', file, submodule_search_locations=[folder])
  sys.modules['configs'] = importlib.util.module_from_spec(spec)
  try:
    yield
  finally:
    _forget_configs()
    sys.modules.update(others)


def _places_of_configs() -> list[str]:
  """The folders that `import configs` searches; empty if the import would fail."""
  try:
    spec = importlib.util.find_spec('configs')
  except ValueError:  # a module without a spec
    return []
  return [os.path.realpath(place) for place in (spec and spec.submodule_search_locations) or []]


def _forget_configs() -> dict[str, object]:
  """Removes the module `configs` and its submodules from `sys.modules`, and returns them."""
  return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition('.')[0] == 'configs'}
