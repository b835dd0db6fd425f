"""Usual values of the options of filters, losses and advantage estimators."""

from __future__ import annotations

import dataclasses
from typing import Any

from ragen_jax.algorithms.advantages import AdvantageSettings
from ragen_jax.training.estimate import EstimateSettings

# Of `filters.select_groups`: everything is kept.
FILTER = {'strategy': 'top_p', 'value': 1.0, 'kind': 'largest', 'include_zero': True, 'top_p_mode': 'linear'}
# Of `losses.policy_loss`.
SURROGATE = {
  'policy_loss': 'ppo', 'clip_ratio_low': 0.2, 'clip_ratio_high': 0.28, 'clip_ratio_c': 3.0, 'ratio_level': 'token',
  'tau_pos': 1.0, 'tau_neg': 1.05, 'dro_beta': 0.05,
}  # fmt: skip
# Of `rewards.shape_rewards`: the plain score on the last token.
REWARD = {'credit': 'trajectory', 'grouping': 'state', 'method': 'identity'}

_SETTINGS = {
  'gamma': 1.0, 'lam': 1.0, 'high_level_gamma': 0.95, 'high_level_lam': None, 'critic_lam': None,
  'length_weight': False, 'whiten_advantages': True, 'step_gamma': 0.95, 'step_weight': 1.0, 'step_std': False,
}  # fmt: skip


def advantage_settings(adv_estimator: str, **fields: Any) -> AdvantageSettings:
  """An estimator with its usual options; `fields` differ."""
  return AdvantageSettings(adv_estimator=adv_estimator, **_SETTINGS | fields)


def estimating(settings: EstimateSettings, **fields: Any) -> EstimateSettings:
  """The settings with other values of some fields, which may be those of its `AdvantageSettings`."""
  own = {name: x for name, x in fields.items() if hasattr(settings.advantages, name)}
  advantages = dataclasses.replace(settings.advantages, **own)
  return dataclasses.replace(settings, advantages=advantages, **{n: x for n, x in fields.items() if n not in own})
