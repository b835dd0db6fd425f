"""The demonstrator of the warm start: a speaker that follows an exact solver, with noise, and writes token rows.

Outside JAX it follows the environment's expert, without noise.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.episode import Status, TextReply
from ragen_jax.agent.episode_log import EpisodeLog
from ragen_jax.agent.outside_pool import OutsidePool
from ragen_jax.agent.pools import JaxPool
from ragen_jax.agent.speakers import written_reply
from ragen_jax.agent.world_model.descriptions import describe
from ragen_jax.agent.world_model.formats import OBSERVATION, PREDICTION
from ragen_jax.envs.base import Budget, Solution


@dataclasses.dataclass(frozen=True)
class DemonstrationStyle:
  """The quality of the demonstrator's play. Fields of `config.sft`."""

  discount: float
  noise: float
  hurry: float
  beginner: float
  timid: float
  actions_per_turn: int


@dataclasses.dataclass(frozen=True)
class _Plan:
  """A demonstrated turn.

  It has the names of actions, and texts by tag for the sections of all forms of replies.
  """

  names: list[str]
  texts: dict[str, str]


def _reads_back(context: ContextManager, env: int, plan: _Plan, reply: TextReply) -> bool:
  """Whether a reply is read as its plan; not if the plan's texts hold tags of the form, a separator, special tokens."""
  parsed, plain = context.parse(env, reply.text, reply.ids), context.tokenizer.harmless
  texts = [*plan.names, *plan.texts.values()]
  return parsed.valid and list(parsed.names) == plan.names and all(plain(x) == x for x in texts)


def _own_budget(budget: Budget, style: DemonstrationStyle) -> Budget:
  if not style.actions_per_turn:
    return budget
  most = min(budget.max_actions_per_turn, style.actions_per_turn)
  return dataclasses.replace(budget, max_actions_per_turn=most)


def _texts(pool: JaxPool, plans: dict[int, list[Any]]) -> dict[int, dict[str, str]]:
  """What the replies with these plans say in each section: the thought, and true descriptions of the board.

  `plans` are the actions of the turn by row. The description of the board after the turn is that of the state that the
  actions really lead to, so it is true even if chance decides.
  """
  env, rows = pool.spec.env, list(plans)
  thoughts = env.rationale(pool.states)
  texts = {row: {'think': thoughts[row], 'reasoning': thoughts[row]} for row in rows}
  if env.scene_kinds:
    after = pool.states_after([plans.get(row, []) for row in range(pool.rows)])
    for section, states in ((OBSERVATION, pool.states), (PREDICTION, after)):
      for row, scene in zip(rows, env.scenes(jax.tree.map(lambda x: x[rows], states)), strict=True):
        texts[row][section] = describe(scene)
  return texts


