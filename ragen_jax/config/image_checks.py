"""Checks of environments with images, and of the model that reads them."""

from __future__ import annotations

from collections.abc import Sequence

from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent import image_observations
from ragen_jax.agent.image_observations import shows_images
from ragen_jax.agent.image_table_sizes import image_room
from ragen_jax.agent.language_model import check_vision
from ragen_jax.config import rules
from ragen_jax.envs import SIMULATORS
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models import presets
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.serving.play.env_program import ENVIRONMENT
from ragen_jax.utils.errors import UserError


def check_images(config: ConfigDict, *, sections: Sequence[str] = ('train', 'eval'), weights: bool) -> None:
  """Checks that the model can read the images of the environments of some sections of the config.

  Without `weights` there is no checkpoint, and a preset's processor is that of the published one. Raises UserError if
  the model reads text only, its processor would resize the images of a board, or the images of an observation do not
  fit into the context.
  """
  by_policy = [s for section in sections for s in _specs(config, section) if shows_images(s)]
  by_programs = [s for section in sections for s in _programs_specs(config, section) if shows_images(s)]
  specs = by_policy + by_programs
  if not specs and config.model.vision == 'frozen':
    return
  shape = presets.shape(config.model.preset, config.model.path)
  check_vision(config.model.vision, shape)
  if not specs:
    return
  field = _field(specs[0])
  if shape.vision is None:
    model = f'model.path={config.model.path!r}' if config.model.path else f'model.preset={config.model.preset!r}'
    raise UserError(f'{field}: {model} reads text only; choose a model with a vision tower, such as {presets.TINY_VL}')
  path = presets.resolve(config.model.preset, config.model.path) if weights else config.model.path
  processor = presets.processor(config.model.preset, path)
  for spec in specs:
    image_observations.check_images(spec, processor)
    _check_context(config, spec, image_observations.image_columns(spec, processor))
  for spec in by_programs:
    _check_calls(config, spec, processor)


def _check_context(config: ConfigDict, spec: EnvSpec, columns: int) -> None:
  """Checks that an observation whose images need so many columns leaves room for its text and a reply."""
  agent = config.agent
  own = spec.max_response_tokens or agent.max_response_tokens
  field = f'envs.{spec.tag}' if spec.max_response_tokens else 'agent'
  room = agent.max_context - own
  if columns >= room:
    raise UserError(
      f'{_field(spec)}: the images of an observation need {columns} tokens; agent.max_context={agent.max_context} less '
      f'{field}.max_response_tokens={own} leaves {max(room, 0)} for a prompt, with its text'
    )


def _check_calls(config: ConfigDict, spec: EnvSpec, processor: ProcessorConfig) -> None:
  """Checks that calls over HTTP may show what a row of an environment shows, which has all its images in each call."""
  (shown,) = image_room([spec], processor).shown
  of = f'with {_field(spec)}, whose'
  rules.check(
    config, 'serve.image_tokens', config.serve.image_tokens >= shown.tokens,
    f'must be at least {shown.tokens} {of} images have so many tokens',
  )  # fmt: skip
  most = shown.images(config.agent.max_context, packed=False)
  rules.check(
    config, 'serve.max_images', config.serve.max_images >= most,
    f'must be at least {most} {of} calls show up to so many images',
  )  # fmt: skip


def check_texts(config: ConfigDict, tags: Sequence[str], reader: str) -> None:
  """Raises UserError if an environment shows images; `reader` names what gets text only."""
  for spec in build.env_specs(config, tuple(tags), (1,) * len(tags)):
    if shows_images(spec):
      raise UserError(f'{_field(spec)}: {reader} gets text only')


def _specs(config: ConfigDict, section: str) -> list[EnvSpec]:
  """The environments of training or evaluation, which the policy itself plays, and tasks of programs."""
  tags = tuple(config[section].tags)
  return build.env_specs(config, tags, (1,) * len(tags), field=f'{section}.tags')


def _programs_specs(config: ConfigDict, section: str) -> list[EnvSpec]:
  """The environments of training or evaluation that the built-in program plays."""
  runners = {config.envs[tag].get('runner', '') for tag in config[section].tags}
  played = sorted(name.removeprefix(ENVIRONMENT) for name in runners if name.startswith(ENVIRONMENT))
  return build.env_specs(config, tuple(played), (1,) * len(played))


def _field(spec: EnvSpec) -> str:
  """The field that asks for images."""
  if spec.tile is not None or spec.env.name in SIMULATORS:
    return f"envs.{spec.tag}.observation='image'"
  return f'envs.{spec.tag}.images={spec.env.image_form.count}'
