"""An engine that sees: log-probs are those of a pass over the whole row, whatever of it was in the cache before."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax.agent.language_model import param_state
from ragen_jax.agent.segments import ImageSegment, ImageSpan
from ragen_jax.models.vision.config import FAMILIES
from ragen_jax.serving.engine.engine import Engine
from ragen_jax.serving.engine.eyes import Eyes
from ragen_jax.training.images import POLICY, make_sight
from tests.support.seeing import FACTOR, seeing_config, seeing_policy
from tests.support.serving import ask, request, settings, submit, until
from tests.support.vision import image_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module', params=FAMILIES)
def policy(request, tmp_path_factory):
  return seeing_policy(seeing_config(), tmp_path_factory.mktemp('seeing'), request.param)


def _engine(policy, **changes):
  eyes = Eyes(policy.encoders['policy'], policy.model.policy.cfg.vision)
  # Images of more tokens than the programs have columns.
  own = settings(**dict(slots=2, widths=(8,), chunk=4) | changes)
  return Engine(policy.sampler, policy.tokenizer, own, params=param_state(policy.model), version=0, eyes=eyes)


def _image(number: int, rows: int, columns: int) -> ImageSegment:
  return ImageSegment(image_of(FACTOR * rows, FACTOR * columns, number), rows * columns)


def _asked(policy, *parts, seed: int = 0, **params):
  """A request of ids and images, each between its tokens."""
  ids, spans = [], []
  for part in parts:
    if isinstance(part, ImageSegment):
      spans.append(ImageSpan(part, len(ids) + 1, len(ids) + 1 + part.columns))
      ids += policy.tokenizer.image_ids(part.columns)
    else:
      ids += part
  return dataclasses.replace(request(ids, seed, **dict(max_tokens=6) | params), images=tuple(spans))


def _expected(policy, asked, ids, params=None) -> np.ndarray:
  """log p of each id of a reply by one pass over the row, with the features and positions of the update."""
  tokens = np.asarray([[*asked.prompt, *ids]], np.int32)
  shown = np.full(tokens.shape, -1, np.int32)
  for number, span in enumerate(asked.images):
    shown[0, span.start : span.stop] = number
  params = param_state(policy.model) if params is None else params
  trunk = nnx.merge(nnx.split(policy.model)[0], params).policy
  columns = positions = None
  if asked.images:
    pixels = [span.segment.image for span in asked.images]
    inputs = make_sight(policy, None).of_rows(params, tokens, np.asarray([tokens.size]), shown, pixels)
    inputs = inputs.with_source(inputs.sizes(), None, packed=False)
    columns, positions = inputs.columns(trunk, POLICY, remat=False), inputs.positions
  x, deepstack = trunk.embed_columns(tokens, columns)
  hidden, _ = trunk(x, positions, deepstack=deepstack)
  logits = np.array(trunk.logits(hidden)[0, len(asked.prompt) - 1 : -1], np.float32)
  logits[:, list(policy.tokenizer.banned)] = -np.inf
  logp = np.asarray(jax.nn.log_softmax(logits[:, : policy.tokenizer.size]))
  return logp[np.arange(len(ids)), list(ids)]


def _check(policy, asked, reply, params=None):
  np.testing.assert_allclose(reply.logprobs, _expected(policy, asked, reply.ids, params), rtol=0, atol=1e-4)


@pytest.mark.exhaustive_cases('qwen2_5_vl', 'qwen3_vl')
def test_a_conversation_reads_each_image_once(policy):
  encoder = policy.encoders['policy']
  with _engine(policy) as engine:
    parts = [[9, 10, 11], _image(1, 4, 3), [12, 13]]
    before = encoder.encoded
    first = _asked(policy, *parts)
    (reply,) = ask(engine, first)
    _check(policy, first, reply)
    assert reply.cached_tokens == 0 and encoder.encoded == before + 1
    parts += [list(reply.ids), [14], _image(2, 2, 2), [15]]
    second = _asked(policy, *parts, seed=1)
    (reply,) = ask(engine, second)
    _check(policy, second, reply)
    assert reply.cached_tokens == len(first.prompt) + len(parts[3]) and encoder.encoded == before + 2
    # Text after images.
    third = _asked(policy, *parts, list(reply.ids), [16, 17], seed=2)
    (reply,) = ask(engine, third)
    _check(policy, third, reply)
    assert reply.cached_tokens == len(third.prompt) - 2


@pytest.mark.exhaustive_cases('qwen2_5_vl')
def test_another_image_in_the_same_columns_is_read(policy):
  with _engine(policy, slots=1) as engine:
    asked = [_asked(policy, [9, 10], _image(number, 3, 3), [12]) for number in (1, 2, 1)]
    assert asked[0].prompt == asked[1].prompt
    replies = [ask(engine, own)[0] for own in asked]
    for own, reply in zip(asked, replies, strict=True):
      _check(policy, own, reply)
    # Of the row of the other image, only what stands before it is kept; nothing of a memory, which cannot be cut.
    kept = 0 if policy.model.policy.cfg.linear else 3
    assert replies[1].cached_tokens == replies[2].cached_tokens == kept
    of_other = _expected(policy, asked[1], replies[0].ids)
    assert np.abs(of_other - replies[0].logprobs).max() > 1e-3, 'images matter'


@pytest.mark.exhaustive_cases('qwen2_5_vl')
def test_a_row_is_cut_before_behind_and_between_images(policy):
  with _engine(policy, slots=2) as engine:
    begin = [[9, 10], _image(1, 2, 3), [11, 12, 13, 14], _image(2, 3, 2), [15] * 6]
    (reply,) = ask(engine, _asked(policy, *begin))
    for seed, parts in enumerate(
      (
        [*begin[:4], [16, 17]],
        [*begin[:2], [11, 12, 13, 14, 18, 19]],
        [*begin[:3], _image(3, 3, 2), [15]],
        [begin[0], [20, 21, 22]],
        [*begin, list(reply.ids)[:2], [23]],
      )
    ):
      own = _asked(policy, *parts, seed=seed)
      _check(policy, own, ask(engine, own)[0])
    stats = engine.stats()
    if policy.model.policy.cfg.linear is None:
      assert stats.copies > 2 and stats.cached_tokens > 20
    else:
      assert stats.copies == stats.cached_tokens == 0


@pytest.mark.exhaustive_cases('qwen2_5_vl', 'qwen3_vl')
def test_calls_side_by_side_see_their_own_images(policy):
  with _engine(policy, slots=4) as engine:
    asked = [_asked(policy, [9, 10, n], _image(n, 2, 2 + n), [12], seed=n) for n in range(3)]
    asked.append(_asked(policy, [9] * 12))
    replies = ask(engine, *asked)
    for own, reply in zip(asked, replies, strict=True):
      _check(policy, own, reply)
      (alone,) = ask(engine, own)
      assert alone.ids == reply.ids


@pytest.mark.exhaustive_cases('qwen2_5_vl', 'qwen3_vl')
def test_new_weights_in_mid_reply_read_the_images_again(policy):
  params = param_state(policy.model)
  other = jax.tree.map(lambda x: x * 1.25 if x.ndim > 1 else x, params)
  frozen = jax.tree_util.tree_map_with_path(
    lambda path, x, y: x if 'visual' in jax.tree_util.keystr(path) else y, params, other
  )
  with _engine(policy, chunk=2) as engine:
    asked = _asked(policy, [9, 10], _image(1, 3, 3), [12], max_tokens=12)
    listener = submit(engine, asked)
    until(lambda: listener.pieces)
    engine.pause(drain=False)
    assert not listener.outcomes, 'the reply must be open'
    engine.set_weights(frozen, version=1, keep_cache=False)
    engine.resume()
    reply = listener.reply()
    cut = int((reply.versions == 0).sum())
    assert 0 < cut < len(reply.ids)
    np.testing.assert_allclose(reply.logprobs[:cut], _expected(policy, asked, reply.ids)[:cut], rtol=0, atol=1e-4)
    np.testing.assert_allclose(
      reply.logprobs[cut:], _expected(policy, asked, reply.ids, frozen)[cut:], rtol=0, atol=1e-4
    )


def test_an_engine_without_eyes_refuses_images(policy):
  own = settings(slots=1)
  engine = Engine(policy.sampler, policy.tokenizer, own, params=param_state(policy.model), version=0)
  with engine, pytest.raises(ValueError, match='images'):
    submit(engine, _asked(policy, [9], _image(1, 1, 1), [12]))
