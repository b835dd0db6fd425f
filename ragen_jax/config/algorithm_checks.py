"""Checks of the algorithm's options, and of the combinations that do not work."""

from __future__ import annotations

from ml_collections import ConfigDict

from ragen_jax.agent.context_manager import CONTEXTS, OVERLONG
from ragen_jax.agent.episode import SCHEDULES
from ragen_jax.agent.world_model.formats import has_thought
from ragen_jax.algorithms import filters, losses, rewards
from ragen_jax.algorithms.advantages import ESTIMATORS
from ragen_jax.config import rules
from ragen_jax.training.monitor import ECHO_TRAP_ACTIONS, SIGNALS

# Field -> allowed values.
_CHOICES = {
  'algorithm.adv_estimator': tuple(ESTIMATORS),
  'algorithm.loss_agg_mode': losses.AGGREGATIONS,
  'algorithm.old_logprobs': ('sampler', 'trainer'),
  'agent.context': CONTEXTS,
  'agent.overlong': OVERLONG,
  'agent.schedule': SCHEDULES,
  'algorithm.policy_loss': losses.POLICY_LOSSES,
  'algorithm.ratio_level': losses.RATIO_LEVELS,
  'algorithm.kl_kind': losses.KL_KINDS,
  'reward.credit': rewards.CREDITS,
  'reward.grouping': rewards.GROUPINGS,
  'reward.method': rewards.METHODS,
  'filter.metric': filters.METRICS,
  'filter.strategy': filters.STRATEGIES,
  'filter.type': filters.TYPES,
  'filter.top_p_mode': filters.TOP_P_MODES,
  'filter.loss_scaling': filters.LOSS_SCALINGS,
  'monitor.echo_trap': ECHO_TRAP_ACTIONS,
  'monitor.bucket_mode': ('quantile', 'fixed_rv'),
}
_AT_LEAST_ONE = (
  'agent.context_turns', 'train.online_k', 'filter.max_rollouts', 'monitor.baseline_steps', 'monitor.min_signals',
  'monitor.patience', 'monitor.gradient_buckets', 'monitor.max_bad_iterations',
)  # fmt: skip
_NOT_NEGATIVE = (
  'algorithm.kl_loss_coef', 'algorithm.kl_reward_coef', 'algorithm.tis_cap', 'algorithm.loss_norm_length',
  'algorithm.step_weight', 'monitor.max_rollbacks', 'monitor.flat_reward_patience',
  'monitor.hopeless_patience', 'monitor.empty_patience', 'monitor.information_every', 'monitor.gradients_every',
)  # fmt: skip
# Estimators that read rewards at the last token of a turn only.
READ_AT_TURN_ENDS = ('turn_wise_gae',)


def check_algorithm(config: ConfigDict) -> None:
  """Checks `algorithm`, `reward`, `filter`, `replay`, `monitor`, and fields that depend on them; raises UserError."""
  for field, allowed in _CHOICES.items():
    rules.one_of(config, field, allowed)
  rules.at_least(config, 1, *_AT_LEAST_ONE)
  rules.at_least(config, 2, 'monitor.information_samples')
  rules.at_least(config, 0, *_NOT_NEGATIVE)
  rules.fraction(config, 'algorithm.step_gamma')
  high_level_lam, critic_lam = config.algorithm.high_level_lam, config.algorithm.critic_lam
  rules.check(config, 'algorithm.high_level_lam', high_level_lam <= 1, 'must be at most 1; negative is the same as lam')
  rules.check(config, 'algorithm.critic_lam', critic_lam <= 1, 'must be at most 1; negative is that of the advantages')
  rules.check(
    config, 'reward.method', config.reward.credit == 'trajectory' or config.reward.method == 'identity',
    "with reward.credit='turn' it may be 'identity' only",
  )  # fmt: skip
  _check_monitor(config)
  _check_policy_loss(config)
  _check_old_logprobs_and_replay(config)
  _check_rewards(config)
  _check_critic(config)
  _check_filter(config)


def _check_monitor(config: ConfigDict) -> None:
  m = config.monitor
  rules.below_one(config, 'monitor.ema_decay')
  rules.check(config, 'monitor.min_signals', m.min_signals <= len(SIGNALS), f'there are only {len(SIGNALS)} signals')
  rules.positive_fraction(config, 'monitor.rollback_lr')
  rules.check(
    config, 'monitor.echo_trap', m.echo_trap != 'rollback' or config.checkpoint.every > 0,
    'needs checkpoint.every above 0, since it goes back to a checkpoint',
  )  # fmt: skip
  rules.check(config, 'monitor.spike_factor', m.spike_factor == 0 or m.spike_factor > 1, 'must be 0 (off) or above 1')
  rules.check(
    config, 'monitor.flat_reward_patience', not m.flat_reward_patience or config.train.group_size > 1,
    'compares the rewards of a group, so train.group_size must be at least 2',
  )  # fmt: skip
  rules.check(
    config, 'monitor.information_every', not m.information_every or has_thought(config.agent.format),
    f'measures thoughts, which agent.format={config.agent.format!r} has not',
  )  # fmt: skip


def _check_policy_loss(config: ConfigDict) -> None:
  """Checks the options of the policy's loss."""
  a = config.algorithm
  rules.above(config, 0, 'algorithm.tau_pos', 'algorithm.tau_neg', 'algorithm.dro_beta')
  rules.check(
    config, 'algorithm.ratio_level', a.ratio_level == 'token' or a.policy_loss == 'ppo',
    f"with algorithm.policy_loss={a.policy_loss!r} it may be 'token' only",
  )  # fmt: skip
  for field in ('clip_ratio_low', 'clip_ratio_high') if a.policy_loss == 'dppo_tv' else ():
    rules.check(config, f'algorithm.{field}', a[field] < 1, "must be below 1 with algorithm.policy_loss='dppo_tv'")


