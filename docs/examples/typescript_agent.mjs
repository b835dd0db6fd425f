// An agent with OpenAI's client for TypeScript and JavaScript: it guesses a number by calling a tool.
import OpenAI from 'openai';

const {RAGEN_TASK, OPENAI_BASE_URL, OPENAI_API_KEY} = process.env;
const secret = JSON.parse(RAGEN_TASK).input.seed % 10;
const openai = new OpenAI(); // reads OPENAI_BASE_URL and OPENAI_API_KEY
const tools = [{
  type: 'function',
  function: {
    name: 'guess',
    description: 'Guesses the number.',
    parameters: {type: 'object', properties: {number: {type: 'integer'}}, required: ['number']},
  },
}];
const messages = [{role: 'user', content: 'Guess my number, which is from 0 to 9.'}];

let call, found = false;
for (let turn = 0; turn < 6 && !found; turn++) {
  const reply = await openai.chat.completions.create({model: 'policy', messages, tools});
  call = reply.id;
  const {message} = reply.choices[0];
  messages.push(message);
  for (const {id, function: {arguments: text}} of message.tool_calls ?? []) {
    let number;
    try { number = JSON.parse(text).number; } catch { /* no number */ }
    found ||= number === secret;
    const content = number === secret ? 'Yes!' : number < secret ? 'It is larger.' : 'It is smaller.';
    messages.push({role: 'tool', tool_call_id: id, content});
  }
  if (!message.tool_calls?.length) messages.push({role: 'user', content: 'Call the tool.'});
}

const answer = await fetch(OPENAI_BASE_URL.replace(/\/v1$/, '/rewards'), {
  method: 'POST',
  headers: {authorization: `Bearer ${OPENAI_API_KEY}`, 'content-type': 'application/json'},
  body: JSON.stringify({value: found ? 1 : 0, call, id: 'outcome'}),
});
if (!answer.ok) throw new Error(await answer.text());
