// Runs in Node: Vercel's `ai`, whose answers follow a zod schema. Arguments: URL, API key, folder with node_modules.
//
// Prints one JSON object.

import { createRequire } from "node:module";

const [url, key, folder] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const { generateObject, streamObject } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const capital = z.object({
  name: z.string().max(20),
  kind: z.enum(["city", "town"]),
  inhabitants: z.number().int().min(0).max(99_999_999),
  tags: z.array(z.string().max(8)).max(2),
});
const provider = createOpenAICompatible({
  name: "splitserve",
  baseURL: `${url}/v1`,
  apiKey: key,
  supportsStructuredOutputs: true,
});
const asked = {
  model: provider("SmolLM2-135M-Instruct"),
  prompt: "What is the capital of France?",
  temperature: 0,
  maxOutputTokens: 120,
  maxRetries: 0,
};

const whole = await generateObject({ ...asked, schema: capital });
const choice = await generateObject({ ...asked, output: "enum", enum: ["city", "town"] });
const stream = streamObject({ ...asked, schema: capital });
let numParts = 0;
for await (const _ of stream.partialObjectStream) numParts += 1;
console.log(
  JSON.stringify({
    whole: whole.object,
    finishReason: whole.finishReason,
    choice: choice.object,
    streamed: await stream.object,
    numParts,
  }),
);
