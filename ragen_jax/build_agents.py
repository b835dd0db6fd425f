"""Makes the parts of a run whose episodes programs outside play over HTTP, from its config."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterator

from ml_collections import ConfigDict

from ragen_jax import build, build_frozen
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.env_manager import EnvStateManager, first_training_level
from ragen_jax.agent.language_model import LanguageModel, param_state
from ragen_jax.agent.reply_reader import BadCalls
from ragen_jax.build_environments import played_by_programs
from ragen_jax.envs import VerifiersTasks
from ragen_jax.models import presets
from ragen_jax.prompt_search.player import PromptPlayer
from ragen_jax.prompt_search.tasks import TaskRanges
from ragen_jax.runs.interrupt import Interrupt
from ragen_jax.serving.agent_server import ADMIN_KEY, LOOPBACK, AgentServer
from ragen_jax.serving.engine.settings import EngineSettings
from ragen_jax.serving.http.service import ServerSettings
from ragen_jax.serving.play.agent_player import AgentPlayer, AgentSettings, function_runner, make_runner, run_agents
from ragen_jax.serving.play.async_player import AsyncAgentPlayer
from ragen_jax.serving.play.env_program import ENVIRONMENT, EnvironmentProgram
from ragen_jax.serving.play.episodes import EpisodeSettings
from ragen_jax.serving.play.group_queue import QueueSettings
from ragen_jax.serving.play.runners import Runner
from ragen_jax.serving.play.verifiers_runner import VerifiersRunner
from ragen_jax.serving.rollouts.records import AttemptLimits
from ragen_jax.serving.types import AttemptState, SamplingParams
from ragen_jax.serving.wire.images import ImageLimits
from ragen_jax.serving.wire.spec import RequestLimits
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)

# The most that one request of an agent program may hold.
_MOST_REPLIES, _MOST_MESSAGES, _MOST_TOOLS = 64, 4096, 256
# The most calls of an attempt, if no environment says so.
_MOST_CALLS = 10_000


def plays_agents(config: ConfigDict) -> bool:
  """Whether programs outside play the run's tags. Raises UserError if they play some, and the policy others."""
  tags = dict.fromkeys((*config.train.tags, *config.eval.tags))
  agents = [tag for tag in tags if tag in config.envs and played_by_programs(config.envs[tag].get('type'))]
  if agents and len(agents) < len(tags):
    others = ', '.join(tag for tag in tags if tag not in agents)
    raise UserError(
      f'train.tags={config.train.tags}, eval.tags={config.eval.tags}: {", ".join(agents)} of the type '
      f'{" and ".join(sorted({repr(config.envs[tag].type) for tag in agents}))} cannot be mixed with {others}'
    )
  return bool(agents)


def _limits(config: ConfigDict) -> AttemptLimits:
  """Time-outs and retries of rollouts."""
  s, retried = config.serve, (AttemptState.FAILED, AttemptState.TIMEOUT, AttemptState.UNRESPONSIVE)
  return AttemptLimits(timeout_s=s.timeout, heartbeat_s=s.heartbeat, max_attempts=s.max_attempts, retry_on=retried)


def initial_prompt(config: ConfigDict) -> str:
  """The text of `prompt.text` or `prompt.file`, without white space at its ends; '' for none.

  Raises UserError if both are given, or the file cannot be read.
  """
  p = config.prompt
  if p.text and p.file:
    raise UserError(f'prompt.file={p.file!r}: must be empty with prompt.text')
  if not p.file:
    return p.text.strip()
  try:
    text = pathlib.Path(p.file).read_text(encoding='utf-8')
  except OSError as e:
    raise UserError(f'prompt.file={p.file!r}: cannot be read ({e.strerror})') from e
  except UnicodeDecodeError as e:
    raise UserError(f'prompt.file={p.file!r}: is not UTF-8') from e
  return text.strip()


def agent_settings(config: ConfigDict, model: LanguageModel, section: str) -> AgentSettings:
  """How programs play the tasks of `config.train` or `config.eval`."""
  s, tokenizer = config.serve, model.tokenizer
  return AgentSettings(
    mode='train' if section == 'train' else 'val',
    limits=_limits(config),
    # `AgentPlayer.play` sets how the tokens are drawn.
    episodes=build.fill(
      EpisodeSettings,
      s,
      group_size=config[section].group_size,
      incomplete=s.incomplete if section == 'train' else 'keep',
      off_policy='exclude',
      temperature=config[section].temperature,
      top_p=config[section].top_p,
      top_k=config[section].top_k,
      max_calls=_most_calls(config),
      stop_id=tokenizer.stop_ids[0],
      pad_id=tokenizer.pad_id,
    ),
    max_turns=max(config.envs[tag].max_turns for tag in config[section].tags),
    keep_s=3600 * s.keep,
    ahead=s.max_staleness > 0,
    prompt=initial_prompt(config),
  )


