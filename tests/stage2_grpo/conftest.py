"""A real Agent Lightning gateway for the tests of a module, emptied for each of them."""

from collections.abc import Iterator

import pytest

from shared.processes.owned_process import free_port, random_key
from tests.stage2_grpo.gateway import Gateway, running_gateway


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), free_port(), random_key()) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Gateway:
    shared_gateway.clear()
    return shared_gateway
