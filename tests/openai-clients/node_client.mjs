// The official Node client against `/v1`.
// Usage: node node_client.mjs URL KEY, in a folder with the package `openai`. `just openai-clients` runs it.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, key, modules] = process.argv.slice(2);
const resolved = createRequire(`${modules}/x.js`).resolve("openai");
const { default: OpenAI } = await import(pathToFileURL(resolved));
const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];

const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert(models.includes("alpha"), models);

const parameters = { model: "alpha", messages, max_tokens: 20, seed: 1 };
const whole = await client.chat.completions.create(parameters);
const text = whole.choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...parameters, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, text);

const continued = await client.completions.create({ model: "alpha", prompt: "The capital of France is", max_tokens: 8, temperature: 0 });
assert(continued.choices[0].text.includes("Paris"), continued);

const schema = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"], additionalProperties: false };
const format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
const answer = await client.chat.completions.create({ ...parameters, max_tokens: 40, response_format: format });
assert.equal(typeof JSON.parse(answer.choices[0].message.content).sure, "boolean");

const refused = async (call, kind) => assert.rejects(call, (error) => error instanceof kind);
await refused(client.chat.completions.create({ model: "gpt-4o", messages }), OpenAI.NotFoundError);
await refused(client.chat.completions.create({ ...parameters, n: 2 }), OpenAI.BadRequestError);
const stranger = new OpenAI({ baseURL: url, apiKey: "wrong-key-0123456789", maxRetries: 0 });
await refused(stranger.chat.completions.create(parameters), OpenAI.AuthenticationError);
console.log("node: ok");
