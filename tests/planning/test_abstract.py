"""Abstract policies have the weights that runs train."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ragen_jax import build
from ragen_jax.agent.language_model import param_state
from ragen_jax.models import lora
from ragen_jax.models.vision.config import QWEN3_VL
from ragen_jax.planning import abstract
from ragen_jax.planning.lowering import abstract_rows, lower_gradient, lower_sampler
from ragen_jax.sampling.draw import PLAIN
from tests.support.configs import small_config
from tests.support.seeing import checkpoint, seeing_config


@pytest.mark.slow
def test_the_tower_of_a_model_that_reads_images_is_not_trained():
  config = small_config(model__preset='qwen3-vl-2b')
  trained, frozen = lora.partition(param_state(abstract.abstract_policy(config, 'bfloat16').model))
  assert set(frozen['policy']) == {'visual'} and 'visual' not in trained['policy']
  assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(frozen))


@pytest.mark.parametrize('vision', ['frozen', 'trained'])
@pytest.mark.slow
def test_the_programs_of_a_plan_read_images(tmp_path, vision):
  fields = {'model__vision': vision, 'model__separate_critic': True, 'optimizer__packing': vision == 'trained'}
  config = seeing_config(**fields, plan__prompt_tokens=90)
  config.model.path = checkpoint(config, tmp_path, QWEN3_VL)
  policy = abstract.abstract_policy(config, jnp.float32)
  trainer = build.make_trainer(config, policy)
  state = abstract.abstract_state(trainer)
  assert abstract.visual_columns(config) == 18 and abstract.prompt_columns(config) == 128
  assert abstract.prompt_columns(_as_text(config)) == 64  # and 32 in another call
  _, shape = abstract.micro_batches(config, trainer, trainer.settings.estimate.batching)
  batch = abstract.abstract_batch(config, trainer, shape)
  source = batch.images.source
  if vision == 'frozen':
    # Four rows of three turns with an image of 16 tokens each; the towers of policy and critic are the same.
    assert {name: x.embeddings.shape for name, x in source.by_trunk.items()} == {'policy': (192, 32)}
    assert source.by_trunk['policy'].deepstack.shape == (2, 192, 32)
    config.model.param_dtype = 'bfloat16'
    assert set(abstract.abstract_batch(config, trainer, shape).images.source.by_trunk) == {'policy', 'critic'}
  else:
    (pixels,) = source.groups
    # As many images as the columns of both bins could hold.
    assert shape[:2] == (2, 1280) and pixels.shape == (2 * 71, 32, 32, 3)
  assert abstract.abstract_batch(_as_text(config), trainer, shape).images is None
  lower_gradient(trainer.learner, state, batch)
  seen = abstract.sampler_images(config, policy, 16, 128)
  assert seen.features.embeddings.shape == (768, 32)
  lowered = lower_sampler(
    policy.sampler, policy.sampler.abstract_weights(state.params), abstract_rows(policy.sampler, 16, 384), width=128,
    columns=6, sampling=PLAIN, images=lambda rows: abstract.sampler_images(config, policy, rows, 128),
  )  # fmt: skip
  assert '768x32xf32' in lowered['extend'].as_text()


def _as_text(config):
  config = config.copy_and_resolve_references()
  config.envs.FrozenLake.observation = 'grid'
  return config


@pytest.mark.slow
def test_a_plan_with_images_of_many_tokens(tmp_path):
  config = seeing_config(model__vision='trained', envs__FrozenLake__tile=64, agent__max_context=3400)
  config.model.path = checkpoint(config, tmp_path, QWEN3_VL)
  trainer = build.make_trainer(config, abstract.abstract_policy(config, jnp.float32))
  assert abstract.visual_columns(config) == 1026
  batch = abstract.abstract_batch(config, trainer, (4, 3400, 30))
  assert [group.shape for group in batch.images.source.groups] == [(4 * 3, 256, 256, 3)]
  lower_gradient(trainer.learner, abstract.abstract_state(trainer), batch)


def test_calls_of_programs_are_planned_with_the_largest_image():
  fields = {'train__tags': ('Agent',), 'eval__tags': ('Agent',), 'agent__max_context': 900}
  config = small_config(model__preset='qwen3-vl-2b', serve__image_tokens=300, **fields)
  assert abstract.visual_columns(config) == 17 * 17 + 2
  config.agent.max_context = 104
  assert abstract.visual_columns(config) == 10 * 10 + 2
  config.serve.max_images = 0
  assert abstract.visual_columns(config) == abstract.visual_columns(small_config(**fields)) == 0
