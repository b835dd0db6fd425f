"""A program that plays FrozenLake over HTTP, with the prompts and the game of this project.

The policy is called as any OpenAI-compatible server is. `benchmarks/agents_learning.py` compares training with this
program and training with the environment itself: in synchronous mode both give the same rows. The task's prompt, if
there is one, takes the place of the rules at the beginning of the conversation (`benchmarks/prompt_search.py` searches
for one).
"""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

import ragen_jax
from ragen_jax import build
from ragen_jax.agent import templates
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Status, Turn, status_after_turn
from ragen_jax.agent.segments import Segments, as_text, map_text
from ragen_jax.serving import client


class Player:
  """Plays the FrozenLake of a config; `content` makes the content of a message of texts and images."""

  def __init__(self, config: ConfigDict, content: Callable[[Segments], Any] = as_text):
    policy = ragen_jax.load_policy(config)
    self.config, self.specs, self._content = config, build.env_specs(config, ('FrozenLake',), (1,)), content
    self.context = build.context_manager(config, policy.tokenizer, self.specs)
    self._rules = templates.describe_task(self.specs[0], config.agent.action_sep)
    # As in training without the endpoint, a training level that equals a held-out level is replaced by another one.
    held_out = {'train': frozenset(build.held_out_levels(config)), 'val': frozenset()}
    self.games = {
      mode: EnvStateManager(self.specs, 1, held_out=levels, processor=policy.processor)
      for mode, levels in held_out.items()
    }

  def __call__(self, task: client.Task) -> float:
    """Plays an episode. Posts the reward of each turn, and returns what is left for the whole episode: nothing."""
    game, context = self.games[task.mode].fresh_copy(), self.context
    (observation,) = game.reset(task.input['seed'], first_member=task.input['member'])
    turns, status = [], Status.RUNNING

    def reworded(text: str) -> str:
      return text.replace(self._rules, task.prompt) if task.prompt else text

    while status == Status.RUNNING:
      left = int(game.actions_left()[0])
      messages = context.messages(0, turns, observation, left, lambda user: self._content(map_text(reworded, user)))
      answer = ask(task, [*messages, {'role': 'assistant', 'content': context.reply_prefix}])
      text = context.reply_prefix + answer['choices'][0]['message']['content']
      read = context.parse(0, text)
      step = game.step([list(read.actions)])
      penalty = 0.0 if read.valid else self.config.agent.format_penalty
      actions = list(read.names[: step.executed[0]])
      turns.append(Turn(observation, text, actions, step.rewards[0], penalty, read.valid, 0, actions_left=left))
      if turns[-1].reward:
        client.reward(turns[-1].reward, call=answer['id'], name='goal', of=task)
      if penalty:
        client.reward(penalty, call=answer['id'], of=task)
      (observation,) = game.render()
      status = status_after_turn(
        done=bool(step.done[0]),
        success=bool(step.success[0]),
        actions_left=int(game.actions_left()[0]),
        last_turn=len(turns) == self.specs[0].budget.max_turns,
      )
    return 0.0


def ask(task: client.Task, messages: list[dict[str, Any]]) -> dict:
  """The answer to a conversation whose last message is the beginning of the reply."""
  url = urllib.parse.urlsplit(task.base_url)
  connection = http.client.HTTPConnection(url.hostname, url.port, timeout=task.timeout_s)
  body = {'model': 'policy', 'messages': messages, 'continue_final_message': True, 'add_generation_prompt': False}
  headers = {'Authorization': f'Bearer {task.api_key}', 'Content-Type': 'application/json'}
  try:
    connection.request('POST', f'{url.path}/chat/completions', json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
  finally:
    connection.close()
  if response.status != 200:
    raise RuntimeError(answer['error']['message'])
  return answer


PLAYER = Player(ragen_jax.load_config('frozenlake_ppo'))


def play(task: client.Task) -> float:
  """See `Player`."""
  return PLAYER(task)
