"""Writes the Python program in the folder of an export that runs one of its files.

The program needs only tokenizers, NumPy and the library of the format. It reads lines of texts from
files or stdin, and prints the answers of `student-predict`, vectors with more digits. It truncates
long texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from string import Template

from teachonce.student_export.student_inputs import StudentInputs
from teachonce.support.errors import UserError
from teachonce.training.words import WORD

LIBRARIES = {"onnx": "onnxruntime", "openvino": "openvino", "torchscript": "torch"}
LOADING = {
    "onnx": 'model = onnxruntime.InferenceSession(str(folder / "$file"))',
    "openvino": """# the student's own precision: a processor with bfloat16 would compute in that
exact = {"INFERENCE_PRECISION_HINT": "f32"}
model = openvino.Core().compile_model(str(folder / "$file"), "CPU", exact)""",
    "torchscript": 'model = torch.jit.load(str(folder / "$file"))',
}
RUNNING = {
    "onnx": 'return model.run(["$output"], inputs)[0][0]',
    "openvino": 'return model(inputs)["$output"][0]',
    "torchscript": """with torch.inference_mode():
        return model(*map(torch.as_tensor, inputs.values()))$first[0].numpy()""",
}
PROGRAM = '''"""Print an answer to each line of files, or of stdin: python $program [FILE]..."""

import fileinput
import json
import os
${modules}import sys
from pathlib import Path

import numpy as np
import $library
$imports

folder = Path(__file__).parent
$loading
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
${settings}

def run(encoding):
    inputs = {
$inputs
    }
    $running

${functions}
${answer}

def main():
$main
if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    if sys.stdout is None:
        sys.exit("stdout: is closed, so no answer can be written; redirect it to a file")
    sys.stdin = sys.stdin or open(os.devnull)  # None if the shell closed it
    sys.stdin.reconfigure(encoding="utf-8-sig")  # some programs write a mark
    sys.stdout.reconfigure(encoding="utf-8")
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # of `| head`; an exit of Python would write to the pipe once more
        os._exit(1)
    except (OSError, UnicodeDecodeError) as error:
        # an error of a file has its name, and of a folder at stdin its type
        if getattr(error, "filename", "") is None and not isinstance(error, IsADirectoryError):
            print(f"stdout: cannot be written ({error}); free some space", file=sys.stderr)
            os._exit(1)  # an exit of Python would write once more
        where = fileinput.filename() or "stdin"
        sys.exit(f"{where}: cannot be read ({error}); give a file in UTF-8")
'''
ARRAYS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
TEXTS = """    for line in fileinput.input(encoding="utf-8-sig"):
        text = line.rstrip("\\r\\n")
        fields = answer(text) if text.strip() else {"empty": True}
        print(json.dumps({"text": text, **fields}, ensure_ascii=False))
"""
PAIRS = """    for line in fileinput.input(encoding="utf-8-sig"):
        if line.strip() and line.count("\\t") != 1:
            where = f"{fileinput.filename()}, line {fileinput.filelineno()}"
            raise SystemExit(f"{where}: expected two texts with a TAB between them")
        text_a, _, text_b = line.rstrip("\\r\\n").partition("\\t")
        fields = answer(text_a, text_b) if text_a.strip() and text_b.strip() else {"empty": True}
        print(json.dumps({"text_a": text_a, "text_b": text_b, **fields}, ensure_ascii=False))
"""
LABELS = """labels = json.loads((folder / "export.json").read_text("utf-8"))["labels"]
"""
SOFTMAX = """
def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)

"""
VECTORS = """def answer(text):
    return {"vector": run(tokenizer.encode(${prompt}text)).tolist()}
"""
ONE_LABEL = """def answer($texts):
    shares = softmax(run(tokenizer.encode($texts)))
    order = np.argsort(-shares)
    scores = {labels[n]: round(float(shares[n]), 6) for n in order}
    return {"label": labels[order[0]], "probabilities": scores}
"""
SEVERAL_LABELS = """def answer($texts):
    shares = 1 / (1 + np.exp(-run(tokenizer.encode($texts))))
    scores = {labels[n]: round(float(shares[n]), 6) for n in np.argsort(-shares)}
    return {"labels": [label for label in labels if scores[label] >= 0.5], "probabilities": scores}
