"""Rollouts of made-up prompts that rows share, read once or for each row; as a program, on several devices."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from unittest import mock

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ragen_jax.agent import sampler_speaker
from ragen_jax.agent.context_manager import Prompt
from ragen_jax.agent.episode import Status
from ragen_jax.agent.sampler_speaker import FedRows, SamplerSpeaker
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.sampling.draw import Sampling
from ragen_jax.sampling.sampler import Sampler
from tests.support.models import random_model
from tests.support.speakers import limits

VOCAB, STOP = 64, 1


@dataclasses.dataclass(frozen=True)
class Episodes:
  """Prompts and numbers of turns that a seed determines.

  Attributes:
    seed: of the numbers.
    rows: episodes, in groups of up to six with the same first prompt; two groups may have the same one.
    window: each turn begins a new row.
  """

  seed: int
  rows: int
  window: bool

  def turns(self, row: int) -> int:
    """Turns of an episode."""
    return int(np.random.default_rng((self.seed, 1, row)).integers(1, 4))

  def prompt(self, row: int, turn: int) -> Prompt:
    """The prompt of a turn; those that begin a row begin alike."""
    rng = np.random.default_rng((self.seed, 2))
    common = rng.integers(8, VOCAB, size=rng.integers(0, 60))
    levels = np.repeat(rng.integers(0, 1 + self.rows // 3, size=self.rows), rng.integers(1, 6, size=self.rows))
    who = int(levels[row]) if turn == 0 or (self.window and row % 2) else self.rows + row
    own = np.random.default_rng((self.seed, 3, who, turn))
    own = own.integers(8, VOCAB, size=own.integers(1, 50 if turn == 0 or self.window else 12))
    fresh = turn == 0 or self.window
    return Prompt(tuple((*common.tolist(), *own.tolist()) if fresh else own.tolist()), fresh)


class MadeUpLog:
  """In the place of an `EpisodeLog`; records the token rows of all episodes."""

  def __init__(self, episodes: Episodes, **changes):
    rows = episodes.rows
    self.episodes, self.turn, self.status = episodes, np.zeros(rows, int), np.full(rows, Status.RUNNING)
    fields = dict(max_response_tokens=6, max_context=192, length_step=64, decode_chunk=4) | changes
    self.limits = limits(**fields)
    self.envs = types.SimpleNamespace(rows=rows, all_rows=rows, first_row=0, has_images=False)
    self.context = types.SimpleNamespace(
      tokenizer=types.SimpleNamespace(pad_id=0), reply_texts=lambda replies: [''] * len(replies)
    )
    self.timeline, self.row_steps = self, 0
    self.tokens, self.logprobs = ([[] for _ in range(rows)] for _ in range(2))  # of each row of each episode
    self.length = np.zeros(rows, int)

  away = ()

  @property
  def live(self):
    return np.flatnonzero(self.status == Status.RUNNING).tolist()

  def check_first_prompt(self, row):
    pass

  def past(self, row):
    return [None] * self.turn[row]

  def limits_of(self, row):
    return self.limits

  def prompts(self, rows):
    return {row: self.episodes.prompt(row, self.turn[row]) for row in rows}

  def begin_row(self, row):
    self.length[row] = 0
    self.tokens[row].append([])
    self.logprobs[row].append([])

  def append_context(self, row, ids, turn, images):
    self._append(row, ids, [0.0] * len(ids))

  def append_reply(self, row, ids, turn, *, logprobs, values, entropies, experts):
    self._append(row, ids, logprobs)

  def _append(self, row, ids, logprobs):
    self.length[row] += len(ids)
    self.tokens[row][-1] += np.asarray(ids).tolist()
    self.logprobs[row][-1] += np.asarray(logprobs).tolist()


def play(sampler: Sampler, params, episodes: Episodes, *, share: bool, **changes) -> tuple[MadeUpLog, list[FedRows]]:
  """Plays episodes: their record, and what was fed.

  Args:
    sampler: of the model.
    params: its weights.
    episodes: the prompts.
    share: prompts that rows share are read once; otherwise each row reads its own.
    **changes: of the limits.
  """
  log, fed = MadeUpLog(episodes, **changes), []
  speaker = SamplerSpeaker(sampler, params, jax.random.key(5), Sampling(1.0, 1.0, 0), observer=fed.append)
  apart = dict(_beginning=lambda prompt: object() if prompt.fresh else None, common_tokens=lambda prompts: 0)
  with contextlib.nullcontext() if share else mock.patch.multiple(sampler_speaker, **apart):
    while (complete := speaker.reply(log)) is not None:
      for row in complete:
        log.turn[row] += 1
        if log.turn[row] >= episodes.turns(row):
          log.status[row] = Status.SUCCESS
  return log, fed


def make_sampler(mesh=None) -> tuple[Sampler, object]:
  """A sampler of a random model, and its weights; on the devices of a mesh."""
  model = random_model(VOCAB)
  params = nnx.split(model)[1]
  if mesh is not None:
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
  return Sampler(model, stop_ids=(STOP,), mesh=mesh), params


def compare(sampler: Sampler, params, episodes: Episodes, **changes) -> tuple[int, int]:
  """Asserts that sharing changes nothing; the tokens that were fed with it, and without it."""
  (shared, some), (apart, every) = (play(sampler, params, episodes, share=share, **changes) for share in (True, False))
  assert shared.tokens == apart.tokens
  assert {len(rows) for rows in shared.tokens} == ({1, 2, 3} if episodes.window else {1})
  for row in range(episodes.rows):
    assert shared.tokens[row][0][: len(episodes.prompt(row, 0).ids)] == list(episodes.prompt(row, 0).ids)
    for got, want in zip(shared.logprobs[row], apart.logprobs[row], strict=True):
      np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
  return tuple(int(sum(call.count.sum() for call in fed)) for fed in (some, every))


if __name__ == '__main__':
  found = make_sampler(make_mesh(*map(int, sys.argv[1].split('x'))))
  for seed, (window, schedule) in enumerate([(False, 'lockstep'), (True, 'continuous'), (True, 'lockstep')]):
    fed = compare(*found, Episodes(seed, 64, window), schedule=schedule, drop_finished=True, rows_in_flight=48)
    assert fed[0] < fed[1], fed
    print(*fed)
