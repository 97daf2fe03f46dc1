import pytest

from tests.distributed.pool import WorkerPool


@pytest.fixture(scope="session")
def pools():
    """Gloo processes by their number, started when they are first needed."""
    pools: dict[int, WorkerPool] = {}
    yield lambda size: pools.get(size) or pools.setdefault(size, WorkerPool(size))
    for pool in pools.values():
        pool.close()


@pytest.fixture
def four(pools):
    return pools(4)