def _most_calls(config: ConfigDict) -> int:
  """The most calls of an attempt of a run."""
  return max(config.envs[tag].max_turns for tag in (*config.train.tags, *config.eval.tags))


def prompt_player(config: ConfigDict, model: LanguageModel, server: AgentServer) -> PromptPlayer:
  """Plays the tasks of a prompt search, as in evaluations."""
  settings = agent_settings(config, model, 'eval')
  episodes = dataclasses.replace(settings.episodes, group_size=config.prompt.attempts)
  tags = tuple(dict.fromkeys((*config.train.tags, *config.eval.tags)))
  specs = build.env_specs(config, tags, (1,) * len(tags))
  settings = dataclasses.replace(settings, episodes=episodes)
  return PromptPlayer(settings, server, specs, model.tokenizer, config.seed, config.prompt.failed_score)


def prompt_tasks(config: ConfigDict) -> TaskRanges:
  """The tasks of a prompt search: those of `train.tags` for critiques, those of `eval.tags` for scores."""
  envs = {}
  for section in ('train', 'eval'):
    tags = tuple(config[section].tags)
    specs = build.env_specs(config, tags, (1,) * len(tags), field=f'{section}.tags')
    envs[section] = tuple((spec.tag, spec.env) for spec in specs)
  return TaskRanges(
    train=envs['train'],
    held_out=envs['eval'],
    train_first=first_training_level(config.train.first_level, config.seed),
    held_out_first=config.eval.first_level,
    scored=config.prompt.held_out,
  )


def server_settings(config: ConfigDict, model: LanguageModel, *, trains: bool) -> ServerSettings:
  """The settings of `config.serve`; `trains` if a trainer or an evaluation creates the rollouts, and not clients."""
  s, a = config.serve, config.agent
  of = {
    section: build.fill(SamplingParams, config[section], max_tokens=a.max_response_tokens, stop=(), top_logprobs=0)
    for section in ('train', 'eval')
  }
  return build.fill(
    ServerSettings,
    s,
    open_access=s.host in LOOPBACK,
    rollout_limits=_limits(config),
    creates=not trains,
    prompt='' if trains else initial_prompt(config),
    frozen=build_frozen.frozen_agents(config),
    engine=build.fill(
      EngineSettings,
      s,
      max_context=a.max_context,
      chunk=min(a.decode_chunk, a.max_response_tokens),
      widths=_prompt_widths(config),
    ),
    limits=RequestLimits(
      vocabulary=model.tokenizer.size,
      context=a.max_context,
      replies=_MOST_REPLIES,
      messages=_MOST_MESSAGES,
      tools=_MOST_TOOLS,
      lenient=True,
      images=_image_limits(config, model),
    ),
    training=of['train'],
    evaluation=of['eval'],
    bad_calls=BadCalls(s.bad_calls),
    max_calls=_most_calls(config) if trains else _MOST_CALLS,
    grace_s=s.grace,
  )


