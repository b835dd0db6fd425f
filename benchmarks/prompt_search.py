"""Shows that --mode=optimize_prompt finds a better prompt, with a critic that does not know which one is better.

  python benchmarks/prompt_search.py           writes benchmarks/results/prompt_search.json; about 5 minutes on 2 cores
  python benchmarks/prompt_search.py --quick   one small round, to runs/quick

The built-in model plays FrozenLake through docs/examples/frozenlake.py, whose rules are the prompt. The first prompt is
the text of the game in small letters, which the model was not trained on: it cannot play then. The critic is a small
server in this file, which stands for a language model. It changes one line of the prompt at random: it writes the line
as the game has it, leaves it out, repeats it, writes it in small letters, or puts a line of general advice before it.
Its draws follow from the request, so the result depends on the seed only. The prompt is chosen by its scores on 48
held-out levels, and compared with the first one on 96 others.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.server
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import ragen_jax  # noqa: E402
from benchmarks.learning_curves import hardware  # noqa: E402
from ragen_jax import build  # noqa: E402
from ragen_jax.agent import templates  # noqa: E402

RESULT = ROOT / 'benchmarks' / 'results' / 'prompt_search.json'
ADVICE = ('Think about every step.', 'Be careful near the holes.', 'Take a short way.')
FULL = {'rounds': 3, 'beam': 2, 'branches': 4, 'tasks': 4, 'held_out': 48, 'final': 96}
QUICK = {'rounds': 1, 'beam': 1, 'branches': 2, 'tasks': 2, 'held_out': 4, 'final': 4}


def game_text() -> str:
  """The rules of FrozenLake as the built-in model knows them."""
  config = ragen_jax.load_config('frozenlake_ppo')
  (spec,) = build.env_specs(config, ('FrozenLake',), (1,))
  return templates.describe_task(spec, config.agent.action_sep)


def edited(prompt: str, known: list[str], draw: random.Random) -> str:
  """A prompt with one random change of a line.

  Args:
    known: lines of the game's own text.
    draw: source of the draws.
  """
  lines = prompt.split('\n')
  at = draw.randrange(len(lines))
  own = [line for line in known if line.lower() == lines[at].lower()]
  changes = {
    'as in the game': own or [lines[at]],
    'left out': [],
    'repeated': [lines[at], lines[at]],
    'in small letters': [lines[at].lower()],
    'after advice': [draw.choice(ADVICE), lines[at]],
  }
  lines[at : at + 1] = changes[draw.choice(sorted(changes))]
  return '\n'.join(lines)


def answer(request: str, known: list[str]) -> str:
  """The critic's reply to the text of a request: a critique, or a new prompt."""
  draw = random.Random(hashlib.sha256(request.encode()).hexdigest())
  quoted = re.search(r'instructions:\n((?:\| .*\n)+)', request)[1]
  if '<prompt>' not in request:
    return f'One of the lines is to be written differently. Number of this critique: {draw.randrange(10**6)}.'
  prompt = '\n'.join(line.removeprefix('| ') for line in quoted.splitlines())
  return f'<prompt>\n{edited(prompt, known, draw)}\n</prompt>'


@contextlib.contextmanager
def critic(known: list[str]) -> Iterator[str]:
  """Serves the critic on this machine; yields its base address."""

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
      message = {'role': 'assistant', 'content': answer(body['messages'][-1]['content'], known)}
      content = json.dumps({'choices': [{'index': 0, 'message': message}]}).encode()
      self.send_response(200)
      self.send_header('Content-Length', str(len(content)))
      self.end_headers()
      self.wfile.write(content)

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    yield f'http://127.0.0.1:{server.server_port}/v1'
  finally:
    server.shutdown()
    server.server_close()


def flags(address: str, prompt_file: pathlib.Path, size: dict[str, int]) -> list[str]:
  """The flags of the search."""
  return [
    '--mode=optimize_prompt', '--config=configs/agents_ppo.py', '--config.eval.step=base', '--config.serve.port=0',
    '--config.agent.max_context=1024',
    f'--config.prompt.file={prompt_file}', f'--config.prompt.critic={address}', '--config.prompt.critic_model=script',
    *(f'--config.prompt.{name}={value}' for name, value in size.items()),
  ]  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='one small round')
  parser.add_argument('--workdir', help='directory of the search; default a temporary one, with --quick runs/quick')
  options = parser.parse_args()
  text, size = game_text(), QUICK if options.quick else FULL
  with tempfile.TemporaryDirectory() as scratch, critic(text.split('\n')) as address:
    first = pathlib.Path(scratch) / 'first_prompt.txt'
    first.write_text(text.lower() + '\n', encoding='utf-8')
    workdir = options.workdir or (str(ROOT / 'runs' / 'quick' / 'prompt_search') if options.quick else f'{scratch}/run')
    start = time.monotonic()
    subprocess.run(
      [sys.executable, 'main.py', *flags(address, first, size), f'--workdir={workdir}'], cwd=ROOT, check=True
    )
    found = json.loads((pathlib.Path(workdir) / 'prompt_search' / 'prompts.json').read_text(encoding='utf-8'))
  result = {'hardware': hardware(), 'seconds': round(time.monotonic() - start), 'size': size, **found}
  path = ROOT / 'runs' / 'quick' / 'prompt_search.json' if options.quick else RESULT
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')
  print(f'written: {path}')


if __name__ == '__main__':
  main()
