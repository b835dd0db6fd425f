"""Checks of the levels, the form of replies and the evaluation of a run."""

from __future__ import annotations

import functools
import math

import pytest

from ragen_jax.config.checks import check_config, check_sft
from ragen_jax.config.run_checks import (
  check_eval,
  check_levels,
  check_parts,
  check_replies,
  evaluates_training,
  parts_of_one_source,
)
from ragen_jax.utils.errors import UserError
from tests.support.configs import assert_refused, small_config

_check = functools.partial(check_config, weights=False)
_MOST = {'num_iterations': 2_500_000}  # of four groups: all levels that a seed has


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      {'num_iterations': 2_500_001},
      r'^num_iterations=2500001: times train\.groups and filter\.max_rollouts must be at',
    ),
    (_MOST | {'filter.max_rollouts': 2}, r'^num_iterations=2500000: times train\.groups .* must be at most 10000000$'),
    (
      {'train.first_level': 2**32 - 11},
      r'^train\.first_level=4294967285: the last training level would be 4294967296; at most 4294967295$',
    ),
    ({'seed': 500}, r'^seed=500: at most 428; the last training level would be 50000\d+, past 2\*\*32$'),
    (_MOST | {'seed': 429}, r'^seed=429: at most 428; the last training level would be'),
    (
      {'eval.first_level': 2**32 - 15},
      r'^eval\.first_level=4294967281: the last held-out level would be past 2\*\*32$',
    ),
    (
      {'train.first_level': 120},
      r'^eval\.first_level=123: held-out levels 123\.\.138 overlap with training levels 120\.\.131$',
    ),
    (
      {'eval.first_level': 30_010_000, 'seed': 3, 'train.groups': 8, 'filter.max_rollouts': 2},
      r'^eval\.first_level=30010000: held-out .* overlap with training levels 30010000\.\.30010047$',
    ),
  ],
)
def test_seeds_of_levels_that_overlap_or_do_not_exist_are_refused(fields, message):
  assert_refused(_check, small_config(fields), message)


@pytest.mark.parametrize(
  'fields', [_MOST | {'seed': 428}, {'eval.first_level': 2**32 - 16}, {'train.first_level': 2**32 - 12}]
)
def test_the_last_seeds_are_allowed(fields):
  _check(small_config(fields))


def test_levels_are_refused_where_training_and_evaluation_have_one_in_common():
  training, refused = set(range(10_000, 10_012)), []
  for first in range(9_980, 10_020):
    try:
      check_levels(small_config(eval__first_level=first))
    except UserError:
      refused.append(first)
  assert refused == [first for first in range(9_980, 10_020) if training & set(range(first, first + 16))]


def test_held_out_levels_of_a_file_are_not_trained_on(tmp_path):
  board = '######\n#@   #\n# $  #\n#  . #\n#    #\n######\n'
  for name in ('train', 'eval'):
    (tmp_path / f'{name}.txt').write_text(f'; 0\n{board}')
  config = small_config(
    train__tags=('SimpleSokoban',), eval__tags=('CoordSokoban',),
    envs__SimpleSokoban__levels=str(tmp_path / 'train.txt'), envs__CoordSokoban__levels=str(tmp_path / 'eval.txt'),
  )  # fmt: skip
  check_config(config)
  config.envs.CoordSokoban.levels = str(tmp_path / '..' / tmp_path.name / 'train.txt')
  message = r'envs\.CoordSokoban\.levels=.*train\.tags, and SimpleSokoban plays it'
  assert_refused(check_config, config, message)
  config.sft.tags, config.sft.levels, config.sft.batch_size = ('CoordSokoban',), (8,), 8
  assert_refused(check_sft, config, r'must not be a file of sft\.tags, and CoordSokoban plays it')
  config.envs.SimpleSokoban.levels = str(tmp_path / 'none.txt')
  assert_refused(check_config, config, r"envs\.SimpleSokoban: levels='.*none\.txt'; allowed: a file")


