"""The policy as a speaker: the ids in a Trajectory are exactly those that were fed and sampled, in whatever batches."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build
from ragen_jax.agent.context_manager import Prompt
from ragen_jax.agent.episode import Status
from ragen_jax.agent.language_model import make_sampler
from ragen_jax.agent.sampler_speaker import SamplerSpeaker, _Chosen
from ragen_jax.agent.trajectory import Timeline
from ragen_jax.models import presets
from ragen_jax.sampling.draw import PLAIN, Sampling
from ragen_jax.sampling.feeding import Stage
from ragen_jax.sampling.schedule import Share
from ragen_jax.sampling.shapes import Shapes
from ragen_jax.training.batches import TokenRows, sampled_columns
from tests.support import learning
from tests.support.compilations import compiled
from tests.support.configs import small_config
from tests.support.models import random_policy
from tests.support.speakers import ScriptedSampler, make_proxy


class Recorder:
  """Stands between the speaker and the sampler and writes down, row by row, every id that passes."""

  def __init__(self, sampler, rows):
    self.timelines = {r: [] for r in range(rows)}
    self.sampled = {r: [] for r in range(rows)}
    self.turn_ends = {r: [] for r in range(rows)}
    self.batch_sizes = []
    self.copied = set()
    self._sampler = sampler
    self._fed = self._slots = None

  def __getattr__(self, name):
    return getattr(self._sampler, name)

  def observe(self, fed):
    """The rows that the next calls are about."""
    self._fed, self._slots = fed.rows, fed.slots

  def extend(self, params, state, tokens, count, begins, **options):
    for row, ids, n in zip(self._fed, np.asarray(tokens), np.asarray(count), strict=True):
      if n:
        self.timelines[int(row)] += ids[:n].tolist()
        self.sampled[int(row)] += [False] * int(n)
    return self._sampler.extend(params, state, tokens, count, begins, **options)

  def share_rows(self, state, source, columns):
    slots = self._slots.tolist()  # of one shard
    for at, of in enumerate(source.tolist()):
      if of != at:
        self.timelines[slots[at]] = list(self.timelines[slots[of]])
        self.sampled[slots[at]] = list(self.sampled[slots[of]])
        self.copied.add(slots[at])
    return self._sampler.share_rows(state, source, columns)

  def decode(self, *args, **kwargs):
    state, reply, goes_on = self._sampler.decode(*args, **kwargs)
    host = jax.device_get(reply)
    slots = self._slots if kwargs['rows'] is None else self._slots[kwargs['rows']]
    self.batch_sizes.append(len(slots))
    for row, ids, n, still in zip(slots, host.tokens, host.count, host.open, strict=True):
      if n:
        self.timelines[int(row)] += ids[:n].tolist()
        self.sampled[int(row)] += [True] * int(n)
        if not still:
          self.turn_ends[int(row)].append(len(self.timelines[int(row)]) - 1)
    return state, reply, goes_on


def _rollout(directory, config, *, seed=0, temperature=1.0, policy=None):
  policy = policy or random_policy(config, directory, seed=seed)
  tags = tuple(config.train.tags)
  specs = build.env_specs(config, tags, build.group_counts(config.train, 'train'))
  proxy = build.agent_proxy(config, policy.tokenizer, policy.sampler, specs, config.train.group_size)
  recorder = Recorder(policy.sampler, proxy.envs.rows)
  params = nnx.split(policy.model)[1]
  speaker = SamplerSpeaker(
    recorder, params, jax.random.key(seed), Sampling(temperature, top_p=1.0, top_k=0), observer=recorder.observe
  )
  rollout = proxy.rollout(speaker, 10_000)
  return policy, params, rollout, recorder, proxy


def _tiny_config(**fields):
  return small_config(**{'agent__max_response_tokens': 24, 'length_step': 128} | fields)


@pytest.fixture(scope='module', params=[pytest.param('random', marks=pytest.mark.slow), 'built-in'])
def played(request, tmp_path_factory):
  config = _tiny_config(train__tags=('FrozenLake', 'SimpleSokoban'), train__groups=8)
  policy = build.load_policy(config) if request.param == 'built-in' else None
  return _rollout(tmp_path_factory.mktemp('model'), config, policy=policy)


@pytest.mark.slow_cases('built-in')
@pytest.mark.exhaustive_cases('random')
def test_ids_are_those_fed_and_sampled(played):
  _, _, rollout, recorder, _ = played
  t = rollout.trajectory
  turns = {len(e.turns) for e in rollout.episodes}
  assert max(turns) == 5  # some episodes are really long
  for row, timeline in recorder.timelines.items():
    n = int(t.length[row])
    assert n == len(timeline)
    assert t.tokens[row, :n].tolist() == timeline
    assert not t.loss_mask[row, n:].any() and (t.turn[row, n:] == -1).all()


def test_loss_mask_is_true_on_sampled_tokens_and_only_there(played):
  policy, _, rollout, recorder, _ = played
  t = rollout.trajectory
  stop = policy.tokenizer.stop_ids[0]
  prefix = policy.tokenizer.encode('<think>')
  stops_trained = stops_forced = 0
  for row, sampled in recorder.sampled.items():
    n = len(sampled)
    assert t.loss_mask[row, :n].tolist() == sampled
    ids, mask = t.tokens[row, :n], t.loss_mask[row, :n]
    stops_trained += int(np.sum((ids == stop) & mask))
    stops_forced += int(np.sum((ids == stop) & ~mask))
    for start in np.flatnonzero(mask & ~np.roll(mask, 1)):
      assert ids[start - len(prefix) : start].tolist() == list(prefix) and not mask[start - len(prefix) : start].any()
  assert stops_forced > 0  # those of the system and user messages, at least
  assert t.logprobs[~t.loss_mask].tolist() == [0.0] * int((~t.loss_mask).sum())
  if policy.directory == presets.resolve('tiny', ''):
    assert stops_trained > 0.9 * sum(len(e.turns) for e in rollout.episodes)


@pytest.mark.slow
def test_a_cut_reply_is_closed_by_a_token_without_loss(tmp_path):
  config = _tiny_config()
  policy, _, rollout, recorder, _ = _rollout(tmp_path, config)
  t, stop = rollout.trajectory, policy.tokenizer.stop_ids[0]
  cut = 0
  for row, ends in recorder.turn_ends.items():
    for end in ends[:-1]:
      if t.tokens[row, end] not in policy.tokenizer.stop_ids:
        assert t.tokens[row, end + 1] == stop and not t.loss_mask[row, end + 1]
        cut += 1
  assert cut > 0


def test_rewards_are_on_each_turn_s_last_sampled_token(played):
  _, _, rollout, recorder, _ = played
  t = rollout.trajectory
  for row, episode in enumerate(rollout.episodes):
    expected = np.zeros(t.rewards.shape[1], np.float32)
    for end, turn in zip(recorder.turn_ends[row], episode.turns, strict=True):
      expected[end] = np.float32(turn.reward + turn.penalty)
      assert t.loss_mask[row, end]
    np.testing.assert_allclose(t.rewards[row], expected, atol=1e-6)
    assert t.rewards[row].sum() == pytest.approx(episode.score, abs=1e-5)


def test_sampler_s_logprobs_and_values_equal_a_full_forward_pass_on_the_timeline(played):
  policy, params, rollout, _, _ = played
  t = rollout.trajectory
  columns, mask = sampled_columns(t.loss_mask)
  logprobs, entropies, values = learning.score(
    nnx.merge(nnx.split(policy.model)[0], params),
    TokenRows(t.tokens, columns, columns > 0),
    learning.scoring(vocab_limit=policy.tokenizer.size),
  )
  for recorded, recomputed in ((t.logprobs, logprobs), (t.values, values), (t.entropies, entropies)):
    at = np.take_along_axis(recorded, columns, axis=1)
    np.testing.assert_allclose(at[mask], np.asarray(recomputed)[mask], atol=1e-4)


def test_turns_number_the_observation_and_its_reply(played):
  _, _, rollout, recorder, _ = played
  t = rollout.trajectory
  for row, ends in recorder.turn_ends.items():
    expected = np.concatenate([np.full(b - a, i) for i, (a, b) in enumerate(zip([-1, *ends[:-1]], ends, strict=True))])
    assert t.turn[row, : len(expected)].tolist() == expected.tolist()


@pytest.mark.slow
def test_rows_that_are_over_leave_the_batch_and_nothing_else_changes(tmp_path):
  policy = build.load_policy(_tiny_config())
  runs = []
  for drop in (True, False):
    # Few actions, so that episodes run out of them after two turns, three or four.
    config = _tiny_config(
      agent__drop_finished=drop,
      train__groups=8,
      train__group_size=8,
      envs__FrozenLake__max_actions=4,
      envs__FrozenLake__max_turns=5,
    )
    fresh = dataclasses.replace(policy, sampler=make_sampler(policy.model, policy.tokenizer))
    runs.append(_rollout(tmp_path, config, policy=fresh))
  assert min(runs[0][3].batch_sizes) < 64 and min(runs[1][3].batch_sizes) == 64
  a, b = runs[0][2].trajectory, runs[1][2].trajectory
  np.testing.assert_array_equal(a.tokens, b.tokens)
  np.testing.assert_array_equal(a.status, b.status)
  # Batches of two sizes are two programs, which add in different orders: 1e-5 of a log-prob, whatever its size.
  np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_an_episode_that_outgrows_its_context_ends_with_a_status(tmp_path):
  config = _tiny_config(agent__max_context=160)
  _, _, rollout, recorder, _ = _rollout(tmp_path, config)
  t = rollout.trajectory
  assert (t.status == Status.OUT_OF_CONTEXT).any()
  assert t.length.max() <= 160
  for row, timeline in recorder.timelines.items():
    assert t.tokens[row, : t.length[row]].tolist() == timeline


@pytest.mark.slow
@pytest.mark.usefixtures('new_programs')
def test_programs_are_compiled_a_bounded_number_of_times_over_ragged_rollouts(tmp_path):
  config = _tiny_config(train__groups=8, train__group_size=8, length_step=64)
  policy = build.load_policy(config)
  specs = build.env_specs(config, ('FrozenLake',), (8,))
  proxy = build.agent_proxy(config, policy.tokenizer, policy.sampler, specs, 8)
  params = nnx.split(policy.model)[1]
  lengths = set()
  with compiled() as names:
    for i in range(8):
      rollout = proxy.rollout(SamplerSpeaker(policy.sampler, params, jax.random.key(i), PLAIN), 10_000 + 8 * i)
      lengths |= set(rollout.trajectory.length.tolist())
  assert len(lengths) > 20  # they are ragged
  shapes = Shapes(64, 1, config.agent.max_context, 32, 64)
  assert policy.sampler.traces['decode'] <= len(shapes.caches) + len(shapes.decoded) - 1
  assert policy.sampler.traces['extend'] <= 8
  assert policy.sampler.traces['resize'] < len(shapes.caches)
  assert names.count('step') <= 1  # none if another batch of this file had the same shape


class KeyRecorder:
  """A sampler that notes the keys of the rows that take part, turn by turn."""

  def __init__(self, sampler):
    self._sampler = sampler
    self.drawn = []

  def __getattr__(self, name):
    return getattr(self._sampler, name)

  def decode(self, params, state, keys, budget, **options):
    self.drawn.append([tuple(key) for key in jax.random.key_data(keys)[np.asarray(budget) > 0].tolist()])
    return self._sampler.decode(params, state, keys, budget, **options)


def test_draws_of_different_turns_are_independent():
  """Rows begin anew at position 0; with the turn left out of the key, every turn would draw with the same luck."""
  config = small_config(train__groups=8, agent__context='single_turn', agent__context_turns=1, train__temperature=1.0)
  policy = build.load_policy(config)
  sampler = KeyRecorder(policy.sampler)
  trainer = build.make_trainer(config, dataclasses.replace(policy, sampler=sampler))
  trainer.rollout(trainer.init())
  assert len(sampler.drawn) > 2
  every = [key for turn in sampler.drawn for key in turn]
  assert len(set(every)) == len(every) > 32  # all rows draw in the first turn, and some go on


class SizedSampler(ScriptedSampler):
  """Notes the columns of the cache, the columns that each turn needs, and the rows that sample."""

  def __init__(self, tokenizer, replies):
    super().__init__(tokenizer, replies)
    self.sizes, self.needed, self.decoded, self._size, self._most = [], [], [], 0, 0

  def init(self, rows, size):
    self._size, self._count = size, np.zeros(rows, int)
    return super().init(rows, size)

  def resize(self, state, size):
    self._size = size
    return super().resize(state, size)

  def decode(self, params, state, keys, budget, *, columns, rows, **options):
    at = state if rows is None else rows
    state, reply, goes_on = super().decode(params, state, keys, budget, columns=columns, rows=rows, **options)
    self.needed.append(max(self._most, self._count[at[budget > 0]].max() + columns))
    self.sizes.append(self._size)
    self._count[at] += np.asarray(reply.count)
    self._most = 0
    self.decoded.append(len(reply.count))
    return state, reply, goes_on

  def extend(self, params, state, tokens, count, begins, *, rows, **options):
    at = state if rows is None else rows
    self._count[at[begins]] = 0
    fed = count > 0
    self._most = max(self._most, self._count[at[fed]].max() + tokens.shape[1])
    assert self._most <= self._size
    self._count[at] += count
    return super().extend(params, state, tokens, count, begins, rows=rows, **options)

  def share_rows(self, state, source, columns):
    assert self._count[source[source != state]].max() <= columns <= self._size
    self._count = self._count[source]
    return super().share_rows(state, source, columns)


def _say(count):
  return '</think><answer>' + ' || '.join(['Up'] * count) + '</answer>'


def _scripted(tiny, *, drop_finished):
  """16 episodes, of which 12 are out of actions after two turns: (rollout, what was fed, sampler)."""
  proxy = make_proxy(tiny, ('SimpleSokoban',), 8, 2, drop_finished=drop_finished, length_step=64)
  replies = [[_say(5 if row % 4 else 1 + row // 8)] * 5 for row in range(16)]
  fed, sampler = [], SizedSampler(tiny, replies)
  speaker = SamplerSpeaker(sampler, None, jax.random.key(0), PLAIN, observer=fed.append)
  return proxy.rollout(speaker, 70), fed, sampler


def test_rows_that_are_over_leave_a_scripted_batch_too(tiny):
  """As with a model (slow, above): each reply goes to the episode that it was written for, wherever its row lies."""
  (dropped, fed, some), (kept, whole, every) = (_scripted(tiny, drop_finished=drop) for drop in (True, False))
  assert every.decoded == [16] * 5
  assert some.decoded == [16, 16, 5, 5, 5]
  jax.tree.map(np.testing.assert_array_equal, dropped.trajectory, kept.trajectory)
  assert [e.status for e in dropped.episodes] == [e.status for e in kept.episodes]
  assert {e.status for e in dropped.episodes} == {Status.OUT_OF_ACTIONS, Status.OUT_OF_TURNS}
  for small, large in zip(fed, whole, strict=True):
    for call in (small, large):  # rows that are over are fed nothing
      assert (call.count[call.rows < 0] == 0).all() and len(call.count) in (1, 4)
    taking_part = [
      dict(zip(t.rows[t.count > 0], map(tuple, t.tokens[t.count > 0]), strict=True)) for t in (small, large)
    ]
    assert taking_part[0] == taking_part[1]


def test_sizes_are_few_and_have_room_for_the_turn(tiny):
  _, fed, sampler = _scripted(tiny, drop_finished=True)
  shapes = Shapes(16, 1, 1024, 64, 64)
  assert len(set(sampler.sizes)) > 1 and sampler.sizes == sorted(sampler.sizes)
  assert sampler.sizes == [shapes.cache(n) for n in np.maximum.accumulate(sampler.needed)]
  assert {call.tokens.shape[1] for call in fed} <= set(shapes.widths)


def test_a_reply_without_the_stop_token_is_not_closed(tiny):
  class Endless(ScriptedSampler):
    def decode(self, *arguments, **options):
      state, reply, goes_on = super().decode(*arguments, **options)
      return state, dataclasses.replace(reply, count=reply.count - (reply.count > 0)), goes_on

  speaker = SamplerSpeaker(Endless(tiny, [[_say(1)] * 5] * 2), None, jax.random.key(0), PLAIN)
  first, _ = make_proxy(tiny, ('SimpleSokoban',), 1, 2).rollout(speaker, 70).episodes
  assert [turn.closed for turn in first.turns] == [False] * 5
  assert first.turns[0].ids == tiny.encode(_say(1)) and first.turns[0].reply == '<think>' + _say(1)


def _pieces_config(**fields):
  return _tiny_config(
    agent__max_response_tokens=8, agent__decode_chunk=4, train__tags=('FrozenLake', 'SimpleSokoban'), train__groups=2,
    train__group_size=2, envs__FrozenLake__max_turns=2, envs__SimpleSokoban__max_turns=2, **fields,
  )  # fmt: skip


@pytest.mark.parametrize('kind', ['common', 'begin', 'follow'])
def test_only_the_first_piece_of_a_prompt_begins_a_row(kind):
  calls = []

  def extend(params, state, tokens, count, begins, rows, images):
    calls.append((tokens.tolist(), count.tolist(), begins.tolist()))

  speaker = types.SimpleNamespace(
    _observer=None, _params=None, _state=None, _sampler=types.SimpleNamespace(extend=extend, experts=False),
  )  # fmt: skip
  log = types.SimpleNamespace(
    context=types.SimpleNamespace(tokenizer=types.SimpleNamespace(pad_id=0)),
    envs=types.SimpleNamespace(has_images=False),
  )
  stage = Stage(kind, (2,), slice(0, None), (4, 4, 2), before=0, columns=16, shared=0)
  prompts = {5: Prompt(tuple(range(1, 11)), kind != 'follow'), 7: Prompt((1, 2), kind != 'follow')}
  call = types.SimpleNamespace(stage=stage, episodes=np.asarray([5, -1, 7]), rows=None)
  SamplerSpeaker._extend(speaker, log, prompts, call)
  first = stage.empties
  assert first == (kind != 'follow')
  assert calls == [
    ([[1, 2, 3, 4], [0] * 4, [1, 2, 0, 0]], [4, 0, 2], [first, False, first]),
    ([[5, 6, 7, 8], [0] * 4, [0] * 4], [4, 0, 0], [False] * 3),
    ([[9, 10], [0] * 2, [0] * 2], [2, 0, 0], [False] * 3),
  ]


def test_experts_of_prompts_stand_behind_their_rows_whether_fed_in_pieces_or_copied():
  """Rows 0 to 2 begin: their first two tokens are those of row 0, and row 2 copies row 1. Row 3 goes on."""
  timeline = Timeline(4, 6)
  timeline.record_experts((1, 1), np.dtype(np.uint8))
  timeline.append_context(3, (8, 8), 0)
  prompts = {row: Prompt((5,) * n, row < 3) for row, n in enumerate((4, 3, 3, 2))}

  def chosen(episodes, first, *experts):
    of_tokens = jnp.asarray([[*x, *[99] * (3 - len(x))] for x in experts], jnp.uint8)[..., None, None]
    return _Chosen(np.asarray(episodes), first, np.asarray([*map(len, experts)]), of_tokens)

  found = [
    chosen([0, -1], 0, [1, 2], []), Share(np.asarray([0, 0, 2, 0, 1, 2]), 2),
    chosen([0, 1], 2, [3, 4], [5]), Share(np.asarray([0, 1, 1, 0, 1, 2]), 5),
    chosen([-1, 3], 0, [], [6]), chosen([-1, 3], 1, [], [7]),
  ]  # fmt: skip
  speaker = types.SimpleNamespace(_schedule=types.SimpleNamespace(slots=np.asarray([[0, 1, 2], [3, -1, -1]])))
  SamplerSpeaker._record(speaker, types.SimpleNamespace(timeline=timeline), prompts, found)
  recorded = timeline.experts[:, :, 0, 0].tolist()
  assert recorded == [[1, 2, 3, 4, 0, 0], [1, 2, 5, 0, 0, 0], [1, 2, 5, 0, 0, 0], [0, 0, 6, 7, 0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize('schedule', ['lockstep', 'continuous'])
@pytest.mark.exhaustive_cases('continuous')
def test_prompts_in_several_pieces_are_those_fed_in_one_call(tmp_path, monkeypatch, schedule):
  """First prompts are longer than the widest call, and later ones are divided too; rows end in different pieces."""
  config, found = _pieces_config(agent__schedule=schedule), []
  policy = random_policy(config, tmp_path)
  for widths in (None, (16, 32)):
    if widths:
      monkeypatch.setattr(Shapes, 'widths', widths)
    fresh = dataclasses.replace(policy, sampler=make_sampler(policy.model, policy.tokenizer))
    specs = build.env_specs(config, tuple(config.train.tags), build.group_counts(config.train, 'train'))
    proxy, fed = build.agent_proxy(config, policy.tokenizer, fresh.sampler, specs, 2), []
    speaker = SamplerSpeaker(
      fresh.sampler, nnx.split(policy.model)[1], jax.random.key(0), Sampling(1.0, top_p=1.0, top_k=0),
      observer=fed.append,
    )  # fmt: skip
    found.append((proxy.rollout(speaker, 10_000).trajectory, fed))
  (whole, once), (cut, pieces) = found
  widest = 32
  first = np.argmax(whole.loss_mask, axis=1)  # tokens of first prompts
  assert first.min() > widest and len({-(-n // widest) for n in first.tolist()}) > 1
  assert max(x.tokens.shape[1] for x in pieces) == widest < max(x.tokens.shape[1] for x in once)
  assert max(int(x.count.max()) for x in once[1:]) > widest  # a later prompt
  # The calls for one stage, here first prompts or later ones, have the pieces of its longest prompt.
  calls = {later: [int(x.count.max()) for x in once if (len(x.count) > 1) == later] for later in (False, True)}
  assert [len(x) for x in calls.values()] == [2, 1]
  assert len(pieces) == sum(len(x) * -(-max(x) // widest) for x in calls.values())
  for name in ('tokens', 'loss_mask', 'turn', 'length', 'status'):
    np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name), err_msg=name)
  for name in ('logprobs', 'values', 'entropies'):
    np.testing.assert_allclose(getattr(cut, name), getattr(whole, name), rtol=1e-5, atol=1e-5, err_msg=name)
