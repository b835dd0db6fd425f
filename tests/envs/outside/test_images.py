"""Observations of text and images from environments outside JAX, and every way in which they can be wrong."""

from __future__ import annotations

import base64
import io
import itertools
import json
import struct
import zlib

import gymnasium
import numpy as np
import pytest
from PIL import Image

from ragen_jax import envs as registry
from ragen_jax.agent.pools import make_pool
from ragen_jax.envs.base import Budget
from ragen_jax.envs.outside.base import TextStep, read_observation, read_step
from ragen_jax.envs.outside.images import (
  ImageForm,
  ImageObservation,
  check_image_options,
  decode_images,
  read_image_observation,
)
from ragen_jax.envs.outside.timed_http import JsonRequests
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.utils.files import encode_png
from ragen_jax.utils.threads import Fault
from tests.support.environments import raises_one_line

FORM = ImageForm(2, 4, 6)
PATH = f'{__name__}:Lamp'


def picture(seed=0, shape=(4, 6, 3)):
  return np.random.default_rng(seed).integers(256, size=shape).astype(np.uint8)


def png(image):
  return base64.b64encode(encode_png(image)).decode()


class Lamp:
  """A lamp that two toggles switch on for good; one image shows it."""

  rules, action_names = 'Switch the lamp on.', ('Toggle', 'Wait', 'Break')

  def reset(self, seed):
    self.count = self.level = seed % 2
    return self.told()

  def told(self):
    return {'text': 'A lamp.', 'images': [np.full((4, 6, 3), 100 * self.count, np.uint8)]}

  def step(self, action):
    self.count += action == 'Toggle'
    told = {'text': 'A lamp.', 'images': []} if action == 'Break' else self.told()
    return told, 0.0, self.count == 2, self.count == 2


class Screen(gymnasium.Env):
  """A screen that shows the number of steps."""

  action_space, observation_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(9)

  def __init__(self, render_mode=None):
    self.render_mode = render_mode

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.steps = 0
    return 0, {}

  def step(self, action):
    self.steps += int(action)
    return self.steps, 0.0, False, False, {}

  def render(self):
    return np.full((4, 6, 3), self.steps, np.uint8)


gymnasium.register('Screen-v0', Screen, disable_env_checker=True)


def written(observation):
  return f'step {observation}'


# -- what is read ------------------------------------------------------------------------------------------------------


def test_images_have_places_in_the_text():
  images = [picture(0), picture(1)]
  told = read_observation({'text': 'a <image> b\ud800 <image>', 'images': images}, FORM)
  assert told == ImageObservation('a <image> b? <image>', tuple(images))
  assert read_observation({'text': 'a', 'images': tuple(images)}, FORM).text == '<image><image>\na'
  assert read_observation({'text': '', 'images': images}, FORM).text == '<image><image>'
  # The arrays are the run's own, whatever the environment does to its arrays.
  kept = images[0].copy()
  images[0][:] = 0
  np.testing.assert_array_equal(told.images[0], kept)
  assert told != ImageObservation(told.text, tuple(images)) and told != ImageObservation('', told.images)
  assert told != ImageObservation(told.text, told.images[:1]) and told != told.text
  # Without images, the mark is text like any other.
  assert read_observation('a <image>') == 'a <image>'
  step = read_step(({'text': '', 'images': [picture(0), picture(1)]}, 1, True, True), FORM)
  assert isinstance(step, TextStep) and step.success and len(step.observation.images) == 2


@pytest.mark.parametrize(
  ('raw', 'message'),
  [
    ('text', "observation is not {'text': text, 'images': [...]}: str"),
    ({'text': 'a'}, "observation is not {'text': text, 'images': [...]}: dict"),
    ({'text': b'a', 'images': []}, "observation is not {'text': text, 'images': [...]}: dict"),
    ({'text': 'a', 'images': picture()}, 'images are not a list: ndarray'),
    ({'text': 'a', 'images': [picture()]}, 'observation has 1 images, must have 2'),
    ({'text': 'a', 'images': [picture()] * 3}, 'observation has 3 images, must have 2'),
    ({'text': 'a', 'images': [picture(), picture().tolist()]}, 'image is not a NumPy array: image 1 is list'),
    ({'text': 'a', 'images': [picture(), picture() / 255]}, 'image is not of uint8: image 1 is of float64'),
    (
      {'text': 'a', 'images': [picture(), picture(0, (6, 4, 3))]},
      'image has another size: image 1 is (6, 4, 3), must be (4, 6, 3)',
    ),
    (
      {'text': 'a', 'images': [picture(0, (4, 6, 4)), picture()]},
      'image has another size: image 0 is (4, 6, 4), must be (4, 6, 3)',
    ),
    ({'text': '<image>', 'images': [picture()] * 2}, 'observation has 1 marks <image>, must have 2 or none'),
    (
      {'text': 'x' * (1 << 20) + 'x', 'images': [picture()] * 2},
      'observation is longer than 1048576 characters: it has 1048577',
    ),
    (Fault('x', 'y'), 'x: y'),
  ],
)
def test_wrong_observations_are_faults_in_one_line(raw, message):
  fault = read_observation(raw, FORM)
  assert isinstance(fault, Fault) and str(fault) == message
  assert str(read_step((raw, 0.0, False, False), FORM)) == message


