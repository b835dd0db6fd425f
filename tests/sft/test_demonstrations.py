"""Demonstrations: how well the demonstrator plays, and the rows that it writes."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Status
from ragen_jax.agent.episode_log import EpisodeLog
from ragen_jax.agent.world_model.descriptions import describe
from ragen_jax.agent.world_model.formats import described_sections
from ragen_jax.models import presets
from ragen_jax.sft.demonstrations import DemonstrationStyle, Demonstrator
from tests.support.configs import small_config


def _style(**changes) -> DemonstrationStyle:
  """Half of the turns random, half of them in a hurry, with changes."""
  fields = dict(discount=0.97, noise=0.5, hurry=0.5, beginner=0.0, timid=0.0, actions_per_turn=0)
  return DemonstrationStyle(**fields | changes)


def _demonstrations(style, tags=('FrozenLake', 'SimpleSokoban', 'Bandit'), groups=64, seed=0, **fields):
  config = small_config(**{'agent__max_context': 512} | fields)
  specs = build.env_specs(config, tags, (groups,) * len(tags))
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  context = build.context_manager(config, tokenizer, specs)
  proxy = AgentProxy(EnvStateManager(specs, 1), context, build.episode_limits(config, specs))
  rollout = proxy.rollout(Demonstrator(np.random.default_rng(seed), style), 77)
  return rollout.trajectory, rollout.episodes, proxy.envs.optimal(), tokenizer, context


@pytest.mark.slow
def test_an_expert_without_noise_reaches_the_optimum_and_noise_costs():
  expert = _style(discount=1.0, noise=0.0, hurry=0.0)
  _, episodes, optimal, _, _ = _demonstrations(expert, groups=256)
  tags = np.asarray([e.tag for e in episodes])
  success = np.asarray([e.success for e in episodes])
  for tag in ('FrozenLake', 'SimpleSokoban', 'Bandit'):
    best, reached = optimal[tags == tag].mean(), success[tags == tag].mean()
    assert abs(reached - best) < 4 * np.sqrt(best * (1 - best) / 256) + 1e-6, tag
  _, noisy, _, _, _ = _demonstrations(_style(noise=0.8), groups=256)
  assert np.mean([e.success for e in noisy]) < success.mean() - 0.2


def test_all_turns_may_be_those_of_a_beginner_or_random():
  style = _style(noise=0.9, beginner=0.1)  # 1 - 0.9 - 0.1 is below 0
  _, episodes, _, _, _ = _demonstrations(style, ('FrozenLake',), groups=4)
  assert all(e.turns for e in episodes)


@pytest.mark.slow
def test_the_loss_mask_of_demonstrations_is_on_replies_and_their_stop_tokens():
  trajectory, episodes, _, tokenizer, context = _demonstrations(_style())
  for row, episode in enumerate(episodes):
    mask, tokens = trajectory.loss_mask[row], trajectory.tokens[row]
    starts = np.flatnonzero(mask & ~np.roll(mask, 1))
    ends = np.flatnonzero(mask & ~np.roll(mask, -1))
    assert len(starts) == len(episode.turns)
    for start, end, turn in zip(starts, ends, episode.turns, strict=True):
      assert tokens[end] == tokenizer.stop_ids[0]
      assert context.reply_prefix + tokenizer.decode(tokens[start:end]) == turn.reply
      parsed = context.parse(int(trajectory.env[row]), turn.reply)
      assert parsed.valid and turn.valid and not turn.penalty
      assert turn.actions == list(parsed.names)[: len(turn.actions)] and turn.actions


@pytest.mark.slow
def test_rewards_of_demonstrations_are_on_the_last_token_of_their_turns():
  trajectory, episodes, _, tokenizer, _ = _demonstrations(_style(noise=0.2))
  ends = trajectory.loss_mask & (trajectory.tokens == tokenizer.stop_ids[0])
  assert (trajectory.rewards[~ends] == 0).all()
  for row, episode in enumerate(episodes):
    np.testing.assert_allclose(trajectory.rewards[row][ends[row]], [t.reward for t in episode.turns], atol=1e-6)
    np.testing.assert_array_equal(trajectory.turn[row][ends[row]], np.arange(len(episode.turns)))
  assert {e.tag for e in episodes if e.env_return > 0} == {'FrozenLake', 'SimpleSokoban', 'Bandit'}


def test_the_work_for_a_row_does_not_grow_with_the_number_of_rows(monkeypatch):
  reads = []
  turn = EpisodeLog.turn.fget
  monkeypatch.setattr(EpisodeLog, 'turn', property(lambda log: reads.append(log) or turn(log)))  # looks at all rows
  counts = []
  for groups in (2, 64):
    reads.clear()
    _, episodes, *_ = _demonstrations(_style(), tags=('Bandit',), groups=groups)
    assert len(episodes) == groups
    counts.append(len(reads))
  assert counts[0] == counts[1] > 0


@pytest.mark.slow
def test_rows_are_the_whole_conversation_whatever_the_context_policy_and_end_where_it_does_not_fit():
  whole, *_ = _demonstrations(_style(), groups=16)
  windowed, *_ = _demonstrations(_style(), groups=16, agent__context='single_turn', agent__context_turns=1)
  np.testing.assert_array_equal(windowed.tokens, whole.tokens)
  np.testing.assert_array_equal(windowed.rewards, whole.rewards)
  short = small_config(agent__max_context=160)
  specs = build.env_specs(short, ('SimpleSokoban',), (16,))
  context = build.context_manager(short, ChatTokenizer(presets.resolve('tiny', '')), specs)
  proxy = AgentProxy(EnvStateManager(specs, 1), context, build.episode_limits(short, specs))
  rollout = proxy.rollout(Demonstrator(np.random.default_rng(0), _style(noise=1.0)), 77)
  assert rollout.trajectory.length.max() <= 160
  cut = [e for e in rollout.episodes if e.status == Status.OUT_OF_CONTEXT]
  assert cut and all(e.turns for e in cut)


@pytest.mark.slow
@pytest.mark.parametrize('form', ['state_estimation', 'transition_modeling', 'world_modeling'])
def test_descriptions_of_demonstrations_are_true_even_if_chance_decides(form):
  _, episodes, _, _, _ = _demonstrations(
    _style(noise=0.2), ('FrozenLake', 'SimpleSokoban'), groups=12, agent__format=form, agent__max_context=4096
  )
  sections = described_sections(form)
  moved = 0
  for episode in episodes:
    for turn in episode.turns:
      assert turn.valid and set(turn.sections) == {*sections, 'reasoning', 'answer'}
      for name in sections:
        scene = turn.scenes[name == 'prediction']
        assert turn.sections[name] == describe(scene)
      moved += turn.scenes[0] != turn.scenes[1]
  assert moved > 20 and {e.tag for e in episodes} == {'FrozenLake', 'SimpleSokoban'}
