"""Beds need root and a kernel with network namespaces, veth, bridge and tbf; they are skipped where there are none."""

import ctypes

import pytest

from megatron_compress.netbed.bed import opened
from megatron_compress.netbed.chain import Chain
from megatron_compress.netbed.errors import BedError
from tests.training.conftest import model_values, text, train_values, write_files  # noqa: F401 (fixtures)


@pytest.fixture(scope="session")
def can_build():
    try:
        with opened(Chain(2, 20e6)):
            return
    except BedError as error:
        if "permitted" in str(error) or "kernel" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture
def without_admin():
    """For `preexec_fn`: root without CAP_SYS_ADMIN, as in a container."""
    prctl, cap_bset_drop, cap_sys_admin = ctypes.CDLL(None, use_errno=True).prctl, 24, 21
    return lambda: prctl(cap_bset_drop, cap_sys_admin, 0, 0, 0)
