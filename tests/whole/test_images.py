"""Policies that see boards as images: the rows that come of it, and the numbers of sampler and update."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build
from ragen_jax.agent.segments import images_of
from ragen_jax.models.vision.config import QWEN2_5_VL, QWEN3_5, QWEN3_VL
from ragen_jax.training.batches import TokenRows, at_columns, sampled_columns
from ragen_jax.training.packing import plan_rows
from ragen_jax.training.probes import Probes, Prompt
from ragen_jax.utils import alike
from ragen_jax.utils.errors import UserError
from tests.support import learning
from tests.support.seeing import act_at_random, seeing_config, seeing_policy

pytestmark = pytest.mark.slow

MODES = {
  'full': {'agent__schedule': 'lockstep'},
  'limited': {'agent__context': 'limited_multi_turn', 'agent__context_turns': 2},
  'single': {'agent__context': 'single_turn', 'agent__context_turns': 3, 'agent__schedule': 'continuous',
             'agent__rows_in_flight': 8, 'agent__decode_chunk': 3},
  'drop_oldest': {'agent__overlong': 'drop_oldest', 'agent__max_context': 176},
}  # fmt: skip


@pytest.fixture(
  scope='module',
  params=[
    (QWEN3_VL, 'full'),
    *[pytest.param((family, 'full'), marks=pytest.mark.exhaustive) for family in (QWEN2_5_VL, QWEN3_5)],
    # Rows that come and go, and other rows than those that were sampled first.
    (QWEN3_5, 'single'),
    (QWEN3_VL, 'limited'),
    *[pytest.param((QWEN3_VL, mode), marks=pytest.mark.exhaustive) for mode in ('single', 'drop_oldest')],
  ],
  ids='-'.join,
)
def played(request, tmp_path_factory):
  """A trainer and a rollout of a policy that sees."""
  alike.forget()  # nothing is traced yet
  family, mode = request.param
  config = seeing_config(envs__FrozenLake__is_slippery=False, **MODES[mode])
  policy = seeing_policy(config, tmp_path_factory.mktemp('seeing'), family)
  trainer = build.make_trainer(config, policy)
  state = learning.copied(trainer.init())
  with pytest.MonkeyPatch.context() as monkeypatch:
    act_at_random(trainer.player.proxy.context, monkeypatch)
    return trainer, state, trainer.rollout(state)


def _runs(shown: np.ndarray) -> list[tuple[int, int]]:
  """(image, columns) of each run of columns of an image."""
  cuts = np.flatnonzero(np.diff(shown)) + 1
  return [(int(part[0]), len(part)) for part in np.split(shown, cuts) if part[0] >= 0]


def test_rows_show_the_images_of_their_turns_in_their_columns(played):
  trainer, _, rollout = played
  t, tokenizer = rollout.trajectory, trainer.model.tokenizer
  assert len({image.tobytes() for image in rollout.images}) == len(rollout.images) > 3
  for image in rollout.images:  # none keeps those of the other rows in memory
    assert image.base is None or memoryview(image.base).nbytes == image.nbytes
  np.testing.assert_array_equal(t.image >= 0, t.tokens == tokenizer.placeholder)
  assert not t.loss_mask[t.image >= 0].any()
  several = 0
  for row in np.flatnonzero(t.length):
    shown = _runs(t.image[row, : t.length[row]])
    assert all(columns == 16 for _, columns in shown)
    episode = rollout.episodes[t.episode[row]]
    last = int(t.turn[row].max())
    own = [images_of(turn.observation)[0] for turn in episode.turns[last + 1 - len(shown) : last + 1]]
    assert len(own) == len(shown) > 0
    for (number, _), image in zip(shown, own, strict=True):
      np.testing.assert_array_equal(rollout.images[number], image)
    several += len({number for number, _ in shown}) > 1
  assert several, 'no row shows several images'


def test_the_board_is_not_in_the_text_of_prompts(played):
  trainer, _, rollout = played
  text = trainer.model.tokenizer.decode(rollout.trajectory.tokens[0])
  assert 'Each state is an image of the board. It shows: ' in text and 'Symbols' not in text
  assert 'State:\n<|vision_start|><|image_pad|>' in text


def test_an_image_goes_through_the_tower_once(played):
  trainer, _, rollout = played
  encoder = trainer.model.encoders['policy']
  assert encoder.encoded == len(rollout.images) and encoder.traces <= 2


def _scores(trainer, state, rollout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Log-probs of the sampled tokens by the update and by the sampler, and which they are."""
  t = rollout.trajectory
  columns, mask = sampled_columns(t.loss_mask)
  images = trainer.sight.inputs(state.params, t, rollout.images)
  (plans,) = plan_rows([np.flatnonzero(t.length)], t, trainer.settings.estimate.batching)
  found = trainer.scorer.logprobs(state.params, TokenRows(t.tokens, columns, mask, images=images), plans)
  return found, at_columns(t.logprobs, columns, mask), mask


