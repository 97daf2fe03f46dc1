"""Every replaced name: found, checked, replaced, put back."""

import dataclasses

import pytest

import megatron_compress
from megatron_compress import cpu
from megatron_compress.config import CompressionConfig
from megatron_compress.hooks.active import NotInstalledError

cpu.apply()

from megatron_compress.hooks import seams  # noqa: E402  (imports megatron-core, which needs the shims)

FP8 = CompressionConfig(pipeline={"forward": {"compressor": "fp8"}})
IDENTITY = CompressionConfig(pipeline={"forward": {"compressor": "identity"}})


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    megatron_compress.uninstall()


def _current():
    return {(seam.module, seam.name): seam.locate()[2] for seam in seams.seams()}


def test_install_replaces_every_name_and_uninstall_restores_all():
    before = _current()
    megatron_compress.install(FP8)
    during = _current()
    assert all(during[name] is not before[name] for name in before)
    megatron_compress.uninstall()
    assert all(now is before[name] for name, now in _current().items())


def test_install_is_idempotent_and_refuses_another_configuration():
    session = megatron_compress.install(FP8)
    during = _current()
    assert megatron_compress.install(FP8) is session
    assert all(now is during[name] for name, now in _current().items())
    with pytest.raises(RuntimeError, match=r"another compression configuration is installed; call .*uninstall"):
        megatron_compress.install(IDENTITY)


def test_report_needs_an_installation():
    with pytest.raises(NotInstalledError, match=r"megatron_compress\.install"):
        megatron_compress.report()
    megatron_compress.uninstall()


@pytest.mark.parametrize("index", range(len(seams.seams())))
def test_each_missing_name_is_refused_and_nothing_is_replaced(index, monkeypatch):
    found = seams.seams()
    found[index] = dataclasses.replace(found[index], name=found[index].name + "_gone")
    monkeypatch.setattr(seams, "seams", lambda: found)
    before = _current_of(found[:index])
    with pytest.raises(seams.UnsupportedMegatronError, match=rf"{found[index].name} does not exist"):
        megatron_compress.install(FP8)
    assert _current_of(found[:index]) == before


def _current_of(found):
    return {(seam.module, seam.name): seam.locate()[2] for seam in found}


def test_a_changed_signature_is_refused_by_name(monkeypatch):
    from megatron.core.tensor_parallel import mappings

    monkeypatch.setattr(mappings, "_reduce", lambda input_, process_group: input_)
    with pytest.raises(seams.UnsupportedMegatronError, match=r"mappings\._reduce takes \(input_, process_group\)"):
        megatron_compress.install(FP8)


@pytest.mark.parametrize("version", ["0.13.1", "0.20.0"])
def test_other_versions_are_refused_with_those_to_install(version, monkeypatch):
    monkeypatch.setattr("megatron.core.__version__", version)
    with pytest.raises(seams.UnsupportedMegatronError, match=rf"{version} is not supported: install 0\.16\.1"):
        megatron_compress.install(FP8)


def test_versions_within_range_are_said_to_be_untested(monkeypatch):
    monkeypatch.setattr("megatron.core.__version__", "0.15.3")
    assert "0.15.3 (untested" in seams.check(seams.seams())


def test_the_stand_in_for_torch_is_torch_but_for_one_name():
    import torch
    from megatron.core.tensor_parallel import layers

    megatron_compress.install(FP8)
    assert layers.torch is not torch
    assert layers.torch.matmul is torch.matmul
    assert layers.torch.distributed.ProcessGroup is torch.distributed.ProcessGroup
    assert layers.torch.distributed.all_reduce is not torch.distributed.all_reduce
