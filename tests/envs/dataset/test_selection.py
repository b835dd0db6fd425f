"""Permutations, splits and digests: the same everywhere, and right for every size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_jax.envs.dataset.selection import digest, is_held_out, permuted, seed_of, select, unpermuted
from tests.support.datasets import untimed

PERMUTED = [2, 9, 6, 1, 8, 7, 4, 3, 0, 5]
PERMUTED_OF_A_MILLION = [361658, 233161, 423657]


@untimed
@given(st.integers(1, 700), st.integers(0, 2**63))
def test_a_permutation_has_every_index_once(size, key):
  assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


@untimed
@given(st.integers(1, 10**6), st.integers(0, 2**63), st.data())
def test_a_permutation_is_undone(size, key, data):
  index = data.draw(st.integers(0, size - 1))
  assert unpermuted(permuted(index, size, key), size, key) == index
  for order in ('shuffled', 'fixed'):
    assert select(seed_of(index, size, order), size, order) == index and seed_of(index, size, order) < size


def test_a_permutation_is_the_same_on_every_machine_and_mixes():
  """Written down; a change would change the items of every seed."""
  assert [permuted(i, 10) for i in range(10)] == PERMUTED
  assert [permuted(i, 10**6) for i in range(3)] == PERMUTED_OF_A_MILLION
  places = [permuted(i, 1000) for i in range(1000)]
  assert abs(sum(a < b for a, b in itertools.pairwise(places)) - 500) < 50
  assert sum(i == x for i, x in enumerate(places)) < 10
  assert abs(sum(places[:100]) / 100 - 500) < 100
  assert [permuted(i, 10, 1) for i in range(10)] != PERMUTED


@pytest.mark.parametrize('index', [-1, 3])
def test_an_index_outside_is_refused(index):
  with pytest.raises(ValueError, match=f'index={index}; allowed: from 0 to 2'):
    permuted(index, 3)


@untimed
@given(st.integers(0, 2**32), st.integers(1, 50), st.sampled_from(['shuffled', 'fixed']))
def test_consecutive_seeds_select_every_item_once(first, size, order):
  assert sorted(select(first + i, size, order) for i in range(size)) == list(range(size))


def test_fixed_order_is_that_of_the_items():
  assert [select(seed, 4, 'fixed') for seed in range(6)] == [0, 1, 2, 3, 0, 1]
  assert [select(seed, 10, 'shuffled') for seed in range(10)] == PERMUTED


def test_a_digest_forgets_case_blanks_and_forms_only():
  assert digest('  What  is\n2 + 2? ') == digest('what is 2 + 2?') == digest('\uff37hat is \uff12 + 2?')
  assert len({digest(text) for text in ('What is 2+2?', 'What is 2 + 2?', 'What is 2 + 3?', '')}) == 4
  assert digest('\ud800') != digest('\ud801')


@untimed
@given(st.lists(st.text(max_size=8), unique=True), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_a_larger_share_keeps_what_a_smaller_one_holds_out(texts, a, b):
  small, large = sorted([a, b])
  held = [{text for text in texts if is_held_out(digest(text), share)} for share in (small, large)]
  assert held[0] <= held[1]


@pytest.mark.parametrize('share', [0.05, 0.1, 0.5, 0.9])
def test_the_test_part_has_its_share(share):
  count = sum(is_held_out(digest(str(i)), share) for i in range(20_000))
  assert count == pytest.approx(20_000 * share, abs=5 * (20_000 * share * (1 - share)) ** 0.5)
  assert is_held_out(digest('q'), 0.1) == is_held_out(digest(' Q '), 0.1)
