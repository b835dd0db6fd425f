"""benchmarks/prompts.py: what it counts, and that measured rows are not measured again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from configs import default
from ragen_jax import build
from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.templates import shown_actions
from tests.support.benchmarks import benchmark
from tests.support.paths import ROOT


def turn(action='Left', *, valid=True, form=True, tokens=10, closed=True):
  return Turn(
    'board', 'a reply', [action], (0.5,), 0.0, valid, 1, tokens=tokens, closed=closed,
    sections={'answer': action} if form else {},
  )  # fmt: skip


def test_first_and_later_turns_are_counted_apart():
  episodes = [
    Episode(
      'FrozenLake', 0, 0, [turn(), turn(valid=False, form=False, tokens=80, closed=False)], status=Status.FAILURE
    ),
    Episode('FrozenLake', 1, 1, [turn('Up', valid=False, tokens=80)], status=Status.SUCCESS),
  ]
  with benchmark('prompts') as module:
    found = module.summary(episodes, 80)
    only_first = module.summary(episodes[1:], 80)
  # A reply of 80 tokens that ended by itself was not cut.
  assert found['first'] == {'replies': 2, 'form': 1.0, 'valid': 0.5, 'cut': 0.0, 'tokens': 45.0}
  assert found['later'] == {'replies': 1, 'form': 0.0, 'valid': 0.0, 'cut': 1.0, 'tokens': 80.0}
  assert (found['first_actions'], found['success'], found['score']) == ({'Left': 1, 'Up': 1}, 0.5, 0.75)
  assert only_first['later'] is None
  assert found['invalid'] == ['a reply'] * 2


def test_first_actions_are_counted_by_the_action_of_the_example():
  (spec,) = build.env_specs(default.get_config(), ('Bandit',), (1,))
  boards = ['\n'.join(['Arms on offer:', *pair, 'Think']) for pair in (('Dragon', 'Phoenix'), ('Phoenix', 'Dragon'))]
  (first,), (second,) = (shown_actions(spec, 0, board)[0] for board in boards)
  pulled = [(boards[0], first), (boards[0], second), (boards[1], second), (boards[1], second)]
  turns = [Turn(board, 'a reply', [arm], (0.0,), 0.0, True, 1) for board, arm in pulled]
  silent = Turn(boards[0], 'a reply', [], (), 0.0, False, 0)
  episodes = [Episode('Bandit', 0, 0, [t], status=Status.FAILURE) for t in [*turns, silent]]
  with benchmark('prompts') as module:
    assert module.by_example(episodes, spec) == {first: {first: 1, second: 1}, second: {second: 2}}


def test_every_wording_can_be_filled():
  from ragen_jax.agent.templates import REQUEST_FIELDS, request_fields

  with benchmark('prompts') as module:
    assert all({*request_fields(x)} <= {*REQUEST_FIELDS} for x in module.WORDINGS.values())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_measured_rows_are_kept():
  output = ROOT / 'runs' / 'quick' / 'prompts.json'
  output.unlink(missing_ok=True)
  for _ in range(2):
    done = subprocess.run(
      [sys.executable, 'benchmarks/prompts.py', '--quick'], cwd=ROOT, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads(output.read_text())
    assert '| tiny | FrozenLake | free_think | default | 25 | 1.0 |' in done.stdout
  assert row['first']['valid'] > 0.9  # the built-in model knows its own request
