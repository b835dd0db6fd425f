"""Data sets and verifiers to test with."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from hypothesis import HealthCheck, settings

from ragen_jax import envs as registry
from ragen_jax.envs.dataset.environment import DatasetEnvironment
from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.verifiers import Verifier, VerifierSettings, make_verifier

FUNCTIONS = __name__
never = threading.Event()
# Property tests whose result does not depend on the speed of the machine.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def write_lines(path, rows) -> str:
  """Writes rows as JSON lines and returns the path."""
  path.write_text(''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows), encoding='utf-8')
  return str(path)


def make(**options) -> DatasetEnvironment:
  return registry.make('dataset', options)


def verifier(name: str, options=None, *, timeout_s: float = 30.0, workers: int = 2) -> Verifier:
  return make_verifier(name, VerifierSettings(options or {}, timeout_s, workers, '', {}))


def judge(name: str, pairs, options=None, choices=()) -> list:
  """The results of a verifier for pairs of a gold and an answer."""
  judging = verifier(name, options)
  row = {'choices': choices, 'choice_labels': tuple('ABCDEFGHIJ'[: len(choices)])} if choices else {}
  items = [Item('?', judging.read_gold(gold, row), tuple(choices)) for gold, _ in pairs]
  return judging.score([answer for _, answer in pairs], items)


# -- functions as verifiers --------------------------------------------------------------------------------------------


def starts(gold, answer, *, weight=1.0):
  return weight * answer.startswith(gold), {'length': len(answer)}


def is_in(gold, answer):
  return answer in gold['any']


def is_odd(gold, answer):
  return len(answer) % 2 == 1


def broken(gold, answer):
  """Everything that can be wrong with a function, chosen by the answer."""
  del gold
  if answer == 'raise':
    raise KeyError('no such thing\nat all')
  if answer == 'exit':
    raise SystemExit(3)
  if answer == 'hang':
    never.wait(60)
  return {
    'none': None, 'text': '1', 'two': 2, 'less': -0.1, 'nan': float('nan'), 'three': (1, {}, 3), 'list': (1, ['a']),
    'name': (1, {'No Good': 1}), 'value': (1, {'good': float('inf')}), 'number': (0.5, {'good': True}), 'yes': True,
  }[answer]  # fmt: skip


def reference_answers(env: DatasetEnvironment, seeds: Sequence[int]) -> list[list[str]]:
  """The actions of the expert at the beginning of the episodes of these seeds."""
  rows = range(len(seeds))
  session = env.open(len(seeds))
  session.reset(rows, list(seeds), [0] * len(seeds))
  return session.expert(rows)
