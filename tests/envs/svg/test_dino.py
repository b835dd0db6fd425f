"""The part of the score that a vision model computes: equal to transformers, and its folder checked."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from configs import svg_vision_ppo
from ragen_jax import build
from ragen_jax.build_environments import check_needs
from ragen_jax.envs.outside.base import read_step
from ragen_jax.envs.svg import dino
from ragen_jax.envs.svg.environment import SvgEnvironment
from ragen_jax.envs.svg.program import read_program
from ragen_jax.envs.svg.raster import draw
from ragen_jax.utils.errors import UserError
from tests.envs.svg.test_program import svg
from tests.support.environments import raises_one_line

WIDTH, DEPTH, HEADS, PATCH = 24, 2, 3, 4
CONFIG = {
  'model_type': 'dinov2', 'hidden_size': WIDTH, 'num_hidden_layers': DEPTH, 'num_attention_heads': HEADS,
  'patch_size': PATCH, 'image_size': 20, 'layer_norm_eps': 1e-6, 'hidden_act': 'gelu', 'mlp_ratio': 2,
  'intermediate_size': 2 * WIDTH, 'qkv_bias': True, 'use_swiglu_ffn': False,
}  # fmt: skip
PROCESSOR = {
  'image_processor_type': 'BitImageProcessor', 'do_resize': True, 'size': {'shortest_edge': 32}, 'resample': 3,
  'do_center_crop': True, 'crop_size': {'height': 28, 'width': 28}, 'do_rescale': True, 'rescale_factor': 1 / 255,
  'do_normalize': True, 'image_mean': [0.485, 0.456, 0.406], 'image_std': [0.229, 0.224, 0.225],
}  # fmt: skip
OF_VIT = {
  'image_processor_type': 'ViTImageProcessor', 'size': {'height': 20, 'width': 20}, 'resample': 2,
  'do_center_crop': False,
}  # fmt: skip


def write_model(folder: pathlib.Path, seed: int = 0, kind: str = 'dinov2', processor=None, **changes) -> str:
  """A random model in Hugging Face's format; returns its folder."""
  config, rng = CONFIG | {'model_type': kind} | changes, np.random.default_rng(seed)
  side = config['image_size'] // PATCH
  tensors = {
    'embeddings.cls_token': (1, 1, WIDTH), 'embeddings.position_embeddings': (1, side * side + 1, WIDTH),
    'embeddings.patch_embeddings.projection.weight': (WIDTH, 3, PATCH, PATCH),
    'embeddings.patch_embeddings.projection.bias': (WIDTH,), 'layernorm.weight': (WIDTH,), 'layernorm.bias': (WIDTH,),
  }  # fmt: skip
  if kind == 'dinov2':
    tensors['embeddings.mask_token'] = (1, WIDTH)
  for i in range(DEPTH):
    for own, theirs in dino._LAYERS[kind].items():
      shape = {'fc1': (2 * WIDTH, WIDTH), 'fc2': (WIDTH, 2 * WIDTH)}.get(own, (WIDTH, WIDTH))
      shape = shape[:1] if own.startswith('norm') else shape
      tensors[f'encoder.layer.{i}.{theirs}.weight'] = shape
      tensors[f'encoder.layer.{i}.{theirs}.bias'] = shape[:1]
    for scale in dino._SCALES.values() if kind == 'dinov2' else ():
      tensors[f'encoder.layer.{i}.{scale}'] = (WIDTH,)
  folder.mkdir(parents=True, exist_ok=True)
  stored = {name: (0.3 * rng.normal(size=shape)).astype(np.float32) for name, shape in tensors.items()}
  save_file(stored, folder / 'model.safetensors', {'format': 'pt'})
  (folder / 'config.json').write_text(json.dumps(config))
  (folder / 'preprocessor_config.json').write_text(json.dumps(PROCESSOR | (processor or {})))
  return str(folder)


def pictures(side: int = 40) -> list[np.ndarray]:
  """A target, a drawing that is nearly right, another one, and a white canvas."""
  shapes = ('x="20" width="50" height="40" fill="red"', 'x="24" width="50" height="40" fill="red"',
            'x="10" y="60" width="80" height="20" fill="black"', 'width="0" height="0"')  # fmt: skip
  return [draw(read_program(svg(f'<rect {shape}/>')), side) for shape in shapes]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return write_model(tmp_path_factory.mktemp('dino'))


def without(mapping, name):
  return {key: value for key, value in mapping.items() if key != name}


