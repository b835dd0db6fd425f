"""Decoders with images against `transformers` on the same weights, and turns with a cache against whole rows."""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models import lora
from ragen_jax.models.checkpoint.load import load_model
from ragen_jax.models.checkpoint.names import stored_name, weights
from ragen_jax.models.layers import freeze
from ragen_jax.models.linear_attention import RecurrentState
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.models.vision import features
from ragen_jax.models.vision.config import QWEN2_5_VL, QWEN3_5, QWEN3_VL
from ragen_jax.models.vision.positions import feature_columns, image_starts, rope_positions
from ragen_jax.models.vision.tower import Features
from ragen_jax.sampling.draw import GREEDY
from ragen_jax.sampling.sampler import Sampler
from ragen_jax.training.batches import TokenRows
from ragen_jax.training.images import POLICY, FrozenFeatures, ImageInputs
from ragen_jax.training.scoring import score_tokens
from tests.support import learning, vision
from tests.support.processes import environment
from tests.support.vision import IMAGE, START, Conversation

# Rows and columns of patches. The first has more tokens a side than a window, and sides that windows do not divide.
WIDE, SMALL = (12, 18), (4, 6)
GRIDS = (WIDE, SMALL)
# All rows are padded to one length, so that each family compiles one program.
COLUMNS = 112

# For tests of what all families share.
_QWEN2_5_IS_SLOW = pytest.mark.parametrize(
  'pair', [pytest.param(QWEN2_5_VL, marks=pytest.mark.slow), QWEN3_VL, QWEN3_5], indirect=True, scope='module'
)


def in_groups(rows: list[Conversation]) -> tuple[dict, list[list[int]]]:
  """The patches of all images by grid, and the first row of each image's features in their table, by row."""
  patches, first, start = {}, [[None] * len(row.grids) for row in rows], 0
  for grid in GRIDS:
    own = [(r, i) for r, row in enumerate(rows) for i, g in enumerate(row.grids) if g == grid]
    patches[grid] = np.stack([rows[r].patches[i] for r, i in own])
    for r, i in own:
      first[r][i] = start
      start += grid[0] * grid[1] // 4
  return patches, first


def padded(parts, fill, columns=COLUMNS):
  out = np.full((len(parts), columns, *parts[0].shape[1:]), fill, np.int32)
  for row, part in zip(out, parts, strict=True):
    row[: len(part)] = part
  return out


@dataclasses.dataclass(frozen=True)
class Batch:
  """Rows as the model takes them: i32[B, T], the features' index i32[B, T], positions i32[B, T, 3]."""

  tokens: np.ndarray
  index: np.ndarray
  positions: np.ndarray
  patches: dict


def batch_of(model: Qwen, rows: list[Conversation]) -> Batch:
  patches, first = in_groups(rows)
  cfg = model.cfg.vision
  return Batch(
    padded([row.tokens for row in rows], 0),
    padded([feature_columns(row.tokens, row.grids, cfg, f) for row, f in zip(rows, first, strict=True)], -1),
    padded([rope_positions(row.tokens, row.grids, cfg)[0] for row in rows], 0),
    patches,
  )


def see(model: Qwen, patches: dict) -> Features:
  return features.table([model.see(x, grid) for grid, x in patches.items()])


def hidden_states(model: Qwen, tokens, index, positions, seen: Features):
  x, deepstack = features.insert(model.embed(tokens), seen, index)
  return model(x, positions, deepstack=deepstack)[0]


@nnx.jit
def logits_of(model: Qwen, tokens, index, positions, seen: Features):
  return model.logits(hidden_states(model, tokens, index, positions, seen))


@functools.partial(nnx.jit, static_argnames='grid')
def tower(model: Qwen, patches, grid):
  return model.see(patches, grid)


def logits(model: Qwen, batch: Batch) -> np.ndarray:
  seen = features.table([tower(model, jnp.asarray(x), grid) for grid, x in batch.patches.items()])
  return np.asarray(logits_of(model, batch.tokens, batch.index, batch.positions, seen))


def hf_inputs(torch, row: Conversation) -> dict:
  tokens = torch.tensor(row.tokens)[None]
  return {
    'input_ids': tokens,
    'mm_token_type_ids': (tokens == IMAGE).int(),
    'pixel_values': torch.tensor(np.concatenate(row.patches)),
    'image_grid_thw': torch.tensor([[1, *grid] for grid in row.grids]),
  }