"""
NUMBERS = """def answer($texts):
    values = run(tokenizer.encode($texts)).tolist()
    return {"scores": {label: round(value, 6) for label, value in zip(labels, values)}}
"""
SCORE = """def answer($texts):
    (logit,) = run(tokenizer.encode($texts))
    return {"score": round(float($score), 6)}
"""
ACTIVATIONS = {
    "": "logit",
    "Identity": "logit",
    "Sigmoid": "1 / (1 + np.exp(-logit))",
    "Tanh": "np.tanh(logit)",
    "ReLU": "max(logit, 0)",
}
SPLIT = """words_of = Split(Regex($word), "removed", invert=True)
"""
TAGS = """def answer(text="", words=None):
    # words: a list of words in place of a text, if they are not to be found in it
    if words is None:
        split = words_of.pre_tokenize_str(text)
    else:
        text, stops = " ".join(words), np.cumsum([len(word) + 1 for word in words]).tolist()
        split = [(word, (stop - len(word) - 1, stop - 1)) for word, stop in zip(words, stops)]
    encoding = tokenizer.encode(text)
    shares, last = softmax(run(encoding)), max(end for _, end in encoding.offsets)
    tagged = []
    for word, (begin, end) in split:
        # a word has the tag of its first piece
        pieces = (n for n, (a, b) in enumerate(encoding.offsets) if a < end and b > begin)
        if (piece := next(pieces, None)) is not None:
            tag, share = labels[shares[piece].argmax()], round(float(shares[piece].max()), 6)
        elif words is None or encoding.overflowing and begin >= last:
            continue  # without a token, or behind the last one of a long text
        else:
            tag, share = "O", 0.0
${later}        fields = {"tag": tag, "probability": share}
        tagged.append({"word": word, "begin": begin, "end": end, **fields})
    return {"words": tagged$entities}
"""
LATER = """        if tag == $label:  # continues the entity of the word before
            before = tagged[-1]["tag"] if tagged else "O"
            tag = "I-" + before[2:] if before[:2] in ("B-", "I-") else "O"
"""
ENTITIES = """
def entities(text, words):
    runs, before = [], ""  # the kind of the entity that a word may continue
    for word in words:
        mark, kind = word["tag"][:1], word["tag"][2:]
        if kind and (mark in "BSU" or kind != before):
            runs.append([])
        if kind:
            runs[-1].append(word)
        before = "" if mark in "ELSU" else kind
    for group in runs:
        begin, end = group[0]["begin"], group[-1]["end"]
        share = round(float(np.mean([word["probability"] for word in group])), 6)
        span = {"text": text[begin:end], "label": group[0]["tag"][2:], "begin": begin, "end": end}
        yield {**span, "probability": share}

"""
MASKS = """def answer(text):
    encoding = tokenizer.encode(text)
    shares, masks, filled, done = softmax(run(encoding)), [], "", 0
    positions = (n for n, piece in enumerate(encoding.tokens) if piece == mask)
    for position, match in zip(positions, re.finditer(re.escape(mask), text)):
        begin, end = match.span()
        order = np.argsort(-shares[position])[:5].tolist()
        best = ((n, round(float(shares[position, n]), 6)) for n in order)
        # False: a special piece is printed, too
        pieces = [{"piece": tokenizer.decode([n], False), "probability": p} for n, p in best]
        masks.append({"begin": begin, "end": end, "pieces": pieces})
        before, piece = text[done:begin], pieces[0]["piece"].strip()
${inner}        filled += before + piece
        done = end
    return {"filled": filled + text[done:], "masks": masks}
"""
# Code that joins a piece inside a word to the text before it, for each way in which a vocabulary
# marks such pieces.
INNER = {
    "prefix": """        if piece.startswith($mark):  # continues the word before it
            before, piece = before.rstrip(), piece.removeprefix($mark)
""",
    "blank": """        token = tokenizer.id_to_token(order[0]) or mask
        if not token.startswith($mark) and token not in special:  # continues the word before it
            before = before.rstrip(" ")