def _check_old_logprobs_and_replay(config: ConfigDict) -> None:
  """Checks importance weights, replay and reused rollouts."""
  a = config.algorithm
  for field in ('mask_loss', 'mask_advantages', 'tis_cap'):
    needs = a.tis_cap > 0 if field == 'tis_cap' else not a[field]
    rules.check(
      config, f'algorithm.{field}', not needs or a.old_logprobs == 'trainer', "needs algorithm.old_logprobs='trainer'"
    )
  rules.check(
    config, 'algorithm.mask_loss', a.mask_loss or not a.mask_advantages,
    'needs algorithm.mask_advantages=False, since prompts have no advantages otherwise',
  )  # fmt: skip
  rules.check(
    config, 'algorithm.mask_advantages', a.mask_advantages or a.adv_estimator != 'turn_wise_gae',
    "algorithm.adv_estimator='turn_wise_gae' gives advantages to sampled tokens only",
  )  # fmt: skip
  rules.at_least(config, 0, 'replay.groups')
  rules.at_least(config, 1, 'replay.max_age')
  k, replays = config.train.online_k, config.replay.groups > 0
  rules.check(
    config, 'replay.max_age', not replays or config.replay.max_age >= k, f'must be at least train.online_k = {k}'
  )
  rules.check(config, 'replay.groups', not replays or a.tis_cap > 0, 'needs algorithm.tis_cap above 0')
  for field in ('num_iterations', 'checkpoint.every', 'optimizer.critic_warmup'):
    rules.check(config, field, rules.get(config, field) % k == 0, f'must be a multiple of train.online_k = {k}')


def _check_rewards(config: ConfigDict) -> None:
  """Checks the normalisation of rewards and the level of ratios."""
  a, reward = config.algorithm, config.reward
  one_row = config.agent.context == 'full' and config.agent.overlong == 'end'
  rules.check(
    config, 'algorithm.ratio_level', a.ratio_level != 'sequence' or one_row,
    "'sequence' needs an episode in one row: agent.context='full' and agent.overlong='end'",
  )  # fmt: skip
  rules.check(
    config, 'algorithm.kl_reward_coef', not a.kl_reward_coef or a.adv_estimator not in READ_AT_TURN_ENDS,
    f'algorithm.adv_estimator={a.adv_estimator!r} reads rewards at the ends of turns only; use algorithm.kl_loss_coef',
  )  # fmt: skip
  rules.check(
    config, 'reward.method', reward.method == 'identity' or reward.grouping != 'state' or config.train.group_size > 1,
    "a 'state' of one episode normalises to 0; train.group_size must be at least 2",
  )  # fmt: skip


def _check_critic(config: ConfigDict) -> None:
  """Checks options that need a critic, or a critic that learns."""
  a = config.algorithm
  has_critic = ESTIMATORS[a.adv_estimator].needs_critic
  rules.check(
    config, 'algorithm.bootstrap_truncated', has_critic or not a.bootstrap_truncated,
    f'algorithm.adv_estimator={a.adv_estimator!r} has no critic',
  )  # fmt: skip
  learns = has_critic and a.value_coef > 0
  for field in ('model.separate_critic', 'optimizer.critic_warmup'):
    rules.check(
      config, field, learns or not rules.get(config, field),
      f'needs a critic that learns, not algorithm.adv_estimator={a.adv_estimator!r} with value_coef={a.value_coef}',
    )  # fmt: skip
  warmup = config.optimizer.critic_warmup
  rules.check(
    config, 'optimizer.critic_warmup', not warmup or warmup < config.num_iterations,
    f'must be below num_iterations = {config.num_iterations}, or the policy never learns',
  )  # fmt: skip


def _check_filter(config: ConfigDict) -> None:
  """Checks that the filter can keep a group, and that its metric suits the group size."""
  f = config.filter
  if f.strategy == 'top_k_abs':
    rules.check(config, 'filter.value', f.value >= 1 and f.value % 1 == 0, 'must be a whole number of at least 1')
  else:
    # 'min_p' keeps scores of at least `value` times the largest, so 0 keeps all, unless `type` is 'smallest'.
    all_at_0 = f.strategy == 'min_p' and f.type == 'largest'
    above = f.value >= 0 if all_at_0 else f.value > 0
    rules.check(
      config, 'filter.value', above and f.value <= 1,
      f'must be {"at least" if all_at_0 else "above"} 0 and at most 1 with filter.strategy={f.strategy!r}',
    )  # fmt: skip
  rules.check(
    config, 'filter.value', f.strategy != 'top_k' or int(f.value * config.train.groups + 1e-9) > 0,
    f'keeps no group of train.groups={config.train.groups}',
  )  # fmt: skip
  rules.check(
    config, 'filter.soft', not f.soft or config.train.group_size > 1,
    'weighs groups by the deviation of their rewards, so train.group_size must be at least 2',
  )  # fmt: skip
  drops = f.strategy != 'top_p' or f.value < 1 or not f.include_zero
  compares = f.metric in ('reward_std', 'entropy_variance')
  rules.check(
    config, 'filter.metric', not (compares and drops) or config.train.group_size > 1,
    'compares the members of a group, so train.group_size must be at least 2',
  )  # fmt: skip
