"""Which rows share their beginnings, against a set of all beginnings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ragen_jax.training.batches import PackingSettings, TokenRows, sampled_columns
from ragen_jax.training.forests import forest
from ragen_jax.training.packing import PackedBatch, bin_shapes, pack_batches, shared_tokens


def _rows(rng: np.random.Generator, n: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
  """Random rows of few tokens, most of which go on where another row is left, and their lengths."""
  tokens = rng.integers(0, 3, size=(n, columns)).astype(np.int32)
  length = rng.integers(1, columns + 1, size=n)
  for row in range(1, n):
    if rng.random() < 0.8:
      common = rng.integers(0, columns + 1)
      tokens[row, :common] = tokens[rng.integers(0, row), :common]
  return tokens, length


def _beginnings(tokens: np.ndarray, length: np.ndarray) -> int:
  """Columns of the trees of some rows: different beginnings of at least one token."""
  return len({tuple(row[: i + 1].tolist()) for row, n in zip(tokens, length, strict=True) for i in range(n)})


def test_the_example_of_the_module():
  words = ['abcd', 'fg', 'abef', 'abe']
  tokens = np.asarray([[*map(ord, word.ljust(4))] for word in words])
  length = np.asarray([4, 2, 4, 3])
  found = forest(tokens, length)
  assert [words[i] for i in found.order] == ['abcd', 'abe', 'abef', 'fg'] and found.common.tolist() == [0, 2, 3, 0]
  sizes = np.stack([length, length], axis=1)
  assert found.columns(sizes) == 8
  assert [(part.rows.tolist(), part.size) for part in found.parts(sizes, (8, 13))] == [
    ([0, 3, 2], (6, 11)),
    ([1], (2, 2)),
  ]
  # Where the tree does not fit, its rows are divided; each part has all columns of its first row.
  assert [(part.rows.tolist(), part.size) for part in found.parts(sizes, (5, 9))] == [
    ([0, 3], (5, 7)), ([2], (4, 4)), ([1], (2, 2)),
  ]  # fmt: skip
  assert [part.rows.tolist() for part in found.parts(sizes, (8, 7))] == [[0, 3], [2], [1]]
  assert found.in_order(np.asarray([1, 2, 0])).tolist() == [0, 2, 1]
  assert found.shared(np.asarray([0, 2, 1])).tolist() == [0, 2, 0]


@pytest.mark.parametrize('seed', range(20))
def test_bins_hold_each_beginning_once_and_fit(seed):
  rng = np.random.default_rng(seed)
  tokens, length = _rows(rng, 24, 30)
  scored = np.minimum(rng.integers(0, 8, 24), np.maximum(length - 1, 0))
  settings = PackingSettings(8, 64, 256, int(rng.integers(1, 3)), 8, most_shared=64 if seed % 4 else 48)
  groups = [rng.permutation(24)[:20], np.arange(4)]
  packed = pack_batches(groups, length, scored, settings, tokens)
  for rows, own in zip(groups, packed, strict=True):
    assert sorted(np.concatenate([plan.members for plan in own]).tolist()) == sorted(rows.tolist())
    for plan in own:
      assert (plan.shared is not None) == (plan.width <= settings.most_shared)
      for at, members in enumerate(plan.bins):
        shared = np.zeros(len(members), int) if plan.shared is None else plan.shared[at]
        used = int((length[members] - shared).sum())
        assert used <= plan.width and scored[members].sum() <= plan.replies
        if plan.shared is not None:
          assert used == _beginnings(tokens[members], length[members])


@pytest.mark.parametrize('seed', range(20))
def test_a_scored_token_sees_the_tokens_of_its_row(seed):
  """Rows of no token and of equal tokens, rows that begin others, and rows with one token of their own."""
  rng = np.random.default_rng(seed)
  tokens, length = _rows(rng, 30, 20)
  for row, (of, more) in enumerate(zip(rng.integers(12, 30, 12), (-1, 0, 1) * 4, strict=True)):
    n = min(int(length[of]), 19)
    tokens[row, :n], length[row] = tokens[of, :n], max(n + more, 0)
  length[12] = 0
  loss_mask = (rng.random(tokens.shape) < 0.4) | (np.arange(20) == length[:, None] - 1)
  loss_mask &= (np.arange(20) < length[:, None]) & (np.arange(20) > 0)
  columns, mask = sampled_columns(loss_mask)
  settings = PackingSettings(8, 64, 256, 1, 8, most_shared=64)
  (plans,) = pack_batches([rng.permutation(30)], length, mask.sum(axis=1), settings, tokens)
  found, expected = [], []
  for plan in plans:
    part = plan.cut(TokenRows(tokens, columns, mask))
    for at, r in zip(*np.nonzero(part.mask), strict=True):
      path = np.arange(part.columns[at, r] + 1)
      path = path[part.seen_until[at, path] > part.columns[at, r]]
      assert part.before[at, r] == path[-2]
      found.append((int(plan.bins[at][part.sequence[at, r]]), *part.tokens[at, path].tolist()))
  for row, column in zip(*np.nonzero(loss_mask), strict=True):
    expected.append((int(row), *tokens[row, : column + 1].tolist()))
  assert sorted(found) == sorted(expected)


def test_only_rows_that_share_use_bins_that_are_wider_than_any_row():
  tokens = np.zeros((16, 64), np.int32)
  tokens[:, 40:] = np.arange(16)[:, None] + 1
  length, rows = np.full(16, 64), [np.arange(16)]
  settings = PackingSettings(8, 64, 640, 1, 8, most_shared=10**6, widest=640)
  assert max(width for _, width, _ in bin_shapes(settings)) <= 640 < 1.12 * 640
  ((shared,),) = pack_batches(rows, length, np.full(16, 24), settings, tokens)
  assert (len(shared.bins), shared_tokens([shared])) == (1, 15 * 40 / (16 * 64)) and 424 <= shared.width <= 640
  for own in (None, tokens + np.arange(16, dtype=np.int32)[:, None] * 100):
    (plans,) = pack_batches(rows, length, np.full(16, 24), settings, own)
    assert {plan.width for plan in plans} == {64}, own
  narrow = dataclasses.replace(settings, widest=0)
  (plans,) = pack_batches(rows, length, np.full(16, 24), narrow, tokens)
  assert {plan.width for plan in plans} == {64}


def test_rows_without_common_beginnings_use_no_wider_bins():
  settings = PackingSettings(128, 2048, 8192, 1, 512, most_shared=2**30, widest=4096)
  length = np.asarray([358, 988, 1268, 1798])  # two bins of 2,304 columns would be cheaper
  tokens = np.arange(4 * 1798, dtype=np.int32).reshape(4, 1798)
  (plans,) = pack_batches([np.arange(4)], length, length // 3, settings, tokens)
  assert {plan.width for plan in plans} == {1920}


def test_what_nothing_shares_is_packed_as_rows_are():
  rng = np.random.default_rng(0)
  length = rng.integers(5, 41, size=40)
  tokens = rng.integers(0, 10**6, size=(40, 40)).astype(np.int32)
  settings = PackingSettings(8, 40, 400, 2, 8, most_shared=40)
  with_tokens, without = (pack_batches([np.arange(40)], length, length // 2, settings, x)[0] for x in (tokens, None))
  assert [(len(plan.bins), plan.width, plan.replies) for plan in with_tokens] == [
    (len(plan.bins), plan.width, plan.replies) for plan in without
  ]
  assert shared_tokens(with_tokens) == shared_tokens(without) == 0.0


def test_the_share_of_tokens_counts_members_only():
  plan = PackedBatch(
    (np.asarray([0, 1]), np.asarray([], int)), np.asarray([8, 6, 100]), 16, 8, (np.asarray([0, 4]), np.asarray([], int))
  )
  assert shared_tokens([plan]) == pytest.approx(4 / 14)
