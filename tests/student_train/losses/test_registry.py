"""Every loss is one entry, and its entry says the truth."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature

from teachonce.student_train.losses.registry import (
    FEATURES,
    LOSSES,
    features_of,
    help_text,
    loss_names,
    losses_for,
)


def test_every_entry_names_a_formula_that_takes_what_it_compares() -> None:
    for loss in LOSSES:
        sides = 3 if loss.student == "maps" else 2
        assert len(signature(loss.measure).parameters) == sides + loss.tempered, loss.name
        assert loss.feature is None or loss.feature in FEATURES
        compared = loss.student in ("runs", "sentence") or loss.name in ("embedding", "in-batch")
        assert (loss.projection == "none") == (not compared)


def test_a_name_means_one_loss_of_a_student() -> None:
    for output_kind in (None, "one label", "several labels", "numbers"):
        names = [loss.name for loss in losses_for(output_kind)]
        assert len(names) == len(set(names))
    assert [loss.formula for loss in losses_for("one label", ["kl"])] == ["task.kl"]
    assert [loss.formula for loss in losses_for(None, ["kl"])] == ["logits.kl"]
    assert not losses_for("one label", ["mlm"]) and not losses_for(None, ["ce", "log-odds"])


def test_a_whole_text_is_compared_through_a_gelu_as_tokens_are() -> None:
    (loss,), (has_token_features,) = (
        losses_for("one label", [name]) for name in ("sentence-gelu", "hidden-gelu")
    )
    assert loss.measure is has_token_features.measure and loss.projection == "always"
    assert (loss.teacher, loss.student, loss.feature) == ("sentence", "sentence", "hidden")


def test_what_losses_read_of_a_store() -> None:
    names = ["mlm", "kl", "hidden", "attention", "ce"]
    assert features_of(losses_for(None, names)) == ["hidden", "logits", "attention"]
    assert features_of(losses_for("one label", names)) == ["hidden", "task", "attention"]
    assert features_of(losses_for(None, ["mlm"])) == []
    assert features_of(losses_for(None, ["similarity", "embedding"])) == ["embedding"]


def test_help_lists_every_loss() -> None:
    words = help_text().replace(",", " ").replace(";", " ").split()
    assert set(loss_names()) <= set(words)


def test_the_list_of_losses_does_not_wait_for_torch() -> None:
    code = "import sys, teachonce.student_train.losses.registry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
