"""Programs that show boards as images over HTTP give the rows of the environment, and the update sees the same."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax import build, build_agents
from ragen_jax.agent.language_model import param_state
from ragen_jax.agent.segments import images_of
from ragen_jax.config.checks import check_config
from ragen_jax.training.batches import TokenRows, at_columns, sampled_columns
from ragen_jax.training.packing import plan_rows
from tests.support import learning
from tests.support.configs import small_config
from tests.support.paths import ROOT

pytest.importorskip('starlette')
pytestmark = pytest.mark.slow

GROUPS, SIZE, FIRST = 2, 2, 90_000
LIMITS = {
  'model.preset': 'tiny-vl', 'agent.max_context': 640, 'agent.max_response_tokens': 32, 'train.temperature': 0.7,
  'train.groups': GROUPS, 'train.group_size': SIZE, 'optimizer.mini_batch_size': 4,
}  # fmt: skip


RUNNERS = {
  'a program': {'serve.success_reward': 'goal', 'envs.Agent.runner': f'{ROOT}/docs/examples/frozenlake_images.py:play'},
  'the built-in runner': {'serve.success_reward': 'success', 'envs.Agent.runner': 'env:FrozenLake'},
}


@pytest.fixture(scope='module', params=RUNNERS)
def played(request, tmp_path_factory):
  """The rollout of the environment, the trainer of a program's run, its state and its rollout."""
  inside = small_config({**LIMITS, 'envs.FrozenLake.observation': 'image', 'envs.FrozenLake.max_turns': 5})
  policy = build.load_policy(inside)
  specs = build.env_specs(inside, ('FrozenLake',), (GROUPS,))
  player, key = build.environment_player(inside, policy, specs, SIZE), jax.random.key(5)
  sampling, params = build.sampling(inside.train), param_state(policy.model)
  expected = player.play(params, key, sampling, FIRST, policy_version=4)
  config = small_config({
    **LIMITS, 'train.tags': ('Agent',), 'eval.tags': ('Agent',), 'eval.groups': 1, 'eval.group_size': 1,
    'serve.port': 0, 'serve.slots': 4, 'envs.Agent.max_turns': 5, 'envs.FrozenLake.observation': 'image',
    'envs.FrozenLake.max_turns': 5, **RUNNERS[request.param],
  })  # fmt: skip
  check_config(config)
  with build_agents.open_players(config, policy, str(tmp_path_factory.mktemp('run'))) as players:
    trainer = build.make_trainer(config, policy, player=players['train'])
    state = learning.copied(trainer.init())
    yield expected, trainer, state, players['train'].play(params, key, sampling, FIRST, policy_version=4)


def test_rows_are_those_of_the_environment(played):
  expected, _, _, rollout = played
  ours, theirs = rollout.trajectory, expected.trajectory
  for name in ('length', 'tokens', 'loss_mask', 'turn', 'group', 'episode'):
    np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
  for name in ('logprobs', 'values', 'entropies', 'rewards'):
    np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=2e-4, err_msg=name)
  assert len(rollout.images) == len(expected.images) == len({image.tobytes() for image in rollout.images}) > 2
  pictures = [[r.images[i] for i in r.trajectory.image[r.trajectory.image >= 0]] for r in (rollout, expected)]
  np.testing.assert_array_equal(*pictures)
  for episode, other in zip(rollout.episodes, expected.episodes, strict=True):
    for turn, known in zip(episode.turns, other.turns, strict=True):
      np.testing.assert_array_equal(images_of(turn.observation), images_of(known.observation))


def test_the_update_gives_the_log_probs_of_the_sampler_and_trains(played):
  _, trainer, state, rollout = played
  t = rollout.trajectory
  columns, mask = sampled_columns(t.loss_mask)
  images = trainer.sight.inputs(state.params, t, rollout.images)
  (plans,) = plan_rows([np.flatnonzero(t.length)], t, trainer.settings.estimate.batching)
  found = trainer.scorer.logprobs(state.params, TokenRows(t.tokens, columns, mask, images=images), plans)
  np.testing.assert_allclose(found[mask], at_columns(t.logprobs, columns, mask)[mask], rtol=0, atol=1e-4)
  selected = trainer.select(rollout)
  batch, _ = trainer.estimate(state, selected)
  _, metrics = trainer.update(state, batch, selected)
  assert metrics['actor/grad_norm'] > 1e-4 and metrics['rollout/logprob_gap_max'] < 1e-4