""",
}
SPECIAL = """special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
"""


@dataclass(frozen=True)
class Answering:
    """Holds the parts of a program that depend on the kind of its answers.

    All are source code. answer: the function `answer`. functions: the functions that it calls.
    settings: constants that these functions read. main: the function `main`. module: a module to
    import, or "".
    """

    answer: str
    functions: str = ""
    settings: str = ""
    main: str = TEXTS
    module: str = ""


def run_code(student: StudentInputs, format: str, file: str) -> str:
    """Return a Python program for the folder of an export. It runs `file` of the folder, and prints
    an answer to each line of text."""
    tagger = student.kind == "tagging"
    imports = f"from tokenizers import {'Regex, ' * tagger}Tokenizer"
    imports += "\nfrom tokenizers.pre_tokenizers import Split" * tagger
    inputs = "\n".join(
        f'        "{name}": np.array([encoding.{ARRAYS[name]}], np.int64),'
        for name in student.inputs
    )
    first = "[0]" if student.kind == "embedding" else ""
    parts = _answering(student)
    return _filled(
        PROGRAM,
        program=f"answer_{format}.py",
        modules=parts.module and f"import {parts.module}\n",
        library=LIBRARIES[format],
        imports=imports,
        loading=_filled(LOADING[format], file=file),
        settings=parts.settings,
        inputs=inputs,
        running=_filled(RUNNING[format], output=student.output, first=first),
        functions=parts.functions,
        answer=parts.answer,
        main=parts.main,
    )


def check_answers(student: StudentInputs) -> None:
    """Raise UserError for a student whose answers no program can compute, and for a masked LM
    without a mask token."""
    if student.kind == "mlm":
        student.mask_token()
    is_score = student.task is not None and student.task.is_score
    if is_score and student.activation not in ACTIVATIONS:
        raise UserError(
            f"the student's scores pass through torch.nn.{student.activation}, which the program"
            f" of an export cannot compute ({', '.join(filter(None, ACTIVATIONS))}); train the"
            " reranker with one of them"
        )


def _answering(student: StudentInputs) -> Answering:
    if student.kind == "embedding":
        prompt = f"{_quoted(student.prompt)} + " if student.prompt else ""
        return Answering(_filled(VECTORS, prompt=prompt))
    if student.kind == "mlm":
        settings = f"mask = {_quoted(student.mask_token())}\n"
        inner = ""
        if student.vocabulary is not None:
            marks = student.vocabulary.marks
            inner = _filled(INNER.get(marks.style, ""), mark=_quoted(marks.mark))
            settings += SPECIAL * (marks.style == "blank")
        return Answering(_filled(MASKS, inner=inner), SOFTMAX, settings, module="re")
    task = student.task
    assert task is not None  # only LM heads and embedders have no task
    if student.kind == "tagging":
        later = _filled(LATER, label=_quoted(task.later_label)) if task.later_label else ""
        joins = student.joins_entities
        entities = ', "entities": [*entities(text, tagged)]' if joins else ""
        answer = _filled(TAGS, later=later, entities=entities)
        split = _filled(SPLIT, word=_quoted(WORD))
        return Answering(answer, SOFTMAX + ENTITIES * joins, LABELS + split)
    texts, main = ("text_a, text_b", PAIRS) if student.pairs else ("text", TEXTS)
    if task.is_score:
        score = ACTIVATIONS[student.activation]
        return Answering(_filled(SCORE, texts=texts, score=score), main=main)
    if task.output_kind == "numbers":
        return Answering(_filled(NUMBERS, texts=texts), settings=LABELS, main=main)
    if task.output_kind == "several labels":
        return Answering(_filled(SEVERAL_LABELS, texts=texts), settings=LABELS, main=main)
    return Answering(_filled(ONE_LABEL, texts=texts), SOFTMAX, LABELS, main)


def _filled(template: str, **parts: str) -> str:
    # Not str.format: the programs are full of braces.
    return Template(template).substitute(parts)


def _quoted(text: str) -> str:
    # A JSON string is also a Python literal.
    return json.dumps(text, ensure_ascii=False)
