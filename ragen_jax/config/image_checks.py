"""Checks of environments with images, and of the model that reads them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent import image_observations
from ragen_jax.agent.image_observations import shows_images
from ragen_jax.agent.language_model import check_vision
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models import presets
from ragen_jax.models.vision.processor import read_processor
from ragen_jax.utils.errors import UserError


def check_images(config: ConfigDict, *, sections: Sequence[str] = ('train', 'eval'), weights: bool) -> None:
  """Checks that the model can read the images of the environments of some sections of the config.

  Args:
    config: the run's config.
    sections: names of sections with tags.
    weights: whether the checkpoint exists; its processor is compared with the images.

  Raises:
    UserError: the model reads text only, its processor would resize the images of a board, or there are processes.
  """
  shape = presets.shape(config.model.preset, config.model.path)
  check_vision(config.model.vision, shape)
  specs = [s for section in sections for s in _specs(config, section) if shows_images(s)]
  if not specs:
    return
  field = _field(specs[0])
  if shape.vision is None:
    model = f'model.path={config.model.path!r}' if config.model.path else f'model.preset={config.model.preset!r}'
    raise UserError(f'{field}: {model} reads text only; choose a model with a vision tower, such as qwen2.5-vl-3b')
  if jax.process_count() > 1:
    raise UserError(f'{field}: images need one process, there are {jax.process_count()}; devices may be many')
  if weights:
    processor = read_processor(presets.resolve(config.model.preset, config.model.path), shape.vision)
    for spec in specs:
      image_observations.check_images(spec, processor)


def _specs(config: ConfigDict, section: str) -> list[EnvSpec]:
  tags = []
  for tag in config[section].tags:
    runner = config.envs[tag].get('runner', '')
    tags.append(tag)
    if runner.startswith('env:'):
      tags.append(runner.removeprefix('env:'))
  specs = build.env_specs(config, tuple(dict.fromkeys(tags)), (1,) * len(dict.fromkeys(tags)))
  for spec in specs:
    if shows_images(spec) and spec.tag not in config[section].tags:
      raise UserError(f'{_field(spec)}: programs that play tasks get text only')
  return specs


def _field(spec: EnvSpec) -> str:
  """The field that asks for images."""
  if spec.tile is not None:
    return f"envs.{spec.tag}.observation='image'"
  return f'envs.{spec.tag}.images={spec.env.image_form.count}'
