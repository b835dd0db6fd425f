"""Makes the environments of a run from the tags of its config."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from ragen_jax import envs as registry
from ragen_jax.agent.long_observations import LEAST_TOKENS
from ragen_jax.agent.templates import check_request
from ragen_jax.envs.base import Budget
from ragen_jax.envs.drawing.tiles import MAX_TILE, MIN_TILE
from ragen_jax.envs.spec import OPTIONAL, EnvSpec
from ragen_jax.utils import foreign
from ragen_jax.utils.errors import UserError, describe_error, did_you_mean, one_line

# Types of environments that call no foreign code in this process when they are made.
_OWN_CODE = frozenset(registry.TYPES) - {'python', 'gymnasium', 'dataset'}
_BUDGET_FIELDS = ('max_turns', 'max_actions', 'max_actions_per_turn')


def env_specs(config: ConfigDict, tags: tuple[str, ...], groups: tuple[int, ...], field: str = 'tags') -> list[EnvSpec]:
  """The environments behind tags, each with its number of prompt groups; `field` names the tags in errors.

  Raises UserError if a tag or an option is not known, or has a value that is not allowed.
  """
  specs = []
  for tag, count in zip(tags, groups, strict=True):
    if tag not in config.envs:
      several = f"""several are written as --config.{field}="('A','B')"; """ if ',' in str(tag) else ''
      hint = several or did_you_mean(str(tag), config.envs)
      raise UserError(f'{field}: {tag!r} is not defined in envs; {hint}allowed: {", ".join(config.envs)}')
    options = dict(config.envs[tag])
    shown, tile = options.get('observation'), _tile(tag, options)
    env_type = options.pop('type', None)
    if not isinstance(env_type, str):
      raise UserError(f'envs.{tag}.type={env_type!r}: must name an environment, such as {", ".join(registry.TYPES)}')
    # Missing fields are None.
    numbers = {name: options.pop(name, None) for name in (*_BUDGET_FIELDS, 'max_words')}
    for name, value in numbers.items():
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f'envs.{tag}.{name}={value!r}: must be a whole number of at least 1')
    max_words = numbers.pop('max_words')
    wording = {name: options.pop(name, default) for name, default in OPTIONAL.items()}
    _check_optional(config, tag, wording, by_programs=played_by_programs(env_type))
    budget = Budget(**numbers)
    if 'observation' in options and not _is_option('observation', env_type):  # it is no grid
      raise UserError(f'envs.{tag}.observation={shown!r}: allowed: text, image')
    try:
      with contextlib.nullcontext() if env_type in _OWN_CODE else foreign.calling(f'envs.{tag}'):
        env = registry.make(env_type, options)
      env.check_budget(budget)
    except ValueError as e:
      raise UserError(f'envs.{tag}: {_without_type(str(e), env_type)}') from e
    simulated = env_type in registry.SIMULATORS
    if shown in ('image', 'text') and not simulated and (env.is_outside or env.image_grid is None):
      told = 'draws no images' if shown == 'image' else 'has no such option, since it draws no images'
      raise UserError(f'envs.{tag}.observation={shown!r}: {env.name} {told}')
    specs.append(EnvSpec(tag, env, budget, max_words, count, tile, **wording))
  return specs


def played_by_programs(env_type: Any) -> bool:
  """Whether programs play environments of a type over HTTP."""
  return env_type in registry.TYPES and registry.TYPES[env_type].played_by_programs


def _check_optional(config: ConfigDict, tag: str, values: Mapping[str, Any], *, by_programs: bool) -> None:
  """Checks the fields of `OPTIONAL` of an environment, which programs play or the policy turn by turn."""
  most = config.agent.max_response_tokens
  for name, allowed, told in (
    ('max_response_tokens', (0, most), f'0 or a whole number of at most agent.max_response_tokens={most}'),
    ('max_observation_tokens', (LEAST_TOKENS, math.inf), f'0 for no cut, or a whole number of at least {LEAST_TOKENS}'),
  ):
    value = values[name]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (value and not allowed[0] <= value <= allowed[1]):
      raise UserError(f'envs.{tag}.{name}={value!r}: must be {told}')
  request = values['request']
  if not isinstance(request, str):
    raise UserError(f'envs.{tag}.request={request!r}: must be text')
  try:
    check_request(request)
  except ValueError as e:
    raise UserError(f'envs.{tag}.request={request!r}: {e}') from e
  for name, default in OPTIONAL.items():
    if by_programs and values[name] != default:
      raise UserError(
        f'envs.{tag}.{name}={values[name]!r}: must be {default!r}, since programs write their own prompts'
      )


def check_needs(
  specs: Iterable[EnvSpec],
  episodes: Mapping[str, int] = MappingProxyType({}),
  envs: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
  """Checks each environment once (`Game.check`); UserError, which names envs.TAG, if something it needs is missing.

  Args:
    episodes: for a tag, how many are played at a time, with those of other tags at its server; 1 for others.
    envs: `config.envs`, for errors.
  """
  for tag, env in {spec.tag: spec.env for spec in specs}.items():
    try:
      with foreign.calling(f'envs.{tag}') if env.is_outside else contextlib.nullcontext():
        env.check()
        env.check_episodes(episodes.get(tag, 1))
    except ValueError as e:
      told = _without_type(one_line(e, str), env.name)
      raise UserError(f'envs.{_setting_tag(envs, tag, told)}: {told}') from e
    except Exception as e:
      raise UserError(f'envs.{tag}: check failed ({describe_error(e)})') from e


def _without_type(message: str, env_type: str) -> str:
  """A message without the type of the environment at its beginning, where the tag says it."""
  return message.removeprefix(f'{env_type}: ')


def _setting_tag(envs: Mapping[str, Mapping[str, Any]], tag: str, message: str) -> str:
  """The tag in which people set the field that a message names first: held-out tags follow their training tag."""
  found = re.match(r'(\w+)=', message)
  if found is None or found[1] not in envs.get(tag, ()):
    return tag
  same = [x for x in envs if tag.startswith(x) and all(envs[x].get(y) == envs[tag].get(y) for y in ('type', found[1]))]
  return min(same, key=len)


def _is_option(name: str, env_type: str) -> bool:
  """Whether environments of the type have an option; True for classes outside this package."""
  return env_type not in registry.TYPES or name in {f.name for f in dataclasses.fields(registry.TYPES[env_type])}


def _tile(tag: str, options: dict[str, Any]) -> int | None:
  """Takes `tile`, and `observation` if it is 'image' or 'text', out of options: see `EnvSpec.tile`."""
  shown = options.get('observation')
  tile = options.pop('tile', 0)
  if options.get('type') in registry.SIMULATORS:  # it has pictures of its own
    return None
  if shown in ('image', 'text'):
    del options['observation']
  if not isinstance(tile, int) or isinstance(tile, bool) or (tile and not MIN_TILE <= tile <= MAX_TILE):
    raise UserError(f'envs.{tag}.tile={tile!r}: must be 0 or a whole number of pixels from {MIN_TILE} to {MAX_TILE}')
  if tile and shown != 'image':
    raise UserError(f"envs.{tag}.tile={tile}: needs envs.{tag}.observation='image'")
  return tile if shown == 'image' else None


def group_counts(section: ConfigDict, name: str) -> tuple[int, ...]:
  """The number of prompt groups of each tag: `tag_groups`, or equal shares of `groups` if `tag_groups` is empty.

  The numbers have the order of `section.tags` and add up to `section.groups`; `name` is the section's, for errors.
  Raises UserError if there is no tag, a tag is named twice, or the numbers do not fit the tags and the groups.
  """
  tags, counts, total = tuple(section.tags), tuple(section.tag_groups), section.groups
  if not tags:
    raise UserError(f'{name}.tags=(): name at least one environment')
  if len(set(tags)) != len(tags):
    raise UserError(f'{name}.tags={tags}: a tag may be named once')
  if not counts:
    if total < 1 or total % len(tags):
      raise UserError(
        f'{name}.groups={total}: must be a positive multiple of the number of tags, {len(tags)}, '
        f'or be divided by {name}.tag_groups'
      )
    return (total // len(tags),) * len(tags)
  if len(counts) != len(tags) or not all(isinstance(count, int) and count > 0 for count in counts):
    raise UserError(f'{name}.tag_groups={counts}: must be one positive number for each of {name}.tags={tags}, or empty')
  if sum(counts) != total:
    raise UserError(
      f'{name}.tag_groups={counts}: must add up to {name}.groups={total}, not {sum(counts)}; '
      f'--config.{name}.tag_groups="()" divides them equally'
    )
  return counts
