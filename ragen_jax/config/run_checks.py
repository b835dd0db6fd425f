"""Checks of the levels, the form of replies and the evaluation of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.env_manager import LEVELS_PER_SEED, first_training_level
from ragen_jax.agent.templates import check_request
from ragen_jax.agent.world_model.formats import FORMATS, described_sections
from ragen_jax.agent.world_model.state_reward import PLACES
from ragen_jax.config import rules
from ragen_jax.config.image_checks import check_texts
from ragen_jax.envs.dataset.environment import DatasetEnvironment
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.training.curriculum import ORDERS
from ragen_jax.utils.errors import UserError


def check_levels(config: ConfigDict) -> None:
  """Raises UserError if the levels of training and evaluation have seeds in common, or seeds that exceed 2**32.

  Different seeds can still give the same board; `EnvStateManager` replaces such a training level.
  """
  rollouts = config.num_iterations * config.filter.max_rollouts
  rules.check(
    config, 'num_iterations', rollouts * config.train.groups <= LEVELS_PER_SEED,
    f'times train.groups and filter.max_rollouts must be at most {LEVELS_PER_SEED}',
  )  # fmt: skip
  first, last = (
    first_training_level(config.train.first_level, config.seed, rollout=rollout, groups=config.train.groups)
    for rollout in (0, rollouts)
  )
  held_out = (config.eval.first_level, config.eval.first_level + config.eval.groups)
  own = last - config.seed * LEVELS_PER_SEED
  rules.check(
    config, 'train.first_level', own <= 2**32, f'the last training level would be {own - 1}; at most {2**32 - 1}'
  )
  rules.check(config, 'seed', last <= 2**32, f'at most 428; the last training level would be {last}, past 2**32')
  rules.check(config, 'eval.first_level', held_out[1] <= 2**32, 'the last held-out level would be past 2**32')
  rules.check(
    config, 'eval.first_level', last <= held_out[0] or held_out[1] <= first,
    f'held-out levels {held_out[0]}..{held_out[1] - 1} overlap with training levels {first}..{last - 1}',
  )  # fmt: skip


def check_level_files(config: ConfigDict, section: str) -> None:
  """Raises UserError if a tag of `config.eval` and a tag of `config[section]` read their levels from the same file.

  Levels of a file are not drawn from seeds, so different seeds do not separate them.
  """
  used, held_out = _level_files(config, config[section].tags), _level_files(config, config.eval.tags)
  for path in sorted(set(used) & set(held_out)):
    raise UserError(
      f'envs.{held_out[path]}.levels={config.envs[held_out[path]].levels!r}: must not be a file of '
      f'{section}.tags, and {used[path]} plays it'
    )


def check_curriculum(config: ConfigDict) -> None:
  """Checks the choice of items; raises UserError for the first field that is wrong."""
  rules.one_of(config, 'curriculum.order', ORDERS)
  rules.at_least(config, 0, 'curriculum.iterations')
  rules.fraction(config, 'curriculum.window', 'curriculum.target')
  rules.above(config, 0, 'curriculum.width')
  rules.positive_fraction(config, 'curriculum.explore')
  rules.below_one(config, 'curriculum.ema_decay')
  played = [tag for tag in config.train.tags if config.envs[tag].type == DatasetEnvironment.name]
  rules.check(
    config, 'curriculum.order', not config.curriculum.order or bool(played),
    f"must be '' without a tag of the type 'dataset' among train.tags={tuple(config.train.tags)}",
  )  # fmt: skip


# Options that the two parts of a data set have in common, or the held-out part is one of other questions.
_OF_BOTH_PARTS = ('generator_options', 'fields', 'verifier_options')


def check_parts(config: ConfigDict) -> None:
  """Checks that the train part and the test part of a data set are parts of the same questions."""
  for train, test in parts_of_one_source(config):
    one, other = config.envs[train], config.envs[test]
    for option in _OF_BOTH_PARTS:
      if option in one and one[option] != other[option]:
        raise UserError(
          f'envs.{test}.{option}={other[option].to_dict()}: must equal envs.{train}.{option}='
          f'{one[option].to_dict()}, since it holds out a part of these questions; set both'
        )


def parts_of_one_source(config: ConfigDict) -> list[tuple[str, str]]:
  """Pairs of a training tag and an evaluation tag that play the train part and a held-out part of one source."""
  played, held_out = (
    [tag for tag in tags if config.envs[tag].get('split') in splits]
    for splits, tags in ((('train',), config.train.tags), (('validation', 'test'), config.eval.tags))
  )
  pairs = [(train, test) for test in held_out for train in played]
  names = ('type', 'path', 'generator', 'hub')
  return [(a, b) for a, b in pairs if all(config.envs[a].get(name) == config.envs[b].get(name) for name in names)]


def evaluates_training(config: ConfigDict) -> bool:
  """Whether the evaluation plays what is trained: a tag, a part of its source, or tasks of the same program."""
  train, tags = ([config.envs[tag] for tag in tags] for tags in (config.train.tags, config.eval.tags))
  programs = [{env.runner for env in part if env.type == 'agent'} for part in (train, tags)]
  return bool({*config.train.tags} & {*config.eval.tags} or parts_of_one_source(config) or programs[0] & programs[1])


def _level_files(config: ConfigDict, tags: Sequence[str]) -> dict[str, str]:
  """File of levels -> the tag that reads it."""
  return {os.path.realpath(config.envs[tag].levels): tag for tag in tags if config.envs[tag].get('levels')}


# Estimators for which the place of a reward within its turn matters.
_READ_INSIDE_TURNS = ('gae', 'bi_level_gae', 'reinforce_plus_plus')
_DESCRIBING = tuple(form for form in FORMATS if described_sections(form))


def check_replies(config: ConfigDict) -> None:
  """Checks `agent.format` and the fields of `reward` for replies; raises UserError for the first that is wrong."""
  rules.one_of(config, 'agent.format', tuple(FORMATS))
  _check_request(config)
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


def check_separator(config: ConfigDict, specs: Sequence[EnvSpec]) -> None:
  """Checks that the separator of actions cuts no action into pieces, none of which would be an action."""
  separator = config.agent.action_sep
  for spec in specs:
    cut = [word for word in spec.env.action_words if separator.lower() in word.lower()]
    rules.check(
      config, 'agent.action_sep', spec.env.whole_answer or not cut, f'occurs in actions of {spec.tag}: {", ".join(cut)}'
    )


def _check_request(config: ConfigDict) -> None:
  """Checks that the request for a reply names only what it can be filled with."""
  try:
    check_request(config.agent.request)
  except ValueError as e:
    raise UserError(f'agent.request={config.agent.request!r}: {e}') from e


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


BASELINES = ('random', 'solver')


def check_eval(config: ConfigDict) -> None:
  """Checks checkpoint, baselines and endpoint of an evaluation; raises UserError for the first field that is wrong."""
  e = config.eval
  rules.check(config, 'eval.temperature', e.temperature < math.inf, 'must be a number')
  has_name = e.step in ('latest', 'best', 'base', 'none') or e.step.isdecimal()
  rules.check(config, 'eval.step', has_name, 'must be latest, best, the number of an iteration, base or none')
  known = len(set(e.baselines)) == len(e.baselines) and set(e.baselines) <= set(BASELINES)
  rules.check(config, 'eval.baselines', known, f'allowed: each at most once of {", ".join(BASELINES)}')
  nothing = e.step == 'none' and not e.baselines and not e.endpoint
  rules.check(config, 'eval.step', not nothing, 'nothing would be evaluated; set eval.baselines or eval.endpoint')
  rules.at_least(config, 1, 'eval.endpoint_workers', 'eval.endpoint_tries')
  rules.at_least(config, 0, 'eval.endpoint_max_tokens')
  rules.check(config, 'eval.endpoint_timeout', 0 < e.endpoint_timeout < math.inf, 'must be above 0, in seconds')
  rules.check(
    config, 'eval.endpoint', not e.endpoint or rules.is_address(e.endpoint),
    "must be an address such as 'http://localhost:8000/v1', or empty",
  )  # fmt: skip
  if e.endpoint:
    check_texts(config, tuple(e.tags), f'eval.endpoint={e.endpoint!r}')
    for tag in e.tags:
      rules.check(
        config, f'envs.{tag}.tools_format', config.envs[tag].get('tools_format', 'text') == 'text',
        f"must be 'text' with eval.endpoint={e.endpoint!r}, whose chat template is not known",
      )  # fmt: skip
  rules.check(
    config, 'eval.endpoint_model', bool(e.endpoint_model) == bool(e.endpoint),
    f'must name a model of eval.endpoint={e.endpoint!r}, and must be empty without an endpoint',
  )  # fmt: skip