def test_update_and_sampler_give_the_same_logprobs(played):
  trainer, state, rollout = played
  found, recorded, mask = _scores(trainer, state, rollout)
  assert mask.sum() > 100
  np.testing.assert_allclose(found[mask], recorded[mask], rtol=0, atol=1e-4)
  # With other images in the same columns, the numbers differ.
  others = tuple(image[::-1] for image in rollout.images)
  changed, _, _ = _scores(trainer, state, dataclasses.replace(rollout, images=others))
  assert np.abs(changed - found)[mask].max() > 1e-3


def test_tokens_of_images_are_neither_sampled_nor_given_probability(played):
  trainer, _, rollout = played
  t, banned = rollout.trajectory, trainer.model.tokenizer.banned
  assert len(banned) == 5 and not np.isin(t.tokens[t.loss_mask], banned).any()
  assert trainer.settings.loss.scoring.banned == banned == trainer.model.sampler.banned


def test_rows_whose_placeholders_are_not_those_of_their_images_are_refused(played):
  trainer, state, rollout = played
  t, sight = rollout.trajectory, trainer.sight
  row = int(np.flatnonzero(t.length)[0])
  column = int(np.flatnonzero(t.image[row] >= 0)[0])
  for array, value in (('tokens', 5), ('image', -1)):
    changed = getattr(t, array).copy()
    changed[row, column] = value
    with pytest.raises(UserError, match=rf'^row {row}: \d+ image placeholders do not match \d+ columns of images$'):
      sight.inputs(state.params, t.replace(**{array: changed}), rollout.images)
  larger = tuple(np.zeros((40, 32, 3), np.uint8) for _ in rollout.images)
  with pytest.raises(UserError, match=r'image placeholders \(id \d+\) do not match'):
    sight.inputs(state.params, t, larger)


def test_an_update_trains_the_decoder_and_not_a_frozen_tower(played):
  trainer, state, rollout = played
  selected = trainer.select(rollout)
  batch, _ = trainer.estimate(state, selected)
  before = jax.device_get(nnx.to_pure_dict(state.params))
  after, metrics = trainer.update(learning.copied(state), batch, selected)
  assert metrics['actor/grad_norm'] > 1e-3 and metrics['rollout/logprob_gap_max'] < 1e-4
  changed = jax.tree.map(lambda x, y: bool(np.any(x != y)), before, jax.device_get(nnx.to_pure_dict(after.params)))
  assert not any(jax.tree.leaves(changed['policy'].pop('visual'))) and all(jax.tree.leaves(changed['policy']['layers']))


def _showing(rollout, count: int):
  """The same rows with `count` different images."""
  t = rollout.trajectory
  images = tuple(np.full_like(rollout.images[0], i % 256) for i in range(count))
  begins = (t.image >= 0) & (t.image != np.pad(t.image, ((0, 0), (1, 0)), constant_values=-1)[:, :-1])
  number = np.cumsum(begins).reshape(t.image.shape) % count
  return dataclasses.replace(rollout, images=images, trajectory=t.replace(image=np.where(t.image >= 0, number, -1)))


def test_the_number_of_different_images_changes_no_program(played):
  trainer, state, rollout = played
  encoder, state = trainer.model.encoders['policy'], learning.copied(state)
  probes = Probes(None, trainer)
  traces = []
  for count in (1, 2, 40):
    selected = trainer.select(_showing(rollout, count))
    batch, _ = trainer.estimate(state, selected)
    state, _ = trainer.update(state, batch, selected)
    assert not trainer.try_weights(state, batch, selected)
    t = selected.rollout.trajectory
    columns = np.flatnonzero(t.loss_mask[0])
    prompts = [Prompt(t.tokens[row, : columns[0]], t.image[row, : columns[0]]) for row in (0, 1)]
    probes.cross_scores(state.params, prompts, [t.tokens[0, columns[:2]]], selected.rollout.images)
    traces.append((dict(trainer.scorer.traces), trainer.learner.traces, encoder.traces))
  assert traces[0] == traces[1] == traces[2] and traces[0][1] > 0


def test_a_reply_after_the_prompt_of_another_sees_its_images(played):
  trainer, state, rollout = played
  t, found = rollout.trajectory, {}  # the last reply of a row for each prompt
  for row in np.flatnonzero(t.length):
    sampled = np.flatnonzero(t.loss_mask[row])
    columns = sampled[t.turn[row, sampled] == t.turn[row, sampled[-1]]]
    prompt = Prompt(t.tokens[row, : columns[0]], t.image[row, : columns[0]])
    found.setdefault(prompt.key, (prompt, (row, columns)))
  prompts, drawn = zip(*list(found.values())[-4:], strict=True)
  assert len(prompts) == 4
  scores = Probes(None, trainer).cross_scores(state.params, prompts, [t.tokens[r, c] for r, c in drawn], rollout.images)
  np.testing.assert_allclose(np.diag(scores), [t.logprobs[row, c].sum() for row, c in drawn], rtol=0, atol=1e-3)
