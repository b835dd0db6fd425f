"""Packed rows against a row each, and the schedule of the learning rate."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.models import presets
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.modes import sft
from ragen_jax.sft import tiny_tokenizer, tiny_vision
from ragen_jax.sft.packing import batches
from ragen_jax.sft.step_watch import GRAD_NORM, LOSS, VALUE_LOSS
from ragen_jax.sft.trainer import SftSettings, make_schedule
from ragen_jax.training.batches import PackingSettings
from tests.support.configs import small_config
from tests.support.examples import IMAGE, examples_with_images, made_up_examples
from tests.support.models import random_model

_BINS = PackingSettings(step=16, width=128, columns=256, shards=1, reply_step=16, most_shared=128)


@pytest.mark.slow
def test_packed_rows_give_the_losses_and_gradients_of_a_row_each():
  data, rows = made_up_examples(), np.asarray([6, 0, 1, 3, 2, 5, 4])
  config = small_config(sft__value_coef=0.5)
  model = random_model(40)
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  policy = LanguageModel('', model, tokenizer, None, jax.make_mesh((1,), ('data',), devices=jax.devices()[:1]))
  trainer = sft.make_trainer(config, policy)
  found, used = [], []
  for packing in (None, _BINS):
    cut = list(batches(data, rows, batch_size=7, length_step=16, packing=packing, mesh=None))
    used.append(sum(b.tokens.size for b in cut))
    assert sum(int((b.weights > 0).sum()) for b in cut) == int(data.sampled[rows].sum())
    found.append(trainer.gradients(cut))
  assert used[1] < 0.8 * used[0]  # 7 conversations in 4 rows
  (one_each, parts), (packed, packed_parts) = found
  np.testing.assert_allclose(packed_parts, parts, rtol=1e-6)
  for (path, x), want in zip(jax.tree.leaves_with_path(packed), jax.tree.leaves(one_each), strict=True):
    assert np.linalg.norm(x - want) <= 1e-5 * np.linalg.norm(want), path  # rounding, as of blocks of queries


@pytest.mark.slow
@pytest.mark.parametrize('separate', [False, True])
@pytest.mark.exhaustive_cases('False')
def test_the_gradient_norm_of_a_step_is_that_which_is_clipped(separate):
  data, config = made_up_examples(), small_config(sft__value_coef=0.5)
  model = random_model(40)
  if separate:
    model = ActorCritic(model.policy, random_model(40, seed=1).policy)
  policy = LanguageModel('', model, ChatTokenizer(presets.resolve('tiny', '')), None, make_mesh(1, 1, 1))
  trainer = sft.make_trainer(config, policy)
  assert ('critic' in trainer.state.trained) == separate
  cut = list(batches(data, np.arange(8), batch_size=8, length_step=16, packing=None, mesh=None))
  gradients, (loss, value_loss) = trainer.gradients(cut)
  expected = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(jax.device_get(gradients))))
  found = jax.device_get(trainer.step(cut)[1])
  watched = trainer.watched(found)
  assert list(watched) == [LOSS, GRAD_NORM, VALUE_LOSS]
  np.testing.assert_allclose(list(watched.values()), [loss, expected, value_loss], rtol=1e-5)
  without = sft.make_trainer(small_config(), policy)
  assert VALUE_LOSS not in without.watched(found)


def test_the_learning_rate_rises_over_a_twentieth_of_the_steps_and_falls_to_a_tenth():
  settings = SftSettings(
    steps=100, learning_rate=1e-3, value_coef=0.0, b1=0.9, b2=0.99, weight_decay=0.0, grad_clip=1.0
  )
  rates = [float(make_schedule(settings)(step)) for step in (0, 1, 5, 100)]
  assert rates == pytest.approx([0, 2e-4, 1e-3, 1e-4])


@pytest.mark.slow
def test_the_tower_of_a_fresh_model_learns_the_same_from_packed_rows():
  data, rows = examples_with_images(8), np.arange(8)
  ids = dict(zip(tiny_vision.SPECIALS, (42, 43, IMAGE, 44), strict=True))
  tower, mesh = tiny_vision.tower_config((16, 1, 2, 16), 32, ids), make_mesh(1, 1, 1)
  model = tiny_tokenizer.make_model(
    (32, 1, 2, 1, 8, 32), 45, tower=tower, linear_layers=0, dtype='float32', attention='einsum', seed=0, mesh=mesh
  )
  config = small_config(sft__value_coef=0.5)
  policy = LanguageModel('', model, ChatTokenizer(presets.resolve('tiny', '')), None, mesh)
  trainer = sft.make_trainer(config, policy)
  cut = [
    list(batches(data, rows, batch_size=8, length_step=16, packing=packing, mesh=None)) for packing in (None, _BINS)
  ]
  assert sum(b.tokens.size for b in cut[1]) < sum(b.tokens.size for b in cut[0])
  (one_each, parts), (packed, packed_parts) = (trainer.gradients(batches) for batches in cut)
  np.testing.assert_allclose(packed_parts, parts, rtol=1e-5)
  assert all(np.linalg.norm(x) > 0 for x in jax.tree.leaves(one_each['policy']['visual']['patch_embed']))
  for (path, x), want in zip(jax.tree.leaves_with_path(packed), jax.tree.leaves(one_each), strict=True):
    assert np.linalg.norm(x - want) <= 1e-4 * np.linalg.norm(want) + 1e-7, path
