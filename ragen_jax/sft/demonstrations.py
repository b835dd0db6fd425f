"""Episodes played by an environment's exact solver, with noise: what the warm start learns from."""

from __future__ import annotations

import dataclasses

import numpy as np

from ragen_jax.agent.context_manager import ContextManager, reply_after_prefix
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.trajectory import Episode, Status, Timeline, Trajectory, Turn, status_after_turn
from ragen_jax.envs.base import Budget


@dataclasses.dataclass(frozen=True)
class DemonstrationStyle:
  """How well the demonstrator plays.

  Attributes:
    discount: what a success is worth after each further action; below 1 the expert does not wander.
    noise: probability that a turn's actions are random ones, as many as the expert would take.
    hurry: probability that a turn is planned as if it were the last, with more actions at once than a careful player
      would take.
    beginner: probability that a turn follows the plan of a beginner, see `Environment.naive_view`.
    timid: probability that of a turn's actions only the first is played.
    actions_per_turn: the demonstrator's own limit, below that of the environment; 0 is none.
  """

  discount: float = 0.97
  noise: float = 0.5
  hurry: float = 0.5
  beginner: float = 0.0
  timid: float = 0.0
  actions_per_turn: int = 0


def _random_actions(rng: np.random.Generator, legal: list[int], count: int) -> list[int]:
  return [legal[i] for i in rng.integers(len(legal), size=count)]


def _own_budget(budget: Budget, style: DemonstrationStyle) -> Budget:
  if not style.actions_per_turn:
    return budget
  most = min(budget.max_actions_per_turn, style.actions_per_turn)
  return dataclasses.replace(budget, max_actions_per_turn=most)


def demonstrate(
  envs: EnvStateManager,
  context: ContextManager,
  first_seed: int,
  rng: np.random.Generator,
  style: DemonstrationStyle,
  max_context: int,
) -> tuple[Trajectory, list[Episode]]:
  """Plays one episode a row.

  Args:
    envs: the batch of environments.
    context: writes the prompts.
    first_seed: of the levels.
    rng: for the noise.
    style: how well the demonstrator plays.
    max_context: columns that a row may use; an episode that would need more ends before.

  Returns:
    The timeline, its loss mask on the replies and their stop tokens and its values what the best play within the
    demonstrator's own limits would still bring from each turn on, and the episodes.
  """
  rows = envs.rows
  observations = envs.reset(first_seed)
  starts = np.searchsorted(envs.row_env, np.arange(len(envs.specs)))
  solutions = [
    s.env.solve(envs.pool_states(i), _own_budget(s.budget, style), style.discount) for i, s in enumerate(envs.specs)
  ]
  naive = [
    s.env.naive_view().solve(envs.pool_states(i), _own_budget(s.budget, style), style.discount)
    for i, s in enumerate(envs.specs)
  ]
  timeline = Timeline(rows, max_context)
  episodes = [
    Episode(envs.specs[e].tag, int(g), int(s), [])
    for e, g, s in zip(envs.row_env, envs.row_group, envs.level_seeds, strict=True)
  ]
  status = np.full((rows,), Status.RUNNING, np.int32)
  reward = np.zeros((rows,), np.float32)
  stop = context.tokenizer.stop_ids[0]

  for turn in range(max(s.budget.max_turns for s in envs.specs)):
    if not np.any(status == Status.RUNNING):
      break
    left = envs.actions_left()
    chosen: list[list[int]] = [[] for _ in range(rows)]
    for e, spec in enumerate(envs.specs):
      states = envs.pool_states(e)
      count = len(np.asarray(states.done))
      members = slice(starts[e], starts[e] + count)
      turns_left = np.full((count,), spec.budget.max_turns - turn, np.int32)
      turns_left = np.where(rng.random(count) < style.hurry, 1, np.maximum(turns_left, 1))
      values = solutions[e].value(states, max(spec.budget.max_turns - turn, 0), left[members])
      plans = solutions[e].plan(states, turns_left, left[members])
      naive_plans = naive[e].plan(states, turns_left, left[members])
      kind = rng.choice(3, size=count, p=[style.noise, style.beginner, 1 - style.noise - style.beginner])
      timid = rng.random(count) < style.timid
      thoughts, legal = spec.env.rationale(states), spec.env.legal_actions(states)
      for i, (row, plan) in enumerate(zip(range(members.start, members.stop), plans, strict=True)):
        if status[row] != Status.RUNNING:
          continue
        if kind[i] == 1:
          plan = naive_plans[i]
        if not plan or kind[i] == 0:
          plan = _random_actions(rng, legal[i], max(len(plan), 1))
        if timid[i]:
          plan = plan[:1]
        names = [spec.env.format_action(a) for a in plan]
        text = reply_after_prefix(context, thoughts[i], names)
        if turn == 0:
          ids = context.first_segment(e, observations[row], int(left[row]))
        else:
          ids = context.next_segment(e, turn, float(reward[row]), observations[row], int(left[row]), closed=True)
        reply = (*context.tokenizer.encode(text), stop)
        if timeline.length[row] + len(ids) + len(reply) > max_context:
          status[row] = Status.OUT_OF_CONTEXT
          continue
        timeline.append_context(row, ids, turn)
        start = timeline.length[row]
        timeline.append_context(row, reply, turn)
        timeline.loss_mask[row, start : timeline.length[row]] = True
        timeline.values[row, start : timeline.length[row]] = values[i]
        chosen[row] = plan
        episodes[row].turns.append(Turn(observations[row], context.reply_prefix + text, names, 0.0, 0.0, True, 0))
    result = envs.step(chosen)
    observations = envs.render()
    left = envs.actions_left()
    reward = result.reward
    for row in np.flatnonzero(status == Status.RUNNING):
      timeline.reward_last_token(row, float(reward[row]))
      episodes[row].turns[-1].reward = float(reward[row])
      episodes[row].turns[-1].effective = int(result.effective[row])
      status[row] = status_after_turn(
        done=result.done[row], success=result.success[row], actions_left=left[row],
        last_turn=turn + 1 >= envs.specs[envs.row_env[row]].budget.max_turns,
      )  # fmt: skip

  for row, episode in enumerate(episodes):
    episode.status = Status(int(status[row]))
    episode.final_observation = observations[row]
  trajectory = timeline.trajectory(
    group=envs.row_group,
    episode=np.arange(rows),
    env=envs.row_env,
    status=status,
    policy_version=0,
    pad_id=context.tokenizer.pad_id,
  )
  return trajectory, episodes
