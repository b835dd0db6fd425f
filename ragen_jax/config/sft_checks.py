"""Checks of the section `sft`, for --mode=sft."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.image_observations import shows_images
from ragen_jax.agent.language_model import FLOAT
from ragen_jax.agent.world_model.formats import FORMATS
from ragen_jax.build_environments import check_needs
from ragen_jax.config import rules, shipped
from ragen_jax.config.command_line import load_config
from ragen_jax.config.image_checks import check_images
from ragen_jax.config.run_checks import check_level_files
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import row_shards
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models.rotary import AXES
from ragen_jax.sft import data as sft_data
from ragen_jax.utils.errors import UserError, did_you_mean


def check_sft(config: ConfigDict) -> None:
  """Checks a warm start, after `check_config`; raises UserError for the first field that cannot be used."""
  if jax.process_count() > 1:
    raise UserError(f'--mode=sft runs in one process, there are {jax.process_count()}')
  rules.check(
    config, 'model.separate_critic', not config.model.separate_critic,
    'must be False with --mode=sft, which trains the policy and the value head on its trunk; a separate critic can '
    'start from both later',
  )  # fmt: skip
  rules.check(
    config,
    'model.weights',
    config.model.weights == FLOAT,
    f'must be {FLOAT!r} with --mode=sft, which exports the model',
  )
  _check_ranges(config)
  rules.path(config, 'sft.output', empty=False)
  rules.path(config, 'sft.data')
  rules.path(config, 'sft.save_data')
  _check_skipped(config)
  _check_weights(config)
  if config.sft.data:
    rules.check(
      config, 'sft.value_coef', not config.sft.value_coef, 'conversations of sft.data have no rewards; must be 0'
    )
    rules.check(
      config, 'sft.save_data', not config.sft.save_data, "writes the solvers' play; must be empty with sft.data"
    )
  _check_demonstrations(config)


def _check_ranges(config: ConfigDict) -> None:
  """Checks numbers that have their own bounds, and the rows of a micro-batch."""
  sft = config.sft
  rules.at_least(config, 1, 'sft.group_size', 'sft.batch_size')
  rules.at_least(config, 2, 'sft.steps')  # the first has a learning rate of 0
  rules.at_least(
    config, 0, 'sft.actions_per_turn', 'sft.learning_rate', 'sft.value_coef', 'sft.eval_every',
    'sft.checkpoint_every', 'sft.short_steps',
  )  # fmt: skip
  rules.check(
    config,
    'sft.short_steps',
    sft.short_steps < sft.steps,
    f'must be below sft.steps={sft.steps}, or no second turn is seen',
  )
  rules.below_one(config, 'sft.val_fraction')
  shards, rows = row_shards(make_mesh(**config.mesh)), max(sft.batch_size // 2, 1)
  rules.check(
    config, 'sft.batch_size', sft.packing or rows % shards == 0,
    f'half of it, {rows}, goes through the model at once and must be a multiple of {shards} row shards',
  )  # fmt: skip
  rules.fraction(config, 'sft.noise', 'sft.beginner', 'sft.timid', 'sft.hurry', 'sft.discount')
  rules.check(
    config, 'sft.noise', sft.noise + sft.beginner <= 1, f'and sft.beginner={sft.beginner} add up to more than 1'
  )


def _check_skipped(config: ConfigDict) -> None:
  """Checks that the configs whose held-out levels are not demonstrated exist, and that their tags do."""
  field = 'sft.skip_held_out_of'
  names = config.sft.skip_held_out_of
  for name in names if isinstance(names, tuple | list) else (None,):
    known = isinstance(name, str) and name.isprintable() and shipped.find_file(name.partition(':')[0])
    suggestion = did_you_mean(name, shipped.names()) if isinstance(name, str) else ''
    rules.check(
      config, field, bool(known), f'must be names of configs; {suggestion}allowed: {", ".join(shipped.names())}'
    )
    other = load_config(name, flag=f'{field}=')
    try:
      build.env_specs(other, tuple(other.eval.tags), build.group_counts(other.eval, 'eval'), field='eval.tags')
    except UserError as e:
      raise UserError(f'{field}={names!r}: {name} cannot be used: {e}') from e


def _are_positive(numbers: Iterable[Any]) -> bool:
  return all(type(x) is int and x > 0 for x in numbers)


def _check_weights(config: ConfigDict) -> None:
  """Checks which weights are trained and how they are written."""
  sft, rank = config.sft, config.lora.rank
  rules.check(config, 'lora.rank', not (sft.from_scratch and rank), 'fresh weights must all be trained')
  rules.check(config, 'export.lora', rank > 0 or config.export.lora == 'merged', "'adapter' needs lora.rank above 0")
  rules.check(config, 'sft.shape', len(sft.shape) == 6 and _are_positive(sft.shape), 'must be six positive numbers')
  if sft.from_scratch:
    (*_, heads, shared, width, _) = sft.shape
    rules.check(
      config, 'sft.shape', heads % shared == 0, f'the {heads} heads must be a multiple of the {shared} of keys'
    )
    rules.check(config, 'sft.shape', width % 2 == 0, f'the width of a head must be even, and is {width}')
  rules.at_least(config, 0, 'sft.linear_layers')
  if sft.linear_layers:
    _check_linear(config)
  if sft.tower:
    _check_tower(config)
  elif sft.from_scratch:
    rules.check(
      config, 'model.vision', config.model.vision == 'frozen', 'there is no vision tower to train: sft.tower is empty'
    )


def _check_linear(config: ConfigDict) -> None:
  """Checks the layers with linear attention of a fresh model."""
  sft = config.sft
  fresh = sft.from_scratch and not sft.tower
  rules.check(config, 'sft.linear_layers', fresh, 'must be 0 unless sft.from_scratch, and with sft.tower')
  repeated = sft.linear_layers + 1
  rules.check(config, 'sft.shape', sft.shape[1] % repeated == 0, f'the layers must be a multiple of {repeated}')


def _check_tower(config: ConfigDict) -> None:
  """Checks the vision tower of a fresh model."""
  tower = tuple(config.sft.tower)
  rules.check(config, 'sft.tower', config.sft.from_scratch, 'must be empty unless sft.from_scratch')
  rules.check(config, 'sft.tower', len(tower) == 4 and min(tower) > 0, 'must be four positive numbers, or empty')
  width, _, heads, _ = tower
  rules.check(config, 'sft.tower', width % (4 * heads) == 0, f'the width must be a multiple of 4 heads, {4 * heads}')
  rules.check(
    config, 'sft.shape', config.sft.shape[4] >= 2 * AXES,
    f'with sft.tower the head width must be at least {2 * AXES}, a frequency for each axis of images',
  )  # fmt: skip
  rules.one_of(config, 'model.vision', ('trained',))


def _check_demonstrations(config: ConfigDict) -> None:
  """Checks the demonstrated levels, which are used if no conversations are given."""
  sft = config.sft
  if sft.data and not sft.from_scratch:
    return
  same = len(sft.tags) == len(sft.levels) and len(sft.tags) > 0 and _are_positive(sft.levels)
  rules.check(config, 'sft.levels', same, f'must be one positive number for each of sft.tags={tuple(sft.tags)}')
  specs = build.env_specs(config, tuple(sft.tags), tuple(sft.levels), field='sft.tags')
  if sft.data:
    return
  forms = tuple(sft.forms)
  rules.check(
    config, 'sft.forms', set(forms) <= set(FORMATS) and len(set(forms)) == len(forms),
    f'must be different ones of {", ".join(FORMATS)}',
  )  # fmt: skip
  rules.check(
    config, 'sft.levels', min(sft.levels) >= len(forms), f'must be at least {len(forms)}, one for each of sft.forms'
  )
  _check_images(config, [spec for spec in specs if shows_images(spec)])
  for spec in specs:
    if not (spec.env.has_solver or spec.env.has_expert):
      raise UserError(f'sft.tags: {spec.tag!r} has no solver whose play could be demonstrated')
  _check_experts(config, [spec for spec in specs if spec.env.has_expert])
  first, last = config.eval.first_level, config.eval.first_level + config.eval.groups
  most = 2**32 - max(sft.levels)
  rules.check(
    config, 'sft.first_level', sft.first_level <= most, f'must be at most {most}, for levels up to {2**32 - 1}'
  )
  rules.check(
    config, 'sft.first_level', sft.first_level >= last or sft.first_level + max(sft.levels) <= first,
    f'demonstrated levels overlap with the held-out levels {first}..{last - 1}',
  )  # fmt: skip
  check_level_files(config, 'sft')
  shown = sum(levels // max(len(forms), 1) * max(len(forms), 1) for levels in sft.levels)
  count = (shown - sft_data.validation_levels(shown, sft.val_fraction)) * sft.group_size
  rules.check(
    config, 'sft.batch_size', sft.batch_size <= count,
    f'must be at most the number of training demonstrations, {count}',
  )  # fmt: skip


def _check_experts(config: ConfigDict, specs: list[EnvSpec]) -> None:
  """Checks demonstrations of experts outside JAX; `specs` are their environments."""
  if specs:
    tag, sft = specs[0].tag, config.sft
    rules.check(
      config,
      'sft.from_scratch',
      not sft.from_scratch,
      f'a tokenizer is made of the texts of games in JAX, not of {tag}',
    )
  check_needs(specs, envs=config.envs)


def _check_images(config: ConfigDict, specs: list[EnvSpec]) -> None:
  """Checks demonstrations that show images; `specs` are their environments."""
  sft = config.sft
  if specs:
    rules.check(
      config, 'sft.save_data', not sft.save_data, f'the play of {specs[0].tag} shows images; files hold text only'
    )
  if not sft.from_scratch:
    check_images(config, sections=('sft',), weights=True)
  elif specs:
    rules.check(config, 'sft.tower', len(sft.tower) > 0, f'{specs[0].tag} shows images, so the model must read them')
