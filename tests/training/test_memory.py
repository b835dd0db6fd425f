"""The memory of the update as estimated against what a compiler needs, and the sizes that follow from it."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from ragen_jax import api, build
from ragen_jax.agent.image_table_sizes import ImageCounts, ImageTableSizes
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.distributed.mesh import AXES, make_mesh
from ragen_jax.models import lora, presets
from ragen_jax.models.attention_settings import AttentionSettings
from ragen_jax.models.feed_forward import ExpertsConfig
from ragen_jax.models.layers import freeze
from ragen_jax.models.linear_attention import LinearConfig
from ragen_jax.models.qwen import REMAT, Qwen
from ragen_jax.models.qwen_config import FULL, WINDOWED, QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.models.vision.config import QWEN3_VL, VisionConfig
from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.planning import host_fit
from ragen_jax.planning.lowering import lower_gradient
from ragen_jax.training import batch_sizes, memory
from ragen_jax.training.batch_sizes import SizeSettings
from ragen_jax.training.batches import abstract_mini_batch
from ragen_jax.training.images import ImageInputs, abstract_inputs
from ragen_jax.training.memory import UpdateMemory
from ragen_jax.training.scoring import RematSettings
from ragen_jax.training.state import TrainState
from ragen_jax.utils import host_memory
from tests.support import learning
from tests.support.configs import small_config
from tests.support.models import HYBRID, WINDOWS
from tests.support.paths import ROOT
from tests.support.seeing import seeing_config, seeing_policy

# As for an accelerator: ordered for memory. The machine code is not run.
_OPTIONS = {
  'xla_cpu_enable_concurrency_optimized_scheduler': False,
  'xla_backend_optimization_level': 0,
  'xla_llvm_disable_expensive_passes': True,
}
_SHAPE = {
  'vocab_size': 4096, 'hidden_size': 64, 'intermediate_size': 256, 'num_layers': 8, 'num_heads': 4, 'num_kv_heads': 2,
  'head_dim': 16,
}  # fmt: skip


# Two turns of a loop over four layers.
_HYBRID = HYBRID | {
  'num_layers': 8, 'vocab_size': 64, 'layer_kinds': HYBRID['layer_kinds'] * 2,
  'linear': LinearConfig(key_heads=2, value_heads=4, key_dim=32, value_dim=32, taps=4),
}  # fmt: skip
# And a layer behind a loop over two.
_WINDOWS = WINDOWS | {'num_layers': 9, 'vocab_size': 64, 'layer_kinds': (WINDOWED, FULL) * 4 + (WINDOWED,)}


def _model(*, adapters: bool = False, separate: bool = False, **shape) -> LanguageModel:
  """An abstract model; from eight layers on they are scanned."""

  def make():
    rngs = nnx.Rngs(0)
    policy = Qwen(QwenConfig(**_SHAPE | shape), rngs=rngs)
    if adapters:
      lora.attach(policy, lora.LoraConfig(4, 4, lora.TARGETS), rngs)
    return ActorCritic(policy, Qwen(policy.cfg, rngs=rngs) if separate else None)

  return LanguageModel('', nnx.eval_shape(make), None, None, make_mesh(1, 1, 1))


def _compiled(
  model: LanguageModel, rows: int, width: int, replies: int, images: ImageInputs | None = None, **scoring
) -> int:
  """Bytes that the gradient program needs in addition to its arguments and results."""
  learner = learning.learner(model.model, **scoring)
  trained, frozen = lora.partition(nnx.split(model.model)[1])
  batch = abstract_mini_batch(rows, width, replies, reference=False, importance=False, packed=True, images=images)
  state = TrainState(trained, frozen, jax.eval_shape(learner.optimizer.init, trained))
  compiled = lower_gradient(learner, state, batch).compile(compiler_options=_OPTIONS)
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
  ('model', 'scoring'),
  [
    pytest.param({}, {'remat': 'layers', 'logits_chunk': 64}, marks=pytest.mark.slow),
    pytest.param({'adapters': True}, {'remat': 'layers', 'logits_chunk': 64}, marks=pytest.mark.slow),
    pytest.param({'vocab_size': 64}, {'remat': 'elementwise', 'logits_chunk': 64}, marks=pytest.mark.slow),
    ({'num_layers': 3}, {'remat': 'none', 'logits_chunk': 0}),
    pytest.param(_HYBRID, {'remat': 'layers', 'logits_chunk': 64}, marks=pytest.mark.slow),
    pytest.param(_HYBRID, {'remat': 'attention', 'logits_chunk': 64}, marks=pytest.mark.slow),
    pytest.param(_HYBRID, {'remat': 'elementwise', 'logits_chunk': 64}, marks=pytest.mark.slow),
    pytest.param(_WINDOWS, {'remat': 'layers', 'logits_chunk': 64}, marks=pytest.mark.slow),
    pytest.param(_WINDOWS, {'remat': 'none', 'logits_chunk': 64}, marks=pytest.mark.slow),
    pytest.param({'num_layers': 8, 'vocab_size': 64}, {'remat': 'none', 'logits_chunk': 0}, marks=pytest.mark.slow),
  ],
)
@pytest.mark.exhaustive_cases(
  'model0-scoring0', 'model1-scoring1', 'model2-scoring2', 'model5-scoring5', 'model6-scoring6', 'model7-scoring7',
  'model8-scoring8', 'model9-scoring9', 'model4-scoring4',
)  # fmt: skip
@pytest.mark.slow_cases('model3-scoring3')
def test_the_estimate_is_near_what_a_compiler_needs_for_few_and_many_columns(model, scoring):
  """Below, a run would choose more columns than fit; far above, it would leave the device idle."""
  made = _model(**model)
  found = memory.update_memory(
    made, logits_chunk=scoring['logits_chunk'], width=128, reference=False, platform='cpu', images=None
  )
  for rows in (2, 16):
    needed, estimated = _compiled(made, rows, 128, 96, **scoring), found.activations(rows * 128, scoring['remat'])
    assert 0.9 * needed <= estimated <= 2.5 * needed, (rows, needed, estimated)


# Images of 8 x 8 patches and 16 tokens, up to five in a row.
_PROCESSOR = ProcessorConfig(
  patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=64, max_pixels=4096, mean=(0.5,) * 3, std=(0.5,) * 3
)
_ROOM = ImageTableSizes((ImageCounts((32, 32), 1, 16, 5),))
_TOWER = {
  'hidden_size': 64, 'intermediate_size': 256, 'num_heads': 4, 'out_hidden_size': 64, 'patch_size': 4,
  'temporal_patch_size': 2, 'merge_size': 2, 'window_size': 0, 'full_blocks': (), 'num_positions': 16,
  'image_token_id': 1, 'video_token_id': 2, 'vision_start_token_id': 3, 'vision_end_token_id': 4,
}  # fmt: skip


def _seeing(depth: int, deepstack: tuple[int, ...], layers: int = 2) -> LanguageModel:
  tower = VisionConfig(family=QWEN3_VL, depth=depth, deepstack_blocks=deepstack, **_TOWER)
  return _model(num_layers=layers, vocab_size=64, architecture='qwen3', rope_sections=(4, 2, 2), vision=tower)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('depth', 'deepstack', 'remat'),
  [
    (9, (3,), 'layers'),
    (3, (), 'none'),
    (9, (), 'none'),
    (3, (0, 1), 'layers'),
  ],
)
@pytest.mark.exhaustive_cases('3-deepstack3-layers', '3-deepstack1-none', '9-deepstack2-none', '9-deepstack0-layers')
def test_the_estimate_counts_a_trained_tower(depth, deepstack, remat):
  made = _seeing(depth, deepstack)
  images = memory.SeenColumns(tokens=5 * 16 / 128, patches=64, shards=1)
  estimate = functools.partial(memory.update_memory, made, logits_chunk=64, width=128, reference=False, platform='cpu')
  for rows in (2, 16):
    inputs = abstract_inputs(made, _PROCESSOR, _ROOM, rows, 128, packed=False, shared=False)
    needed = _compiled(made, rows, 128, 96, images=inputs, remat=remat, logits_chunk=64)
    text, estimated = (estimate(images=x).activations(rows * 128, remat) for x in (None, images))
    assert 0.9 * needed <= estimated <= 2.5 * needed and text < 0.5 * needed, (rows, needed, estimated, text)


@pytest.mark.slow
@pytest.mark.parametrize('deepstack', [(0, 1, 2), ()])
@pytest.mark.exhaustive_cases('deepstack1')
def test_the_estimate_counts_layers_that_features_are_added_to(deepstack):
  made = _seeing(3, deepstack, layers=11)
  freeze(made.model.policy.visual)
  images = memory.SeenColumns(tokens=5 * 16 / 128, patches=64, shards=1)
  estimate = memory.update_memory(made, logits_chunk=64, width=128, reference=False, platform='cpu', images=images)
  for rows in (2, 16):
    inputs = abstract_inputs(made, _PROCESSOR, _ROOM, rows, 128, packed=False, shared=False)
    needed = _compiled(made, rows, 128, 96, images=inputs, remat='layers', logits_chunk=64)
    assert 0.9 * needed <= estimate.activations(rows * 128, 'layers') <= 2.5 * needed, rows


def test_a_frozen_tower_holds_its_table_only():
  made = _seeing(9, (3,))
  freeze(made.model.policy.visual)
  images = memory.SeenColumns(tokens=0.5, patches=64, shards=3)
  text, seeing = (
    memory.update_memory(made, logits_chunk=64, width=128, reference=False, platform='cpu', images=x)
    for x in (None, images)
  )
  # Half a token for each column, with an embedding and one level of DeepStack of 64 numbers, on each of three devices.
  assert seeing.saved == {remat: (once, column + 3 * 64 * 4) for remat, (once, column) in text.saved.items()}
  assert dataclasses.replace(seeing, saved=text.saved) == text


@pytest.mark.parametrize(('vision', 'packing'), [('frozen', False), ('frozen', True), ('trained', True)])
@pytest.mark.slow
def test_a_run_counts_the_images_that_its_columns_can_show(tmp_path, vision, packing):
  config = seeing_config(model__vision=vision, optimizer__packing=packing, optimizer__mini_batch_size=4)
  made = seeing_policy(config, tmp_path, QWEN3_VL)
  width = build.size_settings(config, made).width
  # An image has 16 tokens, and one before and after it. A row has 3 turns; a bin may be full of rows of one turn.
  tokens = 16 * (width // 18 if packing else 3)
  seen = memory.SeenColumns(tokens / width, 64, 1)
  found = memory.update_memory(
    made, logits_chunk=config.model.logits_chunk, width=width, reference=False, platform='cpu', images=seen
  )
  assert build.update_memory(config, made) == found


def test_what_is_kept_is_counted_exactly():
  for separate in (False, True):
    made = _model(separate=separate, num_layers=2)
    params = nnx.split(made.model)[1]
    opt_state = jax.eval_shape(learning.optimizer().init, params)
    size = sum(x.size * 4 for x in jax.tree.leaves((params, params, opt_state)))  # weights, gradients, moments
    found = memory.update_memory(made, logits_chunk=0, width=128, reference=False, platform='cpu', images=None)
    assert size - 64 <= found.kept <= size  # but for the optimiser's counters
    policy = sum(x.size * 4 for x in jax.tree.leaves(params['policy']))
    more = memory.update_memory(made, logits_chunk=0, width=128, reference=True, platform='cpu', images=None)
    assert more.kept == found.kept + policy


@pytest.mark.slow
def test_each_device_keeps_its_part_of_what_is_trained():
  def kept(reference, *mesh):
    made = dataclasses.replace(_pretrained('qwen2.5-0.5b'), mesh=AbstractMesh(mesh, AXES))
    return memory.update_memory(made, logits_chunk=64, width=128, reference=reference, platform='tpu', images=None).kept

  # All but norms and some biases.
  assert kept(False, 8, 1, 1) == pytest.approx(kept(False, 1, 1, 1) / 8, rel=1e-2)
  assert kept(True, 8, 1, 1) == pytest.approx(kept(True, 1, 1, 1) / 8, rel=1e-2)
  assert kept(False, 2, 2, 2) == pytest.approx(kept(False, 1, 1, 1) / 8, rel=1e-2)


# GiB that compilers need for the gradient program in addition to its arguments and results (jax 0.10.2, libtpu
# 0.0.42.1, 2026-11-22; of meshes with `data` 2026-11-23), with the kernels of attention of each. The two of
# 7B on TPUs are of a program whose gradient of the head was float32.
@pytest.mark.parametrize(
  ('preset', 'mesh', 'platform', 'remat', 'columns', 'needed'),
  [
    ('qwen2.5-0.5b', (8, 1, 1), 'tpu', 'attention', 5632, 3.24),  # v5e:2x4
    ('qwen2.5-0.5b', (8, 1, 1), 'tpu', 'attention', 14848, 4.66),
    ('qwen2.5-0.5b', (8, 1, 1), 'gpu', 'layers', 5632, 3.73),  # h100:8
    ('qwen2.5-0.5b', (8, 1, 1), 'gpu', 'layers', 14848, 4.28),
    ('qwen2.5-1.5b', (8, 1, 1), 'gpu', 'elementwise', 5632, 12.91),
    ('qwen2.5-1.5b', (8, 1, 1), 'gpu', 'elementwise', 14848, 24.13),
    ('qwen2.5-7b', (1, 4, 1), 'tpu', 'elementwise', 11264, 52.37),  # v5p:2x2x1
    ('qwen2.5-7b', (1, 1, 4), 'tpu', 'elementwise', 45056, 64.75),
    ('qwen2.5-7b', (1, 8, 1), 'gpu', 'elementwise', 5632, 22.00),
    ('qwen2.5-7b', (1, 8, 1), 'gpu', 'layers', 5632, 8.46),
    ('qwen2.5-7b', (1, 2, 4), 'gpu', 'elementwise', 22528, 25.95),
    ('qwen2.5-7b', (1, 4, 2), 'gpu', 'elementwise', 11264, 22.15),
  ],
)
@pytest.mark.slow_cases(
  'qwen2.5-7b-mesh6-tpu-elementwise-11264-52.37', 'qwen2.5-1.5b-mesh4-gpu-elementwise-5632-12.91',
  'qwen2.5-1.5b-mesh5-gpu-elementwise-14848-24.13',
)  # fmt: skip
def test_the_whole_is_within_a_tenth_of_what_compilers_of_accelerators_need(
  preset, mesh, platform, remat, columns, needed
):
  made = dataclasses.replace(_pretrained(preset), mesh=AbstractMesh(mesh, AXES))
  found = memory.update_memory(
    made, logits_chunk=2048, width=3712, reference=False, platform=platform, images=None, dtype='bfloat16'
  )
  assert found.total(columns, remat) == pytest.approx(found.kept + needed * 2**30, rel=0.1)


def test_the_choice_that_the_docs_quote_is_that_of_a_run():
  config = api.load_config('frozenlake_ppo:qwen2.5-0.5b', {})
  made = dataclasses.replace(_pretrained('qwen2.5-0.5b'), mesh=AbstractMesh((8, 1, 1), AXES))
  sizes, limit = build.size_settings(config, made), 0.9 * 16 * 2**30
  found = memory.update_memory(
    made, logits_chunk=config.model.logits_chunk, width=sizes.widest, reference=False, platform='tpu', images=None,
    dtype='bfloat16',
  )  # fmt: skip
  chosen = batch_sizes.batching(sizes, lambda: found, lambda: limit)
  remat = batch_sizes.remat_settings(config.model.remat, made.model.policy, lambda: found, lambda: limit)
  line = batch_sizes.describe(sizes, chosen, remat, found, limit)
  assert line in (ROOT / 'docs' / 'memory.md').read_text(encoding='utf-8').splitlines()


@functools.cache
def _pretrained(preset):
  """An abstract pretrained model with kernels of attention."""
  attention = AttentionSettings('splash', None)
  model = nnx.eval_shape(
    lambda: ActorCritic(Qwen(presets.shape(preset, ''), attention=attention, rngs=nnx.Rngs(0)), None)
  )
  return LanguageModel('', model, None, None, make_mesh(1, 1, 1))


def test_columns_are_the_most_that_fit():
  saved = {'none': (50, 9), 'elementwise': (0, 4), 'attention': (0, 2), 'layers': (0, 1)}
  found = UpdateMemory(
    kept=1000, saved=saved, head=500, head_column=1, layers=100, layers_column=7, scores_column=5, most_scores=300
  )
  for remat in saved:
    for limit in (1499, 1500, 1600, 1999, 2000, 10_000):
      columns = found.columns(limit, remat)
      assert found.total(columns, remat) <= limit < found.total(columns + 1, remat) or (columns == 0 and limit < 1560)
    assert found.columns(0, remat) == 0
  assert found.columns(10_000, 'none') < found.columns(10_000, 'elementwise') < found.columns(10_000, 'layers')
  pieces = dataclasses.replace(found, one_piece=0.75)  # of what is left by the 1000 that are kept
  assert pieces.columns(9000, 'layers') == found.columns(7000, 'layers')


@pytest.mark.parametrize(('platform', 'share'), [('cpu', 1), ('tpu', 1), ('gpu', 0.75), ('cuda', 0.75)])
def test_a_program_gets_a_part_of_the_memory_that_a_gpu_has_left(platform, share):
  found = memory.update_memory(
    _pretrained('qwen2.5-0.5b'), logits_chunk=2048, width=2048, reference=False, platform=platform, images=None
  )
  assert found.one_piece == share


def test_what_is_computed_again_is_the_fastest_that_fits():
  def asked():
    raise AssertionError('asked for the memory')

  for name, remat in ((False, 'none'), ('elementwise', 'elementwise'), ('attention', 'attention'), (True, 'layers')):
    assert batch_sizes.remat_settings(name, _policy(4096, by_row=False), asked, asked).choose(10**6) == remat

  def auto(width, by_row, memory=_MEMORY):
    return batch_sizes.remat_settings(
      'auto', _policy(width, by_row), lambda: memory, lambda: 2 * 2**30 + 5000 * 2**20
    )  # fmt: skip

  # A narrow model computes products again in less time than an accelerator reads them.
  narrow, wide = auto(896, by_row=False), auto(3584, by_row=False)
  assert narrow.choices == (('attention', 5000),)
  assert (narrow.choose(5000), narrow.choose(5001)) == ('attention', 'layers')
  assert (wide.choose(5000), wide.choose(5001)) == ('elementwise', 'layers')
  # A CPU reads them sooner, and keeps less where that does not fit.
  kept = _NOTHING | {'elementwise': (0, 2**20), 'attention': (0, 2**18)}
  host = auto(896, by_row=True, memory=dataclasses.replace(_MEMORY, saved=kept))
  assert host.choices == (('elementwise', 2500), ('attention', 4000))
  assert [host.choose(n) for n in (2500, 2501, 4000, 4001)] == ['elementwise', 'attention', 'attention', 'layers']


def _policy(width, by_row):
  return types.SimpleNamespace(
    cfg=types.SimpleNamespace(hidden_size=width), attention=types.SimpleNamespace(by_row=by_row)
  )  # fmt: skip


_SIZES = SizeSettings(
  mini_batch_size=24, micro_batch_size=0, packing=False, max_context=700, length_step=128, whole_rows=False, shards=2,
  remat='auto', most_columns=2**31, most_shared=2**30,
)  # fmt: skip
_NOTHING = dict.fromkeys(REMAT, (0, 0))
_MEMORY = UpdateMemory(
  kept=2**30, saved=_NOTHING, head=0, head_column=0, layers=2**30, layers_column=2**20, scores_column=0, most_scores=0
)
_REMAT = RematSettings((('elementwise', 1000), ('attention', 2**31)))


@pytest.mark.parametrize(('rows', 'expected'), [(0.5, 2), (1.0, 2), (3.9, 6), (4.0, 8), (7.0, 12), (100.0, 24)])
def test_micro_batches_are_the_largest_even_division_that_fits(rows, expected):
  limit = 2 * 2**30 + rows * 768 * 2**20  # rows of a device
  assert batch_sizes.micro_batch_size(_SIZES, _MEMORY, limit) == expected
  chosen = batch_sizes.batching(_SIZES, lambda: _MEMORY, lambda: limit)
  assert chosen.micro_batch_size == expected and chosen.packing is None and chosen.reply_step == 64
  text = batch_sizes.describe(_SIZES, chosen, _REMAT, _MEMORY, limit)
  columns = expected * 768 // _SIZES.shards
  assert ('up to 1000 of them without computing products again' in text) == (columns > 1000)
  assert f'{expected} rows of up to 768 columns' in text and f'{limit / 2**30:.1f} GiB' in text


def test_a_number_is_taken_as_it_is_and_asks_for_no_memory():
  def asked():
    raise AssertionError('asked for the memory')

  own = dataclasses.replace(_SIZES, micro_batch_size=4)
  assert batch_sizes.batching(own, asked, asked).micro_batch_size == 4
  packed = batch_sizes.batching(dataclasses.replace(own, packing=True, max_context=3600), asked, asked)
  assert packed.packing.width == 3712 and packed.packing.columns == 2 * 3712 and packed.packing.shards == 2
  assert 'micro_batch_size=4' in batch_sizes.describe(own, packed, _REMAT, _MEMORY, 2**40)


@pytest.mark.parametrize(('kept', 'told'), [(0, False), (7423, True), (7424, False), (2**24, False)])
def test_columns_that_nothing_is_computed_again_for_are_told_if_there_are_more(kept, told):
  packed = dataclasses.replace(_SIZES, micro_batch_size=4, packing=True, max_context=3600)
  chosen = batch_sizes.batching(packed, lambda: _MEMORY, lambda: 2**40)
  assert chosen.packing.columns == 7424
  text = batch_sizes.describe(packed, chosen, RematSettings((('elementwise', kept),)), _MEMORY, 2**40)
  assert (f'up to {kept} of them' in text) == ('of them' in text) == told


@pytest.mark.parametrize(
  ('fields', 'widest'),
  [({}, 7424), ({'skips_unseen': False}, 3712), ({'most_shared': 0}, 3712), ({'most_shared': 5000}, 5000),
   ({'most_columns': 6000}, 6000), ({'packing': False}, None)],
)  # fmt: skip
def test_bins_of_trees_may_be_wider_where_attention_skips_what_is_not_seen(fields, widest):
  own = dataclasses.replace(_SIZES, packing=True, max_context=3600, shards=1, skips_unseen=True)
  chosen = batch_sizes.batching(dataclasses.replace(own, **fields), lambda: _MEMORY, lambda: 2**44)
  assert (chosen.packing and chosen.packing.widest) == widest


def test_packed_columns_are_those_that_fit_and_no_more_than_a_mini_batch_needs():
  packed = dataclasses.replace(_SIZES, packing=True)
  assert packed.width == 2048
  for columns, expected in ((100, 2048), (5000, 5000), (10**7, 12 * 2048)):
    limit = 2 * 2**30 + columns * 2**20
    chosen = batch_sizes.batching(packed, lambda: _MEMORY, lambda limit=limit: limit)
    assert chosen.packing.columns == expected and chosen.reply_step == 512


def test_the_memory_of_this_machine_is_that_of_its_smallest_device(monkeypatch):
  class Device:
    def __init__(self, limit):
      self.limit = limit

    def memory_stats(self):
      return self.limit and {'bytes_limit': self.limit}

  assert 2**28 < memory.device_memory() < 2**44  # of this host, but for a busy one
  monkeypatch.setattr(jax, 'local_devices', lambda: [Device(5000), Device(3000)])
  assert memory.device_memory() == 3000 and memory.usable() == 2700


def test_a_cpu_may_fill_what_is_left_and_what_its_arrays_hold_but_for_workspace(monkeypatch):
  monkeypatch.setattr(host_memory, 'available', lambda: 10 * 2**30)
  arrays = [jax.device_put(np.zeros(2**18, np.float32)) for _ in range(2)]
  monkeypatch.setattr(jax, 'live_arrays', lambda: [*arrays, *(x.addressable_shards[0].data for x in arrays)])
  assert memory.device_memory() == 8.5 * 2**30  # 10 GiB + 2 MiB - 1.25 GiB, in steps of half a GiB
  assert memory.usable() == 0.9 * memory.device_memory()
  arrays += [jax.device_put(np.zeros(2**24, np.float32)) for _ in range(4)]
  assert memory.device_memory() == 9 * 2**30
  monkeypatch.setattr(host_memory, 'available', lambda: 41 * 2**28)
  assert memory.device_memory() == 9 * 2**30  # views of the arrays do not count
  monkeypatch.setattr(host_memory, 'available', lambda: 2**28)
  assert memory.device_memory() == 0


_EXPERTS = ExpertsConfig(count=16, chosen=2, width=512, normalised=True)
_SHARED = dataclasses.replace(_EXPERTS, shared_width=1024)
# With the options of a run, but machine code that is made fast.
_FAST = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}


@pytest.mark.parametrize(
  ('model', 'rows', 'remat', 'chunk'),
  [
    ({}, 4, 'layers', 64),
    pytest.param({}, 4, 'layers', 640, marks=pytest.mark.slow),
    pytest.param({}, 16, 'attention', 64, marks=pytest.mark.slow),
    pytest.param({}, 8, 'elementwise', 64, marks=pytest.mark.slow),
    pytest.param({'adapters': True}, 8, 'elementwise', 64, marks=pytest.mark.slow),
    pytest.param({'adapters': True}, 4, 'attention', 640, marks=pytest.mark.slow),
    pytest.param({'experts': _EXPERTS}, 4, 'layers', 64, marks=pytest.mark.slow),
    pytest.param({'experts': _EXPERTS}, 8, 'elementwise', 64, marks=pytest.mark.slow),
    pytest.param({'experts': _EXPERTS, 'adapters': True}, 4, 'layers', 64, marks=pytest.mark.slow),
    pytest.param({'experts': _SHARED, 'adapters': True}, 8, 'elementwise', 64, marks=pytest.mark.slow),
  ],
)
@pytest.mark.slow_cases('model0-4-layers-64')
@pytest.mark.exhaustive_cases(
  'model9-8-elementwise-64', 'model6-4-layers-64', 'model4-8-elementwise-64', 'model7-8-elementwise-64',
  'model5-4-attention-640', 'model3-8-elementwise-64', 'model2-16-attention-64', 'model8-4-layers-64',
)  # fmt: skip
def test_the_whole_is_within_15_percent_of_what_one_cpu_needs(model, rows, remat, chunk):
  made = _model(**model, hidden_size=256, intermediate_size=1024, vocab_size=16384, num_layers=12)
  made.model.policy.attention = blocks = AttentionSettings('blocks', None)
  for layer in made.model.policy.layers:
    layer.self_attn.attention = blocks
  learner = learning.learner(made.model, remat=remat, logits_chunk=chunk)
  trained, frozen = lora.partition(nnx.split(made.model)[1])
  batch = abstract_mini_batch(rows, 256, 160, reference=False, importance=False, packed=True, images=None)
  state = TrainState(trained, frozen, jax.eval_shape(learner.optimizer.init, trained))
  needed = lower_gradient(learner, state, batch).compile(compiler_options=_FAST).memory_analysis().temp_size_in_bytes
  found = memory.update_memory(
    made, logits_chunk=chunk, width=256, reference=False, platform='cpu', images=None
  )  # fmt: skip
  assert found.total(rows * 256, remat) == pytest.approx(found.kept + needed, rel=0.15)


# GiB that the compiler for CPUs needs for the gradient program of 0.5B in addition to its arguments and results (jax
# 0.10, 2026-11-25).
@pytest.mark.parametrize(
  ('adapters', 'rows', 'width', 'remat', 'chunk', 'needed'),
  [
    (False, 4, 2048, 'layers', 2048, 9.27),
    (False, 4, 2048, 'attention', 256, 5.64),
    (False, 2, 896, 'attention', 256, 4.25),
    (False, 1, 3712, 'layers', 256, 4.31),
    (False, 8, 3712, 'layers', 256, 10.95),
    (False, 1, 2048, 'elementwise', 512, 6.68),
    pytest.param(True, 4, 2048, 'attention', 2048, 9.32, marks=pytest.mark.slow),
    (True, 2, 896, 'attention', 256, 3.05),
    (True, 1, 2048, 'layers', 256, 2.95),
    (True, 1, 2048, 'elementwise', 256, 7.51),
  ],
)
@pytest.mark.slow_cases(
  'True-2-896-attention-256-3.05', 'True-1-2048-layers-256-2.95', 'True-1-2048-elementwise-256-7.51',
)  # fmt: skip
def test_the_program_of_half_a_billion_weights_on_one_cpu(adapters, rows, width, remat, chunk, needed):
  made = _half_a_billion(adapters)
  found = memory.update_memory(
    made, logits_chunk=chunk, width=width, reference=False, platform='cpu', images=None
  )  # fmt: skip
  assert 0.95 * needed <= found.activations(rows * width, remat) / 2**30 <= 1.15 * needed


@functools.cache
def _half_a_billion(adapters):
  config = api.load_config('bandit_ppo:qwen2.5-0.5b' + '-lora' * adapters)
  return host_fit.as_it_runs(config)


def test_on_one_cpu_fewer_logits_are_made_at_once(policy):
  def chunk(config, model=policy):
    return build.scoring_settings(config, model, temperature=1.0).logits_chunk

  assert [chunk(small_config(model__logits_chunk=n)) for n in (0, 64, 256, 2048)] == [0, 64, 256, 256]
  estimates = [build.update_memory(small_config(model__logits_chunk=n), policy) for n in (64, 256, 2048)]
  assert estimates[0] != estimates[1] == estimates[2]
  planned = dataclasses.replace(policy, model=_model(num_layers=1).model)  # attends as accelerators' plans do
  assert chunk(small_config(model__logits_chunk=2048), planned) == 2048


def test_on_one_cpu_no_more_columns_are_chosen_than_make_it_faster(policy):
  config = small_config(optimizer__packing=True, optimizer__micro_batch_size=0, optimizer__mini_batch_size=16)
  assert build.size_settings(config, policy).most_columns == batch_sizes.HOST_COLUMNS == 8192
  assert build.batching_settings(config, policy, lambda: 2**50).packing.columns == 8192 < 16 * 2048
  planned = dataclasses.replace(policy, model=_model(num_layers=1).model)
  assert build.batching_settings(config, planned, lambda: 2**50).packing.columns == 16 * 2048


def test_a_run_without_a_number_takes_what_fits(policy, monkeypatch):
  config = small_config(optimizer__micro_batch_size=0, optimizer__mini_batch_size=16, length_step=64)
  found = build.update_memory(config, policy)
  for rows, expected in ((16, 16), (5, 4)):
    limit = found.total(rows * 512, 'none')
    monkeypatch.setattr(memory, 'device_memory', lambda limit=limit: limit / memory.USABLE + 1)
    trainer = build.make_trainer(config, policy)
    assert trainer.settings.estimate.batching.micro_batch_size == expected
    assert f'{expected} rows of up to 512' in build.describe_batching(config, trainer)
  assert np.isclose(found.kept, 4 * sum(x.nbytes for x in jax.tree.leaves(nnx.split(policy.model)[1])))
