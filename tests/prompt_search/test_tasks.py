"""Critiques, scores and the final comparison use different tasks."""

from __future__ import annotations

import json

import pytest

from ragen_jax.envs import AgentTasks
from ragen_jax.prompt_search.tasks import TaskRanges
from ragen_jax.utils.errors import UserError
from tests.support.prompt_search import ranges


def _file(tmp_path, name, values):
  path = tmp_path / name
  path.write_text(''.join(json.dumps(value) + '\n' for value in values))
  return AgentTasks(tasks=str(path))


def test_ranges_follow_one_another_and_tags_take_turns():
  a, b = AgentTasks(), AgentTasks()
  tasks = TaskRanges((('A', a),), (('A', a), ('B', b)), 100, 7, 3)
  assert [(t.tag, t.number) for t in tasks.for_critiques(4, 2)] == [('A', 104), ('A', 105)]
  assert [(t.tag, t.number) for t in tasks.for_scores()] == [('A', 7), ('B', 8), ('A', 9)]
  assert [(t.tag, t.number) for t in tasks.for_the_end(2)] == [('B', 10), ('A', 11)]
  assert tasks.for_scores()[1].env is b


def test_numbers_must_not_meet():
  ranges(scored=4, train_first=17, held_out_first=10).check(5, 3)
  with pytest.raises(UserError, match=r'^prompt\.final=4: held-out task 17 of Val is the same as training task 17 of '):
    ranges(scored=4, train_first=17, held_out_first=10).check(5, 4)
  with pytest.raises(UserError, match=r'^prompt\.held_out=4: held-out task 10 of Val is the same as training task 10'):
    ranges(scored=4, train_first=8, held_out_first=10).check(3, 1)
  ranges(scored=4, train_first=8, held_out_first=10).check(2, 1)


def test_lines_of_files_must_not_meet(tmp_path):
  train = _file(tmp_path, 'train', [{'q': 0, 'p': 1}, 'b'])
  val = _file(tmp_path, 'val', [{'q': i} for i in range(5)])

  def check(held_out, scored, final, first=0):
    TaskRanges((('T', train),), (('V', held_out),), 0, first, scored).check(50, final)

  check(val, 3, 2)
  check(val, 3, 2, first=123)
  with pytest.raises(UserError, match=r'^prompt\.final=3: held-out task 5 of V is the same as held-out task 0 of V;'):
    check(val, 3, 3)
  with pytest.raises(UserError, match=r'^prompt\.held_out=6: held-out task 5 of V is the same as held-out task 0'):
    check(val, 6, 1)
  leaked = _file(tmp_path, 'leaked', ['x', {'p': 1, 'q': 0}])
  with pytest.raises(UserError, match=r'^prompt\.final=1: held-out task 1 of V is the same as training task \d+ of T;'):
    check(leaked, 1, 1)
