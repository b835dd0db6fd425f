"""Environments with images and models that do not fit them: one line each, before anything is compiled."""

from __future__ import annotations

import json
import pathlib

import pytest

from ragen_jax.config.checks import check_config, check_eval
from ragen_jax.config.image_checks import check_images
from ragen_jax.models import presets
from ragen_jax.models.vision.config import QWEN3_VL
from tests.support.configs import assert_refused, small_config
from tests.support.seeing import checkpoint, seeing_config, write_processor

_LAMP = {
  'type': 'python', 'class_path': 'tests.envs.outside.test_images:Lamp', 'images': 1, 'image_size': (4, 6),
  'workers': 0, 'max_turns': 4, 'max_actions': 4, 'max_actions_per_turn': 1, 'max_words': 20,
}  # fmt: skip


def _with_lamp(**fields):
  config = small_config(**fields)
  with config.unlocked():
    config.envs.Lamp = _LAMP
  return config


@pytest.fixture(scope='module')
def seeing(tmp_path_factory):
  """A config with a model that reads images."""
  config = seeing_config()
  config.model.path = checkpoint(config, tmp_path_factory.mktemp('seeing'), QWEN3_VL)
  check_config(config)
  return config


def _changed(config, **fields):
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
  return config


def test_a_model_of_text_and_images_of_an_environment():
  told = r"model\.preset='tiny' reads text only; choose a model with a vision tower, such as tiny-vl$"
  assert_refused(check_config, seeing_config(), rf"^envs\.FrozenLake\.observation='image': {told}")
  assert_refused(check_config, _with_lamp(eval__tags=('Lamp',)), rf'^envs\.Lamp\.images=1: {told}')
  path = presets.resolve('tiny', '')
  assert_refused(check_config, seeing_config(model__path=path), rf"'image': model\.path={path!r} reads text")
  # The plan of a run knows it without weights.
  assert_refused(lambda c: check_config(c, weights=False), seeing_config(), 'reads text only')
  check_config(seeing_config(model__preset='qwen3-vl-2b'), weights=False)
  assert_refused(check_config, small_config(model__vision='trained'), r"^model\.vision='trained': the model reads text")
  assert_refused(check_config, small_config(model__vision='on'), r"^model\.vision='on': allowed: frozen, trained$")


@pytest.mark.slow
def test_options_of_images(seeing):
  for fields, message in (
    ({'envs__FrozenLake__tile': 9}, r'^envs\.FrozenLake\.tile=9: the processor .* 36x36 .* allowed: 8, 10'),
    ({'envs__FrozenLake__tile': 65}, r'^envs\.FrozenLake\.tile=65: must be 0 or .* pixels from 8 to 64$'),
    ({'envs__FrozenLake__observation': 'grid', 'envs__FrozenLake__tile': 8},
     r"^envs\.FrozenLake\.tile=8: needs envs\.FrozenLake\.observation='image'$"),
    ({'envs__FrozenLake__observation': 'picture'}, r"observation='picture'; allowed: grid, spaced, coord, grid_coord"),
    ({'train__tags': ('Bandit',), 'envs__Bandit__observation': 'image'},
     r"^envs\.Bandit\.observation='image': bandit draws no images$"),
    ({'train__tags': ('Bandit',), 'envs__Bandit__observation': 'text'},
     r"^envs\.Bandit\.observation='text': bandit has no such option, since it draws no images$"),
    ({'train__tags': ('Game2048',), 'envs__Game2048__observation': 'grid'},
     r"^envs\.Game2048\.observation='grid': allowed: text, image$"),
  ):  # fmt: skip
    assert_refused(check_config, _changed(seeing, **fields), message)
  for observation in ('text', 'coord'):
    check_config(_changed(seeing, envs__FrozenLake__observation=observation))


def test_a_trained_tower_is_not_exported_as_adapters(seeing):
  fields = {'lora__rank': 4, 'export__lora': 'adapter'}
  check_config(_changed(seeing, **fields))
  told = (
    r"^export\.lora='adapter': files of adapters have no vision tower; must be 'merged' with model\.vision='trained'$"
  )
  assert_refused(check_config, _changed(seeing, **fields, model__vision='trained'), told)


