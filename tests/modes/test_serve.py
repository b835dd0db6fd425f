"""`--mode=serve`: a model answers until it is stopped, and what cannot be served is told in one line."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import threading
import urllib.request

import pytest
from openai import OpenAI

from ragen_jax.modes import serve
from ragen_jax.serving import client
from ragen_jax.serving.agent_server import ADMIN_KEY
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config
from tests.support.processes import start_main
from tests.support.serving import PATIENCE, until

_SMALL = {
  'model.preset': 'tiny', 'serve.port': 0, 'serve.slots': 2, 'agent.max_context': 128, 'agent.max_response_tokens': 8,
}  # fmt: skip


@pytest.mark.slow
def test_a_model_is_served_until_it_is_stopped(tmp_path, caplog, monkeypatch):
  monkeypatch.setenv(ADMIN_KEY, 'a-key-of-16-chars')
  caplog.set_level(logging.INFO)
  stop, failed = threading.Event(), []

  def run():
    try:
      frozen = {'serve.frozen': ('old=base',), 'serve.trained': ''}
      serve.serve(small_config({**_SMALL, **frozen}), str(tmp_path), given=False, stop=stop)
    except BaseException as e:  # noqa: BLE001, the test tells it
      failed.append(e)

  def address():
    found = [m for r in caplog.records if (m := re.search(r"serving 'policy' at (\S+)/v1", r.getMessage()))]
    assert not failed
    return found[0][1] if found else None

  thread = threading.Thread(target=run)
  thread.start()
  try:
    until(address)
    url = address()
    openai = OpenAI(base_url=f'{url}/v1', api_key='none', max_retries=0)
    answer = openai.chat.completions.create(model='policy', messages=[{'role': 'user', 'content': 'a'}])
    assert 1 <= answer.usage.completion_tokens <= 8 and answer.policy_version == 0
    told = {'model': 'policy:old', 'messages': [{'role': 'user', 'content': 'a'}]}
    assert openai.chat.completions.create(**told).model == 'policy:old'
    with urllib.request.urlopen(f'{url}/health', timeout=PATIENCE) as health:
      assert set(json.load(health)['frozen']) == {'base'}
    created = client._post(f'{url}/rollouts', 'a-key-of-16-chars', {'input': 3}, 0.0, PATIENCE)
    assert client.work(lambda task: 0.5, url, 'a-key-of-16-chars', wait_s=0.0, max_tasks=1) == 1
    assert created['state'] == 'queued' and (tmp_path / 'serve' / 'agents.sqlite').exists()
  finally:
    stop.set()
    thread.join(PATIENCE)
  assert not thread.is_alive() and not failed


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'eval.step': 'none'}, r"^eval\.step='none': must name a model to serve"),
    ({'eval.step': 'best'}, r'^--workdir=.*: there is no checkpoint in it'),
    ({'serve.slots': 0}, r'^serve\.slots=0: '),
    ({'serve.host': '0.0.0.0'}, rf"^serve\.host='0\.0\.0\.0': other machines can reach it, so {ADMIN_KEY}"),
  ],
)
def test_what_cannot_be_served(tmp_path, monkeypatch, fields, message):
  monkeypatch.delenv(ADMIN_KEY, raising=False)
  with pytest.raises(UserError, match=message):
    serve.serve(small_config({**_SMALL, **fields}), str(tmp_path), given=False, stop=threading.Event())


@pytest.mark.slow
@pytest.mark.parametrize(('number', 'status'), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_program(tmp_path, request, number, status):
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script; its programs inherit it
  request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
  flags = [f'--config.{name}={value}' for name, value in _SMALL.items()]
  given = ['--config=configs/frozenlake_ppo.py', '--mode=serve', '--config.eval.step=base', f'--workdir={tmp_path}']
  program = start_main(*given, *flags, text=True, stderr=subprocess.PIPE)
  lines = []
  try:
    for line in program.stderr:
      lines.append(line)
      if "serving 'policy' at" in line:
        break
    program.send_signal(number)
    lines += program.communicate(timeout=PATIENCE)[1].splitlines()
  finally:
    program.kill()
  assert 'Traceback' not in '\n'.join(lines) and lines[-1] == 'interrupted', json.dumps(lines[-5:])
  assert program.returncode == status
