"""Experts outside JAX: their advice, as a baseline, in a warm start, and as a hint."""

from __future__ import annotations

import dataclasses
import io
import logging

import numpy as np
import pytest

from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.episode import Status
from ragen_jax.agent.pools import make_pool
from ragen_jax.config.checks import check_sft
from ragen_jax.envs.base import Budget
from ragen_jax.envs.outside.base import TextEnvironment
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.evaluation.baselines import evaluation_levels, play_baseline
from ragen_jax.evaluation.evaluator import EvaluationSettings
from ragen_jax.modes.play import play
from ragen_jax.sft.data import DemonstrationSettings, Lesson, collect_demonstrations
from ragen_jax.sft.demonstrations import DemonstrationStyle
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config
from tests.support.experts import expert_section, expert_spec
from tests.support.speakers import context_settings, limits
from tests.support.text_games import GAMES, make

STYLE = DemonstrationStyle(discount=1.0, noise=0.0, hurry=0.0, beginner=0.0, timid=0.0, actions_per_turn=0)


@pytest.mark.parametrize('workers', [0, 2])
def test_advice_is_that_of_the_present_state_and_fits_the_budget(workers):
  pool = make_pool(expert_spec(5, workers=workers, budget=Budget(3, 3, 2)), 5, 1)
  pool.reset(np.arange(5), np.zeros(5, int))
  assert pool.expert([0, 1, 2, 4]) == [['One'], ['Two'], ['Two', 'One'], ['Two', 'Two']]
  assert pool.rationale([4, 0]) == ['5 more.', '1 more.']
  pool.step([[], [], [], [], ['One', 'One']])
  assert pool.expert([4]) == [['Two']]  # one action is left
  assert pool.render()[4] == '3 left'  # asking changed nothing


def test_experts_that_fail_give_no_advice_and_are_told_of_once(caplog):
  pool = make_pool(expert_spec(6, 'Troubled'), 12, 2)
  pool.reset(np.repeat(np.arange(9, 15), 2), np.zeros(12, int))
  with caplog.at_level(logging.WARNING, 'ragen_jax.agent.outside_pool'):
    for _ in range(2):
      plans = pool.expert(list(range(12)))
      assert pool.rationale([10, 11]) == ['', '']
  assert plans == [['Two', 'Two']] * 2 + [[]] * 8 + [['Two', 'Two']] * 2
  assert not pool.faults
  assert [r.getMessage().split(' (')[0] for r in caplog.records] == [
    "envs.Troubled, level 10: expert raised KeyError: 'no plan'",
    "envs.Troubled, level 11: expert did not return a list of texts: 'One'; there is no advice",
    "envs.Troubled, level 12: expert names what is no action: 'Three'; there is no advice",
    'envs.Troubled: rationale is not a string: 7; the thought is left out',
  ]


class Session:
  """Rows whose actions are free text; the session knows which exist. Two rows tell nonsense."""

  def reset(self, rows, seeds, members):
    return ['begin'] * len(rows)

  def step(self, rows, actions):
    return [(f'{action}!', float(action == 'right'), action == 'right', action == 'right') for action in actions]

  def legal_actions(self, rows):
    return [['no, sir'] if row == 1 else 7 if row == 2 else ['left', 'right'] for row in rows]

  def end(self):
    pass


@dataclasses.dataclass(frozen=True, eq=False)
class Doors(TextEnvironment):
  name = 'doors'
  has_legal_actions = True

  def rules(self):
    return 'Go right.'

  def parse_action(self, text):
    return None if ',' in text else super().parse_action(text)

  def open(self, rows):
    return Session()


