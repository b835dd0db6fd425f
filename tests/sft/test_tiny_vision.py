"""Fresh models that read images: their tokens, processor and initial weights."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.segments import ImageSegment, TextSegment
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.models import presets
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.vision.features import insert, table
from ragen_jax.models.vision.positions import feature_columns, rope_positions
from ragen_jax.models.vision.processor import patches_of, preprocess, read_processor, smart_resize
from ragen_jax.sft import tiny_tokenizer, tiny_vision
from tests.support.configs import small_config

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
    _SHAPE,
    tokenizer.size,
    tower=tower,
    linear_layers=0,
    dtype='float32',
    attention='auto',
    seed=0,
    mesh=make_mesh(-1, 1, 1),
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
@pytest.mark.slow
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


@pytest.mark.slow
def test_the_built_in_model_that_sees_is_small_and_opens_in_transformers():
  directory = pathlib.Path(presets.resolve(presets.TINY_VL, ''))
  assert sum(f.stat().st_size for f in directory.iterdir()) < 2e6
  pytest.importorskip('torch', reason='transformers needs PyTorch to run a model')
  import torch
  from transformers import Qwen3VLForConditionalGeneration

  policy = build.load_policy(small_config({'model.preset': presets.TINY_VL}))
  qwen, processor, tokenizer = policy.model.policy, policy.processor, policy.tokenizer
  assert 150_000 < sum(x.size for x in jax.tree.leaves(nnx.split(qwen)[1])) < 300_000
  env = FrozenLake()
  image = np.asarray(env.pixels(env.reset(jax.random.key(0)), 8))
  patches, grid = preprocess(image, processor)
  segments = (TextSegment('Turn 1:\nState:\n'), ImageSegment(image, 16), TextSegment('\nActions left: 10<think>'))
  ids = np.asarray(tokenizer.encode_segments(segments).ids)
  positions, _ = rope_positions(ids, [grid], qwen.cfg.vision)
  index = feature_columns(ids, [grid], qwen.cfg.vision, [0])
  x, _ = insert(qwen.embed(ids[None]), table([qwen.see(patches[None], grid)]), index[None])
  hidden, _ = qwen(x, positions[None])
  theirs = Qwen3VLForConditionalGeneration.from_pretrained(str(directory), dtype=torch.float32)
  with torch.no_grad():
    expected = theirs(
      input_ids=torch.tensor(ids[None]), pixel_values=torch.tensor(patches), image_grid_thw=torch.tensor([[1, *grid]]),
      mm_token_type_ids=torch.tensor((ids == qwen.cfg.vision.image_token_id)[None].astype(np.int64)),
    ).logits[0].numpy()  # fmt: skip
  np.testing.assert_allclose(np.asarray(qwen.logits(hidden))[0], expected, atol=1e-4)
