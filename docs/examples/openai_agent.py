"""An agent with OpenAI's client: plain messages, one move a reply, and a reward for the reply that ended the game."""

import re

from lake import RULES, Lake
from openai import OpenAI

from ragen_jax.serving import client

game = Lake(client.task().input['seed'])
openai = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages = [
  {'role': 'system', 'content': f'{RULES} Answer with one of these words.'},
  {'role': 'user', 'content': game.show()},
]
for _ in range(8):
  reply = openai.chat.completions.create(model='policy', messages=messages)
  text = reply.choices[0].message.content
  found = re.search('up|down|left|right', text.lower())
  seen = game.move(found[0] if found else text[:20])
  if game.over:
    break
  messages += [{'role': 'assistant', 'content': text}, {'role': 'user', 'content': seen}]
client.reward(game.reward, call=reply.id)
