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

import ragen_jax
from ragen_jax import build
from ragen_jax.agent import templates
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Status, Turn, status_after_turn
from ragen_jax.serving import client

CONFIG = ragen_jax.load_config('frozenlake_ppo')
SPECS = build.env_specs(CONFIG, ('FrozenLake',), (1,))
RULES = templates.describe_task(SPECS[0], CONFIG.agent.action_sep)
# As in training without the endpoint, a training level that equals a held-out level is replaced by another one.
GAMES = {
  'train': EnvStateManager(SPECS, 1, held_out=frozenset(build.held_out_levels(CONFIG))),
  'val': EnvStateManager(SPECS, 1),
}
CONTEXT = build.context_manager(CONFIG, ragen_jax.load_policy(CONFIG).tokenizer, SPECS)


def play(task: client.Task) -> float:
  """Plays an episode. Posts the reward of each turn, and returns what is left for the whole episode: nothing."""
  game, budget = GAMES[task.mode].fresh_copy(), SPECS[0].budget
  (observation,) = game.reset(task.input['seed'], first_member=task.input['member'])
  turns, status = [], Status.RUNNING
  while status == Status.RUNNING:
    left = int(game.actions_left()[0])
    messages = CONTEXT.messages(0, turns, observation, left)
    if task.prompt:
      messages = [m | {'content': m['content'].replace(RULES, task.prompt)} for m in messages]
    prefix = CONTEXT.reply_prefix
    answer = ask(task, [*messages, {'role': 'assistant', 'content': prefix}])
    text = prefix + answer['choices'][0]['message']['content']
    read = CONTEXT.parse(0, text)
    step = game.step([list(read.actions)])
    penalty = 0.0 if read.valid else CONFIG.agent.format_penalty
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
      last_turn=len(turns) == budget.max_turns,
    )
  return 0.0


def ask(task: client.Task, messages: list[dict[str, str]]) -> dict:
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