_STATE = {'agent.format': 'world_modeling', 'reward.state_reward': 0.25}
_AGENT = {'train.tags': ('Agent',), 'eval.tags': ('Agent',)}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      {'agent.format': 'thinking'},
      r"^agent\.format='thinking': allowed: no_think, free_think, state_estimation, transition_modeling, "
      'world_modeling$',
    ),
    ({'reward.state_place': 'end'}, r"^reward\.state_place='end': allowed: turn, section$"),
    ({'reward.format_reward': -0.1}, r'^reward\.format_reward=-0\.1: must be at least 0$'),
    ({'reward.state_reward': -1.0}, r'^reward\.state_reward=-1\.0: must be at least 0$'),
    ({'reward.state_floor': 1.0}, r'^reward\.state_floor=1\.0: must be at least 0 and below 1$'),
    (
      {'reward.state_reward': 0.5},
      r"^reward\.state_reward=0\.5: replies with agent\.format='free_think' do not describe the board; allowed: state",
    ),
    (
      {**_STATE, 'train.tags': ('FrozenLake', 'Bandit')},
      r'^reward\.state_reward=0\.25: must be 0, since descriptions cannot be compared with the state of Bandit ',
    ),
    ({**_STATE, **_AGENT}, r'^reward\.state_reward=0\.25: must be 0, .*the state of Agent '),
    (
      {**_AGENT, 'reward.format_reward': 0.5},
      r'^reward\.format_reward=0\.5: must be 0, since programs choose the form of replies in Agent$',
    ),
    (
      {**_STATE, 'reward.state_place': 'section', 'algorithm.adv_estimator': 'turn_wise_gae'},
      r"^reward\.state_place='section': algorithm\.adv_estimator='turn_wise_gae' does not read where in a turn",
    ),
    (
      {**_STATE, 'reward.state_place': 'section', 'algorithm.adv_estimator': 'grpo'},
      r"^reward\.state_place='section': algorithm\.adv_estimator='grpo' does not read where in a turn a reward is",
    ),
    (
      {**_STATE, 'reward.state_place': 'section', 'reward.credit': 'trajectory'},
      r"^reward\.state_place='section': reward\.credit='trajectory' puts all rewards on the last token",
    ),
  ],
)
def test_what_is_refused(fields, message):
  assert_refused(check_replies, small_config(fields), message)


@pytest.mark.parametrize(
  'fields',
  [
    {},
    {'reward.format_reward': 0.5, 'train.tags': ('FrozenLake', 'Bandit')},
    _STATE | {'train.tags': ('SimpleSokoban', 'CoordFrozenLake'), 'eval.tags': ('Bandit',)},
    _STATE | {'reward.state_place': 'section', 'algorithm.adv_estimator': 'bi_level_gae'},
    {'agent.format': 'state_estimation', 'train.tags': ('Bandit',)},
  ],
)
def test_what_is_allowed(fields):
  check_replies(small_config(fields))


def test_the_field_of_earlier_versions_is_named_with_what_it_is_now():
  config = small_config()
  config.agent.think = False  # as in a file of a user; the default config is not locked
  assert_refused(
    lambda c: check_config(c, weights=False),
    config,
    r"^agent\.think=False: it is agent\.format now, 'free_think' for True and 'no_think' for False$",
  )


@pytest.mark.parametrize(
  ('request_text', 'word'),
  [
    ('Answer as {form} with {words}.', 'allowed: text, with {form}, {example}, {actions}, {max_words}'),
    ('Answer as {form!r}.', 'no conversion or format'),
    ('Answer in {max_words:d} words.', 'no conversion or format'),
    ('Answer as {form.', 'a brace itself is {{ or }}'),
    ('Answer as {}.', 'allowed: text, with'),
  ],
)
def test_a_request_names_only_what_it_can_be_filled_with(request_text, word):
  config = small_config({'agent.request': request_text})
  with pytest.raises(UserError, match=r'^agent\.request=') as e:
    check_replies(config)
  assert word in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('request_text', ['', 'Braces {{}} and {example}.', '{form}{form}', 'One of {actions}.'])
def test_other_requests_are_accepted(request_text):
  check_replies(small_config({'agent.request': request_text}))


_ENDPOINT = {'eval.endpoint': 'http://127.0.0.1:9/v1', 'eval.endpoint_model': 'm'}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'eval.temperature': math.inf}, r'^eval\.temperature=inf: must be a number$'),
    ({'eval.temperature': math.nan}, r'^eval\.temperature=nan: must be a number$'),
    ({'eval.step': 'newest'}, r"^eval\.step='newest': must be latest, best, the number of an iteration, base or none$"),
    ({'eval.step': '-1'}, r"^eval\.step='-1': must be latest, best"),
    ({'eval.step': ''}, r"^eval\.step='': must be latest, best"),
    ({'eval.baselines': ('expert',)}, r"^eval\.baselines=\('expert',\): allowed: each at most once of random, solver$"),
    ({'eval.baselines': ('random', 'random')}, r'^eval\.baselines=.*: allowed: each at most once'),
    (
      {'eval.step': 'none', 'eval.baselines': ()},
      r"^eval\.step='none': nothing would be evaluated; set eval\.baselines or eval\.endpoint$",
    ),
    ({'eval.endpoint_workers': 0}, r'^eval\.endpoint_workers=0: must be at least 1$'),
    ({'eval.endpoint_tries': 0}, r'^eval\.endpoint_tries=0: must be at least 1$'),
    ({'eval.endpoint_max_tokens': -1}, r'^eval\.endpoint_max_tokens=-1: must be at least 0$'),
    ({'eval.endpoint_timeout': 0.0}, r'^eval\.endpoint_timeout=0\.0: must be above 0, in seconds$'),
    ({'eval.endpoint_timeout': math.inf}, r'^eval\.endpoint_timeout=inf: must be above 0, in seconds$'),
    (
      _ENDPOINT | {'eval.endpoint_model': ''},
      r"^eval\.endpoint_model='': must name a model of eval\.endpoint='http://",
    ),
    (
      _ENDPOINT
      | {
        'eval.tags': ('Dataset',),
        'envs.Dataset.tools': ('search',),
        'envs.Dataset.tools_format': 'template',
        'envs.Dataset.tool_options.search.retriever': 'mock',
        'envs.Dataset.max_turns': 2,
        'envs.Dataset.max_actions': 2,
      },
      r"^envs\.Dataset\.tools_format='template': must be 'text' with eval\.endpoint='http://\S+', whose chat template",
    ),
    (
      {'eval.endpoint_model': 'm'},
      r"^eval\.endpoint_model='m': must name a model of eval\.endpoint='', and must be empty without an endpoint$",
    ),
  ],
)
def test_what_cannot_be_evaluated_is_told_in_one_line(fields, message):
  assert_refused(check_eval, small_config(fields), message)