def test_random_play_chooses_among_what_a_session_lists(tiny, caplog):
  spec = EnvSpec('Doors', Doors(), Budget(max_turns=4, max_actions=4, max_actions_per_turn=1), 30, 4)
  pool = make_pool(spec, 4, 1)
  pool.reset(np.arange(4), np.zeros(4, int))
  with caplog.at_level(logging.WARNING, 'ragen_jax.agent.outside_pool'):
    assert pool.legal_actions() == [['left', 'right'], [], [], ['left', 'right']]
    pool.step([['right'], [], [], ['left']])
    assert pool.legal_actions() == [[], [], [], ['left', 'right']]
  told = [r.getMessage().split(' (')[0] for r in caplog.records]
  assert told == [
    "envs.Doors, level 1: legal_actions names what is no action: 'no, sir'; random play has no action",
    'envs.Doors, level 2: legal_actions did not return a list of texts: 7; random play has no action',
  ]
  (levels,) = evaluation_levels([spec], _evaluation(0))
  context = ContextManager(tiny, [spec], context_settings())
  episodes, _ = play_baseline('random', levels, context, _evaluation(0), limits=limits(max_turns=4), step=0)
  played = [[action for turn in e.turns for action in turn.actions] for e in episodes]
  assert played[1] == played[2] == []
  assert all(own[-1] == 'right' or len(own) == 4 for own in (played[0], *played[3:]))
  assert {action for own in played for action in own} == {'left', 'right'}


def _evaluation(first: int) -> EvaluationSettings:
  return EvaluationSettings(
    first_level=first, group_size=2, temperature=1.0, top_p=1.0, top_k=0, greedy_too=False, episodes=0
  )


def test_the_expert_is_the_solver_of_an_evaluation(tiny, caplog):
  spec = expert_spec(5)
  (levels,) = evaluation_levels([spec], _evaluation(0))
  context = ContextManager(tiny, [spec], context_settings())
  episodes, _ = play_baseline('solver', levels, context, _evaluation(0), limits=limits(max_turns=3), step=0)
  assert len(episodes) == 10 and all(e.success for e in episodes) and levels.best is None
  actions = [[turn.actions for turn in e.turns] for e in episodes]
  assert actions[::2] == [
    [['One']], [['Two']], [['Two', 'One']], [['Two', 'Two']], [['Two', 'Two'], ['One']],
  ]  # fmt: skip
  none = make('Climb')
  assert not none.has_expert and spec.env.has_expert


def _lesson(tiny, spec, first=0, **changes) -> Lesson:
  context = ContextManager(tiny, [spec], context_settings(**changes))
  return Lesson(spec, context, limits(max_turns=spec.budget.max_turns), first)


def _collect(tiny, spec, first=0, style=STYLE, held_out=frozenset()):
  lesson = _lesson(tiny, spec, first)
  return collect_demonstrations([lesson], style, DemonstrationSettings(2, 0), held_out, None)[0]


def test_demonstrations_are_the_expert_s_actions_with_its_thoughts(tiny):
  rollout = _collect(tiny, expert_spec(5))
  t = rollout.trajectory
  assert len(t.tokens) == 10 and (t.values == 0).all()
  texts = [tiny.decode(row[mask]) for row, mask in zip(t.tokens, t.loss_mask, strict=True)]
  stop = tiny.decode(tiny.stop_ids[:1])
  assert texts[8] == f'5 more.</think><answer>Two || Two</answer>{stop}1 more.</think><answer>One</answer>{stop}'
  assert len(set(t.group.tolist())) == 5
  slow = DemonstrationStyle(discount=1.0, noise=0.0, hurry=0.0, beginner=0.0, timid=0.0, actions_per_turn=1)
  one = _collect(tiny, expert_spec(5), style=slow).trajectory
  assert tiny.decode(one.tokens[4][one.loss_mask[4]]).count('<answer>') == 2


def test_the_time_limits_of_rollouts_end_no_demonstration(tiny):
  lesson = _lesson(tiny, expert_spec(5), 0)
  limited = dataclasses.replace(lesson.limits, episode_timeout=1e-9, rollout_timeout=1e-9)
  lesson = dataclasses.replace(lesson, limits=limited)
  t = collect_demonstrations([lesson], STYLE, DemonstrationSettings(2, 0), frozenset(), None)[0].trajectory
  assert len(t.tokens) == 10


