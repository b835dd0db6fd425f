"""Which training episodes are kept for the viewer, and that their numbers are those of the update."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.training.records import Recorder
from tests.support.configs import small_config
from tests.support.plain import sampled_in_turn
from tests.support.speakers import REPLIES, ScriptedSampler


class NoisySampler(ScriptedSampler):
  """Written replies, with random numbers on their tokens."""

  values = True

  def decode(self, *arguments, **options):
    state, reply, goes_on = super().decode(*arguments, **options)
    rng = np.random.default_rng(self._turn)
    logprobs, values = jnp.asarray(rng.normal(size=(2, *reply.tokens.shape)), jnp.float32)
    return state, dataclasses.replace(reply, logprobs=-jnp.abs(logprobs), values=values), goes_on


@pytest.fixture(scope='module')
def iteration(policy):
  """An iteration up to its update: (trainer, rollout, selection, batch, episodes, records).

  Replies are scripted, and half of the groups are filtered out.
  """
  config = small_config(
    train__tags=('FrozenLake', 'Bandit'), train__groups=4, agent__max_response_tokens=64, logging__episodes=6,
    filter__value=0.5, algorithm__lam=0.9,
  )  # fmt: skip
  replies = [REPLIES[row % 3 :] + REPLIES for row in range(8)]
  replies += [[f'</think><answer>{("Phoenix", "Dragon")[row % 2]}</answer>'] for row in range(8)]
  trainer = build.make_trainer(config, dataclasses.replace(policy, sampler=NoisySampler(policy.tokenizer, replies)))
  state = trainer.init()
  rollout, selection = trainer.collect(state)
  batch, _ = trainer.estimate(state, selection)
  return trainer, rollout, selection, batch, *trainer.recorder.records(rollout, selection, batch, 0)


def test_the_first_episodes_of_each_environment_are_kept(iteration):
  _, rollout, _, _, episodes, records = iteration
  assert [e.tag for e in episodes] == ['FrozenLake'] * 6 + ['Bandit'] * 6
  assert [(r['tag'], r['level'], r['member']) for r in records] == [
    (e.tag, e.level_seed, i % 4) for e, i in zip(episodes, [*range(6), *range(6)], strict=True)
  ]
  assert episodes == rollout.episodes[:6] + rollout.episodes[8:14]
  assert {r['step'] for r in records} == {1} and {r['split'] for r in records} == {'train'}


def test_advantages_stand_on_the_tokens_that_they_are_of(iteration):
  _, rollout, selection, batch, episodes, records = iteration
  learnt = []
  for episode, record in zip(episodes, records, strict=True):
    row = next(i for i, e in enumerate(rollout.episodes) if e is episode)
    learnt.append(record['learnt'])
    assert record['learnt'] == selection.keep[row]
    for i, turn in enumerate(record['turns']):
      if not record['learnt']:
        assert 'advantage' not in turn
        continue
      _, columns = sampled_in_turn(rollout, row, i)
      place = {int(c): j for j, c in enumerate(batch.columns[row]) if batch.mask[row, j]}
      expected = [batch.advantages[row, place[column]] for column in columns]
      np.testing.assert_allclose(turn['advantage'], expected, rtol=5e-4)
  assert len(set(learnt)) == 2
  assert len({x for r in records for turn in r['turns'] for x in turn.get('advantage', ())}) > 10


def test_only_what_is_kept_is_drawn_and_most_iterations_keep_nothing(iteration):
  trainer, rollout, selection, batch, _, _ = iteration
  drawn = [i for i, e in enumerate(rollout.episodes) if e.final_picture is not None]
  assert drawn == [*range(6), *range(8, 14)]
  settings = trainer.settings.records
  every = settings.episodes_every
  kept = [i for i in range(12) if trainer.recorder.records(rollout, selection, batch, i)[1]]
  assert kept == [0, every - 1, 2 * every - 1]
  # A rollout of several iterations, of which the last of the second rollout is a multiple.
  twice = dataclasses.replace(settings, online_k=4, episodes_every=8)
  recorder = Recorder(twice, trainer.player, trainer.model.tokenizer)
  assert [i for i in range(0, 20, 4) if recorder.rows(i)] == [0, 4, 12]
  off = Recorder(dataclasses.replace(settings, episodes_every=0), trainer.player, trainer.model.tokenizer)
  assert not off.records(rollout, selection, batch, 0)[1]


def test_values_that_the_sampler_does_not_record_are_the_critic_s_own(iteration):
  """Without them in the rollout, those of the batch are shown, where the update learnt and an estimator reads them."""
  trainer, rollout, selection, batch, episodes, _ = iteration
  batch = batch.replace(old_values=np.where(batch.mask, np.random.default_rng(0).normal(size=batch.mask.shape), 0))
  for needs_critic in (True, False):
    settings = dataclasses.replace(trainer.settings.records, records_values=False, needs_critic=needs_critic)
    recorder = Recorder(settings, trainer.player, trainer.model.tokenizer)
    shown = recorder.records(rollout, selection, batch, 0)[1]
    for episode, record in zip(episodes, shown, strict=True):
      row = next(i for i, e in enumerate(rollout.episodes) if e is episode)
      for i, turn in enumerate(record['turns']):
        assert ('value' in turn) == (needs_critic and record['learnt'])
        if 'value' in turn:
          _, columns = sampled_in_turn(rollout, row, i)
          place = {int(c): j for j, c in enumerate(batch.columns[row]) if batch.mask[row, j]}
          np.testing.assert_allclose(turn['value'], [batch.old_values[row, place[c]] for c in columns], rtol=5e-4)


def test_rows_of_replay_behind_the_fresh_ones_and_masks_of_the_loss_are_told(iteration):
  trainer, rollout, selection, batch, _, records = iteration
  settings = dataclasses.replace(trainer.settings.records, prompts_trained=True)
  recorder = Recorder(settings, trainer.player, trainer.model.tokenizer)
  assert not any(record['prompts_trained'] for record in records)
  assert all(record['prompts_trained'] for record in recorder.records(rollout, selection, batch, 0)[1])
  # A selection whose last rows were replayed: the rollout of the iteration has the first ones.
  twice = dataclasses.replace(selection, keep=np.tile(selection.keep, 2))
  double = batch.replace(**{n: np.concatenate([x, x]) for n, x in vars(batch).items() if isinstance(x, np.ndarray)})
  again = trainer.recorder.records(rollout, twice, double, 0)[1]
  assert [r['learnt'] for r in again] == [r['learnt'] for r in records]