def test_the_images_of_an_observation_fit_into_the_context(seeing):
  lamp = _LAMP | {'images': 3, 'image_size': (30, 40)}
  config = seeing.copy_and_resolve_references()
  with config.unlocked():
    config.envs.Lamp = lamp
  config.eval.tags = ('Lamp',)
  # An image is read as 32 x 40 pixels: 20 tokens, one before and one after them.
  for context, room in ((72, 66), (71, 65), (5, 0)):
    told = (
      rf'^envs\.Lamp\.images=3: the images of an observation need 66 tokens; agent\.max_context={context} less '
      rf'agent\.max_response_tokens=6 leaves {room} for a prompt, with its text$'
    )
    assert_refused(
      lambda c: check_images(c, sections=('eval',), weights=True), _changed(config, agent__max_context=context), told
    )
  check_images(_changed(config, agent__max_context=73), sections=('eval',), weights=True)
  told = r"^envs\.FrozenLake\.observation='image': the images of an observation need 18 tokens"
  assert_refused(check_config, _changed(seeing, agent__max_context=24), told)


def test_calls_of_an_environment_may_show_its_images(seeing):
  fields = {'envs__Agent__runner': 'env:FrozenLake', 'train__tags': ('Agent',), 'eval__tags': ('Agent',)}
  config = _changed(seeing, serve__image_tokens=16, serve__max_images=3, **fields)
  assert config.envs.FrozenLake.max_turns == 3
  check_config(config)
  asks = r"with envs\.FrozenLake\.observation='image', whose"
  for changed, told in (
    ({'serve__image_tokens': 15}, rf'^serve\.image_tokens=15: must be at least 16 {asks} images have so many tokens$'),
    ({'serve__max_images': 2}, rf'^serve\.max_images=2: must be at least 3 {asks} calls show up to so many images$'),
    ({'serve__max_images': 0}, r'^serve\.max_images=0: must be at least 3'),
    (
      {'model__path': '', 'model__preset': 'tiny'},
      r"^envs\.FrozenLake\.observation='image': model\.preset='tiny' reads",
    ),
    (
      {'agent__max_context': 24},
      r"^envs\.FrozenLake\.observation='image': the images of an observation need 18 tokens",
    ),
  ):
    assert_refused(lambda c: check_images(c, weights=True), _changed(config, **changed), told)
  # Two images fit into a row.
  check_images(_changed(config, serve__max_images=2, agent__max_context=53), weights=True)


def test_models_on_a_server_get_text_only(seeing):
  told = r"^envs\.FrozenLake\.observation='image': eval\.endpoint='http://localhost:1/v1' gets text only$"
  fields = {'eval__endpoint': 'http://localhost:1/v1', 'eval__endpoint_model': 'm'}
  assert_refused(check_eval, _changed(seeing, **fields), told)
  check_eval(_changed(seeing, envs__FrozenLake__observation='grid', **fields))


def test_a_wrong_processor(seeing, tmp_path):
  directory = pathlib.Path(seeing.model.path)
  for name in ('config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json'):
    (tmp_path / name).write_bytes((directory / name).read_bytes())
  config = _changed(seeing, model__path=str(tmp_path))
  assert_refused(check_config, config, r'preprocessor_config\.json: cannot be read, and images need it')
  write_processor(tmp_path, patch_size=14)
  assert_refused(check_config, config, r'preprocessor_config\.json: patch_size=14 differs from the 4 of vision_config')
  write_processor(tmp_path, min_pixels=4096)  # boards of 32 x 32 pixels would be enlarged
  check_config(config)  # with larger tiles
  assert_refused(check_config, _changed(config, envs__FrozenLake__tile=8), r'32x32 pixels to 64x64; allowed: 16')


def test_a_checkpoint_without_a_tower(seeing, tmp_path):
  raw = json.loads((pathlib.Path(seeing.model.path) / 'config.json').read_text())
  text = {'model_type': 'qwen3', 'architectures': ['Qwen3ForCausalLM']} | raw['text_config']
  text |= {'model_type': 'qwen3', 'architectures': ['Qwen3ForCausalLM']}
  (tmp_path / 'config.json').write_text(json.dumps(text))
  assert_refused(check_config, _changed(seeing, model__path=str(tmp_path)), 'reads text only')
