"""The code in a model card that loads a student, and the heads for which this code differs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from teachonce.store import TaskSpec
from teachonce.store.format.features import PROBLEM_TYPES, OutputKind
from teachonce.student_train.model.any_student import head_of

THIS_FOLDER = '"this folder"'
"""The model that the code of a card loads; `push` replaces it by the repository."""


MOST_NEW = 40
"""Tokens by which the code of a card continues a text; fewer if the student has few positions."""


@dataclass(frozen=True)
class CardHead:
    """Describes a head for a card: the Auto class that loads it, its pipeline, a description, and
    code of an example text."""

    auto: str
    pipeline: str
    noun: str
    text: str = '"A text."'


HEADS = {
    "mlm": CardHead(
        "AutoModelForMaskedLM",
        "fill-mask",
        "masked language model",
        'f"The {predict.tokenizer.mask_token} is old."',
    ),
    "causal": CardHead(
        "AutoModelForCausalLM", "text-generation", "language model (decoder)", '"Once upon a time"'
    ),
    "classification": CardHead(
        "AutoModelForSequenceClassification", "text-classification", "classifier of texts"
    ),
    "tagging": CardHead(
        "AutoModelForTokenClassification", "token-classification", "tagger of tokens"
    ),
}
CHAT = replace(HEADS["causal"], text='[{"role": "user", "content": "Hello"}]')
SEVERAL_LABELS = replace(
    HEADS["classification"],
    noun="classifier that gives a text any number of labels",
    text='"A text.", top_k=None',  # the probability of each label
)
ENTITIES = replace(  # only the first piece of a word is trained
    HEADS["tagging"], text='"A text.", aggregation_strategy="first"'
)
NUMBERS = replace(SEVERAL_LABELS, noun="regression of texts")
SCORER = replace(
    HEADS["classification"], pipeline="text-ranking", noun="reranker of pairs of texts"
)
ENCODER = CardHead(
    "AutoModel", "feature-extraction", "encoder of texts", '"A text.", return_tensors=True'
)
EMBEDDER = CardHead("AutoModel", "sentence-similarity", "sentence embedding model")
HOW_TO_EMBED = """```python
{imported}from sentence_transformers import SentenceTransformer

model = SentenceTransformer("this folder")
vectors = model.encode(["A text.", "Another text."])
print(model.similarity(vectors, vectors))
```"""
ENCODER_ONLY = "`AutoModel` loads the encoder only, without pooling and the modules after it."
HOW_TO_SCORE = """```python
from sentence_transformers import CrossEncoder

model = CrossEncoder("this folder")
print(model.predict([("A question?", "A text."), ("A question?", "Another text.")]))
```

`AutoModelForSequenceClassification` loads it as well; its score is before the activation."""


def output_kind_of_student(student: PreTrainedModel) -> OutputKind | None:
    """Return the kind of a student's task outputs, by its config; None without a task."""
    if (kind := head_of(student)) in ("mlm", "causal"):
        return None
    declared = student.config.problem_type
    problem_type = declared if kind == "classification" and declared in PROBLEM_TYPES else None
    labels = tuple(map(str, range(len(student.config.id2label or ()))))
    return TaskSpec(kind, labels, problem_type=problem_type).output_kind


def head_for(student: PreTrainedModel) -> CardHead:
    """Return the head of a student's class, as a card describes it."""
    output_kind, head = output_kind_of_student(student), HEADS[head_of(student)]
    if student.config.num_labels == 1 and student.config.problem_type is None:
        return head  # one output without a problem type: the score of a pair
    # transformers would join neighbours of one tag without B- and I- to one entity.
    labels = (student.config.id2label or {}).values()
    if head is HEADS["tagging"] and any(str(label).startswith("B-") for label in labels):
        return ENTITIES
    return {"several labels": SEVERAL_LABELS, "numbers": NUMBERS}.get(str(output_kind), head)


def how_to_load(student: PreTrainedModel, pairs: bool = False, head: CardHead | None = None) -> str:
    """Return Markdown with code that loads a student's folder and predicts for a text or a pair.

    head: the head with which it is loaded; None for the head of its class. If transformers does not
        have the student's class, the code imports its module.
    """
    head = head or head_for(student)
    imported, note = _import_of(student, f"pipelines and `{head.auto}` load it")
    note = note or f"`{head.auto}` loads it as well.{_note_on_pooler(student)}"
    pair = '{"text": "A text.", "text_pair": "Another text."}'
    text = head.text.replace('"A text."', pair) if pairs else head.text
    if head.pipeline == HEADS["causal"].pipeline:
        # By default the pipeline continues by 256 tokens, for which learnt positions may not
        # suffice.
        positions = getattr(student.config, "max_position_embeddings", None) or MOST_NEW
        text += f", max_new_tokens={min(MOST_NEW, max(1, positions // 2))}"
    return f"""```python
{imported}from transformers import pipeline

predict = pipeline("{head.pipeline}", "this folder")
print(predict({text}))
```

{note}"""


def how_to_embed(student: PreTrainedModel) -> str:
    """Return Markdown with code that loads a sentence embedding model and compares two texts."""
    imported, note = _import_of(student, "`SentenceTransformer` loads it")
    if student.config.model_type == "static":  # a class of sentence-transformers alone
        return HOW_TO_EMBED.format(imported="")
    paragraphs = [HOW_TO_EMBED.format(imported=imported), ENCODER_ONLY + _note_on_pooler(student)]
    return "\n\n".join([*paragraphs, *([note] if note else [])])


def _note_on_pooler(student: PreTrainedModel) -> str:
    """Return a note if `AutoModel` adds a pooler to the student, whose weights are random."""
    # No field of config.json stops it: transformers reads `add_pooling_layer` only from the call.
    if getattr(student.base_model, "pooler", True) is not None:
        return ""
    return (
        " No pooler was trained:\n`AutoModel.from_pretrained("
        f"{THIS_FOLDER}, add_pooling_layer=False)` leaves it out, else its weights are random."
    )


def _import_of(student: PreTrainedModel, then: str) -> tuple[str, str]:
    """Return the code line that imports a student's class, and a note on it; two empty texts for a
    class of transformers. `then` is the note's last clause."""
    name, module = type(student).__name__, type(student).__module__
    if module.startswith("transformers."):
        return "", ""
    package = module.partition(".")[0]
    note = (
        f"Its class, `{name}`, comes with {package}, not with transformers: once `{module}` is"
        f" imported,\n{then}."
    )
    return f"import {module}\n", note
