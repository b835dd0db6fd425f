"""Boards as images of a size that the model reads, and texts with images."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest

from ragen_jax import envs as registry
from ragen_jax.agent.image_observations import (
  check_images,
  image_columns,
  observed_images,
  shows_images,
  tile_of,
  with_images,
)
from ragen_jax.agent.pools import make_pool
from ragen_jax.agent.segments import ImageSegment, TextSegment, images_of, join, written
from ragen_jax.agent.templates import describe_descriptions, describe_task
from ragen_jax.agent.world_model.formats import describe_form
from ragen_jax.envs import Budget
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.game_2048 import Game2048
from ragen_jax.envs.manipulation import Manipulation
from ragen_jax.envs.navigation import Navigation
from ragen_jax.envs.outside.images import ImageForm
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.envs.sudoku import Sudoku
from ragen_jax.models.vision.processor import ProcessorConfig, resize
from ragen_jax.utils.errors import UserError
from tests.support.images import draw

# Limits as those of the hub: Qwen2.5-VL's processor takes small images, Qwen3-VL's enlarges them.
SMALL = ProcessorConfig(14, 2, 2, 3136, 12_845_056, (0.5,) * 3, (0.5,) * 3)
LARGE = ProcessorConfig(16, 2, 2, 65_536, 16_777_216, (0.5,) * 3, (0.5,) * 3)


def _spec(env=None, tile: int | None = 0) -> EnvSpec:
  return EnvSpec('Lake', env or FrozenLake(), Budget(5, 10, 5), 50, 2, tile)


def test_a_tile_is_the_smallest_whole_number_of_tokens_that_is_not_resized():
  assert tile_of(_spec(), SMALL) == 28 and tile_of(_spec(Sokoban()), SMALL) == 28
  assert tile_of(_spec(), LARGE) == 64  # 128 x 128 pixels are too few for it
  assert tile_of(_spec(FrozenLake(size=8)), LARGE) == 32
  assert tile_of(_spec(tile=14), SMALL) == 14


def test_a_tile_that_is_resized_is_refused_with_those_that_are_not():
  told = r'^envs\.Lake\.tile=32: the processor of the model would resize .* 128x128 pixels to 256x256; allowed: 64$'
  with pytest.raises(UserError, match=told):
    check_images(_spec(tile=32), LARGE)
  with pytest.raises(UserError, match=r'^envs\.Lake\.tile=0: .* to 256x256; no tile fits this board$'):
    check_images(_spec(FrozenLake(size=3)), LARGE)
  with pytest.raises(UserError, match=r'tile=20: .* images of 80x80 pixels to 84x84; allowed: 14, 21, 28'):
    check_images(_spec(tile=20), SMALL)


def test_an_image_has_a_column_for_each_token_and_two_around_them():
  assert image_columns(_spec(), SMALL) == 16 + 2
  assert image_columns(_spec(Sokoban()), SMALL) == 36 + 2
  assert image_columns(_spec(tile=14), SMALL) == 4 + 2
  assert image_columns(_spec(tile=None), SMALL) == 0
  outside = types.SimpleNamespace(is_outside=True, image_form=ImageForm(count=3, height=60, width=90))
  assert image_columns(_spec(outside, None), SMALL) == 3 * (6 + 2)


def test_marks_become_images_of_the_size_that_the_tower_reads():
  image = np.random.default_rng(0).integers(0, 256, (60, 90, 3)).astype(np.uint8)
  found = with_images('a<image>b<image>', [image, image[:56, :84]], SMALL)
  assert written(found) == 'a<image>b<image>' and isinstance(found[0], TextSegment)
  large, small = [s for s in found if isinstance(s, ImageSegment)]
  np.testing.assert_array_equal(large.image, resize(image, 56, 84))
  np.testing.assert_array_equal(small.image, image[:56, :84])
  assert large.columns == small.columns == 6
  # A mark beyond the images is text of the environment.
  assert with_images('<image>', [], SMALL) == join('<image>')


@pytest.mark.parametrize(('env', 'lines'), [(FrozenLake(), 4), (Game2048(), 4), (Sudoku(side=4, empty_cells=2), 5)])
@pytest.mark.slow_cases('env2-5')
def test_pools_show_boards_as_images_and_the_lines_around_them_as_text(env, lines):
  pool = make_pool(_spec(env), 4, 2, SMALL)
  text = make_pool(_spec(env), 4, 2)
  for one in (pool, text):
    one.reset(np.asarray([3, 3, 4, 4]), np.asarray([0, 1, 0, 1]))
  for observation, board, state in zip(pool.render(), text.render(), range(4), strict=True):
    (image,) = images_of(observation)
    single = dataclasses.replace(pool.states, **{k: np.asarray(v)[state] for k, v in vars(pool.states).items()})
    np.testing.assert_array_equal(image, env.pixels(single, 28))
    rest = written(observation).removeprefix('<image>')
    # Without the lines of the board itself, all of its text.
    assert rest.split('\n')[1:] == board.split('\n')[lines:] and rest.split('\n')[0] == ''
  assert len(set(pool.render())) == 2  # members of a group see equal boards


def test_environments_outside_show_resized_images_in_their_texts():
  path = 'tests.envs.outside.test_images:Lamp'
  env = registry.make('python', {'class_path': path, 'images': 1, 'image_size': [4, 6], 'workers': 0})
  spec = _spec(env, None)
  assert shows_images(spec) and shows_images(_spec()) and not shows_images(_spec(tile=None))
  pool = make_pool(spec, 4, 2, SMALL)
  pool.reset(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]))
  first = pool.render()
  assert [written(x) for x in first] == ['<image>\nA lamp.'] * 4
  assert [(x[0].image.shape, x[0].columns) for x in first] == [((56, 84, 3), 6)] * 4
  assert [int(x[0].image[0, 0, 0]) for x in first] == [0, 0, 100, 100] and first[0] == first[1] != first[2]
  pool.step([['Toggle'], ['Wait'], ['Wait'], ['Wait']])
  after = pool.render()
  assert int(after[0][0].image[0, 0, 0]) == 100 and after[1] == first[1] and after[0] != first[0]
  assert make_pool(spec, 4, 2).processor is None


def test_an_image_that_is_too_long_is_refused():
  path = 'tests.envs.outside.test_images:Lamp'
  env = registry.make('python', {'class_path': path, 'images': 1, 'image_size': [2, 401], 'workers': 0})
  with pytest.raises(UserError, match=r'^envs\.Lake\.image_size=\(2, 401\): an image of 2x401 pixels is not read'):
    check_images(_spec(env, None), SMALL)


def test_a_room_is_a_picture_of_as_many_tiles_as_its_option_says():
  spec = _spec(Navigation(picture=8))
  assert tile_of(spec, SMALL) == 28 and image_columns(spec, SMALL) == 64 + 2
  assert tile_of(spec, LARGE) == 32 and tile_of(_spec(Navigation()), LARGE) == 32


def test_prompts_about_rooms_speak_of_rooms():
  spec = _spec(Navigation(colours=('red', 'blue')))
  assert 'Each state is an image of the room.\n' in describe_task(spec, '||')
  assert 'image' not in describe_task(_spec(Navigation(), None), '||')
  told = describe_descriptions(spec, 'world_modeling')
  assert (
    told.startswith('\nTo describe a room,') and '"the red ball is D and F"' in told and '"midway" or "far"' in told
  )
  assert not describe_descriptions(spec, 'free_think')
  assert '<observation>the room as you see it</observation>' in describe_form('world_modeling', shown_as='room')
  assert '<prediction>the board after your actions</prediction>' in describe_form('world_modeling')


@pytest.mark.slow
def test_a_pool_shows_the_instruction_and_the_picture():
  env = Navigation(dim=(6, 6), num_objects=3, picture=2)
  pool = make_pool(_spec(env, 28), 2, 1, SMALL)
  pool.reset(np.array([3, 4]), np.array([0, 0]))
  for row, observation in enumerate(pool.render()):
    text, image = observation[0], images_of(observation)[0]
    name = env.object_names[pool.states.room.names[row, 0]]
    assert written(observation).startswith(f'Find the {name}.\n') and isinstance(text, TextSegment)
    assert image.shape == (56, 56, 3)
  assert pool.picture(0).shape == (32, 32, 3)
  before = pool.scenes([0, 1])
  assert [scene.target for scene in before] == [env.object_names[n] for n in pool.states.room.names[:, 0]]
  pool.step([[4], [6]])
  turned, looked = pool.scenes([0, 1])
  assert turned.heading == (before[0].heading + 1) % 4 and looked.heading == before[1].heading


@pytest.mark.slow
def test_two_cameras_are_two_images_of_an_observation():
  env = Manipulation(cameras=2, picture=2)
  assert observed_images(_spec(env), SMALL) == (2, (56, 56)) and image_columns(_spec(env), SMALL) == 2 * (4 + 2)
  pool = make_pool(_spec(env), 2, 1, SMALL)
  pool.reset(np.array([3, 4]), np.array([0, 0]))
  whole = draw(env, pool.states, 28)
  for row, observation in enumerate(pool.render()):
    front, above = images_of(observation)
    np.testing.assert_array_equal(np.concatenate([front, above]), whole[row])
    assert written(observation).startswith('Positions: red cube (') and 'From above:' in observation[2].text


def test_prompts_about_tables_speak_of_tables():
  spec = _spec(Manipulation(task='drawer'))
  assert 'Each state is an image of the table.\n' in describe_task(spec, '||')
  told = describe_descriptions(spec, 'world_modeling')
  assert told.startswith('\nTo describe a table, write one sentence for the apple and one for the drawer,')
  assert '"in the drawer"' in told and '"in the drawer"' not in describe_descriptions(
    _spec(Manipulation()), 'world_modeling'
  )