@pytest.mark.parametrize(
  ('kind', 'processor', 'changes'),
  [
    ('dinov2', {'size': {'shortest_edge': 40}, 'crop_size': {'height': 31, 'width': 31}}, {'image_size': 36}),
    ('vit', OF_VIT, {'layer_norm_eps': 1e-12}),
  ],
)  # fmt: skip
def test_the_features_are_those_of_transformers(tmp_path, kind, processor, changes):
  torch = pytest.importorskip('torch', reason='PyTorch is not installed')
  from transformers import AutoModel, BitImageProcessorPil, ViTImageProcessorPil

  where = write_model(tmp_path, 1, kind, processor, **changes)
  model, told = AutoModel.from_pretrained(where, output_loading_info=True)
  assert not told['unexpected_keys'] and all('pooler' in name for name in told['missing_keys'])
  prepare = (BitImageProcessorPil if kind == 'dinov2' else ViTImageProcessorPil).from_pretrained(where)
  shown = pictures()
  with torch.no_grad():
    inputs = prepare(images=[Image.fromarray(x) for x in shown], return_tensors='pt')
    wanted = model.eval()(**inputs).last_hidden_state.mean(1).double().numpy()
  wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
  ours = dino.load_dino(where)
  for picture, features in zip(shown, wanted, strict=True):
    np.testing.assert_allclose(ours.features(picture), features, atol=2e-6)
  cosines = wanted @ wanted[0]
  for i in (1, 2):
    expected = max((cosines[i] - cosines[3]) / (1 - cosines[3]), 0)
    assert ours.score(shown[0], shown[i]) == pytest.approx(expected, abs=1e-4)


def test_equal_pictures_score_1_and_a_white_canvas_0(folder):
  model = dino.load_dino(folder)
  target, near, other, white = pictures()
  scores = [model.score(target, x) for x in (target, near, other, white)]
  assert scores[0] == 1 > scores[1] > scores[2] >= scores[3] == 0 and scores[1] > 0.3
  assert model.score(white, target) == 0  # the model does not tell this target from the canvas
  noise = np.random.default_rng(0).integers(0, 256, (20, 40, 40, 3), np.uint8)
  assert all(0 <= model.score(a, b) <= 1 for a, b in zip(noise[::2], noise[1::2], strict=True))


def test_a_target_that_looks_white_to_the_model_scores_0(folder, monkeypatch):
  model = dino.load_dino(folder)
  _, _, other, target = pictures()
  target[0, 0] = 0
  white, dark = np.array([1 + 1e-13, 0.0]), np.array([0.6, 0.8])  # a length may be above 1 by rounding
  monkeypatch.setattr(model, 'features', lambda picture: white if picture.mean() > 250 else dark)
  assert model.score(target, other) == 0


