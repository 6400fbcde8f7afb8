// Embed texts with a folder that student-export wrote, using only transformers.js in Node:
// node run_export.mjs FOLDER TEXT...   (npm install @huggingface/transformers)
import path from "node:path";
import { AutoModel, AutoTokenizer, env } from "@huggingface/transformers";

const [folder, ...texts] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = path.dirname(path.resolve(folder)) + "/";
const name = path.basename(path.resolve(folder));
const dtype = process.env.DTYPE ?? "fp32"; // q8 for --quantize int8, q4 for int4
const tokenizer = await AutoTokenizer.from_pretrained(name);
const model = await AutoModel.from_pretrained(name, { dtype });
const inputs = tokenizer(texts, { padding: true, truncation: true });
const { sentence_embedding } = await model(inputs);
console.log(JSON.stringify(sentence_embedding.tolist()));
