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

async function agent(task) {
  const client = new OpenAI();
  const messages = [
    { role: "system", content: task.system },
    { role: "user", content: task.question },
  ];
  for (let round = 0; round < (task.rounds ?? 8); round++) {
    const message = await turn(client, task.streamed, { model: MODEL, messages, tools: task.tools, ...task.options });
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls) {
      const replies = task.replies[call.function.name] ?? ["there is no such tool"];
      const reply = replies.length > 1 ? replies.shift() : replies[0];
      messages.push({ role: "tool", tool_call_id: call.id, content: reply });
    }
  }
  return null;
}

async function main() {
  for (const task of JSON.parse(fs.readFileSync(0))) {
    const answer = await agent(task);
    console.log(JSON.stringify({ answer, package: "openai (npm)", version: VERSION }));
  }
}

main();
