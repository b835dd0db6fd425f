"""An agent with LangGraph that plays by calling a tool."""

from lake import RULES, Lake
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError

from ragen_jax.serving import client

game = Lake(client.task().input['seed'])


def move(direction: str) -> str:
  """Moves you up, down, left or right."""
  return game.move(direction)


agent = create_agent(ChatOpenAI(model='policy'), [move], system_prompt=RULES)
replies = []  # ids of the policy's replies
try:
  for update in agent.stream({'messages': [('user', game.show())]}, {'recursion_limit': 20}, stream_mode='updates'):
    replies += [m.response_metadata['id'] for m in update.get('model', {}).get('messages', ())]
except GraphRecursionError:
  pass  # too many moves
client.reward(game.reward, call=replies[-1])
