"""The program of frozenlake.py with the board as an image in each message, for a model that reads images."""

import base64
import io

from PIL import Image

import ragen_jax
from docs.examples.frozenlake import Player
from ragen_jax.agent.segments import ImageSegment
from ragen_jax.serving import client


def content(segments):
  """The content of a message: texts, and images as data URLs."""
  return [_image(s.image) if isinstance(s, ImageSegment) else {'type': 'text', 'text': s.text} for s in segments]


def _image(pixels):
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, 'PNG')
  url = f'data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}'
  return {'type': 'image_url', 'image_url': {'url': url}}


PLAYER = Player(ragen_jax.load_config('frozenlake_vision_ppo'), content)


def play(task: client.Task) -> float:
  """See `Player`."""
  return PLAYER(task)
