"""Two agents cross a frozen lake in turns: 'walker', which is trained, and 'partner', whose weights are frozen.

Both see one conversation, so the replies of both are in one row. The program is for `configs/two_agents_ppo.py`. It
writes the prompts that the built-in model knows, as `frozenlake.py` does.
"""

import openai
from openai import OpenAI

from docs.examples.frozenlake import PLAYER
from ragen_jax.agent.episode import Status, Turn, status_after_turn
from ragen_jax.serving import client

CONNECTIONS = openai.DefaultHttpxClient()  # of all attempts
AGENTS = ('walker', 'partner')


def play(task: client.Task) -> None:
  """Plays an episode turn by turn. The walker gets the reward of the goal, whoever reaches it."""
  model = OpenAI(base_url=task.base_url, api_key=task.api_key, http_client=CONNECTIONS)
  game, budget, turns, status = PLAYER.games[task.mode].fresh_copy(), PLAYER.specs[0].budget, [], Status.RUNNING
  (observation,) = game.reset(task.input['seed'], first_member=task.input['member'])
  while status == Status.RUNNING:
    left, agent = int(game.actions_left()[0]), AGENTS[len(turns) % 2]
    messages = PLAYER.context.messages(0, turns, observation, left)
    answer = model.chat.completions.create(
      model=f'policy:{agent}',
      messages=[*messages, {'role': 'assistant', 'content': PLAYER.context.reply_prefix}],
      extra_body={'continue_final_message': True, 'add_generation_prompt': False},
    )
    text = PLAYER.context.reply_prefix + answer.choices[0].message.content
    read = PLAYER.context.parse(0, text)
    step = game.step([list(read.actions)])
    actions = list(read.names[: step.executed[0]])
    penalty = 0.0 if read.valid else PLAYER.config.agent.format_penalty
    turns.append(Turn(observation, text, actions, step.rewards[0], penalty, read.valid, 0, actions_left=left))
    if penalty and agent == 'walker':
      client.reward(penalty, call=answer.id, of=task)
    (observation,) = game.render()
    status = status_after_turn(
      done=bool(step.done[0]), success=bool(step.success[0]), actions_left=int(game.actions_left()[0]),
      last_turn=len(turns) == budget.max_turns,
    )  # fmt: skip
  client.reward(sum(turn.reward for turn in turns), agent='walker', name='goal', of=task)
