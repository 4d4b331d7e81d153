// Vercel's AI SDK: generateText and streamText over @ai-sdk/openai-compatible. See ../programs/mailbox.py.
const fs = require("node:fs");
const { generateText, streamText, tool, stepCountIs } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const provider = createOpenAICompatible({
  name: "ratchet",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
});

function tools(task) {
  const inputSchema = z.object({ q: z.string(), n: z.number() });
  const make = (name) =>
    tool({
      description: `${name} mails`,
      inputSchema,
      execute: async () => {
        const replies = task.replies[name];
        return replies.length > 1 ? replies.shift() : replies[0];
      },
    });
  return { search: make("search"), read: make("read") };
}

async function agent(task) {
  const options = {
    model: provider(process.env.AGENT_MODEL ?? "agent"),
    system: task.system,
    prompt: task.question,
    tools: tools(task),
    stopWhen: stepCountIs(8),
  };
  if (!task.streamed) return (await generateText(options)).text;
  const result = streamText(options);
  for await (const _ of result.textStream);
  return await result.text;
}

async function main() {
  const { version } = JSON.parse(fs.readFileSync(require.resolve("ai/package.json")));
  for (const task of JSON.parse(fs.readFileSync(0))) {
    console.log(JSON.stringify({ answer: await agent(task), package: "ai (npm)", version }));
  }
}

main();