def test_failed_demonstrations_are_counted_and_not_learnt_from(tiny, caplog):
  with caplog.at_level(logging.WARNING, 'ragen_jax.sft'):
    t = _collect(tiny, expert_spec(8, 'Troubled'), first=9).trajectory
  # Levels 10 to 13 have no advice, and 15 breaks.
  assert len(t.tokens) == 6 and t.loss_mask.any(axis=1).all() and sorted(set(t.group.tolist())) == [0, 1, 2]
  told = 'Troubled: 10 of 16 demonstrations are left out: no advice, a failure, a text that cannot be read, or no room'
  assert [r.getMessage() for r in caplog.records if r.name == 'ragen_jax.sft.data'] == [told]
  with pytest.raises(UserError, match="none of the 2 demonstrations of 'Troubled' can be learnt from"):
    _collect(tiny, expert_spec(1, 'Troubled'), first=15)


def test_texts_that_would_break_a_reply_are_not_demonstrated(tiny):
  t = _collect(tiny, expert_spec(4, 'Wordy')).trajectory
  assert len(t.tokens) == 4
  assert not any('so ' in tiny.decode(row[mask]) for row, mask in zip(t.tokens, t.loss_mask, strict=True))


def test_a_row_without_advice_plays_on_beside_the_others_as_a_baseline(tiny):
  spec = expert_spec(2, 'Troubled')
  (levels,) = evaluation_levels([spec], _evaluation(12))
  context = ContextManager(tiny, [spec], context_settings())
  episodes, _ = play_baseline('solver', levels, context, _evaluation(12), limits=limits(max_turns=3), step=0)
  assert [e.status for e in episodes] == [Status.OUT_OF_TURNS] * 4


def _config(name='Sums', **fields):
  config = small_config(train__tags=('FrozenLake',), **fields)
  with config.unlocked():
    config.envs[name] = expert_section(name)
  config.sft.tags, config.sft.levels = (name,), (8,)
  return config


def test_a_warm_start_takes_tags_with_experts_and_refuses_what_they_do_not_give():
  check_sft(_config(sft__output='out', sft__batch_size=2))
  check_sft(_config(sft__output='out', sft__batch_size=2, sft__value_coef=0.5))
  with pytest.raises(UserError, match=r'^sft\.from_scratch=True: a tokenizer is made of the texts of games in JAX'):
    check_sft(_config(sft__output='out', sft__batch_size=2, sft__from_scratch=True))
  config = _config(sft__output='out', sft__batch_size=2)
  with config.unlocked():
    config.envs.Climb = expert_section() | {'class_path': f'{GAMES}:Climb'}
  config.sft.tags = ('Climb',)
  with pytest.raises(UserError, match=r"sft\.tags: 'Climb' has no solver"):
    check_sft(config)


def test_the_time_limits_of_rollouts_end_no_level_that_a_person_plays():
  config = _config(train__first_level=4, agent__episode_timeout=1e-9, agent__rollout_timeout=1e-9)
  config.train.tags = ('Sums',)
  unlimited = _config(train__first_level=4)
  unlimited.train.tags = ('Sums',)
  shown = [io.StringIO(), io.StringIO()]
  for each, out in zip((config, unlimited), shown, strict=True):
    play(each, io.StringIO('two\nquit\n'), out)
  assert shown[0].getvalue() == shown[1].getvalue() and 'failed' not in shown[0].getvalue()


def test_the_hint_is_the_expert_s_next_turn():
  config = _config(train__first_level=4)
  config.train.tags = ('Sums',)
  out = io.StringIO()
  play(config, io.StringIO('hint\ntwo\nhint\nquit\n'), out)
  assert out.getvalue().count('Two || Two\n') == 1 and '> Two || One\n' in out.getvalue()