@pytest.fixture(scope='module')
def rows(pair) -> list[Conversation]:
  """Rows with two and one image, of which no two have the same length."""
  values = pair.ours.cfg.vision.patch_values
  return [
    vision.conversation((WIDE, SMALL), values, (3, 5, 4), seed=1),
    vision.conversation((SMALL,), values, (6, 7), seed=2),
    vision.conversation((SMALL, WIDE), values, (2, 1, 9), seed=3),
  ]


@pytest.mark.slow_cases('qwen3_vl')
def test_logits_are_those_of_transformers(pair, rows):
  import torch

  found = logits(pair.ours, batch_of(pair.ours, rows))
  for row, own in zip(rows, found, strict=True):
    with torch.no_grad():
      expected = pair.theirs(**hf_inputs(torch, row)).logits[0].numpy()
    assert np.std(expected) > 0.5, 'too flat to show a difference'
    np.testing.assert_allclose(own[: len(row.tokens)], expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('pair', [QWEN3_5], indirect=True, scope='module')
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(pair):
  import torch

  # The errors of one conversation differ by a factor of up to 1.4, in either direction; the means over many do not.
  values = pair.ours.cfg.vision.patch_values
  rows = [vision.conversation((WIDE, SMALL), values, (3, 5, 4), seed=seed) for seed in range(12)]
  ours = load_model(pair.directory, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  theirs = type(pair.theirs).from_pretrained(pair.directory, dtype=torch.bfloat16).eval()
  memories = [part.memory for part in ours.init_cache(1, 1) if isinstance(part, RecurrentState)]
  assert [memory.dtype for memory in memories] == ['float32'] * 3
  errors = []
  for row in rows:
    batch = batch_of(pair.ours, [row])
    (expected,), (own,) = logits(pair.ours, batch), logits(ours, batch)
    with torch.no_grad():
      other = theirs(**hf_inputs(torch, row)).logits[0].float().numpy()
    errors.append([np.std(x[: len(other)] - expected[: len(other)]) for x in (own, other)])
  own, other = np.sqrt(np.mean(np.square(errors), axis=0))
  assert 1e-3 < own < 1.2 * other


@pytest.mark.slow_cases('qwen3_vl')
def test_rows_do_not_see_the_images_of_others(pair, rows):
  batch = batch_of(pair.ours, rows)
  changed = batch.patches | {SMALL: batch.patches[SMALL] + np.arange(3)[:, None, None] // 2}  # the last small image
  before, after = logits(pair.ours, batch), logits(pair.ours, dataclasses.replace(batch, patches=changed))
  np.testing.assert_array_equal(after[:2], before[:2])
  first = image_starts(rows[2].tokens, rows[2].grids, pair.ours.cfg.vision)[0]
  np.testing.assert_array_equal(after[2, :first], before[2, :first])
  assert np.abs(after[2, first:] - before[2, first:]).max() > 0.1


@pytest.mark.parametrize('pair', [QWEN2_5_VL, QWEN3_VL], indirect=True, scope='module')
@pytest.mark.slow
def test_decoders_in_a_loop_add_features_after_their_first_layers(pair):
  graphdef, params = nnx.split(pair.ours)
  rng = np.random.default_rng(6)
  x, deepstack = (jnp.asarray(rng.normal(size=(2, *shape, 64)), jnp.float32) for shape in ((7,), (2, 7)))
  found = {}
  for scan in (False, True):
    model = nnx.merge(graphdef, params)
    model.scan_layers = scan
    found[scan] = nnx.jit(lambda model, x, deepstack: model(x, deepstack=deepstack)[0])(model, x, deepstack)
  np.testing.assert_allclose(found[True], found[False], rtol=0, atol=1e-5)
  assert np.abs(found[True] - pair.ours(x)[0]).max() > 0.1


def turns(pair) -> list[list[Conversation]]:
  """Three turns of two rows, which bring an image each, in one of them of another size."""
  values = pair.ours.cfg.vision.patch_values
  plan = [
    ((WIDE, (3, 2)), (SMALL, (5, 4))),
    ((SMALL, (1, 6)), (SMALL, (4, 1))),
    ((SMALL, (2, 2)), (WIDE, (7, 3))),
  ]
  return [
    [vision.conversation((grid,), values, text, seed=10 * t + r) for r, (grid, text) in enumerate(turn)]
    for t, turn in enumerate(plan)
  ]


REPLY = 5
PROMPT = 68


@_QWEN2_5_IS_SLOW
@pytest.mark.usefixtures('new_programs')
@pytest.mark.slow_cases('qwen3_vl', 'qwen3_5')
@pytest.mark.exhaustive_cases('qwen2_5_vl')
def test_greedy_replies_over_three_turns_with_an_image_each_are_those_of_the_whole_rows(pair):
  model, cfg = pair.ours, pair.ours.cfg.vision
  policy = ActorCritic(model)
  # The tokens of images are never drawn.
  sampler, params = Sampler(policy, stop_ids=(), vocab_limit=START), nnx.split(policy)[1]
  state = sampler.init(2, COLUMNS + PROMPT)
  written = [Conversation(np.zeros(0, int), (), ()) for _ in range(2)]
  replied, log_probs = [[], []], [[], []]
  next_position = [0, 0]
  for turn in turns(pair):
    seen, first, start = [], [[0], [0]], 0
    for r, part in enumerate(turn):
      seen.append(tower(model, jnp.asarray(part.patches[0])[None], part.grids[0]))
      first[r], start = [start], start + part.grids[0][0] * part.grids[0][1] // 4
    offsets = [rope_positions(part.tokens, part.grids, cfg) for part in turn]
    index = padded([feature_columns(p.tokens, p.grids, cfg, f) for p, f in zip(turn, first, strict=True)], -1, PROMPT)
    offset = padded([p for p, _ in offsets], 0, PROMPT)
    state = sampler.extend(
      params, state, padded([p.tokens for p in turn], 0, PROMPT), np.array([len(p.tokens) for p in turn], np.int32),
      images=features.ImageColumns(index, offset, features.table(seen)),
    )  # fmt: skip
    # A turn's positions go on where the row's own end: they differ between rows that had images of other sizes.
    next_position = [at + advance for at, (_, advance) in zip(next_position, offsets, strict=True)]
    assert state.rotary.tolist() == next_position
    keys = jax.random.split(jax.random.key(0), 2)
    state, reply, _ = sampler.decode(params, state, keys, np.full(2, REPLY), columns=REPLY, sampling=GREEDY)
    next_position = [at + REPLY for at in next_position]
    for r, part in enumerate(turn):
      before = written[r]
      own = np.asarray(reply.tokens)[r]
      log_probs[r] += np.asarray(reply.logprobs)[r].tolist()
      replied[r] += range(len(before.tokens) + len(part.tokens), len(before.tokens) + len(part.tokens) + REPLY)
      written[r] = Conversation(
        np.concatenate([before.tokens, part.tokens, own]), before.grids + part.grids, before.patches + part.patches
      )
  assert next_position[0] != next_position[1]
  # Tables of features have two sizes.
  assert sampler.traces == {'resize': 0, 'copy': 0, 'share': 0, 'extend': 2, 'decode': 1}

  patches, first = in_groups(written)
  seen = features.table([tower(model, jnp.asarray(x), grid) for grid, x in patches.items()])
  tokens = padded([row.tokens for row in written], 0)
  index = [feature_columns(row.tokens, row.grids, cfg, f) for row, f in zip(written, first, strict=True)]
  positions = [rope_positions(row.tokens, row.grids, cfg) for row in written]
  assert [p for _, p in positions] == next_position
  whole = np.asarray(logits_of(model, tokens, padded(index, -1), padded([p for p, _ in positions], 0), seen))
  for r, columns in enumerate(replied):
    assert len(columns) == 3 * REPLY
    before, own = whole[r, np.array(columns) - 1, :START], written[r].tokens[columns]
    np.testing.assert_array_equal(own, before.argmax(-1))
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(before)), own[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(log_probs[r], expected, rtol=0, atol=1e-4)
  drawn = np.concatenate([row.tokens[columns] for row, columns in zip(written, replied, strict=True)])
  assert len(np.unique(drawn)) > 3, 'too monotonous to show a difference'


@pytest.fixture(scope='module')
def loss_and_gradient(pair):
  """A policy-gradient loss of a row with an image, its gradient, the row and its weights."""
  values = pair.ours.cfg.vision.patch_values
  row = vision.conversation((WIDE,), values, (3, 6), seed=4)
  first = feature_columns(row.tokens, row.grids, pair.ours.cfg.vision, (0,))
  positions = rope_positions(row.tokens, row.grids, pair.ours.cfg.vision)[0]
  weight = np.random.default_rng(5).normal(size=len(row.tokens) - 1).astype(np.float32)
  weight *= row.tokens[1:] < START
  graphdef, params = nnx.split(ActorCritic(pair.ours))
  columns = jnp.arange(1, len(row.tokens), dtype=jnp.int32)[None]
  tokens = jnp.asarray(row.tokens, jnp.int32)[None]

  def loss(params):
    model = nnx.merge(graphdef, params)
    seen = features.table([model.policy.see(jnp.asarray(row.patches[0])[None], WIDE, remat=True)])
    images = ImageInputs(jnp.asarray(first)[None], jnp.asarray(positions)[None], FrozenFeatures({POLICY: seen}))
    log_probs, _, _ = score_tokens(model, TokenRows(tokens, columns, columns > 0, images=images), learning.scoring())
    return -jnp.sum(log_probs[0] * weight)

  return loss, jax.jit(jax.value_and_grad(loss)), params, row, weight


@_QWEN2_5_IS_SLOW
@pytest.mark.slow_cases('qwen3_vl', 'qwen3_5')
def test_gradients_are_those_of_transformers_and_of_finite_differences(pair, loss_and_gradient):
  import torch

  _, run, params, row, weight = loss_and_gradient
  value, gradient = run(params)
  pair.theirs.zero_grad()
  log_probs = torch.log_softmax(pair.theirs(**hf_inputs(torch, row)).logits[0, :-1], -1)
  log_probs = log_probs.gather(-1, torch.tensor(row.tokens[1:, None]))[:, 0]
  loss = -(log_probs * torch.tensor(weight)).sum()
  loss.backward()
  np.testing.assert_allclose(value, loss.item(), rtol=1e-4)
  found = {path[1:]: np.asarray(x[...]) for path, x in nnx.to_flat_state(gradient) if path[0] == 'policy'}
  expected = {stored_name(name, pair.ours.cfg): x.grad for name, x in pair.theirs.named_parameters()}
  plan = weights(pair.ours.cfg)
  assert {w.name for w in plan} == set(expected)
  for w in plan:
    want = expected[w.name].numpy()
    error = np.linalg.norm(w.to_hf(found[w.path]) - want)
    # The bias of keys changes no softmax: its gradient is a sum of rounding errors.
    assert error <= 1e-3 * np.linalg.norm(want) or ('bias' in w.path and error < 1e-4), w.name

  # Along its own gradient, the tower changes the loss by the norm of the gradient.
  def moved(scale):
    def of(path, x, g):
      return x + scale * g if path[:2] == ('policy', 'visual') else x

    flat = dict(nnx.to_flat_state(gradient))
    return nnx.from_flat_state(
      [(path, x.replace(of(path, x[...], flat[path][...]))) for path, x in nnx.to_flat_state(params)]
    )

  norm = np.sqrt(sum(np.sum(x**2) for path, x in found.items() if path[0] == 'visual'))
  step = 1e-2 / norm
  difference = (run(moved(step / norm))[0] - run(moved(-step / norm))[0]) / (2 * step)
  np.testing.assert_allclose(difference, norm, rtol=1e-2)


@_QWEN2_5_IS_SLOW
@pytest.mark.slow_cases('qwen3_5', 'qwen3_vl')
def test_a_frozen_tower_gets_no_gradient_and_the_others_do(pair, loss_and_gradient):
  loss, _, params, _, _ = loss_and_gradient
  graphdef, own = nnx.split(pair.ours)
  model = ActorCritic(nnx.merge(graphdef, own))
  assert lora.partition(nnx.split(model)[1])[1] == {}
  freeze(model.policy.visual)
  both = nnx.split(model)[1]
  trained, frozen = lora.partition(both)
  in_tower = {path for path, _ in nnx.to_flat_state(params) if path[:2] == ('policy', 'visual')}
  assert in_tower and {path for path, _ in nnx.to_flat_state(frozen)} == in_tower
  before = dict(nnx.to_flat_state(params))
  for path, x in nnx.to_flat_state(lora.join(trained, frozen)):
    assert path[0] == 'value_head' or x[...] is before[path][...], path
  # What a step differentiates is the trained part: shapes are enough to see which weights that is.
  whole = lambda trained: lora.join(trained, jax.tree.map(lambda x: x, frozen))  # noqa: E731 (as in `lora.merge`)
  gradient = jax.eval_shape(jax.grad(lambda trained: loss(whole(trained))), trained)
  assert {path for path, _ in nnx.to_flat_state(gradient)} == {p for p, _ in nnx.to_flat_state(params)} - in_tower
  # Adapters are on the decoder; the tower beside them is trained unless it is frozen.
  for is_frozen in (True, False):
    model = ActorCritic(nnx.merge(graphdef, own))
    if is_frozen:
      freeze(model.policy.visual)
    lora.attach(model.policy, lora.LoraConfig(2, 2, lora.TARGETS), nnx.Rngs(0))
    trained = {path for path, _ in nnx.to_flat_state(lora.partition(nnx.split(model)[1])[0])}
    assert {p for p in trained if p[:2] == ('policy', 'visual')} == (set() if is_frozen else in_tower)
    assert {p[-1] for p in trained if p[0] == 'policy' and p[1] != 'visual'} == {'lora_a', 'lora_b'}


_ON_A_MESH = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import place, place_rows, row_sharding, tree_shardings
from ragen_jax.models.checkpoint.load import load_model
from ragen_jax.models.vision import features

directory, out, data, fsdp, tensor = sys.argv[1:]
model = load_model(directory, dtype=jnp.float32, param_dtype=jnp.float32)
mesh = make_mesh(int(data), int(fsdp), int(tensor))
if mesh.size > 1:
  model.activation_sharding = row_sharding(mesh)
graphdef, params = nnx.split(model)
params = place(params, tree_shardings(params, mesh))
qkv = params['visual']['blocks'][0]['attn']['qkv']['kernel'][...]
assert len({str(x.index) for x in qkv.addressable_shards}) == int(fsdp) * int(tensor)
rng = np.random.default_rng(0)
patches = rng.normal(size=(8, 216, model.cfg.vision.patch_values)).astype(np.float32)
tokens = rng.integers(1, 90, (8, 64)).astype(np.int32)
index = np.where((np.arange(64) >= 4) & (np.arange(64) < 58), np.arange(64) - 4 + 54 * np.arange(8)[:, None], -1)
patches, tokens, index = place_rows((patches, tokens, index.astype(np.int32)), mesh)

@jax.jit
@jax.value_and_grad
def run(params):
  model = nnx.merge(graphdef, params)
  x, deepstack = features.insert(model.embed(tokens), features.table([model.see(patches, (12, 18))]), index)
  hidden, _ = model(x, deepstack=deepstack)
  return jnp.mean(jax.nn.log_softmax(model.logits(hidden))[..., 7])

loss, gradient = run(params)
flat = {'/'.join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(gradient)}
np.savez(out, loss=loss, **flat)
"""


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(2, 2, 2), (1, 8, 1)])
@pytest.mark.exhaustive_cases(
  'qwen2_5_vl-mesh0', 'qwen2_5_vl-mesh1', 'qwen3_vl-mesh0', 'qwen3_5-mesh1', 'qwen3_5_moe-mesh0', 'qwen3_5_moe-mesh1',
)  # fmt: skip
def test_eight_devices_see_the_same(pair, tmp_path, mesh):
  def run(name, *mesh):
    done = subprocess.run(
      [sys.executable, '-c', _ON_A_MESH, pair.directory, str(tmp_path / name), *map(str, mesh)],
      env=environment(devices=math.prod(mesh)),
      capture_output=True,
      text=True,
      check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return np.load(tmp_path / f'{name}.npz')

  expected, found = run('one', 1, 1, 1), run('many', *mesh)
  for name in expected.files:
    want = expected[name]
    error = np.linalg.norm(found[name] - want)
    assert error <= 1e-4 * np.linalg.norm(want) or ('bias' in name and error < 1e-6), name
