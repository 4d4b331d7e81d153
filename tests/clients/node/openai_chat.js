// OpenAI's npm package, Chat Completions: the tool loop that its own documentation shows. See ../programs/mailbox.py.
const fs = require("node:fs");
const { OpenAI } = require("openai");
const { VERSION } = require("openai/version");

const MODEL = process.env.AGENT_MODEL ?? "agent";

async function turn(client, streamed, options) {
  if (!streamed) return (await client.chat.completions.create(options)).choices[0].message;
  const stream = client.chat.completions.stream(options);
  for await (const _ of stream);
  return stream.finalMessage();
}

async function agent(asked) {
  const client = new OpenAI();
  const messages = [
    { role: "system", content: asked.system },
    { role: "user", content: asked.question },
  ];
  for (let round = 0; round < (asked.rounds ?? 8); round++) {
    const message = await turn(client, asked.streamed, { model: MODEL, messages, tools: asked.tools, ...asked.options });
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls) {
      const replies = asked.replies[call.function.name] ?? ["there is no such tool"];
      const reply = replies.length > 1 ? replies.shift() : replies[0];
      messages.push({ role: "tool", tool_call_id: call.id, content: reply });
    }
  }
  return null;
}

async function main() {
  for (const asked of JSON.parse(fs.readFileSync(0))) {
    const answer = await agent(asked);
    console.log(JSON.stringify({ answer, package: "openai (npm)", version: VERSION }));
  }
}

main();