def test_features_are_computed_once(tmp_path, monkeypatch):
  model = dino.load_dino(write_model(tmp_path))
  assert dino.load_dino(str(tmp_path)) is model
  seen, run = [], dino._features
  monkeypatch.setattr(dino, '_features', lambda weights, picture: seen.append(1) or run(weights, picture))
  monkeypatch.setattr(dino, '_KEPT', 4)
  target, near, other, white = pictures()
  first = [model.score(target, x) for x in (near, other, near)]
  assert len(seen) == 4 and first[0] == first[2]  # the target, the canvas and two drawings
  model.score(other, np.full_like(white, 200))
  model.score(target, other)
  assert len(seen) == 6 and len(model._kept) == 4  # the grey picture took the place of the oldest, the target
  config = json.loads((tmp_path / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps(config | {'layer_norm_eps': 0.5}))
  assert dino.load_dino(str(tmp_path)).score(target, near) != first[0]


@pytest.mark.parametrize(
  ('file', 'changes', 'message'),
  [
    ('config.json', {'model_type': 'bert'}, "model_type='bert'; allowed: vit, dinov2"),
    ('config.json', {'model_type': ['vit']}, "model_type=.'vit'.; allowed: vit, dinov2"),
    ('config.json', {'model_type': 'vit'}, 'the weights have no encoder.layer.0.layernorm_before.weight'),
    ('config.json', {'hidden_act': 'silu'}, "hidden_act='silu'; allowed: gelu"),
    ('config.json', {'use_swiglu_ffn': True}, 'use_swiglu_ffn=True; allowed: False'),
    ('config.json', {'num_hidden_layers': 3}, 'the weights have no encoder.layer.2.attention'),
    ('config.json', {'num_hidden_layers': 'two'}, "num_hidden_layers='two'; allowed: integers from 1"),
    ('config.json', {'num_attention_heads': 5}, 'num_attention_heads=5; allowed: divisors of 24'),
    ('config.json', {'layer_norm_eps': None}, 'layer_norm_eps=None; allowed: numbers between 0 and 1'),
    ('config.json', '{', r'config.json cannot be read \('),
    ('config.json', '[]', 'config.json is no JSON object'),
    ('preprocessor_config.json', {'do_resize': False}, 'do_resize=False; allowed: True'),
    ('preprocessor_config.json', {'size': {'height': 20, 'width': 30}}, 'size=.*; allowed: equal sides of 1 to 1024'),
    ('preprocessor_config.json', {'size': {'shortest_edge': [8]}}, 'size=.*; allowed: equal sides of 1 to 1024'),
    ('preprocessor_config.json', {'size': 20}, 'crop_size=28; allowed: up to size=20'),
    ('preprocessor_config.json', {'size': 3, 'crop_size': 3}, 'patch_size=4; allowed: up to the 3 pixels'),
    ('preprocessor_config.json', {'resample': 'cubic'}, "resample='cubic'; allowed: a number of Pillow's filters"),
    ('preprocessor_config.json', {'rescale_factor': 1}, 'rescale_factor=1; allowed: 1/255'),
    ('preprocessor_config.json', {'image_std': [0, 1, 1]}, 'image_std=.*; allowed: three numbers between 0 and 1'),
    ('model.safetensors', b'no header', ''),
    ('model.safetensors', {'layernorm.bias': np.full(WIDTH, np.nan, np.float32)}, 'are not finite numbers'),
    ('model.safetensors', {'layernorm.bias': np.zeros(7, np.float32)}, ''),
    ('model.safetensors', {'embeddings.position_embeddings': np.zeros((1, 8, WIDTH), np.float32)}, ''),
    ('model.safetensors', {'embeddings.cls_token': np.float32(0)}, ''),
  ],
)  # fmt: skip
def test_a_wrong_folder_is_refused_in_one_line(tmp_path, file, changes, message):
  path = tmp_path / file
  where = write_model(tmp_path)
  if file.endswith('.safetensors') and isinstance(changes, dict):
    save_file(load_file(path) | {name: np.asarray(x) for name, x in changes.items()}, path)
  elif isinstance(changes, bytes):
    path.write_bytes(changes)
  else:
    path.write_text(changes if isinstance(changes, str) else json.dumps(json.loads(path.read_text()) | changes))
  with raises_one_line(f"^svg: dino_path='{where}': .*{message}"):
    dino.load_dino(where)


def test_the_environment_scores_with_the_model(folder):
  plain = SvgEnvironment(max_shapes=2, image_size=(40, 40))
  weights = {'pixels': 0.5, 'edges': 0.3, 'colours': 0.2, 'dino': 1.0}
  env, measured = (
    SvgEnvironment(max_shapes=2, image_size=(40, 40), dino_path=folder, weights=weights | {'dino': x})
    for x in (1.0, 0.0)
  )
  target, near, *_ = pictures()
  score, parts = env.score(target, near)
  assert plain.parts == ('pixels', 'edges', 'colours') and list(parts) == [*plain.parts, 'dino']
  assert plain.score(target, near) == (measured.score(target, near)[0], without(parts, 'dino'))
  assert parts['dino'] == dino.load_dino(folder).score(target, near) > 0
  assert score == pytest.approx((plain.score(target, near)[0] + parts['dino']) / 2)
  assert 'colours 0.2, dino 1.' in env.rules() and measured.rules() == plain.rules()
  assert env.score(target, target)[0] == 1
  for one, names in ((env, {*parts, 'similarity'}), (plain, {*plain.parts, 'similarity'})):
    session = one.open(2)
    session.reset([0, 1], [3, 3], [0, 1])
    programs = (svg('<rect width="99" height="50" fill="red"/>'), one.target(3).program)
    first, last = (read_step(x, one.image_form) for x in session.step([0, 1], programs))
    assert set(first.metrics) == set(last.metrics) == names
    assert set(last.metrics.values()) == {1.0} and (', dino ' in first.observation.text) == (one is env)


def test_what_is_refused_before_a_run(tmp_path, folder):
  config = svg_vision_ppo.get_config()
  assert config.envs.SVG.dino_path == '' and config.envs.SVG.weights.dino == 0
  config.envs.SVG.weights.dino = 0.5
  with pytest.raises(
    UserError, match=r"^envs\.SVG: weights\.dino=0\.5 with dino_path=''; allowed: 0, or a folder with the"
  ):
    build.env_specs(config, ('SVG',), (1,))
  config.envs.SVG.dino_path = folder
  check_needs(build.env_specs(config, ('SVG', 'SVGTest'), (1, 1)))
  config.envs.SVG.dino_path = str(tmp_path)
  with pytest.raises(
    UserError, match=r"^envs\.SVG: dino_path='.*': has no \*\.safetensors; allowed: a folder with a DINO"
  ) as e:
    check_needs(build.env_specs(config, ('SVG',), (1,)))
  assert '\n' not in str(e.value)
  with raises_one_line(r'^svg: dino_path=3; allowed: text'):
    SvgEnvironment(dino_path=3)
  with raises_one_line(
    r'^svg: weights=.*; allowed: numbers from 0 by the names pixels, edges, colours, dino, not all 0'
  ):
    SvgEnvironment(dino_path=folder, weights={'dino': -1})
