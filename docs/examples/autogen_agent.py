"""An agent with AutoGen that plays by calling a tool."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from lake import RULES, Lake

from ragen_jax.serving import client

game = Lake(client.task().input['seed'])
# What AutoGen has to know of a model that is not OpenAI's.
ABOUT = {
  'vision': False, 'function_calling': True, 'json_output': False, 'structured_output': False, 'family': 'unknown',
}  # fmt: skip


async def move(direction: str) -> str:
  """Moves you up, down, left or right."""
  return game.move(direction)


async def main() -> None:
  """Plays until the policy calls no tool."""
  policy = OpenAIChatCompletionClient(model='policy', model_info=ABOUT)
  agent = AssistantAgent('walker', policy, tools=[move], system_message=RULES, max_tool_iterations=8)
  await agent.run(task=game.show())
  await policy.close()


asyncio.run(main())
client.reward(game.reward, call='last')
