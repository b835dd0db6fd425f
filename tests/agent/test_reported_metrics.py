"""Metrics that environments report: how they are checked, and where they arrive."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ragen_jax import envs as registry
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.metrics import METRICS, NAMES, episode_metrics, is_reported, is_share, metric_rows
from ragen_jax.envs import Fault
from ragen_jax.envs.base import Budget
from ragen_jax.envs.outside.base import TextStep, read_step
from ragen_jax.envs.outside.local import LocalSession
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.evaluation.intervals import level_intervals
from ragen_jax.evaluation.report import make_row, tables
from ragen_jax.viewer.records import Played, text_records
from ragen_jax.viewer.tensorboard import transcript
from tests.support.speakers import ScriptedText, context_settings, limits


class Graded:
  """Reports the number of each action, and something wrong if it is told to."""

  rules = 'x'

  def reset(self, seed, member):
    self.member = member
    return 'go'

  def step(self, action):
    wrong = {'bad': {'F1': 1}, 'ours': {'success': 1.0}}
    own = {'f1': int(action) / 4, 'searches': 1} if self.member and action.isdecimal() else {}
    return 'go', 1.0, False, {} if action == 'quiet' else {'metrics': wrong.get(action, own)}


def _step(metrics):
  return read_step(('x', 1.0, True, {'success': True, 'metrics': metrics}))


@pytest.mark.parametrize(
  ('raw', 'expected'),
  [
    ({'f1': 0.5, 'a_2': np.float32(2), 'hit': True, 'n': np.int64(3), 'no': np.bool_(False)},
     {'f1': 0.5, 'a_2': 2.0, 'hit': 1.0, 'n': 3.0, 'no': 0.0}),
    ({'heat': (1, np.int64(4)), 'f1': 0.5}, {'heat': 1.0, 'heat/of': 4.0, 'f1': 0.5}),
    ({}, {}),
    (None, {}),
  ],
)  # fmt: skip
def test_numbers_by_name_are_read(raw, expected):
  step = _step(raw)
  assert step == TextStep('x', 1.0, True, True, None, expected)
  assert all(type(value) is float and type(name) is str for name, value in step.metrics.items())


class Name(str):
  def __hash__(self):
    return str.__hash__(self)

  def __str__(self):
    raise RuntimeError


@pytest.mark.parametrize(
  ('raw', 'kind'),
  [
    ([('f1', 1)], 'metrics are not a mapping'),
    ('f1', 'metrics are not a mapping'),
    *(({name: 1}, 'the name of a metric is not in snake case, of at most 64 characters')
      for name in ('F1', 'a-b', 'a/b', '1a', '_a', '', 'a b', 'a\n', 'é', 'a' * 65, 3, None)),
    *(({'f1': value}, 'metric f1 is not a number') for value in ('1', None, 1j, [1], np.ones(1), (1, 2, 3), (1, '2'))),
    ({'f1': (1, math.inf)}, 'metric f1 is not within 1e+15'),
    *(({'f1': value}, 'metric f1 is not within 1e+15') for value in (math.nan, -math.inf, 2e15, 10**400)),
    ({f'm{i}': 1 for i in range(65)}, 'step reports more than 64 metrics'),
  ],
)  # fmt: skip
def test_anything_else_is_a_fault(raw, kind):
  fault = _step(raw)
  assert isinstance(fault, Fault) and fault.kind == kind and '\n' not in str(fault)


def test_names_of_a_subclass_are_plain():
  (name,) = _step({Name('f1'): 1}).metrics
  assert type(name) is str and name == 'f1'


def test_a_local_session_carries_them():
  session = LocalSession(Graded, 2, workers=1, step_timeout_s=9.0)
  session.reset([0, 1], [0, 0], [0, 1])
  steps = [read_step(x) for x in session.step([0, 1], ['2', '2'])]
  assert [step.metrics for step in steps] == [{}, {'f1': 0.5, 'searches': 1.0}]


class Ratio(Graded):
  def step(self, action):
    return 'go', 1.0, False, {'metrics': {'heat': (int(action), 4)}}


@pytest.mark.parametrize('processes', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_ratio_passes_through_sessions(processes):
  options = {'class_path': f'{__name__}:Ratio', 'processes': processes}
  session = registry.make('python', options).open(1)
  session.reset([0], [0], [0])
  assert read_step(session.step([0], ['2'])[0]).metrics == {'heat': 2.0, 'heat/of': 4.0}


def test_a_ratio_counts_only_what_reports_it():
  reports = [{'heat': 1.0, 'heat/of': 1.0, 'f1': 0.5}, {}, {'heat': 0.0, 'heat/of': 3.0}, {}]
  episodes = [
    Episode('A', i, i, [Turn('', '', ['a'], (1.0,), 0.0, True, 1, metrics=x)], status=Status.SUCCESS, outside=True)
    for i, x in enumerate(reports)
  ]
  found = episode_metrics(episodes, 1, 'val')
  assert found['val/A/heat'] == 0.25 and found['val/A/f1'] == 0.125 and 'val/A/heat/of' not in found
  heat = level_intervals(episodes, 1)['heat']
  # Draws without any level that reports it are left out.
  assert heat.mean == 0.25 and heat.low == 0.0 and heat.high == 1.0


def _play(tiny, answers, size=2):
  env = registry.make('python', {'class_path': f'{__name__}:Graded'})
  spec = EnvSpec('Graded', env, Budget(3, 9, 3), 30, 1)
  context = ContextManager(tiny, [spec], context_settings())
  proxy = AgentProxy(EnvStateManager([spec], size), context, limits(max_turns=3))
  speaker = ScriptedText([f'<think>x</think><answer>{a}</answer>' for a in answers])
  return proxy.rollout(speaker, 0, pictured=range(size))


def test_turns_have_the_sums_over_their_actions_and_episodes_those_over_turns(tiny):
  rollout = _play(tiny, ['1 || 3', 'quiet', '2'])
  episodes = rollout.episodes
  assert [turn.metrics for turn in episodes[0].turns] == [{}, {}, {}]
  assert [turn.metrics for turn in episodes[1].turns] == [
    {'f1': 1.0, 'searches': 2.0},
    {},
    {'f1': 0.5, 'searches': 1.0},
  ]
  found = episode_metrics(episodes, 2, 'train')
  # The first episode reports nothing, and counts as 0.
  assert found['train/Graded/f1'] == 1.5 / 2 and found['train/Graded/searches'] == 3 / 2
  assert not is_share('f1') and is_reported('f1') and not is_reported('pass@2') and is_share('success')
  assert list(metric_rows(episodes, 2))[-4:-2] == ['f1', 'searches']
  interval = level_intervals(episodes, 2)['f1']
  assert interval.mean == 0.75
  table = tables([make_row('m', 'model', 'Graded', '', episodes, 2, None)], 2)[0]
  assert 'f1' in table and '0.750' in table and 'searches' in table
  silent, told = text_records(Played(rollout, tiny, 0, 'random', 2), [0, 1], whole=True)
  assert [turn.get('metrics') for turn in told['turns']] == [turn.metrics or None for turn in episodes[1].turns]
  assert not any('metrics' in turn for turn in silent['turns'])
  assert 'reported: f1 1, searches 2' in transcript(episodes[1]) and 'reported' not in transcript(episodes[0])


def test_a_tag_that_reports_nothing_has_no_further_metric(tiny):
  found = episode_metrics(_play(tiny, ['quiet'] * 3).episodes, 2, 'train')
  assert all(name.rpartition('/')[2] in NAMES | {'pass@2'} for name in found)


@pytest.mark.parametrize(
  ('answer', 'error'),
  [
    ('bad', "the name of a metric is not in snake case, of at most 64 characters: 'F1'"),
    ('ours', 'step reports a metric with a name of ragen_jax: success'),
  ],
)
def test_a_wrong_name_ends_the_episode_as_an_error(tiny, answer, error):
  for episode in _play(tiny, [answer] * 3).episodes:
    assert (episode.status, episode.error, len(episode.turns)) == (Status.ENV_ERROR, error, 1)
    assert episode.turns[0].metrics == {} and episode.env_return == 0


def test_every_metric_of_ours_is_a_name_that_is_taken():
  turn = Turn('', '', ['a'], (1.0,), 0.0, True, 1, metrics={'x': 2.0})
  episodes = [Episode('T', 0, 0, [turn], status=Status.SUCCESS, outside=True) for _ in range(2)]
  best = np.ones(1)
  names = {*level_intervals(episodes, 2, best, network=True), *METRICS}
  assert {name for name in names if is_reported(name)} == {'x'}
  silent = [dataclasses.replace(e, turns=[dataclasses.replace(turn, metrics={})]) for e in episodes]
  assert 'x' not in level_intervals(silent, 2)
