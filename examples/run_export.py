"""Runs a folder that student-export made: python run_export.py FOLDER TEXT...

It prints a row for each text: its vector, or the logits. It needs onnxruntime and tokenizers alone.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime  # type: ignore[import-untyped,unused-ignore]
from tokenizers import Tokenizer

if len(sys.argv) < 3:
    sys.exit(__doc__)
folder, texts = Path(sys.argv[1]), sys.argv[2:]
about = json.loads((folder / "export.json").read_text("utf-8"))
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
read = tokenizer.encode_batch([about["prompt"] + text for text in texts])
given = {
    "input_ids": [each.ids for each in read],
    "attention_mask": [each.attention_mask for each in read],
    "token_type_ids": [each.type_ids for each in read],
}
inputs = {name: np.array(given[name], np.int64) for name in about["inputs"]}
session = onnxruntime.InferenceSession(str(folder / about["files"][0]["file"]))
(found,) = session.run([about["output"]], inputs)
print(json.dumps(found.tolist()))
