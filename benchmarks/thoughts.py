"""Reads the episodes of runs of a built-in model: how many statements of its thoughts are true of the board?

  python benchmarks/thoughts.py runs/frozenlake_ppo

The thoughts in demonstrations are short true sentences (`Game.rationale`), and the built-in models write them from
their warm start on. Each evaluation that a run recorded (`logging.episodes` of them for each environment) gives a line:
the share of turns whose thought is the true sentence, and for each of its statements the share that is as in the true
sentence. 'said when it matters' counts those turns only in which the true statement is not the most frequent one, such
as a hole beside the player. Games without such sentences, and boards that cannot be read from their text, are left out.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402

from ragen_jax import build  # noqa: E402
from ragen_jax.envs.base import Game  # noqa: E402
from ragen_jax.viewer.store import read_episodes  # noqa: E402

_THOUGHT = re.compile(r'(?:<think>)?(.*?)</think>', re.DOTALL)


def statements(thought: str) -> list[str]:
  """The statements of a thought: 'I am at (0, 1), the goal is at (2, 2); no hole beside me.' has three."""
  return [part.strip() for part in re.split(r'; |, (?=the )', thought.strip().rstrip('.'))]


def pairs(game: Game, records: list[dict]) -> list[tuple[list[str], list[str]]]:
  """The statements that are true and those that were written, for each turn whose board can be read."""
  found = []
  for turn in (turn for record in records for turn in record['turns']):
    try:
      state = game.from_text(turn['observation'])
      (true,) = game.rationale(jax.tree.map(lambda leaf: np.asarray(leaf)[None], state))
    except ValueError:
      continue
    written = _THOUGHT.match(''.join(turn['pieces']))
    if true:
      found.append((statements(true), statements(written[1]) if written else []))
  return found


def shares(found: list[tuple[list[str], list[str]]]) -> dict[str, float | list[float | None]]:
  """The share of whole thoughts that are true, and that of each statement, over all turns and when it matters."""
  size = collections.Counter(len(true) for true, _ in found).most_common(1)[0][0]
  found = [(true, written) for true, written in found if len(true) == size]
  each, matters = [], []
  for i in range(size):
    right = [(true[i], written[i : i + 1] == [true[i]]) for true, written in found]
    usual = collections.Counter(true for true, _ in right).most_common(1)[0][0]
    each.append(np.mean([is_right for _, is_right in right]))
    rare = [is_right for true, is_right in right if true != usual]
    matters.append(round(float(np.mean(rare)), 3) if rare else None)
  return {
    'turns': len(found),
    'true': round(float(np.mean([true == written for true, written in found])), 3),
    'statements': [round(float(x), 3) for x in each],
    'said when it matters': matters,
  }


def measure(workdir: pathlib.Path) -> list[dict]:
  """A row for each recorded evaluation and tag of a run."""
  config = ConfigDict(json.loads((workdir / 'config.json').read_text()))
  tags = tuple(config.eval.tags)
  games = {spec.tag: spec.env for spec in build.env_specs(config, tags, (1,) * len(tags))}
  rows = []
  for file in read_episodes(workdir):
    for tag, game in games.items():
      records = [r for r in file.records() if r['split'] == 'val' and r['tag'] == tag]
      if found := pairs(game, records):
        rows.append({'workdir': workdir.name, 'step': records[0]['step'], 'tag': tag} | shares(found))
  return rows


def main() -> None:
  """Prints a line of JSON for each evaluation."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('workdir', type=pathlib.Path, nargs='+')
  for workdir in parser.parse_args().workdir:
    for row in measure(workdir):
      print(json.dumps(row))


if __name__ == '__main__':
  main()
