"""Models by name and by path, and the download from the hub."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib

import pytest

from ragen_jax.models import presets
from ragen_jax.models.checkpoint.names import weights
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.utils.errors import UserError


def test_a_path_goes_before_the_preset(checkpoint):
  assert presets.resolve('qwen2.5-0.5b', checkpoint) == checkpoint


def test_paths_that_are_no_checkpoint(tmp_path, checkpoint):
  def message(path):
    with pytest.raises(UserError) as error:
      presets.resolve('tiny', str(path))
    assert f"model.path='{path}'" in str(error.value) and '\n' not in str(error.value)
    return str(error.value)

  assert 'does not exist' in message(tmp_path / 'nowhere')
  assert 'is not a directory' in message(pathlib.Path(checkpoint) / 'config.json')
  (tmp_path / 'empty').mkdir()
  assert 'has no config.json' in message(tmp_path / 'empty')
  (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
  (tmp_path / 'run' / 'config.json').write_text('{}')
  assert 'is the workdir of a run' in message(tmp_path / 'run')
  (pathlib.Path(checkpoint) / 'checkpoints').mkdir()
  assert presets.resolve('tiny', checkpoint) == checkpoint  # it has weights
  os.rename(os.path.join(checkpoint, 'model.safetensors'), os.path.join(checkpoint, 'value_head.safetensors'))
  (pathlib.Path(checkpoint) / 'checkpoints').rmdir()
  assert 'has no *.safetensors' in message(checkpoint)


def test_unknown_presets_are_told_the_known_ones():
  with pytest.raises(UserError) as error:
    presets.resolve('qwen2.5-0.6b', '')
  assert "model.preset='qwen2.5-0.6b'" in str(error.value)
  for name in ('tiny', 'qwen2.5-0.5b', 'qwen2.5-7b-instruct', 'r1-distill-qwen-1.5b', 'qwen3-8b'):
    assert name in str(error.value) and name in presets.names()


def test_presets_are_downloaded_without_code(monkeypatch):
  import huggingface_hub

  asked = {}
  monkeypatch.setattr(
    huggingface_hub, 'snapshot_download', lambda repository, **kwargs: asked.update(kwargs) or f'/hub/{repository}'
  )
  assert presets.resolve('qwen2.5-0.5b-instruct', '') == '/hub/Qwen/Qwen2.5-0.5B-Instruct'
  assert set(asked['allow_patterns']) == {'*.json', '*.safetensors', '*.txt', '*.jinja'}
  assert 'original/*' in asked['ignore_patterns']  # Llama's own copy of the weights


def test_a_hub_that_cannot_be_reached_is_one_line_with_a_way_out(monkeypatch, tmp_path):
  import huggingface_hub

  def unreachable(*args, **kwargs):
    raise ConnectionError('no route\nto host')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', unreachable)
  with pytest.raises(UserError) as error:
    presets.resolve('qwen3-0.6b', '')
  message = str(error.value)
  assert '\n' not in message
  assert 'Qwen/Qwen3-0.6B' in message and 'no route to host' in message and '--config.model.path=DIR' in message


def _with_layers(cfg: QwenConfig, *kinds: str) -> QwenConfig:
  return dataclasses.replace(cfg, num_layers=len(kinds), layer_kinds=kinds if cfg.layer_kinds else ())


def _size(cfg: QwenConfig) -> int:
  """The weights of a model, counted from one layer of each kind, as all layers of a kind have the same."""

  def of(*kinds):
    return sum(weight.size for weight in weights(_with_layers(cfg, *kinds)))

  count = collections.Counter(cfg.layer_kinds or ('',) * cfg.num_layers)
  one = of(*count)
  return one + sum((n - 1) * (of(*count, kind) - one) for kind, n in count.items())


@pytest.mark.parametrize(
  ('preset', 'millions'),
  [
    # As the model cards have them, in millions; the heads' own embedding counted where it is not tied.
    ('qwen3-0.6b', 596), ('llama3.2-1b', 1236), ('gemma3-270m', 268.1),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in (
      ('qwen2.5-0.5b', 494), ('qwen2.5-1.5b', 1544), ('qwen2.5-3b', 3086), ('qwen2.5-7b-instruct', 7616),
      ('r1-distill-qwen-1.5b', 1777), ('qwen3-1.7b', 1721), ('qwen3-4b', 4022), ('qwen3-8b', 8191),
      ('llama3.2-3b-instruct', 3213), ('smollm2-135m', 134.5), ('smollm2-360m', 361.8), ('smollm2-1.7b', 1711),
      ('qwen3-30b-a3b', 30532.1), ('gemma3-1b', 999.9),
    )),
  ],
)  # fmt: skip
def test_presets_have_the_size_that_is_published(preset, millions):
  assert _size(presets.shape(preset, '')) / 1e6 == pytest.approx(millions, abs=0.6)


@pytest.mark.slow
def test_sizes_are_those_of_all_layers():
  for preset in ('qwen2.5-0.5b', 'gemma3-270m'):
    cfg = presets.shape(preset, '')
    assert _size(cfg) == sum(weight.size for weight in weights(cfg))


@pytest.mark.parametrize(
  ('preset', 'size', 'tensors', 'tower', 'mergers'),
  [
    # The totals of the published files, and of their parts.
    pytest.param('qwen2.5-vl-3b', 3_754_622_976, 824, 631_975_680, 36_708_608, marks=pytest.mark.slow),
    pytest.param('qwen2.5-vl-7b', 8_292_166_656, 729, 631_975_680, 44_574_464, marks=pytest.mark.slow),
    ('qwen3-vl-2b', 2_127_532_032, 625, 306_242_560, 100_714_496),
    pytest.param('qwen3-vl-4b', 4_437_815_808, 713, 306_242_560, 109_105_152, marks=pytest.mark.slow),
    pytest.param('qwen3-vl-8b', 8_767_123_696, 750, 415_891_440, 160_496_896, marks=pytest.mark.slow),
  ],
)
@pytest.mark.slow_cases('qwen3-vl-2b-2127532032-625-306242560-100714496')
@pytest.mark.exhaustive_cases(
  'qwen3-vl-8b-8767123696-750-415891440-160496896', 'qwen2.5-vl-7b-8292166656-729-631975680-44574464',
  'qwen2.5-vl-3b-3754622976-824-631975680-36708608',
)  # fmt: skip
def test_presets_that_read_images_have_the_weights_that_are_published(preset, size, tensors, tower, mergers):
  plan = weights(presets.shape(preset, ''))
  assert (sum(w.size for w in plan), len(plan)) == (size, tensors)
  visual = [w for w in plan if w.path[0] == 'visual']
  assert sum(w.size for w in visual if 'merger' in str(w.path)) == mergers
  assert sum(w.size for w in visual) == tower + mergers


@pytest.mark.parametrize(
  ('preset', 'text', 'tower'),
  [
    ('qwen3.5-0.8b', 752_393_024, 100_592_896),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in (
      ('qwen3.5-2b', 1_881_825_088, 331_416_576), ('qwen3.5-4b', 4_205_751_296, 333_514_240),
      ('qwen3.5-9b', 8_953_803_264, 456_010_480), ('qwen3.5-27b', 26_895_998_464, 460_730_096),
      ('qwen3.5-35b-a3b', 34_660_610_688, 446_571_248),
    )),
  ],
)  # fmt: skip
def test_presets_of_qwen3_5_have_the_text_model_and_the_tower_that_are_published(preset, text, tower):
  cfg = presets.shape(preset, '')
  few = _with_layers(cfg, *dict.fromkeys(cfg.layer_kinds))
  assert sum(w.size for w in weights(few) if w.path[0] == 'visual') == tower
  assert _size(dataclasses.replace(cfg, vision=None)) == text


def test_the_processor_of_a_preset_is_that_of_the_published_file():
  found = presets.processor('qwen3.5-0.8b', '')
  assert found == ProcessorConfig(16, 2, 2, 65_536, 16_777_216, (0.5,) * 3, (0.5,) * 3)


def test_every_preset_has_a_shape():
  assert all(presets.shape(name, '').hidden_size for name in presets.names())
  with pytest.raises(UserError, match=r"model\.preset='gpt'"):
    presets.shape('gpt', '')


def test_the_built_in_model_that_sees_has_its_own_processor():
  own = presets.processor(presets.TINY_VL, '')
  assert own.factor == 8 and own == presets.processor('', presets.resolve(presets.TINY_VL, ''))
  assert presets.processor(presets.TINY, '') is None
