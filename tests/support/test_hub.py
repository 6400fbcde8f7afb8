"""Licence and languages are entries of a card's metadata, which the hub's own class parses."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from teachonce.support.errors import UserError
from teachonce.support.hub import with_metadata

CARDS = (
    "# Mine\n",
    "---\nlibrary_name: transformers\n---\n\n# Mine\n",
    "---\nlanguage:\n- de\n- fr\nlicense: mit\nlibrary_name: transformers\n---\n# Mine\n",
)


@pytest.mark.parametrize("card", CARDS)
def test_entries_are_added_or_replaced(card: str) -> None:
    found = ModelCard(with_metadata(card, "apache-2.0", ["ru", "en"]))
    assert (found.data["license"], found.data["language"]) == ("apache-2.0", ["ru", "en"])
    assert found.text.strip() == "# Mine"
    assert found.data.get("library_name") == ("transformers" if "lib" in card else None)
    assert with_metadata(card, None, ()) == card
    only = ModelCard(with_metadata(card, None, ["ru"])).data
    assert only["language"] == ["ru"] and only.get("license") == ("mit" if "mit" in card else None)


def test_what_the_hub_does_not_know_is_refused() -> None:
    with pytest.raises(UserError, match="--license Apache 2.0: expected the hub's name of a lic"):
        with_metadata("", "Apache 2.0", ())
    for language in ("english", "en-US"):  # the hub does not accept BCP 47
        with pytest.raises(UserError, match=f"--language {language}: expected an ISO 639 code"):
            with_metadata("", None, [language])
    assert "openrail++" in with_metadata("", "openrail++", ())
