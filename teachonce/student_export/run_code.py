"""Writes the Python code that runs one exported file, for the README of its folder.

The code needs only tokenizers, NumPy and the library of the format. It prints the same answers as
`student-predict` for its example texts.
"""

from __future__ import annotations

import json
from string import Template

from teachonce.student_export.student_inputs import StudentInputs
from teachonce.student_export.words import WORD

LOADING = {
    "onnx": """import onnxruntime
$imports

model = onnxruntime.InferenceSession("$file")""",
    "openvino": """import openvino
$imports

model = openvino.Core().compile_model("$file", "CPU")""",
    "torchscript": """import torch
$imports

model = torch.jit.load("$file")""",
}
RUNNING = {
    "onnx": 'return model.run(["$output"], inputs)[0]',
    "openvino": 'return model(inputs)["$output"]',
    "torchscript": """with torch.inference_mode():
        return model(*map(torch.as_tensor, inputs.values()))$first.numpy()""",
}
PROGRAM = """import json

import numpy as np
$loading
tokenizer = Tokenizer.from_file("tokenizer.json")


def run(encodings):
    inputs = {
$inputs
    }
    $running


def show(answer):
    print(json.dumps(answer, ensure_ascii=False))


$body"""
ARRAYS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
PARTS = {
    "softmax": """def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


""",
    "labels": """labels = json.load(open("export.json", encoding="utf-8"))["labels"]
""",
    "texts": """texts = ["A text.", "Another text."]
""",
}
VECTORS = """${texts}vectors = run(tokenizer.encode_batch([${prompt}text for text in texts]))
for text, vector in zip(texts, vectors):
    show({"text": text, "vector": vector.tolist()})
"""
ONE_LABEL = """${softmax}${labels}${texts}logits = run(tokenizer.encode_batch(texts))
for text, shares in zip(texts, softmax(logits)):
    order = np.argsort(-shares)
    found = {labels[n]: float(shares[n]) for n in order}
    show({"text": text, "label": labels[order[0]], "probabilities": found})
"""
SEVERAL_LABELS = """${labels}${texts}outputs = run(tokenizer.encode_batch(texts))
for text, logits in zip(texts, outputs):
    shares = 1 / (1 + np.exp(-logits))
    found = {labels[n]: float(shares[n]) for n in np.argsort(-shares)}
    chosen = [label for label in labels if found[label] >= 0.5]
    show({"text": text, "labels": chosen, "probabilities": found})
"""
NUMBERS = """${labels}${texts}for text, values in zip(texts, run(tokenizer.encode_batch(texts))):
    show({"text": text, "scores": dict(zip(labels, values.tolist()))})
"""
NUMBER = """${texts}for text, (value,) in zip(texts, run(tokenizer.encode_batch(texts))):
    show({"text": text, "score": float(value)})
"""
SCORES = """pairs = [("A question?", "A text."), ("A question?", "Another text.")]
for (a, b), (logit,) in zip(pairs, run(tokenizer.encode_batch(pairs))):
    show({"text_a": a, "text_b": b, "score": float($score)})
"""
ACTIVATIONS = {
    "Sigmoid": "1 / (1 + np.exp(-logit))",
    "Tanh": "np.tanh(logit)",
    "ReLU": "max(logit, 0)",
}
TAGS = """${softmax}${labels}words = Split(Regex($word), "removed", invert=True)
for text in ["A text of some words.", "Another text."]:
    encoding = tokenizer.encode(text)
    shares = softmax(run([encoding])[0])
    found = []
    for word, (begin, end) in words.pre_tokenize_str(text):
        # the tag of a word is that of its first piece
        pieces = (n for n, (a, b) in enumerate(encoding.offsets) if a < end and b > begin)
        if (piece := next(pieces, None)) is None:
            continue  # behind the last token of a long text
        tag = labels[shares[piece].argmax()]
${later}        span = {"word": word, "begin": begin, "end": end}
        found.append({**span, "tag": tag, "probability": float(shares[piece].max())})
    show({"text": text, "words": found})
"""
LATER = """        if tag == "$label":  # continues the entity of the word before
            before = found[-1]["tag"] if found else "O"
            tag = "I-" + before[2:] if before[:2] in ("B-", "I-") else "O"
"""
MASKS = """${softmax}mask = $mask
for text in [f"The {mask} is old.", f"A {mask}."]:
    encoding = tokenizer.encode(text)
    shares = softmax(run([encoding])[0])
    for place in (n for n, piece in enumerate(encoding.tokens) if piece == mask):
        best = np.argsort(-shares[place])[:5]
        found = {tokenizer.decode([n]): float(shares[place, n]) for n in best}
        show({"text": text, "pieces": found})
"""


def run_code(student: StudentInputs, format: str, file: str) -> str:
    """Return a Python program, to be started in the folder, that runs an exported file."""
    tagger = student.kind == "tagging"
    imports = f"from tokenizers import {'Regex, ' * tagger}Tokenizer"
    imports += "\nfrom tokenizers.pre_tokenizers import Split" * tagger
    inputs = "\n".join(
        f'        "{name}": np.array([each.{ARRAYS[name]} for each in encodings], np.int64),'
        for name in student.inputs
    )
    first = "[0]" if student.kind == "embedding" else ""
    return _filled(
        PROGRAM,
        loading=_filled(LOADING[format], imports=imports, file=file),
        inputs=inputs,
        running=_filled(RUNNING[format], output=student.output, first=first),
        body=_body(student),
    )


def _body(student: StudentInputs) -> str:
    if student.kind == "embedding":
        prompt = f"{_quoted(student.prompt)} + " if student.prompt else ""
        return _filled(VECTORS, prompt=prompt)
    if student.kind == "mlm":
        return _filled(MASKS, mask=_quoted(student.tokenizer.mask_token))
    task = student.task
    assert task is not None  # only LM heads and embedders have none
    if student.kind == "tagging":
        later = _filled(LATER, label=task.later_label) if task.later_label else ""
        return _filled(TAGS, word=_quoted(WORD), later=later)
    if task.output_kind == "numbers":
        if student.activation:
            return _filled(SCORES, score=ACTIVATIONS.get(student.activation, "logit"))
        return _filled(NUMBER if task.is_score else NUMBERS)
    return _filled(SEVERAL_LABELS if task.output_kind == "several labels" else ONE_LABEL)


def _filled(template: str, **parts: str) -> str:
    return Template(template).substitute(PARTS | parts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