def _image_limits(config: ConfigDict, model: LanguageModel) -> ImageLimits | None:
  """What requests may show; None for text."""
  processor = model.processor or presets.processor(config.model.preset, config.model.path)  # a plan has none
  if processor is None or not config.serve.max_images:
    return None
  tokens, least = config.serve.image_tokens, -(-processor.min_pixels // processor.factor**2)
  if tokens < least:
    raise UserError(f"serve.image_tokens={tokens}: must be at least {least}, which the model's processor makes")
  return ImageLimits(processor, config.serve.max_images, tokens)


def _prompt_widths(config: ConfigDict) -> tuple[int, ...]:
  """Columns of the programs that feed prompts: each is about four times as wide as the one before."""
  step, widths = config.length_step, []
  width = max(step // 4, 1)
  while not widths or (widths[-1] < config.agent.max_context and len(widths) < 4):
    widths.append(min(width, config.agent.max_context))
    width *= 4
  return tuple(dict.fromkeys(widths))


def import_open_server():
  """`open_server.open_server`; a UserError if the packages of a server are missing."""
  try:
    from ragen_jax.serving.open_server import open_server
  except ImportError as e:
    raise UserError(
      f"serving agents needs the package {e.name}; install it with 'pip install -r requirements-serve.txt'"
    ) from e
  return open_server


@contextlib.contextmanager
def open_players(
  config: ConfigDict, model: LanguageModel, workdir: str, interrupt: Interrupt | None = None
) -> Iterator[dict[str, AgentPlayer | None]]:
  """Serves the model to the programs that play a run's episodes, and starts the runner of its tasks.

  Yields the players of 'train' and 'eval'; None each if the policy plays turn by turn, as in other runs. `workdir` gets
  the store. `interrupt` ends a play while it waits for attempts. Raises UserError if the server cannot be opened, or
  the runner cannot be imported.
  """
  if not plays_agents(config):
    yield {'train': None, 'eval': None}
    return
  _warn_of_trained_tasks(config)
  runner, frozen = task_runner(config, model), build_frozen.load_frozen(config, model)
  open_server, settings = import_open_server(), server_settings(config, model, trains=True)
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(open_server(settings, model, param_state(model.model), 0, workdir, frozen))
    # Attempts that are queued since before a restart begin at once, and must not be sampled by the initial weights.
    server.pause(drain=False)
    s = config.serve
    stack.enter_context(run_agents(server, runner, max_concurrency=s.max_concurrency, heartbeat_s=s.heartbeat))
    _log.info('agents call the policy at %s/v1', server.url)
    yield {section: _make_player(config, model, server, section, interrupt) for section in ('train', 'eval')}


def _warn_of_trained_tasks(config: ConfigDict) -> None:
  """Logs the files whose tasks are both trained and evaluated; each section plays all lines of its files."""
  train, evaluation = ({config.envs[tag].get('tasks') for tag in config[x].tags} for x in ('train', 'eval'))
  for name in sorted(filter(None, train & evaluation)):
    message = (
      'the tasks of %s are trained and evaluated: the success in evaluations is that on tasks of training; for other '
      'tasks, a tag of eval.tags needs another file'
    )
    _log.warning(message, name)


def _make_player(
  config: ConfigDict, model: LanguageModel, server: AgentServer, section: str, interrupt: Interrupt | None
) -> AgentPlayer:
  """The player of the tags of `config.train` or `config.eval`."""
  specs = build.env_specs(config, tuple(config[section].tags), build.group_counts(config[section], section))
  settings, size = agent_settings(config, model, section), config[section].group_size
  if section == 'eval' or not config.serve.max_staleness:
    return AgentPlayer(settings, server, specs, size, model.tokenizer, interrupt)
  queue = QueueSettings(config.serve.max_staleness, config.num_iterations, size, settings.limits, settings.prompt)
  c = config.checkpoint
  # One more checkpoint, because the newest may be damaged.
  repeatable = (c.keep + 1) * c.every if c.every else config.num_iterations
  return AsyncAgentPlayer(settings, queue, server, specs, model.tokenizer, repeatable, interrupt)


def task_runner(config: ConfigDict, model: LanguageModel) -> Runner | None:
  """What plays the tasks of a run; None for workers that claim them.

  Raises UserError if the tags have different runners, or a function cannot be imported.
  """
  tags = tuple(dict.fromkeys((*config.train.tags, *config.eval.tags)))
  wanted = {config.envs[tag].get('runner', VerifiersTasks.runner) for tag in tags}
  if len(wanted) > 1:
    raise UserError(f'envs: the tasks of one run have one runner, not {", ".join(sorted(map(repr, wanted)))}')
  (name,) = wanted
  if all(config.envs[tag].type == VerifiersTasks.name for tag in tags):
    packages = {spec.env.key: spec.env.connection for spec in build.env_specs(config, tags, (1,) * len(tags))}
    return VerifiersRunner(packages, config.serve.model, _most_calls(config))
  field = f'envs.{config.train.tags[0]}.runner'
  if not name and not os.environ.get(ADMIN_KEY):
    raise UserError(f"{field}='': workers claim tasks with the key of {ADMIN_KEY}, which is not set in the environment")
  if not name.startswith(ENVIRONMENT):
    return make_runner(field, name, (config.prompt.critic_key,)) if name else None
  tag = name.removeprefix(ENVIRONMENT)
  specs = build.env_specs(config, (tag,), (1,))
  held_out = {'train': _held_out(config, tag), 'val': frozenset()}
  envs = {
    mode: EnvStateManager(specs, 1, held_out=levels, processor=model.processor) for mode, levels in held_out.items()
  }

  def make(mode: str) -> AgentProxy:
    context = build.context_manager(config, model.tokenizer, specs)
    return AgentProxy(envs[mode].fresh_copy(), context, build.episode_limits(config, specs))

  return function_runner(EnvironmentProgram(make, config.serve.model))


def _held_out(config: ConfigDict, tag: str) -> frozenset[bytes]:
  """The levels of an environment that evaluations play, see `EnvStateManager`."""
  levels = EnvStateManager(build.env_specs(config, (tag,), (config.eval.groups,)), 1)
  return frozenset(levels.levels_from(config.eval.first_level))
