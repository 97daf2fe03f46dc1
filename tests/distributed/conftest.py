import pytest

from tests.distributed.pool import WorkerPool


@pytest.fixture(scope="session")
def workers():
    """Eight gloo processes; tests use the first 2, 3, 4 or all of them."""
    pool = WorkerPool(8)
    yield pool
    pool.close()