@pytest.mark.parametrize(
  'fields',
  [
    *({'eval.step': step} for step in ('latest', 'best', '0', '40', 'base')),
    {'eval.step': 'none', 'eval.baselines': ('solver', 'random')},
    _ENDPOINT | {'eval.step': 'none', 'eval.baselines': ()},
    _ENDPOINT | {'eval.temperature': 0.0, 'eval.endpoint_max_tokens': 0, 'eval.endpoint_timeout': 0.5},
  ],
)
def test_what_can_be_evaluated(fields):
  check_eval(small_config(fields))


def test_the_address_of_an_endpoint_is_plain():
  for url in ('http://localhost:8000/v1', 'https://models.example.org/v1', 'http://[::1]:80'):
    check_eval(small_config(_ENDPOINT | {'eval.endpoint': url}))
  for url in (
    'localhost:8000', 'ftp://localhost/v1', 'http:///v1', 'http://localhost:0/v1', 'http://localhost:many/v1',
    'http://me:secret@localhost/v1', 'http://localhost/v1?key=secret', 'http://localhost/v1#top',
    'http://local host/v1', 'http://löcalhost/v1', 'http://localhost/v1\n', 'http://[::1/v1',
  ):  # fmt: skip
    message = r"^eval\.endpoint='.*': must be an address such as 'http://localhost:8000/v1', or empty$"
    assert_refused(check_eval, small_config(_ENDPOINT | {'eval.endpoint': url}), message)


@pytest.mark.parametrize(
  ('option', 'value'),
  [('generator_options', {'size': 7}), ('verifier_options', {'case': True}), ('fields', {'question': 'other'})],
)
def test_the_parts_of_a_data_set_have_the_same_options(option, value):
  config = small_config()
  config.train.tags, config.eval.tags = ('Dataset',), ('DatasetTest',)
  config.envs.Dataset.generator = 'reasoning_gym:chain_sum'
  check_parts(config)
  with config.unlocked():
    for name, x in value.items():
      config.envs.DatasetTest[option] = config.envs.DatasetTest[option].copy_and_resolve_references()
      config.envs.DatasetTest[option][name] = x
  assert_refused(check_parts, config, rf'^envs\.DatasetTest\.{option}=.*: must equal envs\.Dataset\.{option}=')
  config.envs.Dataset.split = 'all'
  check_parts(config)


@pytest.mark.parametrize(
  ('train', 'tags', 'expected'),
  [
    (('FrozenLake', 'Bandit'), ('Bandit',), True),
    (('Navigation',), ('NavigationTest',), True),
    (('Agent',), ('HeldOut',), True),
    (('Agent',), ('Other',), False),
    (('FrozenLake',), ('CoordFrozenLake',), False),
  ],
)
def test_an_evaluation_may_play_what_is_trained_under_another_name(train, tags, expected):
  config = small_config()
  with config.unlocked():
    for name, runner in (('HeldOut', 'python mine.py'), ('Other', 'python other.py')):
      config.envs[name] = config.envs.Agent.copy_and_resolve_references()
      config.envs[name].runner = runner
    config.envs.Agent.runner = 'python mine.py'
  config.train.tags, config.eval.tags = train, tags
  assert evaluates_training(config) == expected


def test_rooms_of_both_held_out_parts_belong_to_the_training_rooms():
  tags = ('NavigationTest', 'FrozenLake', 'NavigationValidation')
  config = small_config(train__tags=('Navigation',), eval__tags=tags)
  assert parts_of_one_source(config) == [('Navigation', 'NavigationTest'), ('Navigation', 'NavigationValidation')]
  assert parts_of_one_source(small_config(train__tags=('NavigationTest',), eval__tags=tags)) == []
