"""Packed rows against a row each, and the schedule of the learning rate."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.models import presets
from ragen_jax.modes import sft
from ragen_jax.sft.packing import batches
from ragen_jax.sft.trainer import SftSettings, make_schedule
from tests.support.configs import small_config
from tests.support.examples import made_up_examples
from tests.support.models import random_model


def test_packed_rows_give_the_losses_and_gradients_of_a_row_each():
  data, rows = made_up_examples(), np.asarray([6, 0, 1, 3, 2, 5, 4])
  config = small_config(sft__value_coef=0.5)
  model = random_model(40)
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  policy = LanguageModel('', model, tokenizer, None, jax.make_mesh((1,), ('data',), devices=jax.devices()[:1]))
  trainer = sft.make_trainer(config, policy)
  found, used = [], []
  for packing in (False, True):
    cut = list(batches(data, rows, batch_size=7, length_step=16, packing=packing, mesh=None))
    used.append(sum(b.tokens.size for b in cut))
    assert sum(int((b.weights > 0).sum()) for b in cut) == int(data.sampled[rows].sum())
    found.append(trainer.gradients(cut))
  assert used[1] < 0.8 * used[0]  # 7 conversations in 4 rows
  (one_each, parts), (packed, packed_parts) = found
  np.testing.assert_allclose(packed_parts, parts, rtol=1e-6)
  for (path, x), want in zip(jax.tree.leaves_with_path(packed), jax.tree.leaves(one_each), strict=True):
    assert np.linalg.norm(x - want) <= 1e-5 * np.linalg.norm(want), path  # rounding, as of blocks of queries


def test_the_learning_rate_rises_over_a_twentieth_of_the_steps_and_falls_to_a_tenth():
  settings = SftSettings(
    steps=100, learning_rate=1e-3, value_coef=0.0, b1=0.9, b2=0.99, weight_decay=0.0, grad_clip=1.0
  )
  rates = [float(make_schedule(settings)(step)) for step in (0, 1, 5, 100)]
  assert rates == pytest.approx([0, 2e-4, 1e-3, 1e-4])
