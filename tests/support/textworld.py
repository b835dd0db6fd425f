"""Files that describe made-up games in TextWorld's form, without a game that could be played."""

from __future__ import annotations

import json
import pathlib
from typing import Any


def story(number: int) -> dict[str, Any]:
  """What the .json file of a game says."""
  places = [{'name': 'at', 'arguments': [{'name': x, 'type': 't'}]} for x in ('P', f'c_{number}')]
  return {
    'version': 1,
    'world': places,
    'infos': [[f'c_{number}', {'id': f'c_{number}', 'name': f'box {number}', 'desc': 'A box.'}]],
    'quests': [{'desc': 'Open it.', 'reward': 1, 'commands': [f'open box {number}']}],
    'objective': 'Open it.',
    'metadata': {'uuid': str(number)},
  }


def write_game(path: pathlib.Path, number: int) -> str:
  """Writes a .z8 file, which is empty, and its .json; returns the path of the first."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(b'')
  path.with_suffix('.json').write_text(json.dumps(story(number)))
  return str(path)
