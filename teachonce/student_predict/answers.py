"""Turns the outputs of a student into answers: labels, tagged words, vectors, scores, pieces.

A classifier, a tagger and a masked LM read a long text in windows of words that overlap. Vectors
and pairs are truncated.
"""

# Vectors are truncated because every library that loads the folder does so: an index and its
# queries may come from different programs.

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from teachonce.align import Vocabulary
from teachonce.checkpoints.labels import activated, sigmoid
from teachonce.downstream.tasks.tagging import continued
from teachonce.downstream.tasks.word_windows import Spans, WordWindow, word_windows
from teachonce.student_export.formats import Runner
from teachonce.student_export.student_inputs import BATCH, StudentInputs
from teachonce.student_predict.texts import InputText
from teachonce.support.arrays import Array, Floats
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.tag_schemes import OUTSIDE, entities
from teachonce.training.words import word_spans

Answer = dict[str, Any]
MASKED_BATCH = 4
"""Texts at once of a masked LM, whose output has a number for each token and piece."""
PIECES = 5
"""Pieces of a mask that are printed by default."""
# A TAB, and every line end of `str.splitlines`, by which other programs may read the table.
BREAK = re.compile(r"\r\n|[\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
"""A character in a text that would end a cell or a line."""
OTHERS = {"mlm": "filled masks", "embedding": "vectors", "numbers": "scores"}


class Predictor:
    """Answers texts, one or two texts each, with a student or an export.

    top: number of labels of a text, or pieces of a mask, that an answer lists.

    Raises UserError if the student cannot answer texts of this kind.
    """

    def __init__(
        self,
        student: StudentInputs,
        run: Runner,
        inputs: Sequence[InputText],
        top: int | None = None,
    ) -> None:
        self.student, self.run, self.inputs, self.top = student, run, inputs, top
        self.blank = self.long = self.cut = 0
        self.pairs = len(inputs[0].texts) == 2
        self.names = ("text_a", "text_b") if self.pairs else ("text",)
        if self.pairs and (student.kind in ("mlm", "tagging") or student.pairs is False):
            raise UserError(
                f"{inputs[0].where}: is a pair, and the student reads single texts"
                f" ({student.kind}); give one text per line (column text)"
            )
        if inputs[0].words and student.kind != "tagging":
            raise UserError(
                f"{inputs[0].where}: has separate words, and the student reads texts"
                f" ({student.kind}); give one text per line (.txt), or a table with column text"
            )
        numbers = student.task is not None and student.task.output_kind == "numbers"
        if top is not None and (numbers or student.kind not in ("classification", "mlm")):
            raise UserError(
                f"--top {top}: ranks the labels of a text, or the pieces for a mask, and this"
                f" student has neither ({student.kind}); leave --top out"
            )
        # Checked before the first answer, because answers are printed as they come.
        if student.kind == "mlm":
            self._check_masks()

    def answers(self) -> Iterator[Answer]:
        """Yield the answer to each text, in the order of the texts.

        The answer to a blank text has the key `empty`. `windows` is the number of windows of a long
        text, `cut` marks a text that was truncated, or that has a word longer than a window.
        """
        answer = {
            "classification": self._classified,
            "mlm": self._filled,
            "tagging": self._tagged,
            "embedding": self._embedded,
        }[self.student.kind]
        # In blocks, so that the first answers are printed before all texts are run.
        for begin in range(0, len(self.inputs), BATCH):
            block = self.inputs[begin : begin + BATCH]
            answered = iter(answer([item for item in block if not item.blank]))
            for item in block:
                self.blank += item.blank
                fields = {"empty": True} if item.blank else next(answered)
                yield {**dict(zip(self.names, item.texts, strict=True)), **fields}

    def notes(self) -> Iterator[str]:
        """Yield a line each on blank texts, long texts, and texts with a long word."""
        total, limit = len(self.inputs), self.student.max_length
        if self.student.pairs and not self.pairs:
            yield (
                "single texts, and the student scores pairs: give two texts with a TAB between them"
                " and --pairs, or a table with columns text_a and text_b"
            )
        if self.blank:
            yield f"{self.blank:,} of {counted(total, 'text')} blank: without an answer"
        if self.long:
            how = "cut" if self.pairs or self.student.kind == "embedding" else "read in windows"
            yield f"{self.long:,} of {counted(total, 'text')} longer than {limit} tokens: {how}"
        if self.cut:
            yield (
                f"{self.cut:,} of {counted(total, 'text')} with a word longer than {limit} tokens:"
                " its end is cut; put spaces between the words"
            )

    def _check_masks(self) -> None:
        mask = self.student.mask_token()
        for item in self.inputs:
            if not item.blank and mask not in item.texts[0]:
                raise UserError(
                    f"{item.where}: has no {mask}; write {mask} where the masked LM is to fill in a"
                    " piece"
                )

    def _outputs(self, rows: Sequence[Any]) -> Iterator[Array]:
        """Yield the output of each tokenized row, without the batch dimension."""
        size = MASKED_BATCH if self.student.kind == "mlm" else BATCH
        for batch in self.student.batches(rows, size):
            for output in self.run(batch):
                if not np.isfinite(output).all():  # else the answer would be an arbitrary label
                    raise UserError(
                        "the student gives NaN or infinity, so its weights are damaged; train it"
                        " again"
                    )
                yield output

    def _truncated(self, texts: Sequence[Sequence[str]]) -> tuple[list[Array], list[Answer]]:
        """Return the outputs of texts, or of pairs (a list of first and a list of second texts),
        and an answer for each: {"cut": True} if it was truncated, else {}."""
        encoded = self.student.tokenized(*texts)
        cut = [bool(encoding.overflowing) for encoding in encoded.encodings]
        self.long += sum(cut)
        rows = [{name: encoded[name][n] for name in self.student.inputs} for n in range(len(cut))]
        return list(self._outputs(rows)), [{"cut": True} if flag else {} for flag in cut]

    def _windows(
        self, inputs: Sequence[InputText], first: str = ""
    ) -> Iterator[tuple[str, Spans, list[tuple[WordWindow, Array]], Answer]]:
        """Yield for each text: the text, its spans of words, its windows with outputs, and the keys
        `windows` and `cut` of its answer."""
        texts = [item.texts[0] for item in inputs]
        spans: list[Spans] = [item.words or word_spans(item.texts[0], first) for item in inputs]
        length, tokenizer = self.student.max_length, self.student.tokenizer
        windows = [
            list(word_windows(tokenizer, text, words, length))
            for text, words in zip(texts, spans, strict=True)
        ]
        rows = [
            {"input_ids": window.ids, "attention_mask": [1] * len(window.ids)}
            for group in windows
            for window in group
        ]
        outputs = self._outputs(rows)
        for text, words, group in zip(texts, spans, windows, strict=True):
            self.long += len(group) > 1
            fields: Answer = {"windows": len(group)} if len(group) > 1 else {}
            if any(window.cut for window in group):
                self.cut += 1
                fields["cut"] = True
            yield text, words, [(window, next(outputs)) for window in group], fields

    def _embedded(self, inputs: Sequence[InputText]) -> Iterator[Answer]:
        sides = list(zip(*(item.texts for item in inputs), strict=True))
        if not self.pairs:
            vectors, cuts = self._truncated(sides)
            for vector, cut in zip(vectors, cuts, strict=True):
                # Converted through text, the shortest that gives the same float32: 0.1, not
                # 0.10000000149011612.
                yield {"vector": [float(str(number)) for number in vector], **cut}
            return
        (one, first), (other, second) = (self._truncated([side]) for side in sides)
        for a, b, *cuts in zip(one, other, first, second, strict=True):
            lengths = np.linalg.norm(a) * np.linalg.norm(b)
            yield {"score": _rounded(a @ b / max(lengths, 1e-12)), **cuts[0], **cuts[1]}

    def _classified(self, inputs: Sequence[InputText]) -> Iterator[Answer]:
        if self.pairs:
            outputs, cuts = self._truncated([*zip(*(item.texts for item in inputs), strict=True)])
            for logits, cut in zip(outputs, cuts, strict=True):
                yield {**self._label(logits[None]), **cut}
            return
        for _, _, windows, fields in self._windows(inputs):
            yield {**self._label(np.stack([output for _, output in windows])), **fields}

    def _label(self, logits: Array) -> Answer:
        """Return the answer of a classifier for the logits [W,C] of a text's windows."""
        task = self.student.task
        assert task is not None  # a classifier has labels
        if task.output_kind == "numbers":
            values = activated(logits, self.student.activation).mean(0)
            if task.is_score:
                return {"score": _rounded(values[0])}
            named = zip(task.labels, values, strict=True)
            return {"scores": {label: _rounded(value) for label, value in named}}
        several = task.output_kind == "several labels"
        shares = (sigmoid(logits) if several else _softmax(logits)).mean(0)
        # Stable: labels of equal probability stay in the model's order.
        order = np.argsort(-shares, kind="stable")[: self.top]
        shown = {task.labels[n]: _rounded(shares[n]) for n in order}
        if several:
            labels = [label for n, label in enumerate(task.labels) if shares[n] >= 0.5]
            return {"labels": labels, "probabilities": shown}
        return {"label": task.labels[order[0]], "probabilities": shown}

    def _tagged(self, inputs: Sequence[InputText]) -> Iterator[Answer]:
        task = self.student.task
        assert task is not None  # a tagger has labels
        for item, (text, spans, windows, fields) in zip(inputs, self._windows(inputs), strict=True):
            words = list[Answer]()
            for window, logits in windows:
                shares = _softmax(logits)
                for number, run in window.own_pieces():
                    if not run and not item.words:
                        continue
                    span = _span(text, *spans[number])
                    # A given word without a token has the tag "O", as in `Tagging.tags_of_words`.
                    if not run:
                        words.append({**span, "tag": OUTSIDE, "probability": 0.0})
                        continue
                    best = int(shares[run.start].argmax())
                    tag = task.labels[best]
                    if tag == task.later_label:
                        tag = continued([word["tag"] for word in words[-1:]])
                    words.append(
                        {
                            **span,
                            "tag": tag,
                            "probability": _rounded(shares[run.start, best]),
                        }
                    )
            yield {
                "words": words,
                **(_entities(text, words) if self.student.joins_entities else {}),
                **fields,
            }

    def _filled(self, inputs: Sequence[InputText]) -> Iterator[Answer]:
        tokenizer, mask = self.student.tokenizer, self.student.mask_token()
        for text, spans, windows, fields in self._windows(inputs, mask):
            masks, filled, end = list[Answer](), "", 0
            for window, logits in windows:
                for number, run in window.own_pieces():
                    span = _span(text, *spans[number])
                    if not run or span.pop("word") != mask:
                        continue
                    shares = _softmax(logits[run.start])
                    order = np.argsort(-shares, kind="stable")[: self.top or PIECES]
                    pieces = [
                        {"piece": tokenizer.decode([n]), "probability": _rounded(shares[n])}
                        for n in order
                    ]
                    masks.append({**span, "pieces": pieces})
                    shown = pieces[0]["piece"]
                    before = text[end : span["begin"]]
                    filled += _with_piece(before, self.student.vocabulary, shown, int(order[0]))
                    end = span["end"]
            yield {"filled": filled + text[end:], "masks": masks, **fields}


def _with_piece(before: str, vocabulary: Vocabulary | None, shown: str, number: int) -> str:
    """Return the text `before`, followed by a piece (its id is `number`, its decoded text `shown`),
    without a space between them if the piece continues a word."""
    shown = shown.strip()
    # A masked LM may have more outputs than its tokenizer has pieces.
    if vocabulary is None or number >= len(vocabulary) or vocabulary.special[number]:
        return before + shown
    piece, marks = vocabulary.pieces[number], vocabulary.marks
    if piece.begins or piece.free:
        return before + shown
    # A line begins without the mark of a space (`Ġ`, `▁`).
    blanks = None if marks.style == "prefix" else " "
    return before.rstrip(blanks) + shown.removeprefix(marks.mark)


def _entities(text: str, words: Sequence[Answer]) -> Answer:
    """Return the entities of tagged words, with the mean probability of their words."""
    records = []
    for first, last, kind in entities([word["tag"] for word in words]):
        members = words[first:last]
        span = _span(text, members[0]["begin"], members[-1]["end"])
        share = _rounded(np.mean([word["probability"] for word in members]))
        records.append({"text": span.pop("word"), "label": kind, **span, "probability": share})
    return {"entities": records}


def _span(text: str, begin: int, end: int) -> Answer:
    return {"word": text[begin:end], "begin": begin, "end": end}


def _rounded(value: Any) -> float:
    return round(float(value), 6)


def _softmax(logits: Array) -> Floats:
    exp = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return np.asarray(exp / exp.sum(-1, keepdims=True))


def tsv_lines(predictor: Predictor) -> Iterator[str]:
    """Yield the lines of `--format tsv`.

    For a tagger, a word and its tag, with an empty line between texts. For a classifier, a header
    and each text or pair with its label. Tabs and line ends in texts are replaced by spaces.

    Raises UserError for other kinds of students.
    """
    student = predictor.student
    kind = student.task.output_kind if student.task else student.kind
    if kind != "one label":
        raise UserError(
            f"--format tsv: prints words with tags, or texts with one label, and this student gives"
            f" {OTHERS.get(kind, kind)}; leave --format out"
        )
    if student.kind == "tagging":
        for number, answer in enumerate(predictor.answers()):
            if number:
                yield ""
            for word in answer.get("words", ()):
                yield _line(word["word"], word["tag"])
        return
    yield _line(*predictor.names, "label")
    for answer in predictor.answers():
        yield _line(*(answer[name] for name in predictor.names), answer.get("label", ""))


def _line(*cells: str) -> str:
    return "\t".join(BREAK.sub(" ", cell) for cell in cells)