def test_arrays_that_state_another_size_or_type_than_they_have_are_faults():
  class Liar(np.ndarray):
    shape, dtype = (4, 6, 3), np.dtype(np.uint8)

  for image, message in (
    (picture(0, (8, 6, 3)), 'image has another size: image 1 is (8, 6, 3), must be (4, 6, 3)'),
    (picture() / 255, 'image is not of uint8: image 1 is of float64'),
  ):
    assert str(read_observation({'text': '', 'images': [picture(), image.view(Liar)]}, FORM)) == message
  endless = type('Endless', (list,), {'__iter__': lambda self: itertools.repeat(picture())})([0, 0])
  assert read_observation({'text': '', 'images': endless}, FORM).kind == 'reading an observation raised ValueError'


def test_text_environments_send_no_mappings():
  assert read_observation({'text': 'a', 'images': []}).kind == 'observation is not a string'


@pytest.mark.parametrize(
  ('images', 'size', 'message'),
  [
    (-1, (0, 0), 'lamp: images=-1; allowed: integers from 0 to 16'),
    (True, (4, 6), 'lamp: images=True; allowed: integers from 0 to 16'),
    (0, (4, 6), r'lamp: image_size=\(4, 6\); allowed: \(0, 0\), with images=0'),
    (1, (0, 6), r'lamp: image_size=\(0, 6\); allowed: \(height, width\), 1 to 4096 pixels each, with images=1'),
    (1, (4, 4097), 'lamp: image_size='),
    (1, (4, 6, 3), 'lamp: image_size='),
    (1, 'ab', 'lamp: image_size='),
  ],
)
def test_wrong_options_are_named(images, size, message):
  with raises_one_line(message):
    check_image_options('lamp', images, size)


def test_the_form_of_observations():
  assert check_image_options('lamp', 2, [4, 6]) == FORM and check_image_options('lamp', 0, (0, 0)) is None


# -- kinds of environments ---------------------------------------------------------------------------------------------


def test_a_python_class_with_images_in_a_pool():
  env = registry.make('python', {'class_path': PATH, 'images': 1, 'image_size': [4, 6], 'workers': 0})
  assert env.image_form == ImageForm(1, 4, 6)
  pool = make_pool(EnvSpec('Lamp', env, Budget(4, 4, 1), 50, 2), 4, 2)
  pool.reset(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]))
  assert pool.render() == ['<image>\nA lamp.'] * 4 and not pool.faults
  assert [int(pool.picture(row)[0, 0, 0]) for row in range(4)] == [0, 0, 100, 100]
  # An action whose image changes is effective, although the text is the same.
  effective = pool.step([['Toggle'], ['Wait'], ['Toggle'], ['Break']]).effective
  assert effective.tolist() == [1, 0, 1, 0] and pool.success.tolist() == [False, False, True, False]
  assert int(pool.picture(0)[0, 0, 0]) == 100 and str(pool.faults[3]) == 'observation has 0 images, must have 1'


def test_gymnasium_s_rgb_array():
  options = {'id': 'Screen-v0', 'task': 'Look.', 'action_names': ('Stay', 'Go'), 'workers': 0}
  options |= {'images': 1, 'image_size': (4, 6), 'kwargs': {'render_mode': 'rgb_array'}}
  for more, text in (({}, '<image>'), ({'render': f'{__name__}:written'}, '<image>\nstep {}')):
    env = registry.make('gymnasium', options | more)
    session = env.open(1)
    first = read_observation(session.reset([0], [0], [0])[0], env.image_form)
    (step,) = session.step([0], ['Go'])
    for told, number in ((first, 0), (read_step(step, env.image_form).observation, 1)):
      assert told == ImageObservation(text.format(number), (np.full((4, 6, 3), number, np.uint8),))
  for wrong in ({'images': 2}, {'kwargs': {}}, {'kwargs': {'render_mode': 'ansi'}}):
    with raises_one_line("gymnasium: images=.; allowed: 0, or 1 with render_mode='rgb_array' in kwargs"):
      registry.make('gymnasium', options | wrong)


