"""The rooms of serving: each file names its room in its first line, and no room is crowded."""

from __future__ import annotations

import ast
import tomllib

from tests.support.paths import ROOT

SERVING = ROOT / 'ragen_jax' / 'serving'
ROOMS = [folder for folder in sorted(SERVING.iterdir()) if (folder / '__init__.py').is_file()]


def test_the_first_line_of_each_file_names_its_room():
  for room in ROOMS:
    name = 'HTTP' if room.name == 'http' else room.name.capitalize()
    for file in room.glob('*.py'):
      first = ast.get_docstring(ast.parse(file.read_text(encoding='utf-8'))).splitlines()[0]
      assert first.startswith(f'{name}: '), file


def test_no_room_has_more_than_twelve_files_and_tests_have_the_same_rooms():
  for room in [SERVING, *ROOMS]:
    assert len([file for file in room.iterdir() if file.is_file()]) <= 12, room
  tests = ROOT / 'tests' / 'serving'
  assert sorted(f.parent.name for f in tests.glob('*/test_*.py') if f.parent.name not in map(_name, ROOMS)) == []


def test_the_design_page_draws_the_contract_of_the_rooms():
  contracts = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['tool']['importlinter']['contracts']
  (layers,) = [c['layers'] for c in contracts if c.get('containers') == ['ragen_jax.serving']]
  assert '\n'.join(' '.join(layer.split(' | ')) for layer in layers) in (ROOT / 'docs' / 'design.md').read_text('utf-8')


def _name(path) -> str:
  return path.name
