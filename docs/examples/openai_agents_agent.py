"""An agent with the OpenAI Agents SDK, which talks to /v1/responses."""

from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, Runner, function_tool, set_tracing_disabled
from lake import RULES, Lake

from ragen_jax.serving import client

set_tracing_disabled(True)  # otherwise the SDK sends what it does to OpenAI
game = Lake(client.task().input['seed'])


@function_tool
def move(direction: str) -> str:
  """Moves you up, down, left or right."""
  return game.move(direction)


agent = Agent(name='walker', instructions=RULES, model='policy', tools=[move])
try:
  call = Runner.run_sync(agent, game.show(), max_turns=10).raw_responses[-1].response_id
except (MaxTurnsExceeded, ModelBehaviorError):  # too many moves; a reply that reached the limit of tokens
  call = 'last'
client.reward(game.reward, call=call)
