"""Run a folder that student-export wrote: python run_export.py FOLDER TEXT...

Prints a row for each text: its vector, or the logits, with the labels of the logits if it has any.
Requires only onnxruntime and tokenizers.
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
encodings = tokenizer.encode_batch([about["prompt"] + text for text in texts])
arrays = {
    "input_ids": [encoding.ids for encoding in encodings],
    "attention_mask": [encoding.attention_mask for encoding in encodings],
    "token_type_ids": [encoding.type_ids for encoding in encodings],
}
# Some students have no token_type_ids; export.json lists the inputs of the graph.
inputs = {name: np.array(arrays[name], np.int64) for name in about["inputs"]}
session = onnxruntime.InferenceSession(str(folder / about["files"][0]["file"]))
(output,) = session.run([about["output"]], inputs)
rows = output.tolist()
print(json.dumps({"labels": about["labels"], "logits": rows} if "labels" in about else rows))
