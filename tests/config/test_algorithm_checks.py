"""Options of the algorithm that do not exist, that are out of range, and that do not go together."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from ragen_jax.algorithms import filters
from ragen_jax.config.checks import check_config
from tests.support.configs import assert_refused, small_config

_check = functools.partial(check_config, weights=False)


@pytest.mark.parametrize(
  ('field', 'allowed'),
  [
    ('algorithm.adv_estimator', 'gae, .*grpo'),
    ('algorithm.loss_agg_mode', 'token-mean, seq-mean-token-mean'),
    ('algorithm.old_logprobs', 'sampler, trainer'),
    ('agent.context', 'full, limited_multi_turn, single_turn'),
    ('agent.overlong', 'end, drop_oldest'),
    ('algorithm.policy_loss', 'ppo, cispo, dppo_tv, dppo_kl, sapo, dro'),
    ('algorithm.ratio_level', 'token, sequence, turn'),
    ('algorithm.kl_kind', 'k1, abs, k2, k3'),
    ('reward.credit', 'trajectory, turn'),
    ('reward.grouping', 'state, inductive, batch'),
    ('reward.method', 'identity, mean, mean_std, asym_clip'),
    ('filter.metric', 'reward_std, reward,'),
    ('filter.strategy', 'top_k, top_k_abs, top_p, min_p'),
    ('filter.type', 'largest, smallest'),
    ('filter.top_p_mode', 'linear, softmax'),
    ('filter.loss_scaling', 'none, linear, sqrt'),
    ('monitor.echo_trap', 'warn, stop, rollback'),
    ('monitor.bucket_mode', 'quantile, fixed_rv'),
  ],
)
def test_a_word_that_is_no_choice_is_told_with_the_choices(field, allowed):
  assert_refused(_check, small_config({field: 'luck'}), rf"^{field}='luck': allowed: {allowed}")


@pytest.mark.parametrize(
  ('least', 'fields'),
  [
    (2, ['monitor.information_samples']),
    (1, ['agent.context_turns', 'train.online_k', 'filter.max_rollouts', 'replay.max_age']),
    (1, [f'monitor.{x}' for x in ('baseline_steps', 'min_signals', 'patience', 'gradient_buckets')]),
    (1, ['monitor.max_bad_iterations']),
    (0, [f'algorithm.{x}' for x in ('kl_loss_coef', 'kl_reward_coef', 'tis_cap', 'loss_norm_length', 'step_weight')]),
    (0, [f'monitor.{x}' for x in ('max_rollbacks', 'flat_reward_patience', 'hopeless_patience', 'empty_patience')]),
    (0, ['monitor.information_every', 'monitor.gradients_every', 'replay.groups']),
  ],
)
def test_numbers_that_are_too_small(least, fields):
  for field in fields:
    _check(small_config({field: least}))
    assert_refused(_check, small_config({field: least - 1}), rf'^{field}={least - 1}(\.0)?: must be at least {least}$')


_NEEDS_TRAINER = r".*: needs algorithm\.old_logprobs='trainer'$"


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'algorithm.step_gamma': 1.5}, r'^algorithm\.step_gamma=1\.5: must be between 0 and 1$'),
    ({'algorithm.high_level_lam': 1.5}, r'^algorithm\.high_level_lam=1\.5: must be at most 1; negative is the same as'),
    ({'algorithm.critic_lam': 1.5}, r'^algorithm\.critic_lam=1\.5: must be at most 1; negative is that of the advant'),
    ({'monitor.ema_decay': 1.0}, r'^monitor\.ema_decay=1\.0: must be at least 0 and below 1$'),
    ({'monitor.min_signals': 6}, r'^monitor\.min_signals=6: there are only 5 signals$'),
    *(
      ({'monitor.spike_factor': x}, rf'^monitor\.spike_factor={x}: must be 0 \(off\) or above 1$')
      for x in (-1.0, 0.5, 1.0)
    ),
    (
      {'monitor.echo_trap': 'rollback', 'checkpoint.every': 0},
      r"^monitor\.echo_trap='rollback': needs checkpoint\.every above 0",
    ),
    (
      {'monitor.flat_reward_patience': 2, 'train.group_size': 1, 'train.groups': 16},
      r'^monitor\.flat_reward_patience=2: .*train\.group_size must be at least 2$',
    ),
    (
      {'monitor.information_every': 2, 'agent.format': 'no_think'},
      r"^monitor\.information_every=2: .*agent\.format='no_think'",
    ),
    ({'monitor.rollback_lr': 0.0}, r'^monitor\.rollback_lr=0\.0: must be above 0 and at most 1$'),
    # Importance weights, replay and reused rollouts.
    ({'algorithm.tis_cap': 2.0}, rf'^algorithm\.tis_cap=2\.0{_NEEDS_TRAINER}'),
    ({'algorithm.mask_loss': False}, rf'^algorithm\.mask_loss=False{_NEEDS_TRAINER}'),
    ({'algorithm.mask_advantages': False}, rf'^algorithm\.mask_advantages=False{_NEEDS_TRAINER}'),
    ({'replay.groups': 2}, r'^replay\.groups=2: needs algorithm\.tis_cap above 0$'),
    (
      {'replay.groups': 2, 'replay.max_age': 1, 'train.online_k': 3, 'checkpoint.every': 3},
      r'^replay\.max_age=1: must be at least train\.online_k = 3$',
    ),
    ({'train.online_k': 2}, r'^num_iterations=3: must be a multiple of train\.online_k = 2$'),
    (
      {'train.online_k': 3, 'checkpoint.every': 3, 'optimizer.critic_warmup': 1},
      r'^optimizer\.critic_warmup=1: must be a multiple of train\.online_k = 3$',
    ),
    (
      {'algorithm.old_logprobs': 'trainer', 'algorithm.mask_loss': False},
      r'^algorithm\.mask_loss=False: needs algorithm\.mask_advantages=False',
    ),
    (
      {
        'algorithm.old_logprobs': 'trainer',
        'algorithm.mask_advantages': False,
        'algorithm.adv_estimator': 'turn_wise_gae',
      },
      r"^algorithm\.mask_advantages=False: algorithm\.adv_estimator='turn_wise_gae' gives",
    ),
    (
      {'filter.soft': True, 'train.group_size': 1, 'train.groups': 16},
      r'^filter\.soft=True: .*train\.group_size must be at least 2$',
    ),
    ({'train.online_k': 3}, r'^checkpoint\.every=1: must be a multiple of train\.online_k = 3$'),
    # Rewards, and what a ratio spans.
    ({'reward.method': 'mean'}, r"^reward\.method='mean': with reward\.credit='turn' it may be 'identity' only$"),
    (
      {'reward.method': 'mean', 'reward.credit': 'trajectory', 'train.group_size': 1, 'train.groups': 16},
      r"^reward\.method='mean': a 'state' of one episode normalises to 0; train\.group_size must be at least 2$",
    ),
    (
      {'algorithm.ratio_level': 'sequence', 'agent.context': 'single_turn'},
      r"^algorithm\.ratio_level='sequence': .*agent\.context='full'",
    ),
    (
      {'algorithm.ratio_level': 'sequence', 'agent.overlong': 'drop_oldest'},
      r"^algorithm\.ratio_level='sequence': .*agent\.overlong='end'",
    ),
    (
      {'algorithm.adv_estimator': 'turn_wise_gae', 'algorithm.kl_reward_coef': 0.1},
      r"^algorithm\.kl_reward_coef=0\.1: algorithm\.adv_estimator='turn_wise_gae' reads rewards at the ends of turns",
    ),
    # The policy's loss.
    (
      {'algorithm.policy_loss': 'cispo', 'algorithm.ratio_level': 'sequence'},
      r"^algorithm\.ratio_level='sequence': with algorithm\.policy_loss='cispo' it may be 'token' only$",
    ),
    (
      {'algorithm.policy_loss': 'dppo_tv', 'algorithm.clip_ratio_high': 1.0},
      r"^algorithm\.clip_ratio_high=1\.0: must be below 1 with algorithm\.policy_loss='dppo_tv'$",
    ),
    *(
      ({f'algorithm.{name}': 0.0}, rf'^algorithm\.{name}=0\.0: must be above 0')
      for name in ('tau_pos', 'tau_neg', 'dro_beta')
    ),
    # A critic, and one that learns.
    (
      {'algorithm.adv_estimator': 'grpo', 'algorithm.bootstrap_truncated': True},
      r"^algorithm\.bootstrap_truncated=True: algorithm\.adv_estimator='grpo' has no critic$",
    ),
    (
      {'model.separate_critic': True, 'algorithm.adv_estimator': 'grpo'},
      r"^model\.separate_critic=True: needs a critic.*adv_estimator='grpo'",
    ),
    (
      {'model.separate_critic': True, 'algorithm.value_coef': 0.0},
      r'^model\.separate_critic=True: needs a critic that learns.*value_coef=0',
    ),
    (
      {'optimizer.critic_warmup': 1, 'algorithm.adv_estimator': 'grpo'},
      r'^optimizer\.critic_warmup=1: needs a critic that learns',
    ),
    ({'optimizer.critic_warmup': 3}, r'^optimizer\.critic_warmup=3: must be below num_iterations = 3'),
    # The filter.
    (
      {'filter.strategy': 'top_k', 'filter.value': 0.1, 'train.groups': 8},
      r'^filter\.value=0\.1: keeps no group of train\.groups=8$',
    ),
    (
      {'filter.value': 0.5, 'train.group_size': 1, 'train.groups': 16},
      r"^filter\.metric='reward_std': compares the members of a group, so train\.group_size must be at least 2$",
    ),
    (
      {'filter.include_zero': False, 'filter.metric': 'entropy_variance', 'train.group_size': 1, 'train.groups': 16},
      r"^filter\.metric='entropy_variance': compares the members of a group",
    ),
  ],
)
def test_options_that_do_not_go_together_are_refused(fields, message):
  assert_refused(_check, small_config(fields), message)


_TRAINER = {'algorithm.old_logprobs': 'trainer'}


@pytest.mark.parametrize(
  'fields',
  [
    {'algorithm.high_level_lam': 1.0, 'algorithm.critic_lam': 1.0, 'algorithm.step_gamma': 1.0},
    {'monitor.spike_factor': 0.0},
    {'monitor.spike_factor': 1.5},
    {'monitor.min_signals': 4, 'monitor.rollback_lr': 1.0, 'monitor.ema_decay': 0.0},
    _TRAINER | {'algorithm.tis_cap': 2.0, 'algorithm.mask_loss': False, 'algorithm.mask_advantages': False},
    _TRAINER
    | {'algorithm.tis_cap': 2.0, 'replay.groups': 2, 'replay.max_age': 3, 'train.online_k': 3, 'checkpoint.every': 3},
    {'reward.method': 'mean', 'reward.credit': 'trajectory'},
    {
      'reward.method': 'mean', 'reward.credit': 'trajectory', 'reward.grouping': 'batch', 'train.group_size': 1,
      'train.groups': 16,
    },
    {'algorithm.ratio_level': 'sequence'},
    {'algorithm.policy_loss': 'dppo_kl', 'algorithm.clip_ratio_high': 1.0},
    {'algorithm.policy_loss': 'cispo', 'algorithm.clip_ratio_low': 1.0},
    {'algorithm.ratio_level': 'turn', 'agent.context': 'single_turn', 'agent.overlong': 'drop_oldest'},
    {'algorithm.adv_estimator': 'grpo', 'algorithm.kl_reward_coef': 0.1},
    {'model.separate_critic': True, 'algorithm.bootstrap_truncated': True, 'optimizer.critic_warmup': 2},
    {'filter.strategy': 'top_k', 'filter.value': 0.25},
    {'filter.metric': 'reward', 'filter.value': 0.5, 'train.group_size': 1, 'train.groups': 16},
    {'train.group_size': 1, 'train.groups': 16},
  ],
)  # fmt: skip
def test_what_stands_beside_a_refused_combination_is_allowed(fields):
  _check(small_config(fields))


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'strategy': 'top_p', 'value': 0.0}, r"above 0 and at most 1 with filter\.strategy='top_p'"),
    ({'strategy': 'top_p', 'value': 1.5}, r"above 0 and at most 1 with filter\.strategy='top_p'"),
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
  options = {
    'kind': fields.get('type', 'largest'),
    'top_p_mode': fields.get('top_p_mode', 'linear'),
  }
  kept = filters.select_groups(scores, strategy=fields['strategy'], value=fields['value'], include_zero=True, **options)
  if message is None:
    _check(config)
    assert kept.any()
    return
  assert_refused(_check, config, rf'^filter\.value={fields["value"]}: must be {message}')
  assert not kept.any() or fields['value'] > 1
