"""Segments of prompts: joining, text, and an image's way to placeholder ids and their columns."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.episode import Turn
from ragen_jax.agent.segments import (
  ImageSegment,
  TextSegment,
  TokenSegment,
  as_text,
  images_of,
  join,
  map_text,
  written,
)
from ragen_jax.models import presets
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config
from tests.support.speakers import context_settings

BOARD = np.zeros((4, 6, 3), np.uint8)


@pytest.fixture(scope='module')
def seeing(tmp_path_factory):
  """The built-in tokenizer with the tokens of images, of a model that reads them."""
  source, directory = presets.resolve('tiny', ''), tmp_path_factory.mktemp('seeing')
  tokenizer = Tokenizer.from_file(f'{source}/tokenizer.json')
  names = ('<|vision_start|>', '<|vision_end|>', '<|image_pad|>')
  tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
  tokenizer.save(str(directory / 'tokenizer.json'))
  for name in ('tokenizer_config.json', 'config.json'):
    (directory / name).write_text(pathlib.Path(source, name).read_text(encoding='utf-8'), encoding='utf-8')
  return ChatTokenizer(directory, images=True)


@pytest.fixture(scope='module')
def blind():
  return ChatTokenizer(presets.resolve('tiny', ''))


def test_adjacent_texts_become_one_segment_and_empty_ones_none():
  image = ImageSegment(BOARD, 3)
  joined = join('', 'a', (TextSegment('b'), image), '', 'c', (TextSegment(''), TokenSegment((5, 6))), 'd')
  assert joined == (TextSegment('ab'), image, TextSegment('c'), TokenSegment((5, 6)), TextSegment('d'))
  assert join() == join('', '') == ()


def test_text_is_mapped_and_the_rest_is_not():
  image, tokens = ImageSegment(BOARD, 3), TokenSegment((5,))
  assert map_text(str.upper, (TextSegment('a'), image, tokens)) == (TextSegment('A'), image, tokens)
  assert map_text(str.upper, 'a') == (TextSegment('A'),)


def test_images_of_equal_pixels_are_equal_and_observations_compare_by_them():
  image, same, other = ImageSegment(BOARD, 3), ImageSegment(BOARD.copy(), 3), ImageSegment(BOARD + 1, 3)
  assert image == same and hash(image) == hash(same) and image != other
  # The same bytes in another shape are another image.
  assert image != ImageSegment(BOARD.reshape(6, 4, 3), 3) and image != ImageSegment(BOARD, 6)
  assert {join('a', (image,)): 1} == {join('a', (same,)): 1} != {join('a', (other,)): 1}


def test_people_read_a_mark_in_the_place_of_an_image():
  image = ImageSegment(BOARD, 3)
  assert written(join('Board: ', (image,), '!')) == 'Board: <image>!' and written('text') == 'text'
  assert [x is BOARD for x in images_of(join('a', (image, image)))] == [True, True] and images_of('text') == []


def test_only_text_has_a_form_in_text():
  assert as_text(join('a', 'b')) == 'ab' and as_text(()) == ''
  for segment in (ImageSegment(BOARD, 3), TokenSegment((5,))):
    with pytest.raises(ValueError, match=type(segment).__name__):
      as_text(('a', segment)[1:])


def test_text_alone_has_the_ids_of_the_text(blind):
  text = '<|im_start|>user\nTurn 1:\nState:\nP_O_\n____\n<|im_end|>\n'
  encoded = blind.encode_segments(join(text[:20], text[20:]))
  assert encoded.ids == blind.encode(text) and encoded.images == ()
  mixed = blind.encode_segments((TextSegment('a'), TokenSegment((7, 8)), TextSegment('b')))
  assert mixed.ids == (*blind.encode('a'), 7, 8, *blind.encode('b'))


def test_an_image_becomes_placeholders_between_its_marks_and_its_columns_are_known(seeing):
  first, second = ImageSegment(BOARD, 3), ImageSegment(BOARD[:2] + 1, 1)
  encoded = seeing.encode_segments(join('State:', (first, second), 'end'))
  text = seeing.decode(encoded.ids)
  image = '<|vision_start|>{}<|vision_end|>'
  assert text == 'State:' + image.format('<|image_pad|>' * 3) + image.format('<|image_pad|>') + 'end'
  # The ids are those of the whole text at once.
  assert encoded.ids == seeing.encode(text)
  (pad,) = seeing.encode('<|image_pad|>')
  assert [x.segment is y for x, y in zip(encoded.images, (first, second), strict=True)] == [True, True]
  columns = [c for span in encoded.images for c in range(span.start, span.stop)]
  assert columns == np.flatnonzero(np.asarray(encoded.ids) == pad).tolist()
  assert [span.stop - span.start for span in encoded.images] == [3, 1]


def test_prompts_carry_the_images_of_observations(seeing):
  specs = build.env_specs(small_config(), ('FrozenLake',), (1,))
  (pad,) = seeing.encode('<|image_pad|>')
  boards = [ImageSegment(BOARD + i, 2 + i) for i in range(3)]
  past = [
    Turn((boards[i],), '', ['Up'], (0.0,), 0.0, True, 1, actions_left=9 - i, ids=(5, seeing.stop_ids[0]))
    for i in range(2)
  ]
  shown = {'full': [2], 'limited_multi_turn': [0, 1, 2], 'single_turn': [0, 1, 2]}
  for mode, expected in shown.items():
    context = ContextManager(seeing, specs, context_settings(context=mode))
    prompt = context.prompt(0, past, join('Board: ', (boards[2],), '<|im_end|>'), 7, used=0, room=10_000)
    assert [int(span.segment.image.max()) for span in prompt.images] == expected
    columns = [c for span in prompt.images for c in range(span.start, span.stop)]
    assert columns == np.flatnonzero(np.asarray(prompt.ids) == pad).tolist()
    # Text around an image is made safe as other text is.
    assert 'Board: <|vision_start|>' in seeing.decode(prompt.ids) and '< |im_end|>' in seeing.decode(prompt.ids)
    with pytest.raises(ValueError, match='ImageSegment'):
      context.messages(0, past, (boards[2],), 7)


def test_models_without_vision_refuse_images_in_one_line(blind):
  context = ContextManager(blind, build.env_specs(small_config(), ('FrozenLake',), (1,)), context_settings())
  with pytest.raises(UserError, match=r'^model\.path=.*: the model reads text only, and a prompt holds an image$'):
    context.first_prompt(0, (ImageSegment(BOARD, 3),), 10)
  with pytest.raises(UserError, match=r'^model\.path=.*: the tokenizer lacks <\|vision_start\|> or '):
    ChatTokenizer(presets.resolve('tiny', ''), images=True)
