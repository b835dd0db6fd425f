"""Abstract policies have the weights that runs train."""

from __future__ import annotations

import jax

from ragen_jax.agent.language_model import param_state
from ragen_jax.compilers import abstract
from ragen_jax.models import lora
from tests.support.configs import small_config


def test_the_tower_of_a_model_that_reads_images_is_not_trained():
  config = small_config(model__preset='qwen3-vl-2b')
  trained, frozen = lora.partition(param_state(abstract.abstract_policy(config, 'bfloat16').model))
  assert set(frozen['policy']) == {'visual'} and 'visual' not in trained['policy']
  assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(frozen))
