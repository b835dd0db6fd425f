"""Packed rows against rows by themselves: what goes where, and losses, gradients and scores."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax.algorithms.losses import AGGREGATIONS, RATIO_LEVELS
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.training.batches import (
  BatchingSettings,
  PackingSettings,
  TrainBatch,
  abstract_mini_batch,
  micro_batches,
)
from ragen_jax.training.objective import WeightSettings, token_means, with_loss_weights
from ragen_jax.training.packing import _cost, bin_shapes, pack, pack_batches, plan_batches, shared_tokens
from ragen_jax.training.scoring import Scorer
from tests.support import learning
from tests.support.models import random_model

_VOCAB, _LIMIT = 30, 27
# Bins of 24 or more columns; of 40, two go through the model at once.
_BINS = PackingSettings(step=8, width=40, columns=80, shards=1, reply_step=8, most_shared=40)


def test_packing_finds_few_bins_and_loses_nothing():
  assert pack(np.asarray([3, 5, 2, 4]), 7) == [[1, 2], [3, 0]]
  rng = np.random.default_rng(0)
  for _ in range(20):
    lengths = rng.integers(1, 101, size=rng.integers(1, 60))
    bins = pack(lengths, 100)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert max(lengths[b].sum() for b in bins) <= 100
    assert len(bins) <= 11 / 9 * (-(-lengths.sum() // 100)) + 0.5 * len(lengths)  # never one each where halves fit
    assert sum(lengths[b].sum() <= 50 for b in bins) <= 1


def test_items_with_two_sizes_fit_in_both():
  sizes = np.asarray([[3, 3], [5, 1], [2, 4], [4, 2]])
  assert pack(sizes, (7, 4)) == [[1], [3], [0], [2]]
  assert pack(sizes, (7, 5)) == [[1, 2], [3, 0]]


def test_shapes_are_few_within_memory_and_hold_any_rows():
  settings = PackingSettings(step=128, width=4096, columns=10_000, shards=8, reply_step=512)
  shapes = bin_shapes(settings)
  assert len(set(shapes)) == len(shapes) < 100
  widths = sorted({width for _, width, _ in shapes})
  assert widths[-1] == 4096 and 512 <= widths[0] <= 640
  for narrow, wide in itertools.pairwise(widths):
    assert wide - narrow == 128 or wide <= 1.2 * narrow
  for bins, width, replies in shapes:
    assert bins % 8 == 0 and width % 128 == 0 and width // 4 <= replies <= width
    assert bins // 8 in (2, 4, 8) and bins // 8 * width <= 10_000
    assert (bins, width, width) in shapes, 'any token may be scored'
  # A row that is longer than all bins gets bins of its own length.
  assert max(width for _, width, _ in bin_shapes(settings, 5000)) == 5120
  scarce = dataclasses.replace(settings, columns=4096)
  assert {bins for bins, width, _ in bin_shapes(scarce) if width == 4096} == {8}


def test_every_batch_has_one_of_the_shapes():
  settings = PackingSettings(step=8, width=160, columns=400, shards=2, reply_step=8)
  rng, shapes = np.random.default_rng(0), bin_shapes(PackingSettings(8, 160, 400, 2, 8))
  for most in (3, 20, 90, 160):
    length = rng.integers(1, most + 1, size=30)
    scored = (length * rng.random(30)).astype(int)
    groups = np.split(rng.permutation(30), [rng.integers(1, 29)])
    packed = pack_batches(groups, length, scored, settings)
    assert len({(len(p.bins), p.width, p.replies) for own in packed for p in own}) == 1
    assert all((len(p.bins), p.width, p.replies) in shapes for own in packed for p in own)


def test_a_row_with_only_scored_tokens_has_room_for_them():
  settings = PackingSettings(step=8, width=160, columns=400, shards=1, reply_step=8)
  ((plan,),) = pack_batches([np.arange(1)], np.asarray([150]), np.asarray([150]), settings)
  assert plan.replies >= 150


def test_the_shape_is_the_one_that_takes_least_time():
  """Against all shapes, tried one after the other."""
  settings = PackingSettings(step=128, width=4096, columns=10_000, shards=8, reply_step=512)
  rng = np.random.default_rng(2)
  for mean, share in itertools.product((300, 900, 2000), (0.1, 0.6, 0.7)):
    length = rng.integers(mean // 2, mean * 3 // 2, size=32)
    scored = (share * length).astype(int)
    costs = {}
    for bins, width, replies in bin_shapes(settings):
      if length.max() <= width and scored.max() <= replies:
        calls = -(-len(pack(np.stack([length, scored], axis=1), (width, replies))) // bins)
        # Attention over 3500 columns takes as long as all else; a scored token 0.3 and a call 1000 columns.
        costs[bins, width, replies] = calls * (bins / 8 * (width + width**2 / 3500 + 0.3 * replies) + 1000)
    ((plan, *_),) = pack_batches([np.arange(32)], length, scored, settings)
    assert costs[len(plan.bins), plan.width, plan.replies] == pytest.approx(min(costs.values()))
    # Rows that are mostly prompts have products with the vocabulary for a quarter of the columns.
    assert plan.replies / plan.width == pytest.approx({0.1: 0.25, 0.6: 0.625, 0.7: 1}[share], abs=0.01)


def test_rows_of_one_length_fill_nine_tenths_of_one_call():
  """Of Qwen2.5-0.5B on eight devices: 32 episodes of 1,281 columns, of which 750 are sampled."""
  settings = PackingSettings(step=128, width=3712, columns=6_000, shards=8, reply_step=512)
  ((plan,),) = pack_batches([np.arange(32)], np.full(32, 1281), np.full(32, 750), settings)
  assert 0.9 * len(plan.bins) * plan.width <= 32 * 1281 and 750 / 1281 <= plan.replies / plan.width < 0.7
  assert plan.width < 2 * 1281  # attention takes time for the whole width
  # Long and short rows share bins.
  length = np.random.default_rng(0).integers(400, 1800, 32)
  plans = pack_batches([np.arange(32)], length, length // 2, dataclasses.replace(settings, columns=20_000))[0]
  assert len(plans) == 1 and length.sum() >= 0.8 * len(plans[0].bins) * plans[0].width


# How the rows of a mini-batch go through the model: as they are, in bins, and in bins with their beginnings shared.
_KINDS = ('alone', 'rows', 'trees')


def _batch() -> tuple[TrainBatch, np.ndarray]:
  """Nine rows of up to 24 columns and three turns, and their lengths; every number differs from its default.

  Rows 0, 2, 6 and 8 begin equally, and so do 1 and 5; row 4 is the beginning of row 7.
  """
  rng = np.random.default_rng(3)
  length = np.asarray([24, 9, 12, 17, 4, 7, 20, 11, 16])
  loss_mask = np.zeros((9, 24), bool)
  for row, n in enumerate(length):
    loss_mask[row, 1:n] = rng.random(n - 1) < 0.6
    loss_mask[row, n - 1] = True
  batch = learning.mini_batch(loss_mask, _LIMIT, seed=5)
  mask = batch.mask

  def some(share):
    return mask & (rng.random(mask.shape) < share)

  batch = batch.replace(
    turn=np.where(mask, batch.columns // 9, -1).astype(np.int32), trained=some(0.7), valued=some(0.5),
    importance=np.where(mask, rng.uniform(0.4, 2.0, size=mask.shape), 0).astype(np.float32),
  )  # fmt: skip
  tokens = batch.tokens.copy()
  for row, of, columns in ((2, 0, 7), (6, 0, 13), (8, 6, 16), (5, 1, 3), (4, 7, 4)):
    tokens[row, :columns] = tokens[of, :columns]
  return batch.replace(tokens=tokens), length


_ROWS = np.asarray([4, 0, 2, 1, 6, 8, 5, 7], np.int32)  # row 3 is of another mini-batch


def _plans(batch, length, kind: str):
  if kind != 'alone':
    tokens = batch.tokens if kind == 'trees' else None
    plans = pack_batches([_ROWS], length, batch.mask.sum(axis=1), _BINS, tokens)[0]
    assert (shared_tokens(plans) > 0.2) == (kind == 'trees')
    return plans
  settings = BatchingSettings(micro_batch_size=3, length_step=24, whole_rows=False, packing=None)
  return plan_batches([_ROWS], length, batch.mask.sum(axis=1), settings)[0]


def _tokens(parts):
  """What the batches say of each scored token, sorted; turns as they are counted within their row."""
  found = []
  for part in parts:
    for b, r in zip(*np.nonzero(part.mask), strict=True):
      column = part.columns[b, r]
      path = np.arange(column + 1)
      if part.seen_until is not None:
        path = path[part.seen_until[b, path] > column]
        assert part.before[b, r] == path[-2]
      names = ('trained', 'valued', 'old_logprobs', 'advantages', 'returns', 'ref_logprobs', 'importance', 'weights')
      numbers = [float(getattr(part, name)[b, r]) for name in names]
      found.append((*part.tokens[b, path].tolist(), len(path) - 1, *numbers))
  return sorted(found, key=lambda x: x[-5:])


def test_bins_have_each_token_with_all_that_stands_before_it():
  batch, length = _batch()
  batch = with_loss_weights(batch, _ROWS, np.arange(9), WeightSettings('token-mean', 9), multiple=1)
  alone, rows, trees = (_tokens(micro_batches(batch, _plans(batch, length, kind))) for kind in _KINDS)
  assert len(alone) == batch.mask[_ROWS].sum() and alone == rows == trees


@pytest.mark.parametrize('kind', _KINDS[1:])
def test_turns_and_rows_of_a_bin_have_numbers_of_their_own(kind):
  batch, length = _batch()
  for plan in _plans(batch, length, kind):
    part = plan.cut(batch)
    for b, members in enumerate(plan.bins):
      scored = part.mask[b]
      segment = part.sequence[b][scored]
      own = [[(row, turn) for turn in batch.turn[row][batch.mask[row]]] for row in members.tolist()]
      pairs = [pair for row in own for pair in row]
      assert [pair[0] for pair in pairs] == [members[s] for s in segment]
      numbers = dict(zip(part.turn[b][scored].tolist(), pairs, strict=True))
      assert sorted(set(pairs)) == sorted(numbers.values()) and len(numbers) == len(set(pairs))
    assert (part.turn[~part.mask] == -1).all() and (part.columns[~part.mask] == 1).all()
    assert (part.sequence[~part.mask] == -1).all() and not part.before[~part.mask].any()


def test_a_shared_column_has_the_experts_of_the_first_row_of_its_bin():
  batch, length = _batch()
  experts = np.random.default_rng(0).integers(1, 300, (*batch.tokens.shape, 2, 3)).astype(np.uint16)
  for plan in _plans(batch, length, 'trees'):
    expected = np.zeros((len(plan.bins), plan.width, 2, 3), np.uint16)
    for at, _, row, path, shared in reversed([*plan._rows()]):
      assert len(path) == length[row] >= shared
      expected[at, path] = experts[row, : len(path)]
    np.testing.assert_array_equal(plan.cut(batch.replace(experts=experts)).experts, expected)


def test_packed_batches_are_those_that_programs_are_compiled_for():
  batch, length = _batch()
  experts = np.random.default_rng(0).integers(0, 300, (*batch.tokens.shape, 2, 3)).astype(np.uint16)
  batch = with_loss_weights(
    batch.replace(experts=experts), _ROWS, np.arange(9), WeightSettings('token-mean', 9), multiple=1
  )
  for kind in ('rows', 'trees'):
    plans = _plans(batch, length, kind)
    assert len({(len(p.bins), p.width, p.replies) for p in plans}) == 1 < len(plans)
    sizes = len(plans[-1].bins), plans[-1].width, plans[-1].replies
    replayed = (2, 3), np.uint16
    abstract = abstract_mini_batch(*sizes, reference=True, importance=True, packed=True, experts=replayed)
    for part in micro_batches(batch, plans):
      assert jax.tree.map(lambda x: (x.shape, x.dtype), part) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)


def test_all_mini_batches_of_an_iteration_have_one_shape():
  rng = np.random.default_rng(1)
  length = rng.integers(5, 41, size=40)
  scored = (0.6 * length).astype(int)
  groups = np.split(rng.permutation(40), [12, 24, 30])
  packed = pack_batches(groups, length, scored, PackingSettings(step=8, width=40, columns=400, shards=2, reply_step=8))
  plans = [plan for own in packed for plan in own]
  assert len({(len(p.bins), p.width, p.replies) for p in plans}) == 1 and len(plans) == len(groups)
  for rows, own in zip(groups, packed, strict=True):
    assert sorted(row for plan in own for members in plan.bins for row in members) == sorted(rows)
    for plan in own:
      assert len(plan.bins) % 2 == 0
      assert all(length[list(b)].sum() <= plan.width and scored[list(b)].sum() <= plan.replies for b in plan.bins)
  # The shape depends on the rows alone, not on what was packed before.
  again = pack_batches(groups, length, scored, PackingSettings(step=8, width=40, columns=400, shards=2, reply_step=8))
  assert [p.width for own in again for p in own] == [p.width for p in plans]


def test_a_shape_has_room_for_every_mini_batch_in_one_call():
  """Four rows of 21 have less than 96 columns together, and do not fit into three bins of 32."""
  length = np.asarray([21, 21, 21, 21, 3])
  settings = PackingSettings(step=8, width=40, columns=400, shards=1, reply_step=8)
  packed = pack_batches([np.asarray([4]), np.arange(4)], length, length - 1, settings)
  assert [len(plans) for plans in packed] == [1, 1] and len(packed[0][0].bins) >= 4


@pytest.mark.parametrize('seed', range(4))
def test_rows_that_share_need_no_larger_calls_and_no_more_columns(seed):
  rng = np.random.default_rng(seed)
  size, beginning = rng.integers(2, 6), int(rng.integers(10, 300))
  length = beginning + rng.integers(20, 200, size=8 * size)
  tokens = rng.integers(0, 9, size=(8 * size, length.max())).astype(np.int32)
  tokens[:, :beginning] = tokens[::size, :beginning].repeat(size, axis=0)
  settings = PackingSettings(
    step=64, width=512, columns=8192, shards=int(rng.integers(1, 3)), reply_step=512, most_shared=4096, widest=1024
  )
  every = [np.arange(8 * size)]
  alone, shared = (pack_batches(every, length, length - beginning, settings, own)[0] for own in (None, tokens))
  of_alone, of_shared = (len(plans[0].bins) * plans[0].width for plans in (alone, shared))
  assert of_shared <= of_alone and len(shared) * of_shared <= len(alone) * of_alone
  shapes = [(len(plans[0].bins), plans[0].width, plans[0].replies) for plans in (alone, shared)]
  time_alone, time = (_cost(x, len(plans), settings.shards) for x, plans in zip(shapes, (alone, shared), strict=True))
  assert time < time_alone + 1
  assert seed or shared_tokens(shared) > 0.5 * (1 - 1 / size) * beginning / length.mean()


def _model(separate: bool) -> ActorCritic:
  policy = random_model(_VOCAB)
  if not separate:
    return policy
  critic = random_model(_VOCAB, seed=5)
  model = ActorCritic(policy.policy, critic.policy)
  model.value_head = critic.value_head
  return model


@pytest.mark.parametrize(
  'level', [pytest.param(level, marks=() if level == 'token' else pytest.mark.slow) for level in RATIO_LEVELS]
)
@pytest.mark.slow_cases('token')
@pytest.mark.exhaustive_cases('sequence')
def test_packing_changes_neither_loss_nor_gradient(level):
  """If this fails, a run on an accelerator learns from other gradients than one on a CPU."""
  separate = level == 'turn'
  model = _model(separate)
  batch, length = _batch()
  scores = Scorer(nnx.split(model)[0], learning.scoring(temperature=0.7, vocab_limit=_LIMIT))
  alone = _plans(batch, length, 'alone')
  logprobs, values = scores.score(nnx.split(model)[1], batch, alone)
  rng = np.random.default_rng(4)
  noise = rng.normal(size=(4, *batch.mask.shape)).astype(np.float32)
  # Ratios on both sides of the clips, and a reference and old values that are not far away.
  batch = batch.replace(
    old_logprobs=np.where(batch.mask, logprobs + 0.4 * noise[0], 0), old_values=values + 0.5 * noise[1],
    ref_logprobs=np.where(batch.mask, logprobs + 0.5 * noise[2], 0),
  )  # fmt: skip
  learner = learning.learner(
    model, temperature=0.7, vocab_limit=_LIMIT, clip_ratio_low=0.05, clip_ratio_high=0.1, clip_ratio_c=1.3,
    ratio_level=level, kl_loss_coef=0.6, kl_kind='k3', value_clip=0.4, value_coef=0.8, entropy_coef=0.3,
    logits_chunk=16, remat='layers' if separate else 'none',
  )  # fmt: skip
  state = learning.state_of(learner, nnx.split(model)[1])
  episode = np.asarray([0, 1, 1, 2, 3, 4, 5, 4, 6])  # some have two rows, which need not be in one bin
  traces = []
  for mode in AGGREGATIONS:
    mini = with_loss_weights(batch, _ROWS, episode, WeightSettings(mode, 9), multiple=1)
    found = [learner.gradients(state, micro_batches(mini, _plans(batch, length, kind))) for kind in _KINDS]
    (gradient, metrics), *packed = [(jax.device_get(g), token_means(jax.device_get(sums))) for g, sums in found]
    assert 0.05 < metrics['actor/pg_clipfrac'] < 0.95
    for kind, (packed_gradient, packed_metrics) in zip(_KINDS[1:], packed, strict=True):
      assert metrics.keys() == packed_metrics.keys()
      for name, x in metrics.items():
        np.testing.assert_allclose(packed_metrics[name], x, rtol=1e-4, atol=1e-5, err_msg=f'{kind}, {mode}: {name}')
      for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(packed_gradient), strict=True):
        assert np.linalg.norm(a - b) <= 2e-5 * max(np.linalg.norm(a), 1e-3), (kind, mode)
    traces.append(learner.traces)
  assert len(set(traces)) == 1  # one program serves all


@pytest.mark.parametrize('separate', [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow_cases('False')
def test_packing_changes_no_scores_and_no_gradient_of_the_critic_alone(separate):
  model = _model(separate)
  graphdef, params = nnx.split(model)
  batch, length = _batch()
  scorer = Scorer(graphdef, learning.scoring(temperature=0.7, vocab_limit=_LIMIT))
  plans = [_plans(batch, length, kind) for kind in _KINDS]
  alone, *packed = ((*scorer.score(params, batch, x), scorer.values(params, batch, x)) for x in plans)
  for found in packed:
    for a, b in zip(alone, found, strict=True):
      np.testing.assert_allclose(b, a, atol=2e-5)
      assert not b[3].any() and b[0][batch.mask[0]].all()
  learner = learning.learner(model, temperature=0.7, vocab_limit=_LIMIT, value_clip=0.4, value_coef=0.8)
  state = learning.state_of(learner, params)
  mini = with_loss_weights(batch, _ROWS, np.arange(9), WeightSettings('token-mean', 9), multiple=1)
  a, *others = (learner.gradients(state, micro_batches(mini, x), critic_only=True)[0] for x in plans)
  for b in others:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
      np.testing.assert_allclose(y, x, atol=1e-5 * max(1.0, float(np.abs(x).max())))


@pytest.mark.slow  # a minute
@pytest.mark.usefixtures('new_programs')
@pytest.mark.parametrize('context', ['full', 'single_turn'])
@pytest.mark.exhaustive_cases('single_turn', 'full')
def test_a_packed_run_learns_what_an_unpacked_one_does(policy, context):
  """Estimates and updates of the same rollout: with a row for each turn, the rows of an episode are in several bins."""
  fields = {
    'algorithm__old_logprobs': 'trainer', 'algorithm__tis_cap': 2.0, 'algorithm__kl_loss_coef': 0.1,
    'algorithm__kl_reward_coef': 0.05, 'algorithm__bootstrap_truncated': True, 'algorithm__ppo_epochs': 2,
    'agent__context': context, 'optimizer__actor_lr': 1e-4,
  }  # fmt: skip
  found = []
  for packing in (False, True):
    trainer, state = learning.make_trainer(policy, optimizer__packing=packing, **fields)
    shared = trainer.learner.traces, trainer.scorer.traces['score']  # the trainers share their programs
    _, selection = trainer.collect(state)
    batch, estimates = trainer.estimate(state, selection)
    before = learning.copied(state)
    state, metrics = trainer.update(state, batch, selection)
    assert not trainer.try_weights(state, batch, selection)
    traces = trainer.learner.traces, dict(trainer.scorer.traces)
    trainer.update(before, batch, selection)
    assert traces == (trainer.learner.traces, dict(trainer.scorer.traces))
    assert (traces[0] - shared[0], traces[1]['score'] - shared[1]) == (1, 1) or not packing
    found.append((batch, estimates, metrics, jax.device_get(state.trained)))
  (alone, estimates, metrics, weights), (packed, packed_estimates, packed_metrics, packed_weights) = found
  width = alone.mask.shape[1]
  for name in ('old_logprobs', 'old_values', 'ref_logprobs', 'advantages', 'returns', 'importance'):
    a, b = getattr(alone, name), getattr(packed, name)
    np.testing.assert_allclose(b[:, :width], a, atol=2e-3 if name == 'advantages' else 2e-4, err_msg=name)
    assert not packed.mask[:, width:].any()
  for name, x in {**estimates, **metrics}.items():
    if isinstance(x, float):
      y = {**packed_estimates, **packed_metrics}[name]
      # A share counts tokens, of which one or two are within rounding of a bound.
      few = 2 / alone.mask.sum()
      np.testing.assert_allclose(y, x, rtol=2e-2, atol=few if 'clipfrac' in name else 2e-4, err_msg=name)
  for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(packed_weights), strict=True):
    # A step of Adam is the gradient's sign at first; what is only rounding may fall to either side.
    assert np.quantile(np.abs(a - b), 0.95) < 1e-4


def test_a_group_without_rows_has_no_micro_batches():
  """As an iteration whose filter keeps nothing, or in which no episode was cut off."""
  length, scored = np.asarray([30, 50]), np.asarray([10, 20])
  settings = PackingSettings(16, 64, 128, 1, 16)
  empty, full = pack_batches([np.zeros(0, np.int32), np.asarray([0, 1])], length, scored, settings)
  assert empty == [] and sorted(np.concatenate([b for plan in full for b in plan.bins]).tolist()) == [0, 1]
  assert pack_batches([np.zeros(0, np.int32)], length, scored, settings) == [[]]
  assert pack(np.zeros((0, 2), np.int32), (5, 5)) == []