class Demonstrator:
  """Plays environments that have a solver, or an expert outside JAX.

  Its rows show the whole conversation, whatever the context policy. The loss mask covers replies and their stop tokens.
  """

  writes_tokens: ClassVar[bool] = True

  def __init__(self, rng: np.random.Generator, style: DemonstrationStyle):
    """The solvers run in the first turn. `rng` gives the noise, in the order of turns, environments and rows."""
    self._rng = rng
    self._style = style
    self._solutions: dict[int, tuple[Solution, Solution]] = {}  # environment -> (the expert's, the beginner's)

  def reply(self, log: EpisodeLog) -> dict[int, TextReply] | None:
    """See `agent.speakers.Speaker`. An episode ends before a turn that does not fit, or that has no advice."""
    live = log.live
    if not live:
      return None
    if log.turn == 0:
      self._solutions = {i: self._solve(pool) for i, pool in log.envs.pools.items() if not pool.outside}
    replies = {}
    for index, pool in log.envs.pools.items():
      rows = log.envs.rows_of(index)
      running = [row - rows.start for row in live if rows.start <= row < rows.stop]
      if pool.outside:
        plans = self._advice(pool, running)
        for local in sorted(set(running).difference(plans)):
          log.leave(rows.start + local, Status.ABANDONED)
      else:
        plans = self._plans(pool, self._solutions[index], log.turn, log.actions_left[rows], running)
      for local, plan in plans.items():
        reply = self._write(log, index, rows.start + local, plan)
        if reply is not None:
          replies[rows.start + local] = reply
    return replies

  def _solve(self, pool: JaxPool) -> tuple[Solution, Solution]:
    """The best play on the fresh levels, and the best play according to a beginner's view of the game."""
    env, budget = pool.spec.env, _own_budget(pool.spec.budget, self._style)
    views = (env, env.naive_view())
    return tuple(view.solve(pool.fresh_states, budget, self._style.discount) for view in views)

  def _advice(self, pool: OutsidePool, running: list[int]) -> dict[int, _Plan]:
    """The turns of the running rows for which the expert has actions."""
    most = self._style.actions_per_turn or None
    advice = {row: names[:most] for row, names in zip(running, pool.expert(running), strict=True) if names}
    thoughts = pool.rationale(list(advice))
    return {
      row: _Plan(names, {'think': thought, 'reasoning': thought})
      for (row, names), thought in zip(advice.items(), thoughts, strict=True)
    }

  def _plans(
    self, pool: JaxPool, solutions: tuple[Solution, Solution], turn: int, left: np.ndarray, running: list[int]
  ) -> dict[int, _Plan]:
    """The turns of the running rows, which are ascending, from the solutions of the expert and of the beginner.

    `left` i32[rows] are the actions that each episode still has.
    """
    style, rng = self._style, self._rng
    expert, beginner = solutions
    env, states, count = pool.spec.env, pool.states, pool.rows
    remaining = pool.spec.budget.max_turns - turn
    # All rows draw, so that a row's random numbers do not depend on which other rows are over.
    turns_left = np.where(rng.random(count) < style.hurry, 1, np.maximum(np.full((count,), remaining, np.int32), 1))
    plans = expert.plan(states, turns_left, left)
    naive_plans = beginner.plan(states, turns_left, left)
    others = max(1 - style.noise - style.beginner, 0)  # 1 - 0.9 - 0.1 is below 0
    kind = rng.choice(3, size=count, p=[style.noise, style.beginner, others])
    timid = rng.random(count) < style.timid
    legal = env.legal_actions(states)
    chosen = {}
    for row in running:
      plan = naive_plans[row] if kind[row] == 1 else plans[row]
      if not plan or kind[row] == 0:
        plan = [legal[row][i] for i in rng.integers(len(legal[row]), size=max(len(plan), 1))]
      chosen[row] = plan[:1] if timid[row] else plan
    texts = _texts(pool, chosen)
    return {row: _Plan([env.format_action(action) for action in plan], texts[row]) for row, plan in chosen.items()}

  def _write(self, log: EpisodeLog, env: int, row: int, plan: _Plan) -> TextReply | None:
    """Writes a turn's prompt and reply to the row. If they do not fit, ends the episode and returns None."""
    context, timeline = log.context, log.timeline
    prompt = context.next_prompt(env, log.past(row), log.observations[row], int(log.actions_left[row]))
    reply = written_reply(context, plan.names, plan.texts)
    spec = log.envs.specs[env]
    if spec.env.is_outside and not _reads_back(context, env, plan, reply):
      log.leave(row, Status.ABANDONED)
      return None
    too_long = len(reply.ids) > log.limits_of(row).max_response_tokens and (
      spec.env.is_outside or spec.max_response_tokens  # the plans of solvers have bounds of their own
    )
    if too_long or timeline.length[row] + len(prompt.ids) + len(reply.ids) > log.limits.max_context:
      log.leave(row, Status.OUT_OF_CONTEXT)
      return None
    turn = len(log.past(row))
    timeline.append_context(row, prompt.ids, turn, prompt.images)
    timeline.append_reply(row, reply.ids, turn)
    return reply
