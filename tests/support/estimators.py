"""Settings of the advantage estimators."""

from __future__ import annotations

from typing import Any

from ragen_jax.algorithms.advantages import AdvantageSettings

_SETTINGS = {
  'gamma': 1.0, 'lam': 1.0, 'high_level_gamma': 0.95, 'high_level_lam': None, 'length_weight': False,
  'whiten_advantages': True, 'step_gamma': 0.95, 'step_weight': 1.0, 'step_std': False,
}  # fmt: skip


def advantage_settings(adv_estimator: str, **fields: Any) -> AdvantageSettings:
  """An estimator with its usual options; `fields` differ."""
  return AdvantageSettings(adv_estimator=adv_estimator, **_SETTINGS | fields)
