"""Share one small store of a real teacher, with a masked view, between the tests of this folder."""

import pytest

from teachonce.store import FeatureStore, open_store
from tests.making.models import Stores


@pytest.fixture(scope="session")
def store(tiny_store: Stores) -> FeatureStore:
    return open_store(tiny_store("bert", views=2))