def test_images_behind_http_are_png_in_base64(monkeypatch):
  fields = {'url': 'http://localhost:1', 'task': 'Look.', 'images': 2, 'image_size': (4, 6)}
  env = registry.make('http', fields)
  images = [picture(0), picture(1)]

  def answer(self, url, body, read):
    what = url.rpartition('/')[2]
    observation = {'text': what, 'images': [png(image) for image in images]}
    return json.loads(json.dumps([{'observation': observation, 'reward': 1, 'done': False}] * len(body['episodes'])))

  monkeypatch.setattr(JsonRequests, 'post', answer)
  session = env.open(2)
  for raw in session.reset([0, 1], [3, 4], [0, 0]):
    assert read_observation(raw, env.image_form) == ImageObservation('<image><image>\nreset', tuple(images))
  (step, _) = session.step([0, 1], ['a', 'b'])
  assert read_step(step, env.image_form).observation == ImageObservation('<image><image>\nstep', tuple(images))


def _file(image, kind, mode=None):
  data = io.BytesIO()
  Image.fromarray(image).convert(mode).save(data, kind)
  return base64.b64encode(data.getvalue()).decode()


def _with_chunk(image, kind, data):
  """A PNG file with one more chunk between its pixels and its end."""
  file = encode_png(image)
  chunk = struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
  return base64.b64encode(file[:-12] + chunk + file[-12:]).decode()


@pytest.mark.parametrize('mode', ['RGB', 'RGBA', 'L', 'P'])
def test_kinds_of_png(mode):
  grey = np.full((4, 6, 3), 51, np.uint8)
  told = decode_images({'text': '', 'images': [_file(grey, 'PNG', mode)] * 2}, FORM)
  assert read_image_observation(told, FORM) == ImageObservation('<image><image>', (grey, grey))


@pytest.mark.parametrize(
  ('data', 'message'),
  [
    ('%%%', 'image is not a PNG file in base64: image 0: '),
    ('aGVsbG8=', 'image is not a PNG file in base64: image 0: another kind of file'),
    (_file(picture(), 'BMP'), 'image is not a PNG file in base64: image 0: another kind of file'),
    (png(picture())[:60], 'image is not a PNG file in base64: image 0: '),
    # Pillow reads behind the end of these colour profiles.
    (_with_chunk(picture(), b'iCCP', b''), 'image is not a PNG file in base64: image 0: IndexError: '),
    (_with_chunk(picture(), b'iCCP', b'name\0'), 'image is not a PNG file in base64: image 0: IndexError: '),
    (7, 'image is not a PNG file in base64: image 0: int'),
    (png(picture(0, (6, 4, 3))), 'image has another size: image 0: it is (6, 4, 3), must be (4, 6, 3)'),
    (_file(np.zeros((4, 6), np.uint16), 'PNG'), 'image has another kind of colours: image 0: I'),
  ],
)
def test_wrong_files_are_faults_in_one_line(data, message):
  fault = read_observation(decode_images({'text': '', 'images': [data, data]}, FORM), FORM)
  assert isinstance(fault, Fault) and str(fault).startswith(message) and '\n' not in str(fault)


def test_a_damaged_file_is_a_fault_of_its_own_row(monkeypatch):
  env = registry.make('http', {'url': 'http://localhost:1', 'task': 'Look.', 'images': 1, 'image_size': (4, 6)})
  files = [png(picture()), _with_chunk(picture(), b'iCCP', b''), png(picture())]

  def answer(self, url, body, read):
    told = [{'text': url, 'images': [file]} for file in files]
    return [{'observation': x, 'reward': 1.0, 'done': False} for x in told]

  monkeypatch.setattr(JsonRequests, 'post', answer)
  session = env.open(3)
  first = [read_observation(raw, env.image_form) for raw in session.reset(range(3), [1] * 3, [0] * 3)]
  after = [read_step(raw, env.image_form) for raw in session.step(range(3), ['a'] * 3)]
  assert [isinstance(x, Fault) for x in first] == [isinstance(x, Fault) for x in after] == [False, True, False]
