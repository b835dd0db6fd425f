"""The curriculum: which items are chosen, what they depend on, and what a checkpoint keeps."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ragen_jax import train
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Episode, Status
from ragen_jax.config.run_checks import check_curriculum
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.runs.config_fields import free_in_training
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.training.curriculum import Curriculum, CurriculumSettings
from ragen_jax.utils.errors import UserError
from ragen_jax.viewer.store import read_episodes
from tests.support.configs import assert_refused, small_config
from tests.support.datasets import FUNCTIONS, make, write_lines

ITEMS = 60


def settings(order='success', **fields) -> CurriculumSettings:
  values = {
    'order': order, 'iterations': 11, 'window': 0.2, 'target': 0.5, 'width': 0.4, 'explore': 0.25, 'ema_decay': 0.5,
    'seed': 3, 'online_k': 1, 'max_rollouts': 1,
  }  # fmt: skip
  return CurriculumSettings(**(values | fields))


@pytest.fixture
def spec(tmp_path):
  """Makes the spec of a tag; the difficulty of question i is -i, so the last one is the easiest."""

  def make_spec(groups=8, tag='Quiz', count=ITEMS, field='level', **options):
    rows = [{'question': f'{tag} {i}', 'answer': str(i), 'level': -i} for i in range(count)]
    path = write_lines(tmp_path / f'{tag}.jsonl', rows)
    env = make(path=path, fields={'difficulty': field}, **options)
    return EnvSpec(tag, env, Budget(1, 1, 1), 20, groups)

  return make_spec


def chosen(curriculum, spec, iteration, attempt=0, first_seed=10_000):
  """The indices of the items of a rollout."""
  return [spec.env.index_of(s) for s in curriculum.level_seeds(first_seed, iteration, attempt).tolist()]


def play(curriculum, spec, iteration, rates, attempt=0, group_size=4):
  """Records a rollout whose episodes succeed with the rate of their item; returns its items and metrics."""
  seeds = curriculum.level_seeds(0, iteration, attempt)
  episodes = []
  for group, seed in enumerate(seeds.tolist()):
    wins = round(rates(spec.env.index_of(seed)) * group_size)
    episodes += [
      Episode(spec.tag, group, seed, [], status=Status.SUCCESS if m < wins else Status.FAILURE)
      for m in range(group_size)
    ]
  return [spec.env.index_of(s) for s in seeds.tolist()], curriculum.record(episodes, iteration)


@pytest.mark.parametrize('order', ['shuffled', 'fixed'])
def test_a_window_slides_from_the_easiest_to_the_hardest_items(spec, order):
  quiz = spec(order=order)
  curriculum = Curriculum(settings('sliding'), [quiz])
  # The window has 12 of 60 items, and moves in 10 steps over the other 48.
  for iteration in range(14):
    items = chosen(curriculum, quiz, iteration)
    assert len(set(items)) == 8
    first = round(min(iteration / 10, 1) * 48)
    assert {ITEMS - 1 - i for i in items} <= set(range(first, first + 12))
  assert chosen(curriculum, quiz, 13) != chosen(curriculum, quiz, 12)  # other ones at random


def test_without_a_difficulty_the_order_of_the_file_is_that_of_the_curriculum(spec):
  quiz = spec(field='', groups=6)
  items = [chosen(Curriculum(settings('sliding', window=0.0, iterations=10), [quiz]), quiz, i) for i in range(10)]
  assert [sorted(own) for own in items] == [list(range(6 * i, 6 * i + 6)) for i in range(10)]  # each item once
  reused = Curriculum(settings('sliding', window=0.0, iterations=10, online_k=5), [quiz])
  assert sorted(chosen(reused, quiz, 5)) == list(range(54, 60))  # the last iteration that plays


def test_a_growing_window_keeps_the_easiest_items(spec):
  quiz = spec()
  curriculum = Curriculum(settings('growing'), [quiz])
  for iteration, size in ((0, 12), (5, 36), (10, 60)):
    played = {ITEMS - 1 - i for attempt in range(4) for i in chosen(curriculum, quiz, iteration, attempt)}
    assert max(played) < size and min(played) < 12 and len(played) == min(32, size)


def test_later_rollouts_of_an_iteration_play_other_items(spec):
  quiz = spec()
  for order in ('sliding', 'success'):
    curriculum = Curriculum(settings(order, window=0.0, max_rollouts=3), [quiz])
    for iteration in range(12):
      assert len({i for attempt in range(3) for i in chosen(curriculum, quiz, iteration, attempt)}) == 24
      play(curriculum, quiz, iteration, lambda item: item % 5 / 4)


def test_items_near_the_target_are_played_more_often(spec):
  quiz = spec()
  curriculum = Curriculum(settings(), [quiz])

  def rate(item):
    return (0.0, 0.25, 0.5, 1.0)[item % 4]

  counts = np.zeros(ITEMS, int)
  for iteration in range(200):
    items, metrics = play(curriculum, quiz, iteration, rate)
    assert len(set(items)) == 8
    if iteration >= 40:
      np.add.at(counts, items, 1)
  assert metrics['curriculum/Quiz/seen'] == 1
  by_rate = [counts[i::4].mean() for i in range(4)]
  # Of 8 groups 2 explore; with weights of 0.375 and 1, the others prefer 0.5 to 0.25, and 0 and 1 are only explored.
  assert by_rate[2] > 1.5 * by_rate[1] > 3 * max(by_rate[0], by_rate[3])
  assert counts.min() >= 4  # none is forgotten
  # The mean over the played items that have a rate: nearer to the target than over all items, 0.4375.
  assert 0.3 < metrics['curriculum/Quiz/past_success'] < 0.6


def test_the_first_rollouts_play_what_was_not_played_and_the_share_of_seen_items_grows(spec):
  quiz = spec()
  curriculum = Curriculum(settings(), [quiz])
  seen: set[int] = set()
  for iteration in range(7):
    items, metrics = play(curriculum, quiz, iteration, lambda item: 0.0)  # none is near the target
    assert seen.isdisjoint(items) and ('curriculum/Quiz/past_success' in metrics) is False
    seen |= set(items)
    assert metrics['curriculum/Quiz/seen'] == len(seen) / ITEMS
    assert metrics['curriculum/Quiz/difficulty'] == -np.mean(items)
    assert metrics['curriculum/Quiz/position'] == pytest.approx(1 - np.mean(items) / (ITEMS - 1))
  items, metrics = play(curriculum, quiz, 7, lambda item: 0.0)
  assert set(range(ITEMS)) - seen <= set(items) and metrics['curriculum/Quiz/past_success'] == 0


def test_rates_are_averages_of_late_and_failures_of_the_environment_are_none(spec):
  quiz = spec(groups=1, count=1)
  curriculum = Curriculum(settings(ema_decay=0.75), [quiz])
  past = []
  for iteration, statuses in enumerate([(6, 6), (1, 2), (6, 1), (6, 6), (2, 2)]):
    episodes = [Episode('Quiz', 0, 0, [], status=Status(status)) for status in statuses]
    past.append(curriculum.record(episodes, iteration).get('curriculum/Quiz/past_success'))
  assert past == [None, None, 0.5, 0.625, 0.625]
  assert curriculum.state()[0]['Quiz']['rate'].tolist() == [0.75 * 0.625]
  assert curriculum.state()[0]['Quiz']['last'].tolist() == [4]


def test_few_items_are_played_several_times(spec):
  quiz = spec(groups=8, count=3)
  for order in ('sliding', 'success'):
    curriculum = Curriculum(settings(order, max_rollouts=2), [quiz])
    for iteration in range(4):
      assert set(play(curriculum, quiz, iteration, lambda item: 0.5, attempt=iteration % 2)[0]) == {0, 1, 2}


def test_items_of_the_evaluation_are_not_chosen(spec):
  quiz = spec()
  held_out = frozenset(EnvStateManager([spec(groups=50)], 1).levels_from(123))
  assert len(held_out) == 50
  free = {i for i in range(ITEMS) if b'item|' + quiz.env.items[i].id.encode() not in held_out}
  for order in ('sliding', 'growing', 'success'):
    curriculum = Curriculum(settings(order), [quiz], held_out)
    played = [play(curriculum, quiz, i, lambda item: 0.5)[0] for i in range(12)]
    assert set().union(*played) == free
    assert play(curriculum, quiz, 12, lambda item: 0.5)[1]['curriculum/Quiz/seen'] == 1  # of those that may be played
  every = frozenset(EnvStateManager([spec(groups=ITEMS)], 1).levels_from(123))
  with pytest.raises(
    UserError, match=r'the evaluation asks all 60 questions of envs\.Quiz; set a smaller eval\.groups'
  ):
    Curriculum(settings(), [quiz], every).check()


def test_other_environments_keep_their_levels_and_each_tag_has_its_own_items(spec):
  first, second = spec(groups=2), spec(groups=3, tag='Other')
  lake = EnvSpec('Lake', object(), Budget(1, 1, 1), 20, 4)
  seeds = Curriculum(settings('sliding'), [lake, first, second]).level_seeds(500, 0)
  assert seeds[:4].tolist() == [500, 501, 502, 503] and len(seeds) == 9
  easiest = set(range(ITEMS - 12, ITEMS))
  assert {first.env.index_of(s) for s in seeds[4:6].tolist()} | {
    second.env.index_of(s) for s in seeds[6:].tolist()
  } <= easiest
  episodes = [
    Episode('Lake', 0, 500, []),
    Episode('Quiz', 4, int(seeds[4]), []),
    Episode('Other', 6, int(seeds[6]), []),
  ]
  metrics = Curriculum(settings('sliding'), [lake, first, second]).record(episodes, 0)
  assert {name.split('/')[1] for name in metrics} == {'Quiz', 'Other'}
  assert metrics['curriculum/Quiz/seen'] == metrics['curriculum/Other/seen'] == 1 / ITEMS
  twins = Curriculum(settings('sliding'), [spec(groups=6), spec(groups=6, tag='Twin')]).level_seeds(0, 0)
  assert twins[:6].tolist() != twins[6:].tolist()  # the tags' choices are independent


def test_the_items_depend_on_seed_iteration_and_history_only_also_through_a_checkpoint(spec):
  quiz = spec()

  def rate(item):
    return item % 5 / 4

  whole, other = Curriculum(settings(), [quiz]), Curriculum(settings(seed=4), [quiz])
  all_items = [play(whole, quiz, i, rate) for i in range(20)]
  assert all_items[0][0] != play(other, quiz, 0, rate)[0]
  part = Curriculum(settings(), [quiz])
  assert [play(part, quiz, i, rate) for i in range(9)] == all_items[:9]
  arrays, described = part.state()
  play(part, quiz, 9, lambda item: 1.0)  # the saved arrays are copies
  resumed = Curriculum(settings(), [quiz])
  resumed.check_described(json.loads(json.dumps(described)), 'here')
  resumed.load_state(arrays)
  assert [play(resumed, quiz, i, rate) for i in range(9, 20)] == all_items[9:]
  fresh = Curriculum(settings(), [quiz])
  assert [play(fresh, quiz, i, rate) for i in range(9, 12)] != all_items[9:12]


def test_a_checkpoint_of_other_questions_is_refused(spec, tmp_path):
  quiz = spec()
  _, described = Curriculum(settings(), [quiz]).state()
  rows = [{'question': f'Quiz {i + 1}', 'answer': '1', 'level': 1} for i in range(ITEMS)]
  env = make(path=write_lines(tmp_path / 'new.jsonl', rows), fields={'difficulty': 'level'})
  changed = Curriculum(settings(), [EnvSpec('Quiz', env, Budget(1, 1, 1), 20, 8)])
  with pytest.raises(UserError, match=r'^here: envs\.Quiz: its curriculum is of 60 other questions, or diff'):
    changed.check_described(described, 'here')
  with pytest.raises(
    UserError, match='of no other questions, or difficulties, than the 60 of now; give back the old data, or choose'
  ):
    changed.check_described({}, 'here')
  old = [{'question': f'Quiz {i}', 'answer': str(i), 'level': -i, 'family': i // 2} for i in range(ITEMS)]
  for changes in ({}, {3: {'level': 7}}, {4: {'question': 'Quiz 5'}, 5: {'question': 'Quiz 4'}}):
    path = write_lines(tmp_path / f'{len(changes)}.jsonl', [row | changes.get(i, {}) for i, row in enumerate(old)])
    env = make(path=path, fields={'difficulty': 'level', 'group': 'family'})
    one = Curriculum(settings(), [EnvSpec('Quiz', env, Budget(1, 1, 1), 20, 8)])
    if changes:
      with pytest.raises(UserError, match='other questions, or difficulties'):
        one.check_described(described, 'here')
    else:
      _, described = one.state()


@pytest.mark.parametrize(
  ('level', 'shown'), [('hard', "'hard'"), (None, 'None'), (True, 'True'), (float('inf'), 'inf'), ([1], r'\[1\]')]
)
def test_a_difficulty_is_a_number(tmp_path, level, shown):
  rows = [{'question': 'a', 'answer': 'b', 'level': '2.5'}, {'question': 'c', 'answer': 'd', 'level': level}]
  path = write_lines(tmp_path / 'q.jsonl', rows)
  with pytest.raises(ValueError, match=rf'line 2: level={shown}; allowed: a number, larger if harder'):
    make(path=path, fields={'difficulty': 'level'}).check()
  assert make(path=path, fields={'difficulty': 'level'}, limit=1).items[0].difficulty == 2.5
  assert make(path=path).items[0].difficulty is None


@pytest.mark.parametrize(
  ('field', 'value', 'allowed'),
  [
    ('order', 'easy', "allowed: '', sliding, growing, success"),
    ('iterations', -1, 'must be at least 0'),
    ('window', 1.5, 'must be between 0 and 1'),
    ('target', -0.1, 'must be between 0 and 1'),
    ('width', 0.0, 'must be above 0'),
    ('explore', 0.0, 'must be above 0 and at most 1'),
    ('ema_decay', 1.0, 'must be at least 0 and below 1'),
  ],
)
def test_fields_have_limits(field, value, allowed):
  config = small_config({'train.tags': ('Dataset',), f'curriculum.{field}': value})
  assert_refused(check_curriculum, config, f'^curriculum.{field}={value!r}: {allowed}')


def test_a_curriculum_needs_a_data_set_and_may_hold_the_number_of_iterations():
  config = small_config({'curriculum.order': 'success'})
  assert_refused(check_curriculum, config, "must be '' without a tag of the type 'dataset' among train.tags=")
  config.train.tags = ('FrozenLake', 'GSM8K')
  check_curriculum(config)
  for order, iterations, held in (
    ('success', 0, False),
    ('sliding', 5, False),
    ('sliding', 0, True),
    ('growing', 0, True),
  ):
    config.curriculum.order, config.curriculum.iterations = order, iterations
    free, reasons = free_in_training(config.to_dict())
    assert ('num_iterations' in free, 'num_iterations' in reasons) == (not held, held)


@pytest.mark.slow
def test_a_resumed_run_plays_the_items_of_an_uninterrupted_one_and_the_evaluation_plays_its_own(tmp_path):
  rows = [{'question': f'Say {i}', 'answer': str(i), 'level': i} for i in range(24)]
  fields = {
    'train.tags': ('Dataset',), 'eval.tags': ('DatasetTest',), 'eval.groups': 4, 'eval.group_size': 4, 'eval.every': 1,
    'eval.greedy_too': False, 'envs.Dataset.path': write_lines(tmp_path / 'q.jsonl', rows), 'agent.format': 'no_think',
    'envs.Dataset.verifier': f'{FUNCTIONS}:is_odd', 'envs.Dataset.fields.difficulty': 'level',
    'envs.Dataset.test_share': 0.3, 'curriculum.order': 'success', 'checkpoint.every': 1, 'logging.episodes': 16,
  }  # fmt: skip
  train.train_and_evaluate(small_config({**fields, 'num_iterations': 2}), str(tmp_path / 'whole'))
  train.train_and_evaluate(small_config({**fields, 'num_iterations': 1}), str(tmp_path / 'parts'))
  train.train_and_evaluate(small_config({**fields, 'num_iterations': 2}), str(tmp_path / 'parts'))
  whole, parts = (
    [
      {n: x for n, x in line.items() if not n.startswith(('timing_s/', 'perf/'))}
      for line in read_metrics(tmp_path / run)
    ]
    for run in ('whole', 'parts')
  )
  assert whole[-1] == parts[-1]
  seen = [line['curriculum/Dataset/seen'] for line in whole[1:]]
  assert 0 < seen[0] < seen[1] <= 1
  items = {split: make(path=fields['envs.Dataset.path'], split=split, test_share=0.3) for split in ('train', 'test')}
  played = {'train': set(), 'val': set()}
  for file in read_episodes(tmp_path / 'whole'):
    for summary in file.episodes:
      env = items['test' if summary['tag'] == 'DatasetTest' else 'train']
      played[summary['split']].add(env.item(summary['level']).question)
  assert 0 < len(played['train']) <= round(seen[1] * len(items['train'].items))
  own = {items['test'].item(123 + group).question for group in range(4)}  # of the evaluation's own seeds
  assert played['val'] and played['val'] <= own
