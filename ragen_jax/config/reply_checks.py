"""Checks of the form of replies and of the rewards for replies."""

from __future__ import annotations

from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.world_model.formats import FORMATS, described_sections
from ragen_jax.agent.world_model.state_reward import PLACES
from ragen_jax.config import rules

# Estimators for which the place of a reward within its turn matters.
_READ_INSIDE_TURNS = ('gae', 'bi_level_gae', 'reinforce_plus_plus')
_DESCRIBING = tuple(form for form in FORMATS if described_sections(form))


def check_replies(config: ConfigDict) -> None:
  """Checks `agent.format`, and the fields of `reward` for replies.

  Raises:
    UserError: a field has a value that is not allowed; the first such field is named.
  """
  rules.one_of(config, 'agent.format', tuple(FORMATS))
  rules.one_of(config, 'reward.state_place', PLACES)
  rules.at_least(config, 0, 'reward.format_reward', 'reward.state_reward')
  rules.below_one(config, 'reward.state_floor')
  tags = tuple(config.train.tags)
  specs = build.env_specs(config, tags, build.group_counts(config.train, 'train'), 'train.tags')
  by_programs = [spec.tag for spec in specs if spec.env.played_by_programs]
  rules.check(
    config, 'reward.format_reward', not (config.reward.format_reward and by_programs),
    f'must be 0, since programs choose the form of replies in {", ".join(by_programs)}',
  )  # fmt: skip
  if config.reward.state_reward:
    _check_state_reward(config, [spec.tag for spec in specs if not spec.env.scene_kinds])


def _check_state_reward(config: ConfigDict, unknown: list[str]) -> None:
  """Checks what a reward for described states needs; `unknown` are the tags without scenes."""
  rules.check(
    config, 'reward.state_reward', config.agent.format in _DESCRIBING,
    f'replies with agent.format={config.agent.format!r} do not describe the board; allowed: {", ".join(_DESCRIBING)}',
  )  # fmt: skip
  rules.check(
    config, 'reward.state_reward', not unknown,
    f'must be 0, since descriptions cannot be compared with the state of {", ".join(unknown)} (docs/vision.md)',
  )  # fmt: skip
  if config.reward.state_place == 'section':
    estimator = config.algorithm.adv_estimator
    rules.check(
      config, 'reward.state_place', estimator in _READ_INSIDE_TURNS,
      f"algorithm.adv_estimator={estimator!r} does not read where in a turn a reward is; must be 'turn'",
    )  # fmt: skip
    rules.check(
      config, 'reward.state_place', config.reward.credit == 'turn',
      "reward.credit='trajectory' puts all rewards on the last token of the episode; must be 'turn'",
    )  # fmt: skip
