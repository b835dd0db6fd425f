"""The page at the server's root: rollouts with their states, and the calls of each. Texts are never read as HTML."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Rollouts</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
script-src 'unsafe-inline'; connect-src 'self'">
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .3rem .6rem; text-align: left; vertical-align: top; }
tr { border-bottom: 1px solid #ddd; } tbody tr { cursor: pointer; } tbody tr:hover { background: #f4f6f8; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f6f8; padding: .5rem; margin: .2rem 0; }
.failed { color: #a11; } .succeeded { color: #161; } .note { color: #666; } input { font: inherit; width: 24rem; }
</style></head><body>
<h1>Rollouts</h1>
<form id="login"><label>Admin key <input id="key" type="password" autocomplete="off"></label>
<button>Show</button></form>
<p id="counts" class="note"></p><table><thead><tr><th>Rollout<th>Mode<th>State<th>Attempts<th>Iteration<th>Task</tr>
</thead><tbody id="rows"></tbody></table><button id="more" hidden>Older</button><div id="one"></div>
<script>
'use strict';
const by = id => document.getElementById(id);
let key = '', before = null;
async function get(path) {
  const answer = await fetch(path, {headers: {authorization: 'Bearer ' + key}});
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error.message);
  return body;
}
function add(parent, tag, text, kind) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  parent.append(node);
  return node;
}
async function list(older) {
  try {
    const page = await get('/rollouts?limit=50' + (older ? '&before=' + before : ''));
    if (!older) by('rows').replaceChildren();
    before = page.before;
    const counts = Object.entries(page.counts).map(([state, n]) => n + ' ' + state).join(', ');
    by('counts').textContent = counts || 'There is no rollout yet.';
    for (const r of page.rollouts) {
      const row = add(by('rows'), 'tr');
      const link = add(add(row, 'td'), 'a', r.rollout_id);
      link.href = '#' + encodeURIComponent(r.rollout_id);
      add(row, 'td', r.mode); add(row, 'td', r.state, r.state);
      add(row, 'td', r.attempts); add(row, 'td', r.metadata?.iteration ?? '');
      add(row, 'td', JSON.stringify(r.input).slice(0, 80));
      row.onclick = () => link.click();
      link.onclick = event => { event.stopPropagation(); if (location.hash === link.hash) show(); };
    }
    by('more').hidden = page.rollouts.length < 50;
  } catch (error) { by('counts').textContent = error.message; }
}
async function show() {
  const id = decodeURIComponent(location.hash.slice(1)), box = by('one');
  if (!id || !key) return;
  let r;
  try { r = await get('/rollouts/' + encodeURIComponent(id)); }
  catch (error) { box.replaceChildren(); add(box, 'p', error.message, 'failed'); return; }
  box.replaceChildren();
  add(box, 'h2', id); add(box, 'pre', JSON.stringify(r.input, null, 2));
  for (const a of r.attempts) {
    add(box, 'h3', 'Attempt ' + a.attempt_id + ': ' + a.state, a.state);
    if (a.error) add(box, 'pre', a.error, 'failed');
    for (const c of a.calls) {
      const rewards = a.rewards.filter(x => x.call_id === c.call_id).map(x => 'reward ' + x.value).join(', ');
      const about = [c.agent || 'agent', 'row ' + c.row, c.new_row_cause,
        c.prompt_tokens_new + ' + ' + c.tokens + ' tokens', c.finish, c.trained ? '' : 'not trained', rewards];
      add(box, 'p', about.filter(Boolean).join(' · '), 'note'); add(box, 'pre', c.text);
    }
    for (const x of a.rewards.filter(x => !x.call_id)) add(box, 'p', 'Reward of the episode: ' + x.value, 'note');
  }
  box.scrollIntoView();
}
by('login').onsubmit = event => { event.preventDefault(); key = by('key').value; list(false).then(show); };
by('more').onclick = () => list(true);
window.onhashchange = show;
</script></body></html>
"""
