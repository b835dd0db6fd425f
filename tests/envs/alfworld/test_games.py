"""The names of things in ALFWorld."""

from __future__ import annotations

import random

import pytest

from ragen_jax.envs.alfworld.games import name_things

IDS = [
  'desk_bar__plus_01_dot_50_bar_1', 'desk_bar__minus_01_dot_50_bar_1', 'desk_bar__plus_00_dot_10_bar_2',
  'sink_bar__plus_01_bar_sinkbasin', 'sink_bar__minus_01_bar_2_bar_sinkbasin', 'sink_bar_3',
  'bathtub_bar_1_bar_bathtubbasin',
  'basin_bar_1', 'mug_bar_1', 'mug_bar_10', 'mug_bar_2', 'agent1', 'loc_bar_1',
]  # fmt: skip


def test_things_of_a_kind_are_numbered_in_the_descending_order_of_their_ids():
  names = name_things(IDS)
  assert names['desk_bar__minus_01_dot_50_bar_1'] == 'desk 3' and names['desk_bar__plus_01_dot_50_bar_1'] == 'desk 1'
  assert [names[x] for x in ('mug_bar_1', 'mug_bar_10', 'mug_bar_2')] == ['mug 3', 'mug 2', 'mug 1']
  assert names['sink_bar__plus_01_bar_sinkbasin'] == 'sinkbasin 1' and names['sink_bar_3'] == 'sink 1'
  assert names['agent1'] == 'agent1 ' and names['bathtub_bar_1_bar_bathtubbasin'] == 'bathtubbasin 1'


def test_the_names_are_those_of_the_package():
  misc = pytest.importorskip('alfworld.agents.utils.misc', reason='needs the package alfworld')
  infos = {x: type('Info', (), {'id': x}) for x in IDS}
  theirs = misc.Demangler(game_infos=infos)
  shuffled = random.Random(0).sample(IDS, len(IDS))
  assert name_things(shuffled) == {x: theirs.demangle_alfred_name(x) for x in shuffled}
