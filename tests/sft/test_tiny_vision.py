"""Fresh models that read images: their tokens, processor and initial weights."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.vision.processor import patches_of, read_processor, smart_resize
from ragen_jax.sft import tiny_tokenizer, tiny_vision

_SHAPE, _TOWER = (32, 2, 4, 2, 8, 64), (16, 2, 2, 32)


@pytest.fixture(scope='module')
def fresh(tmp_path_factory):
  """A fresh model, and the directory of its checkpoint."""
  files, directory = tmp_path_factory.mktemp('files'), tmp_path_factory.mktemp('model')
  tiny_tokenizer.save(tiny_tokenizer.build(['Turn '], images=True), str(files))
  tiny_vision.save_processor(str(files))
  tokenizer = ChatTokenizer(files, images=True)
  tower = tiny_vision.tower_config(_TOWER, _SHAPE[0], tokenizer.added)
  model = tiny_tokenizer.make_model(
    _SHAPE, tokenizer.size, tower=tower, dtype='float32', attention='auto', seed=0, mesh=make_mesh(-1, 1, 1)
  )
  save_model(str(directory), model.policy, model.policy.cfg, 'float32', tokenizer_dir=str(files))
  return model.policy, directory


def test_a_checkpoint_of_a_fresh_model_is_read_as_it_was_made(fresh):
  policy, directory = fresh
  cfg = read_config(str(directory))
  assert cfg == policy.cfg and cfg.rope_sections == (2, 1, 1)
  v = cfg.vision
  assert (v.hidden_size, v.depth, v.num_heads, v.intermediate_size) == _TOWER
  tokenizer = ChatTokenizer(directory, images=True)
  ids = [tokenizer.encode(text) for text in tiny_vision.SPECIALS]
  expected = (v.vision_start_token_id, v.vision_end_token_id, v.image_token_id, v.video_token_id)
  assert [i for (i,) in ids] == list(expected) and set(expected) <= set(tokenizer.banned)


@pytest.mark.parametrize('env', [FrozenLake(), Sokoban()], ids=lambda env: env.name)
def test_a_tile_of_8_pixels_is_one_token_of_contrast(fresh, env):
  policy, directory = fresh
  processor = read_processor(str(directory), policy.cfg.vision)
  rows, columns = env.image_grid
  assert processor.factor == 8 and smart_resize(8 * rows, 8 * columns, processor) == (8 * rows, 8 * columns)
  states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 16))
  patches = np.asarray(patches_of(jax.vmap(lambda state: env.pixels(state, 8))(states), processor))
  assert patches.shape[1] == rows * columns
  assert 0.7 < patches.std() < 1.5 and abs(patches.mean()) < 1.5


def test_initial_positions_are_as_large_as_contents_and_queries_long(fresh):
  policy, _ = fresh
  positions = np.asarray(policy.visual.pos_embed[...])
  assert positions.shape == (36, _TOWER[0])
  assert positions.std() == pytest.approx(4 * _TOWER[0] ** -0.5, rel=0.1)
  for layer in policy.layers:
    np.testing.assert_array_equal(layer.self_attn.q_norm.weight[...], 2.0)
    np.testing.assert_array_equal(layer.self_attn.k_norm.weight[...], 1.0)
