"""The programs on fixed shapes: rows that are fed in pieces, copied and cut, against forward passes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax.distributed.processes import RowShare
from ragen_jax.sampling.sampler import RowSampling
from ragen_jax.serving.engine.device_rows import DeviceRows, Feed
from ragen_jax.utils.errors import UserError
from tests.support.serving import expected_logprobs, prompts, small_sampler, weights

ROWS = 6
_FEW = {'rows': 1, 'widths': (4,)}  # that need four programs


@pytest.fixture(scope='module')
def sampler_and_params():
  return small_sampler()


def device_rows(sampler, params, **changes):
  options = dict(rows=ROWS, columns=100, chunk=4, widths=(4, 16)) | changes
  return DeviceRows(sampler, params, **options)


def decode(rows, batch, *, budget, alternatives=False):
  """A chunk for some rows, each with its number as its key."""
  n = len(batch)
  keys = np.stack([np.zeros(n), batch], axis=1).astype(np.uint32)
  plain = RowSampling(np.ones(n, np.float32), np.ones(n, np.float32), np.zeros(n, np.int32))
  return rows.decode(batch, keys, np.asarray(budget, np.int32), plain, alternatives=alternatives)


def check_reply(sampler, params, reply, row, prompt):
  """A reply is not empty, and its log-probabilities are those of a forward pass."""
  n = int(reply.count[row])
  assert n > 0
  expected = expected_logprobs(sampler, params, prompt, reply.tokens[row, :n].tolist())
  np.testing.assert_allclose(reply.logprobs[row, :n], expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures('new_programs')
def test_rows_are_fed_in_pieces_of_any_width_and_nothing_new_is_compiled():
  sampler, params = small_sampler()
  rows = device_rows(sampler, params)
  rows.compile()
  traces = dict(sampler.traces)
  assert traces['extend'] == 4  # 1, 4 or all 6 rows of 4 columns, 1 row of 16
  texts = [np.asarray(p, np.int32) for p in prompts(ROWS, 31)]
  # Five rows of at most four ids; one row is left alone, and gets its ids in two pieces later.
  rows.feed([Feed(i, texts[i][: 4 - i % 2], True) for i in range(ROWS - 1)], 4)
  rows.feed([Feed(5, texts[5][:16], True)], 16)
  rows.feed([Feed(5, texts[5][16:29], False), Feed(2, texts[2][4:16], False)], 16)
  fed = [texts[i][: 4 - i % 2] for i in range(ROWS - 1)] + [texts[5][:29]]
  fed[2] = texts[2][:16]
  rows.copy(5, 1, 20)  # the row begins anew with 20 columns of another one
  rows.feed([Feed(1, texts[1][:3], False)], 4)
  fed[1] = np.concatenate([texts[5][:20], texts[1][:3]])
  assert rows.fed_columns == 6 * 4 + 3 * 16 + 4
  reply = decode(rows, [5, 0, 4, 1, 2], budget=[4, 4, 2, 4, 4])
  assert reply.count[2] <= 2
  for i, row in enumerate([5, 0, 4, 1, 2]):
    check_reply(sampler, params, reply, i, fed[row])
  reply = decode(rows, [3], budget=[4], alternatives=True)
  check_reply(sampler, params, reply, 0, fed[3])
  assert reply.top_tokens.shape == (1, 4, 20)
  assert sampler.traces == traces


@pytest.mark.slow
def test_a_row_is_sampled_alone_or_with_others_alike(sampler_and_params):
  """One row, four rows and all rows are programs of their own; rows that do not take part stay as they are."""
  rows, found = device_rows(*sampler_and_params), []
  texts = [np.asarray(p, np.int32) for p in prompts(ROWS, 4)]
  for others, computed in (([], 1), ([1, 5], 4), ([0, 1, 2, 3, 5], 6)):
    rows.feed([Feed(i, text, True) for i, text in enumerate(texts)], 4)
    before = rows.row_steps
    reply = decode(rows, [*others, 4], budget=[4] * (len(others) + 1))
    assert rows.row_steps - before == computed * reply.count.max()
    if len(others) == 2:  # the rows that filled the batch up begin now
      assert decode(rows, [0, 2, 3], budget=[4] * 3).count.all()
    found.append((reply.tokens[-1].tolist(), reply.logprobs[-1]))
  assert found[0][0] == found[1][0] == found[2][0]
  for _, logprobs in found[1:]:
    np.testing.assert_allclose(logprobs, found[0][1], atol=1e-5)


def test_weights_are_replaced_without_a_new_program(sampler_and_params):
  sampler, params = sampler_and_params
  rows, other = device_rows(sampler, params, **_FEW), weights(5)
  rows.compile()
  traces, prompt = dict(sampler.traces), np.asarray(prompts(1, 4)[0], np.int32)
  for version in (params, other):
    rows.check_weights(version)
    rows.set_weights(version)
    rows.feed([Feed(0, prompt, True)], 4)
    reply = decode(rows, [0], budget=[4])
    check_reply(sampler, version, reply, 0, prompt)
  assert sampler.traces == traces


def test_every_program_runs_before_serving(sampler_and_params, monkeypatch):
  rows, run = device_rows(*sampler_and_params), []
  monkeypatch.setattr(rows, '_extend', lambda feeds, width, sees: run.append((width, len(feeds))))
  monkeypatch.setattr(rows, 'copy', lambda *copy: run.append(copy))
  monkeypatch.setattr(rows, 'decode', lambda own, *_, alternatives: run.append((len(own), alternatives)))
  rows.compile()
  # As many rows as make no more columns than all rows of the smallest width; the likeliest tokens of all rows.
  assert run == [(4, 1), (4, 4), (4, 6), (16, 1), (0, 0, 100), (1, False), (4, False), (6, False), (1, True)]


def test_weights_without_finite_numbers_leave_no_trace(sampler_and_params):
  """Columns that nobody attends to have the weight 0, and 0 * NaN is NaN."""
  sampler, params = sampler_and_params
  rows, text = device_rows(sampler, params, **_FEW), np.asarray(prompts(1, 4)[0], np.int32)
  rows.compile()
  traces = dict(sampler.traces)

  def play(length):
    rows.feed([Feed(0, text[:length], True)], 4)
    return decode(rows, [0], budget=[4])

  rows.set_weights(jax.tree.map(lambda x: x * np.nan, params))
  assert np.isnan(play(4).logprobs[:, 0]).all()
  old = jax.tree.leaves(rows._state)
  layout = [x.sharding for x in old]
  rows.set_weights(params)
  assert all(x.is_deleted() for x in old)  # no second cache
  assert [x.sharding for x in jax.tree.leaves(rows._state)] == layout
  check_reply(sampler, params, play(2), 0, text[:2])
  assert sampler.traces == traces


def test_rows_stay_as_they_are_if_new_weights_keep_them(sampler_and_params):
  sampler, params = sampler_and_params
  rows, prompt = device_rows(sampler, params, **_FEW), np.asarray(prompts(1, 4)[0], np.int32)
  rows.feed([Feed(0, prompt, True)], 4)
  rows.set_weights(params, keep_cache=True)
  check_reply(sampler, params, decode(rows, [0], budget=[4]), 0, prompt)


def test_weights_of_another_model_are_refused(sampler_and_params):
  sampler, params = sampler_and_params
  rows = device_rows(sampler, params)
  with pytest.raises(ValueError, match=r'^params: has no weight .*embed_tokens'):
    rows.check_weights({name: part for name, part in params.items() if name != 'policy'})
  other = weights(1)
  other['value_head']['kernel'].set_value(np.zeros(3, np.float32))
  with pytest.raises(ValueError, match=r'^params: .*value_head.* float32\[3\].* must '):
    rows.check_weights(other)


def test_the_width_is_the_smallest_that_holds_what_is_left_and_fits_behind_the_row(sampler_and_params):
  rows = device_rows(*sampler_and_params)
  assert [rows.width_for(0, n) for n in (1, 4, 5, 16, 17, 90)] == [4, 4, 16, 16, 16, 16]
  # Of 100 columns, 96 are for tokens; a program writes 16 columns or 4.
  assert rows.width_for(84, 11) == 16 and rows.width_for(85, 11) == 4


def test_rows_that_do_not_fit_are_refused(sampler_and_params, monkeypatch):
  sampler, params = sampler_and_params
  monkeypatch.setattr(sampler, 'rows_that_fit', lambda rows, columns, image_tokens=0: rows // 2)
  with pytest.raises(UserError, match=r'^slots=6: .* 3 rows .* fit'):
    device_rows(sampler, params)
  monkeypatch.setattr(sampler, 'share', RowShare(4, 0, 4))
  with pytest.raises(UserError, match=r'^slots=6: .* multiple of 4'):
    device_rows(sampler, params)
  monkeypatch.setattr('jax.process_count', lambda: 2)
  with pytest.raises(UserError, match=r'^serving: .* process.* 2$'):
    device_rows(sampler, params)
