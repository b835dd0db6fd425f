"""The page of rollouts in a browser: what it shows, its links, and that it runs nothing foreign."""

from __future__ import annotations

import shutil

import pytest

from ragen_jax.serving import client as agents
from ragen_jax.serving.types import AttemptState
from tests.support.endpoint_store import new_rollout
from tests.support.made_up_episodes import ATTACKS
from tests.support.scripted import ADMIN, ScriptedEngine, chat, serve
from tests.support.wire import CALL_TAGS, tokenizer

webdriver = pytest.importorskip('selenium.webdriver', reason='needs selenium, of requirements-dev.txt')
from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which('chromium'), shutil.which('chromedriver')
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason='needs chromium and chromedriver (apt-get install chromium chromium-driver)'
  ),
]

ATTACK = ATTACKS[0] + ATTACKS[1]


@pytest.fixture(scope='module')
def server(tmp_path_factory):
  """A server with 56 rollouts: 51 that wait, and one of each other state; whatever a client can write is an attack."""
  directory = tmp_path_factory.mktemp('server')
  tok = tokenizer(directory / 'tokenizer', CALL_TAGS)
  with serve(directory, ScriptedEngine(tok, lambda prompt, number: ATTACK)) as opened:
    played = {
      name: opened.attempt(rollout_id=name, task={'text': ATTACK}, metadata={'iteration': ATTACK})
      for name in ('succeeded', 'failed', 'cancelled', 'running')
    }
    answer = chat(opened.client(played['succeeded']), model='policy:writer')
    chat(opened.client(played['succeeded']))
    agents.reward(0.25, call=answer.id, name=ATTACK[:200], of=played['succeeded'])
    agents.reward(2.0, of=played['succeeded'])
    agents.finish(of=played['succeeded'])
    opened.lifecycle.finish(played['failed'].attempt_id, AttemptState.FAILED, ATTACK)
    opened.lifecycle.cancel('cancelled')
    for k in range(51):
      opened.lifecycle.create(new_rollout(f'waits-{k:02}'))
    opened.lifecycle.create(new_rollout('deleted'))
    yield opened


@pytest.fixture(scope='module')
def browser():
  options = webdriver.ChromeOptions()
  options.binary_location = CHROMIUM
  # No sandbox: containers, in which tests run as root, do not let it be.
  for argument in ('--headless=new', '--no-sandbox', '--disable-dev-shm-usage', '--window-size=1400,900'):
    options.add_argument(argument)
  driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
  yield driver
  driver.quit()


@pytest.fixture
def page(browser, server):
  """The page, freshly loaded; at the end no foreign script has run, and no element is foreign."""
  browser.get('about:blank')
  browser.get(server.url)
  yield browser
  assert browser.title == 'Rollouts'
  assert not _all(browser, 'img, iframe, body script ~ script')


def _all(page, selector):
  return page.find_elements(By.CSS_SELECTOR, selector)


def _wait(page, condition):
  # The page replaces elements while it is read.
  ignored = [StaleElementReferenceException]
  return WebDriverWait(page, 60, poll_frequency=0.02, ignored_exceptions=ignored).until(lambda _: condition())


def _text(page, name):
  return page.find_element(By.ID, name).text


def _log_in(page, key=ADMIN):
  field = page.find_element(By.ID, 'key')
  field.clear()
  field.send_keys(key)
  page.find_element(By.CSS_SELECTOR, '#login button').click()


def _row(page, name):
  return page.find_element(By.CSS_SELECTOR, f'a[href="#{name}"]').find_element(By.XPATH, './ancestor::tr')


def _open_older(page):
  _log_in(page)
  _wait(page, lambda: len(_all(page, '#rows tr')) == 50)
  page.find_element(By.ID, 'more').click()
  _wait(page, lambda: len(_all(page, '#rows tr')) == 56)


def test_another_key_shows_nothing(page):
  _log_in(page, 'no key of mine at all')
  _wait(page, lambda: 'admin key' in _text(page, 'counts'))
  assert not _all(page, '#rows tr')
  _log_in(page)
  _wait(page, lambda: _all(page, '#rows tr'))


def test_rollouts_are_listed_with_their_states(page):
  _open_older(page)
  assert _text(page, 'counts').split(', ') == ['52 queued', '1 running', '1 succeeded', '1 failed', '1 cancelled']
  for state in ('succeeded', 'failed', 'cancelled', 'running'):
    cells = [cell.text for cell in _row(page, state).find_elements(By.TAG_NAME, 'td')]
    assert cells[:4] == [state, 'train', state, '1'] and cells[4] == ATTACK and cells[5].startswith('{"text":')
  colours = {
    state: _row(page, state).find_element(By.CLASS_NAME, state).value_of_css_property('color')
    for state in ('succeeded', 'failed')
  }
  assert colours == {'succeeded': 'rgba(17, 102, 17, 1)', 'failed': 'rgba(170, 17, 17, 1)'}
  assert not page.find_element(By.ID, 'more').is_displayed()


def test_a_rollout_is_shown_with_calls_and_rewards_as_text(page):
  _open_older(page)
  _row(page, 'succeeded').click()
  _wait(page, lambda: _all(page, '#one h3'))
  shown = _text(page, 'one')
  assert shown.count(ATTACK) == 2, 'the replies of both calls'
  notes = [note.text for note in _all(page, '#one .note')]
  assert len(notes) == 3 and notes[0].startswith('writer · row 0') and notes[0].endswith('reward 0.25')
  assert notes[2] == 'Reward of the episode: 2'
  _row(page, 'failed').click()
  _wait(page, lambda: 'Attempt failed.1: failed' in _text(page, 'one'))
  assert _all(page, '#one pre.failed')[0].text == ATTACK and ATTACK not in _all(page, '#one h2')[0].text


def test_a_link_leads_to_a_rollout_and_what_is_gone_is_told(page, server):
  page.get(f'{server.url}/#succeeded')
  assert not _text(page, 'one'), 'nothing without the key'
  _log_in(page)
  _wait(page, lambda: 'Attempt succeeded.1' in _text(page, 'one'))
  _row(page, 'deleted').find_element(By.TAG_NAME, 'a').click()
  _wait(page, lambda: _all(page, '#one h2') and _all(page, '#one h2')[0].text == 'deleted')
  page.back()
  _wait(page, lambda: 'Attempt succeeded.1' in _text(page, 'one'))
  page.get(f'{server.url}/#no-such-rollout')
  _log_in(page)
  _wait(page, lambda: "rollout 'no-such-rollout' does not exist" in _text(page, 'one'))
