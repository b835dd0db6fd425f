"""The states of linear attention in the sampler: every way in which rows go on, wait, are copied and begin again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.sampling.draw import GREEDY
from ragen_jax.sampling.sampler import Sampler
from tests.support.models import HYBRID, random_model

VOCAB, STOP, WIDTH = 40, 7, 8


@pytest.fixture(scope='module')
def model():
  return random_model(VOCAB, seed=3, **HYBRID)


@pytest.fixture(scope='module')
def sampler(model):
  return Sampler(model, stop_ids=(STOP,))


@nnx.jit
def _logprobs(model, tokens):
  hidden, _ = model.policy(model.policy.embed(tokens))
  return jax.nn.log_softmax(model.policy.logits(hidden), axis=-1)


class Rows:
  """Rows of the sampler, and the tokens that each of them has been through."""

  def __init__(self, model, sampler, rows: int):
    self.model, self.sampler, self.params = model, sampler, nnx.split(model)[1]
    self.state, self.rng = sampler.init(rows, 48), np.random.default_rng(0)
    self.tokens = [[] for _ in range(rows)]
    self.compared = 0

  def read(self, count, *, rows=None, begins=None):
    """Feeds random prompts of so many tokens, padded to a width."""
    at = np.arange(len(count)) if rows is None else np.asarray(rows)
    prompts = self.rng.integers(8, VOCAB, (len(count), WIDTH)).astype(np.int32)
    begins = np.zeros(len(count), bool) if begins is None else np.asarray(begins)
    for i, row in enumerate(at):
      self.tokens[row] = ([] if begins[i] else self.tokens[row]) + prompts[i, : count[i]].tolist()
    rows = None if rows is None else np.asarray(rows, np.int32)
    self.state = self.sampler.extend(self.params, self.state, prompts, np.asarray(count, np.int32), begins, rows=rows)

  def reply(self, budget, *, rows=None, enough=None):
    """The likeliest tokens of the rows with a budget; each must be that of a forward pass over the whole row."""
    at = np.arange(len(budget)) if rows is None else np.asarray(rows)
    keys = jax.random.split(jax.random.key(0), len(budget))
    rows = None if rows is None else np.asarray(rows, np.int32)
    self.state, reply, _ = self.sampler.decode(
      self.params, self.state, keys, np.asarray(budget), columns=6, sampling=GREEDY, rows=rows, enough=enough
    )
    reply = jax.device_get(reply)
    before = [len(self.tokens[row]) for row in at]
    for i, row in enumerate(at):
      self.tokens[row] += reply.tokens[i, : reply.count[i]].tolist()
    whole = np.zeros((4, 48), np.int32)  # one program
    for i, row in enumerate(at):
      whole[i, : len(self.tokens[row])] = self.tokens[row]
    logp = np.asarray(_logprobs(self.model, jnp.asarray(whole)))
    for i, row in enumerate(at):
      assert reply.count[i] > 0 or not budget[i]
      for j, column in enumerate(range(before[i], len(self.tokens[row]))):
        assert self.tokens[row][column] == int(np.argmax(logp[i, column - 1]))
        np.testing.assert_allclose(reply.logprobs[i, j], logp[i, column - 1].max(), atol=1e-4)
        self.compared += 1
    return reply

  def states(self):
    """The states of linear attention, of all rows."""
    return [np.asarray(x) for layer in self.state.cache[:3] for x in jax.tree.leaves(layer)]


@pytest.mark.slow
def test_likeliest_replies_of_three_ragged_turns_are_those_of_forward_passes(model, sampler):
  """Row 1 waits in the second turn; prompts come in pieces; a reply is sampled in two calls; row 2 begins again."""
  rows = Rows(model, sampler, 4)
  rows.read([5, 8, 1, 3])
  rows.read([2, 0, 0, 8])
  rows.reply([6, 4, 6, 2])
  before = rows.states()
  rows.read([3, 0, 8, 1])
  rows.reply([5, 0, 6, 6], enough=1)
  for got, want in zip(rows.states(), before, strict=True):
    np.testing.assert_array_equal(got[1], want[1])
    assert (got[0] != want[0]).any()
  rows.reply([0, 3, 0, 0])
  rows.read([4, 7], rows=[2, 1], begins=[True, False])
  rows.reply([6, 6], rows=[1, 2])
  rows.read([2, 2, 2, 2])
  rows.reply([6, 6, 6, 6])
  assert rows.compared > 30


@pytest.mark.slow
def test_rows_that_share_a_prompt_or_are_copied_go_on_as_if_each_had_read_it(model, sampler):
  """Rows 1 and 3 get what row 0 holds, over what they held; later row 2 gets that of row 3."""
  rows = Rows(model, sampler, 4)
  rows.read([8, 8, 8, 8])
  rows.read([5, 0, 4, 0], begins=[True, False, False, False])
  rows.state = rows.sampler.share_rows(rows.state, np.asarray([0, 0, 2, 0], np.int32), 16)
  rows.tokens = [rows.tokens[i][:] for i in (0, 0, 2, 0)]
  rows.read([0, 3, 2, 1])
  rows.reply([6, 6, 6, 6])
  rows.state = rows.sampler.copy_rows(rows.state, np.asarray([[3, 2, 48]], np.int32))
  rows.tokens[2] = rows.tokens[3][:]
  rows.read([1, 1, 4, 2])
  rows.reply([6, 6, 6, 6])
  assert rows.compared > 20


@pytest.mark.slow
def test_a_row_that_is_cut_is_empty_or_not_a_number(model, sampler):
  """What a memory held before some of its columns is not known; without columns it is that of a new row."""
  rows = Rows(model, sampler, 4)
  rows.read([8, 8, 8, 8])
  rows.state = rows.sampler.copy_rows(rows.state, np.asarray([[1, 1, 0], [2, 2, 5], [3, 3, 8]], np.int32))
  for x in rows.states():
    assert np.isfinite(x[[0, 1, 3]]).all() and np.isnan(x[2]).all()
    assert x[0].any() and x[3].any() and not x[1].any()
  rows.tokens[1] = []
  rows.read([0, 6, 3, 3], begins=[False, False, True, False])
  rows.reply([6, 6, 6, 6])
