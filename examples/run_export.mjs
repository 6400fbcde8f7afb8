// Run a folder that student-export wrote, using only transformers.js in Node:
// node run_export.mjs FOLDER TEXT...   (npm install @huggingface/transformers)
// Prints a line of JSON for each text: of a tagger its tokens, without characters. In a text of a
// masked LM write its mask; the two texts of a reranker have a TAB between them.
import { readFile } from "node:fs/promises";
import path from "node:path";
import { AutoModel, AutoModelForSequenceClassification, AutoTokenizer, env, pipeline } from "@huggingface/transformers";

const [folder, ...texts] = process.argv.slice(2);
const about = JSON.parse(await readFile(path.join(folder, "export.json"), "utf8"));
env.allowRemoteModels = false;
env.localModelPath = path.dirname(path.resolve(folder)) + "/";
const name = path.basename(path.resolve(folder));
const dtype = process.env.DTYPE ?? "fp32"; // q8 for --quantize int8, q4 for int4

const embed = async () => {
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  const model = await AutoModel.from_pretrained(name, { dtype });
  const inputs = tokenizer(texts.map((text) => about.prompt + text), { padding: true, truncation: true });
  const { sentence_embedding } = await model(inputs);
  return sentence_embedding.tolist();
};

const score = async () => {
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  const model = await AutoModelForSequenceClassification.from_pretrained(name, { dtype });
  const pairs = texts.map((text) => text.split("\t"));
  const text_pair = pairs[0].length > 1 ? pairs.map(([, second]) => second) : undefined;
  const inputs = tokenizer(pairs.map(([first]) => first), { text_pair, padding: true, truncation: true });
  const { logits } = await model(inputs);
  const activated = { Sigmoid: (x) => 1 / (1 + Math.exp(-x)) }[about.activation] ?? ((x) => x);
  return logits.tolist().map((row) => row.map(activated));
};

const answer = async (task, options) => {
  const predict = await pipeline(task, name, { dtype });
  return Promise.all(texts.map((text) => predict(text, options)));
};

// a softmax would be wrong for numbers, and for the one output of a reranker
const numbers = about.problem_type === "regression" || about.activation;
const tasks = {
  embedding: embed,
  classification: numbers ? score : () => answer("text-classification", { top_k: null }),
  tagging: () => answer("token-classification", { ignore_labels: [] }),
  mlm: () => answer("fill-mask"),
};
for (const row of await tasks[about.kind]()) console.log(JSON.stringify(row));
