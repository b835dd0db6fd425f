"""What cannot run is refused in one line, before anything is compiled."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from ragen_jax.algorithms import filters
from ragen_jax.config import checks
from ragen_jax.config.checks import check_config, check_sft
from ragen_jax.distributed.processes import RowShare
from ragen_jax.utils.errors import UserError
from tests.support.configs import leaves, small_config


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('algorithm.adv_estimator', 'ppo', r"algorithm\.adv_estimator='ppo'.*gae.*grpo"),
    ('algorithm.loss_agg_mode', 'mean', r"algorithm\.loss_agg_mode='mean'.*token-mean"),
    ('algorithm.clip_ratio_c', 0.5, r'algorithm\.clip_ratio_c=0\.5.*above 1'),
    ('algorithm.gamma', 1.5, r'algorithm\.gamma=1\.5.*between 0 and 1'),
    ('optimizer.mini_batch_size', 7, r'optimizer\.mini_batch_size=7.*divide.* 16'),
    ('optimizer.micro_batch_size', 3, r'optimizer\.micro_batch_size=3.*divide.* 8'),
    ('optimizer.micro_batch_size', -1, r'optimizer\.micro_batch_size=-1: must be at least 0'),
    ('train.groups', 0, r'train\.groups=0'),
    ('train.tags', (), r'train\.tags'),
    ('train.tags', ('FrozenLake', 'Bandit', 'SimpleSokoban'), r'train\.groups=4.*multiple of.*3'),
    ('train.tags', ('Nowhere',), r"'Nowhere'.*FrozenLake"),
    ('train.tags', ('FrozenLake', 'FrozenLake'), r'named once'),
    ('train.tag_groups', (2, 2), r"train\.tag_groups=\(2, 2\).*for each of train\.tags=\('FrozenLake',\)"),
    ('train.tag_groups', (0,), r'train\.tag_groups=\(0,\).*positive'),
    ('train.tag_groups', (4.0,), r'train\.tag_groups=\(4\.0,\).*positive'),
    ('eval.tag_groups', (7,), r'eval\.tag_groups=\(7,\): must add up to eval\.groups=16, not 7'),
    ('envs.FrozenLake.symbols', 'P_OGX', r"envs\.FrozenLake.*symbols='P_OGX'; allowed: 6 different"),
    ('train.temperature', 0.0, r'train\.temperature=0\.0.*above 0'),
    ('train.first_level', 120, r'overlap'),
    ('eval.top_p', 0.0, r'eval\.top_p=0\.0'),
    ('envs.FrozenLake.p', 1.5, r'envs\.FrozenLake.*p=1\.5'),
    ('envs.FrozenLake.type', 'lake', r"envs\.FrozenLake.*'lake'.*frozen_lake"),
    ('envs.FrozenLake.max_turns', 0, r'envs\.FrozenLake\.max_turns=0'),
    ('envs.FrozenLake.max_turns', None, r'envs\.FrozenLake\.max_turns=None: must be a whole number of at least 1'),
    ('envs.FrozenLake.max_actions', True, r'envs\.FrozenLake\.max_actions=True: must be a whole number of at least 1'),
    ('envs.FrozenLake.type', None, r'envs\.FrozenLake\.type=None: must name an environment, such as frozen_lake'),
    ('agent.format_penalty', 0.1, r'agent\.format_penalty=0\.1'),
    ('logging.trajectories', 17, r'logging\.trajectories=17: must be at most logging\.episodes = 16'),
    ('logging.episodes_every', -1, r'logging\.episodes_every=-1'),
    ('model.preset', 'gpt', r"model\.preset='gpt'.*tiny"),
    ('model.path', '/does/not/exist', r"model\.path='/does/not/exist' does not exist"),
    ('model.dtype', 'int8', r"model\.dtype='int8'.*bfloat16"),
    ('seed', 500, r'seed=500.*at most 428'),
    ('train.temperature', math.inf, r'^train\.temperature=inf: must be a finite number$'),
    ('algorithm.entropy_coef', math.nan, r'^algorithm\.entropy_coef=nan: must be a finite number$'),
    ('optimizer.critic_lr', math.inf, r'^optimizer\.critic_lr=inf: must be a finite number$'),
    ('agent.format_penalty', -math.inf, r'^agent\.format_penalty=-inf: must be a finite number$'),
    ('optimizer.weight_decay', 1e39, r'optimizer\.weight_decay=1e\+39: must be at most 3\.4e\+38 in magnitude'),
    ('train.temperature', 1e-45, r'train\.temperature=1e-45: must be 0 or at least 1\.2e-38'),
    ('optimizer.warmup_steps', 2**31, r'optimizer\.warmup_steps=2147483648: must be at most 2147483647'),
    ('filter.value', 0.0, r"filter\.value=0\.0: must be above 0 and at most 1 with filter\.strategy='top_p'"),
    ('filter.value', 1.5, r"filter\.value=1\.5: must be above 0 and at most 1 with filter\.strategy='top_p'"),
    ('monitor.min_signals', 5, r'monitor\.min_signals=5: there are only 4 signals'),
    ('monitor.max_bad_iterations', 0, r'monitor\.max_bad_iterations=0: must be at least 1'),
    ('train.top_p', 0.9, r"algorithm\.old_logprobs='sampler'.*'trainer'"),
  ],
)
def test_what_cannot_run_is_refused_in_one_line(field, value, message):
  config = small_config()
  with config.unlocked():
    config.update_from_flattened_dict({field: value})
  with pytest.raises(UserError, match=message) as e:
    check_config(config)
  assert '\n' not in str(e.value)


def test_no_number_of_the_config_may_be_infinite_or_nan():
  names = [name for name, value in leaves(small_config()) if isinstance(value, float)]
  assert len(names) > 60 and any(name.startswith('envs.') for name in names)
  for name in names:
    for x in (math.inf, -math.inf, math.nan):
      with pytest.raises(UserError, match=rf'^{re.escape(name)}={x}: must be a finite number$'):
        check_config(small_config({name: x}), weights=False)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'strategy': 'top_k', 'value': 0.0}, r'above 0 and at most 1'),
    ({'strategy': 'top_k', 'value': 1.5}, r'above 0 and at most 1'),
    ({'strategy': 'top_k_abs', 'value': 0.0}, r'a whole number of at least 1'),
    ({'strategy': 'top_k_abs', 'value': 2.5}, r'a whole number of at least 1'),
    ({'strategy': 'top_k_abs', 'value': 2.0}, None),
    ({'strategy': 'min_p', 'value': 2.0}, r'at least 0 and at most 1'),
    ({'strategy': 'min_p', 'value': 0.0}, None),  # all groups
    ({'strategy': 'min_p', 'value': 0.0, 'type': 'smallest'}, r'above 0 and at most 1'),
    ({'strategy': 'top_p', 'value': 0.0, 'top_p_mode': 'softmax'}, r'above 0 and at most 1'),
  ],
)
def test_a_filter_that_keeps_nothing_is_refused(fields, message):
  config = small_config({f'filter.{name}': x for name, x in fields.items()})
  scores = np.asarray([0.2, 0.5, 0.9, 0.4])
  options = {'kind': fields.get('type', 'largest'), 'top_p_mode': fields.get('top_p_mode', 'linear')}
  kept = filters.select_groups(scores, strategy=fields['strategy'], value=fields['value'], **options)
  if message is None:
    check_config(config, weights=False)
    assert kept.any()
    return
  with pytest.raises(UserError, match=rf'^filter\.value={fields["value"]}: must be {message}'):
    check_config(config, weights=False)
  assert not kept.any() or fields['value'] > 1


@pytest.mark.parametrize('name', ['type', 'max_turns', 'max_actions', 'max_actions_per_turn', 'max_words'])
def test_an_environment_without_a_field_that_all_have_is_refused(name):
  config = small_config()
  with config.unlocked():
    del config.envs.FrozenLake[name]
  with pytest.raises(UserError, match=rf'envs\.FrozenLake\.{name}=None: must ') as e:
    check_config(config)
  assert '\n' not in str(e.value)


def test_fractions_of_words_are_refused():
  config = small_config(train__tags=('Own',))
  config.envs.unlock()
  config.envs.Own = {**config.envs.FrozenLake, 'max_words': 2.5}
  with pytest.raises(UserError, match=r'envs\.Own\.max_words=2\.5: must be a whole number of at least 1') as e:
    check_config(config)
  assert '\n' not in str(e.value)


def test_a_limit_of_sokoban_that_the_prompt_does_not_tell_is_refused():
  config = small_config(train__tags=('SimpleSokoban',), envs__SimpleSokoban__max_steps=9)
  with pytest.raises(UserError, match=r'envs\.SimpleSokoban: max_steps=9; allowed: at least max_actions=10') as e:
    check_config(config)
  assert '\n' not in str(e.value)


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
  with pytest.raises(UserError, match=r'envs\.CoordSokoban\.levels=.*train\.tags, where SimpleSokoban plays it') as e:
    check_config(config)
  assert '\n' not in str(e.value)
  config.sft.tags, config.sft.levels, config.sft.batch_size = ('CoordSokoban',), (8,), 8
  with pytest.raises(UserError, match=r'must be none of sft\.tags, where CoordSokoban plays it'):
    check_sft(config)
  config.envs.SimpleSokoban.levels = str(tmp_path / 'none.txt')
  with pytest.raises(UserError, match=r"envs\.SimpleSokoban: levels='.*none\.txt'; allowed: a file") as e:
    check_config(config)
  assert '\n' not in str(e.value)


def test_processes_play_equal_numbers_of_groups(monkeypatch):
  monkeypatch.setattr(checks, 'row_share', lambda mesh: RowShare(shards=3, first=1, own=1))
  with pytest.raises(UserError, match=r'train\.groups=4: must be a multiple of 3, the parts'):
    check_config(small_config())


def test_grpo_needs_a_group_to_compare_with():
  config = small_config(algorithm__adv_estimator='grpo', train__group_size=1, train__groups=16)
  with pytest.raises(UserError, match=r'train\.group_size=1.*at least 2'):
    check_config(config)
