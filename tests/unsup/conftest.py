import pytest

from tests.tiny_texts import Texts, make_texts


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("unsup"))
